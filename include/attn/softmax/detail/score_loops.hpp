// attn: the loops over scores that their terms need, in packets: compilers vectorise them at -O3 only.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/packing.hpp>

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
inline constexpr T log2_e = T(1.442695040888963407359924681001892137L);

/// s[n] = f(s[n], n, count of lanes in use) by whole packets; the last one through a buffer.
template <class T, class F>
ATTN_INLINE void map_scores(T* s, idx_t count, F&& f) {
  idx_t n = 0;
  for (; n + width<T> <= count; n += width<T>) store<T>(s + n, f(load<T>(s + n), n, idx_t(width<T>)));
  if (width<T> == 1 || n == count) return;
  alignas(64) T rest[width<T>] = {};
  std::copy(s + n, s + count, rest);
  store<T>(rest, f(load<T>(rest), n, count - n));
  std::copy(rest, rest + (count - n), s + n);
}

/// A finite number, or the nearest to one that overflowed. NaN stays.
template <class T>
ATTN_INLINE packet<T> in_range(const packet<T>& x) {
  return (max)((min)(x, broadcast<T>((std::numeric_limits<T>::max)())), broadcast<T>(std::numeric_limits<T>::lowest()));
}

/// Scores to base 2: -infinity stays, finite ones stay finite. NaN stays.
template <class T>
[[gnu::noinline]] void scores_to_base_2(T* s, idx_t count) {
  const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest());
  map_scores(s, count, [&](const packet<T>& x, idx_t, idx_t) {
    return if_less(x, lowest, x, in_range<T>(mul(x, broadcast<T>(log2_e<T>))));
  });
}
/// A logit to base 2, in the same way.
template <class T>
T to_base_2(T x) {
  constexpr T most = (std::numeric_limits<T>::max)();
  return std::abs(x) <= most ? std::clamp(x * log2_e<T>, -most, most) : x;
}

/// c tanh(s / c)
template <class T>
[[gnu::noinline]] void cap_scores(T* s, idx_t count, T softcap) {
  const packet<T> cap = broadcast<T>(softcap), uncap = broadcast<T>(T(1) / softcap);
  map_scores(s, count, [&](const packet<T>& x, idx_t, idx_t) { return mul(cap, tanh<T>(mul(x, uncap))); });
}

/// s[n] = (s[n] + bias[n] - slope |distance - step n|) factor, of a bias and a slope that are given. -infinity of the
/// bias masks, whatever the score.
template <class T>
[[gnu::noinline]] void add_linear_terms(T* s, idx_t count, const T* bias, T slope, idx_t distance, idx_t step,
                                        T factor) {
  const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest()), times = broadcast<T>(factor);
  alignas(64) T ramp[width<T>];
  for (int n = 0; n < width<T>; ++n) ramp[n] = static_cast<T>(step * n);
  const packet<T> steps = load<T>(ramp), down = broadcast<T>(-slope);
  const auto away = [&](const packet<T>& x, idx_t n) {
    return fma(down, abs(sub(broadcast<T>(static_cast<T>(distance - step * n)), steps)), x);
  };
  if (!bias)
    return map_scores(s, count,
                      [&](const packet<T>& x, idx_t n, idx_t) { return in_range<T>(mul(away(x, n), times)); });
  const auto biased = [&](const packet<T>& x, idx_t n, idx_t lanes, const auto& more) {
    const packet<T> b = lanes == width<T> ? load<T>(bias + n) : load_part<T>(bias + n, 1, lanes);
    return if_less(b, lowest, b, in_range<T>(mul(more(add(x, b), n), times)));
  };
  if (slope != T(0))
    map_scores(s, count, [&](const packet<T>& x, idx_t n, idx_t lanes) { return biased(x, n, lanes, away); });
  else
    map_scores(s, count, [&](const packet<T>& x, idx_t n, idx_t lanes) {
      return biased(x, n, lanes, [](const packet<T>& y, idx_t) { return y; });
    });
}

/// The same with one bias for all, without a slope.
template <class T>
[[gnu::noinline]] void add_constant(T* s, idx_t count, T bias, T factor) {
  if (bias == -std::numeric_limits<T>::infinity()) return void(std::fill_n(s, count, bias));
  const packet<T> b = broadcast<T>(bias), times = broadcast<T>(factor);
  map_scores(s, count, [&](const packet<T>& x, idx_t, idx_t) { return in_range<T>(mul(add(x, b), times)); });
}

/// x where bytes are not 0, else -infinity. Compilers widen bytes one by one; here every lane of 32 bits has the eight
/// bytes, or its four of them, that its own is part of.
template <class T>
ATTN_INLINE packet<T> seen_or_hidden(const packet<T>& x, const unsigned char* bytes) {
  constexpr T hidden = -std::numeric_limits<T>::infinity();
  if constexpr (width<T> == 1) {
    return *bytes ? x : hidden;
  } else {
    constexpr int lanes_each = sizeof(T) / sizeof(float), count = width<T> * lanes_each;
    using lanes = typename lanes_of<std::uint32_t, count>::type;
    using words = typename lanes_of<std::uint64_t, count / 2>::type;
    using numbers = typename lanes_of<float, count>::type;
    const auto eight_from = [&](int first) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + first, (std::min)(width<T>, 8));
      return (packet<float>)(words{} + word);
    };
    const auto nearby = shuffle<float>(eight_from(0), eight_from(width<T> / 16 * 8), [](int lane) {
      const int number = lane / lanes_each;
      return number / 8 * count + number % 8 / 4;
    });
    const lanes own = [&]<int... Lane>(std::integer_sequence<int, Lane...>) {
      constexpr int first = std::endian::native == std::endian::little ? 0 : 3;  // the lowest byte of a lane
      return lanes{std::uint32_t(0xff) << 8 * (first ^ (Lane / lanes_each % 4))...};
    }(std::make_integer_sequence<int, count>{});
    return (packet<T>)(((lanes)nearby & own) != 0 ? (numbers)x : (numbers)broadcast<T>(hidden));
  }
}
template <class T>
[[gnu::noinline]] void hide_scores(T* s, idx_t count, const unsigned char* bytes) {
  map_scores(s, count, [&](const packet<T>& x, idx_t n, idx_t lanes) {
    if (lanes == width<T>) return seen_or_hidden<T>(x, bytes + n);
    unsigned char rest[width<T>] = {};
    std::copy_n(bytes + n, lanes, rest);
    return seen_or_hidden<T>(x, rest);
  });
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
