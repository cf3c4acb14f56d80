// attn: sums over keys, weighted by exponentials of any size.
//
//   num = sum_j e^(k_j + w_j) v_j     den = sum_j e^(k_j + w_j)     for a packet of channels, both times 2^-top
//
// e^k and e^w are taken apart into factor and power of two (split_exp); a weight is the product of the factors, and the
// powers meet as whole numbers. So nothing overflows, nothing is lost to the rounding of k + w, and since a change of
// `top` is a change by powers of two, it changes no digit. This is the exact form of everything in this family; its
// fast form is aft_block.hpp.
//
// A key of -infinity, or a w of -infinity, masks: it contributes nothing, whatever its value, not even NaN.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/exp.hpp>
#include <attn/core/tile_product.hpp>

namespace attn::detail {

template <class T>
struct key_sums {
  packet<T> num = zero<T>(), den = zero<T>(), top = broadcast<T>(-std::numeric_limits<T>::infinity());

  static constexpr index size = 3 * width<T>;  // numbers in memory

  static ATTN_INLINE key_sums read(const T* p) {
    return {load<T>(p), load<T>(p + width<T>), load<T>(p + 2 * width<T>)};
  }
  ATTN_INLINE void write(T* p) const {
    store<T>(p, num);
    store<T>(p + width<T>, den);
    store<T>(p + 2 * width<T>, top);
  }

  /// Takes the sums to a `top` that is at least `least`; that of no key at all stays -infinity.
  ATTN_INLINE void raise(const packet<T>& least) {
    const packet<T> higher = max(top, least);
    const packet<T> factor = power_of_two<T>(sub(top, finite(higher)));
    num = mul(num, factor), den = mul(den, factor), top = higher;
  }
  ATTN_INLINE void merge(const key_sums& other) {
    raise(other.top);
    const packet<T> factor = power_of_two<T>(sub(other.top, finite(top)));
    num = fma(other.num, factor, num), den = fma(other.den, factor, den);
  }

  /// num / den; 0 where no key was seen.
  ATTN_INLINE packet<T> mean() const { return if_less(zero<T>(), den, div(num, den), den); }

  /// A `top` to subtract: that of no key, -infinity, is replaced by the lowest number.
  static ATTN_INLINE packet<T> finite(const packet<T>& x) {
    return max(x, broadcast<T>(std::numeric_limits<T>::lowest()));
  }
};

/// A packet of `count` elements, converted to T, zeros after them; one element for all lanes where they do not move.
template <class T, class S>
ATTN_INLINE packet<T> load_channels(const S* p, index stride, index count) {
  if (stride == 0) return broadcast<T>(static_cast<T>(*p));
  return load_part<T>(p, stride, count);
}

/// Keys taken at a time.
inline constexpr index key_piece = 96;

/// The keys of one packet of channels with their values, taken apart.
template <class T>
struct split_keys {
  T *factor = nullptr, *exponent = nullptr, *value = nullptr;  // [key_piece][width]; value: factor * v

  static split_keys layout(carver& memory) {
    constexpr index size = key_piece * width<T>;
    return {memory.take<T>(size), memory.take<T>(size), memory.take<T>(size)};
  }

  /// Rows [begin, begin + count) of k and v, channels from c on.
  template <class S>
  void take(const matrix_view<const S>& k, const matrix_view<const S>& v, index c, index begin, index count) const {
    for (index j = 0; j < count; ++j) {
      const auto e = split_exp<T>(load_channels<T>(k.row(begin + j) + c * k.col_stride, k.col_stride, k.cols - c));
      const packet<T> x = load_channels<T>(v.row(begin + j) + c * v.col_stride, v.col_stride, v.cols - c);
      store<T>(factor + j * width<T>, e.factor);
      store<T>(exponent + j * width<T>, e.exponent);
      store<T>(value + j * width<T>, if_less(zero<T>(), e.factor, mul(e.factor, x), e.factor));
    }
  }
};

/// `count` biases from `from` on, converted.
template <class T, class S>
void copy_biases(const S* from, index stride, index count, T* to) {
  index j = 0;
  for (; j + width<T> <= count; j += width<T>) store<T>(to + j, load_part<T>(from + j * stride, stride, width<T>));
  for (; j < count; ++j) to[j] = static_cast<T>(from[j * stride]);
}

/// The biases of one row towards `key_piece` keys, taken apart.
template <class T>
struct split_biases {
  static constexpr index stride = round_up(key_piece, 16) + 16;
  T *factor = nullptr, *exponent = nullptr;

  static split_biases layout(carver& memory, index rows) {
    return {memory.take<T>(rows * stride), memory.take<T>(rows * stride)};
  }
  split_biases row(index r) const { return {factor + r * stride, exponent + r * stride}; }

  /// Takes the first `count` entries of `factor`, which hold biases, apart.
  void split(index count) const {
    std::fill(factor + count, factor + round_up(count, width<T>), T(0));
    for (index j = 0; j < count; j += width<T>) {
      const auto e = split_exp<T>(load<T>(factor + j));
      store<T>(factor + j, e.factor);
      store<T>(exponent + j, e.exponent);
    }
  }
};

/// Adds `count` keys with their biases.
template <class T>
void add_keys(key_sums<T>& sums, const split_keys<T>& keys, const split_biases<T>& bias, index count) {
  packet<T> top = sums.top;
  for (index j = 0; j < count; ++j)
    top = max(top, add(load<T>(keys.exponent + j * width<T>), broadcast<T>(bias.exponent[j])));
  sums.raise(top);
  const packet<T> reference = key_sums<T>::finite(top);
  packet<T> num = sums.num, den = sums.den;
  for (index j = 0; j < count; ++j) {
    if (bias.factor[j] == T(0)) continue;
    const packet<T> exponent = add(load<T>(keys.exponent + j * width<T>), broadcast<T>(bias.exponent[j]));
    const packet<T> weight = mul(power_of_two<T>(sub(exponent, reference)), broadcast<T>(bias.factor[j]));
    num = fma(weight, load<T>(keys.value + j * width<T>), num);
    den = fma(weight, load<T>(keys.factor + j * width<T>), den);
  }
  sums.num = num, sums.den = den;
}

/// Packets of channels that are summed up together.
inline constexpr int sum_columns = 4;

/// Adds rows [begin, end) of k and v, channels from c on, without biases, to `sums` of C packets.
template <class T, int C, class S>
void add_plain_keys(key_sums<T> (&sums)[C], const matrix_view<const S>& k, const matrix_view<const S>& v, index c,
                    index begin, index end) {
  constexpr index step = 16;  // rows that share a maximum; they come from the cache the second time
  constexpr T log2_e = T(1.442695040888963407359924681L), log2_e_rest = T(1.442695040888963407359924681L - log2_e);
  const auto part = [&](const matrix_view<const S>& x, index j, int n) {
    const index at = c + n * width<T>;
    return load_channels<T>(x.row(j) + at * x.col_stride, x.col_stride, x.cols - at);
  };
  for (index j0 = begin; j0 < end; j0 += step) {
    const index j1 = std::min(j0 + step, end);
    packet<T> reference[C];
    unroll<C>([&](auto n) { reference[n] = broadcast<T>(-std::numeric_limits<T>::infinity()); });
    for (index j = j0; j < j1; ++j) unroll<C>([&](auto n) { reference[n] = max(reference[n], part(k, j, n)); });
    unroll<C>([&](auto n) {
      const auto highest = split_exp<T>(reference[n]);
      sums[n].raise(highest.exponent);
      sums[n].den = fma(highest.factor, zero<T>(), sums[n].den);  // an infinite key makes it NaN
      reference[n] = sub(zero<T>(), key_sums<T>::finite(sums[n].top));
    });
    for (index j = j0; j < j1; ++j)
      unroll<C>([&](auto n) {
        const packet<T> x = part(k, j, n), y = part(v, j, n);
        const packet<T> power = fma(x, broadcast<T>(log2_e_rest), fma(x, broadcast<T>(log2_e), reference[n]));
        const packet<T> weight = exp2_weight<T>(min(power, broadcast<T>(T(1))));  // huge keys are no multiples of 1
        sums[n].num = fma(weight, if_less(zero<T>(), weight, y, zero<T>()), sums[n].num);
        sums[n].den = add(sums[n].den, weight);
      });
  }
}

/// One head of one batch item.
template <class S>
struct aft_head {
  matrix_view<const S> q, k, v;
  matrix_view<S> out;
};

/// Writes channels c ... of row t: `mean`, times sigmoid(q) if gated.
template <class T, class S>
ATTN_INLINE void write_channels(packet<T> mean, bool gate, const aft_head<S>& head, index t, index c) {
  const index count = head.out.cols - c, stride = head.out.col_stride;
  if (gate)
    mean = mul(mean, sigmoid<T>(load_channels<T>(head.q.row(t) + c * head.q.col_stride, head.q.col_stride, count)));
  S* const to = head.out.row(t) + c * stride;
  if constexpr (std::same_as<T, S>)
    if (stride == 1 && count >= width<T>) return store<T>(to, mean);
  alignas(64) T lanes[width<T>];
  store<T>(lanes, mean);
  for (index i = 0; i < std::min<index>(count, width<T>); ++i) to[i * stride] = static_cast<S>(lanes[i]);
}

}  // namespace attn::detail
