// attn: the discrete Hartley transform of many real channels at once.
//
//   H_k = sum over t of x_t (cos + sin)(2 pi t k / n)
//
// Two channels make one complex one: the packets of real and of imaginary parts of a row are channels of their own.
// With Z the Fourier transform of a + i b, the transforms of a and b at k and -k are sums and differences of Z_k and
// Z_-k: 2 H_k(a) = Re (Z_k + Z_-k) - Im (Z_k - Z_-k), 2 H_k(b) = Im (Z_k + Z_-k) + Re (Z_k - Z_-k).
#pragma once

#include <attn/fourier/plan.hpp>

namespace attn::detail {

/// Twice the transform of the rows; result k stands at plan.place(returned rows, k).
template <class T>
T* hartley_twice(const fourier_plan<T>& plan, T* rows) {
  T* const results = plan.transform(rows);
  const index n = plan.length();
  for (index k = 0; k <= n / 2; ++k) {
    const index mirrored = k == 0 ? 0 : n - k;
    const complex_packet<T> x = plan.result(results, k), y = plan.result(results, mirrored);
    const complex_packet<T> sum = add(x, y), difference = sub(x, y);
    store_row(plan.place(results, k), add_i(sum, difference));
    store_row(plan.place(results, mirrored), sub_i(sum, difference));
  }
  return results;
}

}  // namespace attn::detail
