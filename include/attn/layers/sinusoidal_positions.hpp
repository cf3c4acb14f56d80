// attn: sinusoidal positions, which models without learned ones add to their embeddings.
//
//   interleaved   out_(t, 2i) = sin(p / base^(2i / D)),  out_(t, 2i + 1) = cos(p / base^(2i / D))   Vaswani et al. 2017
//   halves        out_(t, i) = sin(p / base^(i / (n - 1))),  out_(t, n + i) = cos(p / base^(i / (n - 1))),  n = D / 2
//                                                  tensor2tensor, Universal Sentence Encoder, fairseq
//   with p = first + t, t the token's number in its sequence
//
//   attn::sinusoidal_positions(out);                                            // Eigen matrix [length, dim]
//   attn::sinusoidal_positions(x, {.first = 512, .layout = attn::position_layout::halves, .accumulate = true});
//
// Shapes   out [B, L, D], the same for every batch item. Of an odd D the last number is a sine where interleaved, and 0
//          where halves; with n = 1 its exponent is 0. float, double, or Eigen::half / Eigen::bfloat16 in memory.
// Cost     a sine and a cosine in double for L D numbers, which are rounded once: angles are accurate to 1e-16 p. No
//          scratch.
// Throws   std::invalid_argument for a base that is not positive, and for extents without memory.
#pragma once

#include <attn/layers/detail/sequence.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA {

enum class position_layout { interleaved, halves };

struct sinusoidal_positions_options {
  idx_t first = 0;  // the position of the first token
  position_layout layout = position_layout::interleaved;
  double base = 10000;
  bool accumulate = false;  // add to what is there instead of writing it over
};

namespace detail {

/// Number d of the row of position p.
inline double sinusoid(double p, idx_t d, idx_t dim, const sinusoidal_positions_options& options) {
  const auto at = [&](idx_t i, double steps, bool cosine) {
    const double angle = p * std::pow(options.base, -static_cast<double>(i) / steps);
    return cosine ? std::cos(angle) : std::sin(angle);
  };
  if (options.layout == position_layout::interleaved) return at(d - d % 2, static_cast<double>(dim), d % 2 != 0);
  const idx_t n = dim / 2;
  return d < 2 * n ? at(d % n, static_cast<double>(std::max<idx_t>(n - 1, 1)), d >= n) : 0.0;
}

template <class S>
[[gnu::noinline]] void fill_sinusoids(const tensor_view<S, 3>& out, const sinusoidal_positions_options& options) {
  using T = compute_type<S>;
  call_views check{"sinusoidal_positions"};
  check.write("out", out);
  if (!(options.base > 0)) check.fail("base > 0", options.base);
  for (idx_t t = 0; t < out.extent(1) && !out.empty(); ++t)
    for (idx_t d = 0; d < out.extent(2); ++d) {
      const T x = static_cast<T>(sinusoid(static_cast<double>(options.first + t), d, out.extent(2), options));
      for (idx_t b = 0; b < out.extent(0); ++b) store_gradient(out(b, t, d), x, options.accumulate);
    }
}

}  // namespace detail

template <viewable O>
void sinusoidal_positions(O&& out, const sinusoidal_positions_options& options = {}) {
  using S = element_of<O&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  detail::fill_sinusoids<S>(detail::as_sequence(out), options);
}

}}  // namespace attn::ATTN_ISA
