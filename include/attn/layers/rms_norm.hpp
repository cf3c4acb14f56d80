// attn: root mean square normalisation.
//
//   out = gamma x / sqrt(mean(x^2) + eps)                       Zhang & Sennrich 2019, per token, over its features
//
//   attn::rms_norm(x, out);                         // Eigen matrices [length, dim]; out may be x
//   attn::rms_norm(x, out, {.gamma = g}, {.eps = 1e-6f}, threads);
//
// Shapes   x and out [B, L, D], gamma [D]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic.
// Cost     a few operations a number; scratch: gamma and a row per thread.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/layer_norm.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct rms_norm_weights {
  view_field<const S, 1> gamma{};   // 1 unless given
};

template <class S>
struct rms_norm_options {
  /// Added to the mean of the squares; > 0 where a token may be all zeros.
  compute_type<S> eps = compute_type<S>(1e-5);
};

template <viewable X, viewable O, class Weights = rms_norm_weights<element_of<const X&>>,
          class Options = rms_norm_options<element_of<const X&>>>
void rms_norm(const X& x, O&& out, Weights&& weights = {}, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_norm<S>("rms_norm", false, 1, from, to,
                       {.gamma = detail::weights_of<rms_norm_weights<S>, true>(weights).gamma},
                       detail::options_or_default<rms_norm_options<S>>(options).eps,
                       detail::execution_of(exec, options, weights));
}

}}  // namespace attn::ATTN_ISA
