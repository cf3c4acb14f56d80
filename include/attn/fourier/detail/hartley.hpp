// attn: the discrete Hartley transform of many real channels, H_k = sum over t of x_t (cos + sin)(2 pi t k / n).
//
// Two channels make one complex one: the packets of real and of imaginary parts of a row are channels of their own.
// With Z the Fourier transform of a + i b, sums and differences of Z_k and Z_-k are the transforms of a and b at k and
// -k: the rows of 2 H_k and 2 H_-k are (Z_k + Z_-k) +- i (Z_k - Z_-k).
#pragma once

#include <attn/fourier/detail/plan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// -k modulo n
ATTN_INLINE idx_t mirror(idx_t k, idx_t n) { return k == 0 ? 0 : n - k; }

/// 2 H_k of Z_k and Z_-k; 2 H_-k if these change places.
template <class T>
ATTN_INLINE complex_packet<T> hartley_twice(const complex_packet<T>& z, const complex_packet<T>& z_mirrored) {
  return add_i(add(z, z_mirrored), sub(z, z_mirrored));
}

/// Twice the Hartley transform of plan.length() rows, in place; result k is row plan.order(k).
template <class T>
void hartley_twice(const fourier_plan<T>& plan, T* rows, T* spare) {
  plan.transform(rows, spare);
  const idx_t n = plan.length();
  for (idx_t k = 0; k <= n / 2; ++k) {
    T *const at = rows + plan.order(k) * row_width<T>, *const other = rows + plan.order(mirror(k, n)) * row_width<T>;
    const auto z = load_row(at), y = load_row(other);
    store_row(at, hartley_twice<T>(z, y));
    store_row(other, hartley_twice<T>(y, z));
  }
}

}}}  // namespace attn::ATTN_ISA::detail
