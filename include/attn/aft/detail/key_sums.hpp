// attn: sums over keys, weighted by exponentials of any size.
//
//   num = sum_j e^(k_j + w_j) v_j     den = sum_j e^(k_j + w_j)     for a packet of channels, both times 2^-exponent
//
// e^k and e^w are split into a factor and a power of two (split_exp); a weight is the product of the factors, and the
// exponents are added as integers. So nothing overflows, and changing `exponent` multiplies by powers of two, which
// changes no digit. In float, k + w is not rounded where it is below 10^7, up to where the exponents are all integers.
// Beyond that weights are right only for keys whose k + w differ by more than 2^-20 of the size of k and w: the result
// is some mean of the values of keys this close to the largest; from 5e37 on all sizes count as one. (Double: 5 10^15,
// 2^-49, 3e307. Without fused multiply-adds e^k and e^w lose about what rounding k and w would cost.) This is the exact
// form of everything in this family; its fast form is aft_block.hpp.
//
// A key of -infinity, or a w of -infinity, masks: it contributes nothing, whatever its value, not even NaN.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/detail/compensated.hpp>
#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A single key with its value is a sum too: num = e^k v, den = e^k.
template <class T>
struct key_sums {
  packet<T> num = zero<T>(), den = zero<T>(), exponent = broadcast<T>(-std::numeric_limits<T>::infinity());

  /// Rescales the sums so that `exponent` is at least `least`; that of no key at all stays -infinity.
  ATTN_INLINE void raise(const packet<T>& least) {
    const packet<T> higher = (max)(exponent, least);
    const packet<T> factor = power_of_two<T>(sub(exponent, finite(higher)));
    num = mul(num, factor), den = mul(den, factor), exponent = higher;
  }
  ATTN_INLINE void merge(const key_sums& other) {
    raise(other.exponent);
    const packet<T> factor = power_of_two<T>(sub(other.exponent, finite(exponent)));
    num = fma(other.num, factor, num), den = fma(other.den, factor, den);
  }

  /// An exponent to subtract: that of no key, -infinity, is replaced by the lowest number.
  static ATTN_INLINE packet<T> finite(const packet<T>& x) {
    return (max)(x, broadcast<T>(std::numeric_limits<T>::lowest()));
  }
};

/// Arrays of sums of `parts` packets each.
template <class T>
struct sums_array {
  key_sums<T>* data = nullptr;
  idx_t parts = 0;

  static sums_array layout(arena& memory, idx_t count, idx_t parts) {
    return {memory.allocate<key_sums<T>>(count * parts), parts};
  }
  key_sums<T>* at(idx_t n) const { return data + n * parts; }
  void clear(idx_t n) const { std::fill_n(at(n), parts, key_sums<T>{}); }
  void merge(idx_t to, const key_sums<T>* from) const {
    for (idx_t p = 0; p < parts; ++p) at(to)[p].merge(from[p]);
  }
  /// Of `count` sums from `first` on, `step` apart, each becomes the sum of those up to it. Some are added up before
  /// they meet the sum of all before them: no sum has so many terms that one large one swallows small ones.
  [[gnu::noinline]] void accumulate(idx_t first, idx_t count, idx_t step = 1) const {
    constexpr idx_t together = 64;
    for (idx_t p = 0; p < parts; ++p) {
      key_sums<T> before, some;
      for (idx_t n = 0; n < count; ++n) {
        key_sums<T>& sum = at(first + n * step)[p];
        some.merge(sum);
        sum = before;
        sum.merge(some);
        if ((n + 1) % together == 0) before = sum, some = {};
      }
    }
  }
};

inline constexpr idx_t key_chunk = 96;  // keys that are split at a time

/// The biases of one row towards `key_chunk` keys as factor and exponent.
template <class T>
struct split_biases {
  static constexpr idx_t stride = round_up(key_chunk, 16) + 16;
  T *factor = nullptr, *exponent = nullptr;

  static split_biases layout(arena& memory, idx_t rows) {
    return {memory.allocate<T>(rows * stride), memory.allocate<T>(rows * stride)};
  }
  split_biases row(idx_t r) const { return {factor + r * stride, exponent + r * stride}; }

  /// Splits the first `count` entries of `factor`, which hold biases, in place.
  void split(idx_t count) const {
    std::fill(factor + count, factor + round_up(count, width<T>), T(0));
    for (idx_t j = 0; j < count; j += width<T>) {
      const auto e = split_exp<T>(load<T>(factor + j));
      store<T>(factor + j, e.factor);
      store<T>(exponent + j, e.exponent);
    }
  }
};

/// Adds `count` keys with their biases, summed up from zero.
template <class T>
void add_keys(key_sums<T>& sums, const key_sums<T>* keys, const split_biases<T>& bias, idx_t count) {
  packet<T> highest = sums.exponent;
  for (idx_t j = 0; j < count; ++j) highest = (max)(highest, add(keys[j].exponent, broadcast<T>(bias.exponent[j])));
  sums.raise(highest);
  const packet<T> reference = key_sums<T>::finite(highest);
  packet<T> num = zero<T>(), den = zero<T>();
  for (idx_t j = 0; j < count; ++j) {
    if (bias.factor[j] == T(0)) continue;
    const packet<T> exponent = add(keys[j].exponent, broadcast<T>(bias.exponent[j]));
    const packet<T> weight = mul(power_of_two<T>(sub(exponent, reference)), broadcast<T>(bias.factor[j]));
    num = fma(weight, keys[j].num, num);
    den = fma(weight, keys[j].den, den);
  }
  sums.num = add(sums.num, num), sums.den = add(sums.den, den);
}

/// The size from which exponents may be no multiples of 1.
template <class T>
inline constexpr T large_exponent = T(std::uint64_t(2) << float_bits<T>::mantissa);

/// An exponent for sums of e^x 2^-exponent: itself up to large_exponent. Beyond, its rounding error could make the
/// largest weights underflow, and it is lowered by more than that error.
template <class T>
ATTN_INLINE packet<T> lower_large(const packet<T>& exponent) {
  const packet<T> error = fma(abs(exponent), broadcast<T>(4 / large_exponent<T>), broadcast<T>(T(-4)));
  return sub(exponent, (max)(error, zero<T>()));
}

/// e^x 2^negated where that is at most 1, up to rounding; larger ones, of lower_large(), become 2.
template <class P, class T = std::remove_cvref_t<decltype(sum_lanes(std::declval<P>()))>>
ATTN_INLINE P weight_beside(const P& x, const P& negated) {
  using constants = exp_constants<T>;
  const P power = fma(x, broadcast<T>(constants::log2_e_low), fma(x, broadcast<T>(constants::log2_e_high), negated));
  return exp2_weight<T>((min)(power, broadcast<T>(T(1))));
}

}}}  // namespace attn::ATTN_ISA::detail
