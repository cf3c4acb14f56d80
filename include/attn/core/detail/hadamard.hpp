// attn: rows times an orthogonal matrix that spreads large numbers over their row: signs, then a Hadamard matrix.
//
//   y = H S x / sqrt(n)     n: the largest power of two that divides the row; H: one n x n matrix for every n numbers
//
// S has fixed signs: rows that do not come from this matrix are not made of few large numbers either. Products of two
// rows stay what they were. The transform is the fast one, n log2(n) sums for n numbers: butterflies between lanes of a
// vector, then between vectors. 128 numbers take 40 ns on a Zen 4.
#pragma once

#include <attn/core/detail/coded.hpp>
#include <attn/core/detail/simd.hpp>
#include <attn/core/random.hpp>

#include <array>
#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Numbers that are rotated together in rows of `dim`; 1, or 0 for none, where there is nothing to rotate.
constexpr idx_t rotation_block(idx_t dim) { return dim & -dim; }

/// The sign of number d of a row is rotation_signs[d % rotation_period].
inline constexpr idx_t rotation_period = 256;
inline constexpr auto rotation_signs = [] {
  std::array<float, rotation_period> signs{};
  random_numbers numbers(0);
  for (float& sign : signs) sign = numbers.bits() >> 63 != 0 ? -1.0f : 1.0f;
  return signs;
}();

/// Sums and differences of lanes `Distance` lanes from one another.
template <int Distance>
ATTN_INLINE packet<float> butterfly(const packet<float>& x) {
  alignas(64) static constexpr auto signs = [] {
    std::array<float, width<float>> numbers{};
    for (int n = 0; n < width<float>; ++n) numbers[static_cast<std::size_t>(n)] = n & Distance ? -1.0f : 1.0f;
    return numbers;
  }();
  return fma(x, load<float>(signs.data()), shuffle<float>(x, x, [](int lane) { return lane ^ Distance; }));
}
/// The same for all distances from Distance on that lie within `block` lanes.
template <int Distance = 1>
ATTN_INLINE packet<float> butterflies(const packet<float>& x, idx_t block) {
  if constexpr (Distance < width<float>) {
    if (Distance < block) return butterflies<2 * Distance>(butterfly<Distance>(x), block);
  }
  return x;
}

/// H x / sqrt(n), in place; `first` and `last` are called with a vector and the number of its first lane, before and
/// after. x has `dim` numbers and zeros up to whole vectors.
template <class First, class Last>
ATTN_INLINE void hadamard(float* x, idx_t dim, First&& first, Last&& last) {
  constexpr idx_t w = width<float>;
  const idx_t block = rotation_block(dim), all = (dim + w - 1) / w * w;
  for (idx_t d = 0; d < all; d += w) store<float>(x + d, butterflies(first(load<float>(x + d), d), block));
  for (idx_t distance = w; distance < block; distance *= 2)
    for (idx_t begin = 0; begin < dim; begin += 2 * distance)
      for (idx_t d = begin; d < begin + distance; d += w) {
        const packet<float> a = load<float>(x + d), b = load<float>(x + d + distance);
        store<float>(x + d, add(a, b)), store<float>(x + d + distance, sub(a, b));
      }
  for (idx_t d = 0; d < all; d += w) store<float>(x + d, last(load<float>(x + d), d));
}

ATTN_INLINE packet<float> rotation_signs_of(idx_t d, float factor) {
  return mul(load<float>(rotation_signs.data() + d % rotation_period), broadcast<float>(factor));
}

/// A row is rotated, or rotated back. It has `dim` numbers, an even number of them, and zeros up to whole vectors.
inline void rotate_row(float* x, idx_t dim) {
  const float factor = 1 / std::sqrt(static_cast<float>(rotation_block(dim)));  // first, so that sums stay small
  hadamard(x, dim, [&](const packet<float>& p, idx_t d) { return mul(p, rotation_signs_of(d, factor)); },
           [](const packet<float>& p, idx_t) { return p; });
}
inline void rotate_row_back(float* x, idx_t dim) {
  const float factor = 1 / std::sqrt(static_cast<float>(rotation_block(dim)));
  hadamard(x, dim, [](const packet<float>& p, idx_t) { return p; },
           [&](const packet<float>& p, idx_t d) { return mul(p, rotation_signs_of(d, factor)); });
}

}}}  // namespace attn::ATTN_ISA::detail
