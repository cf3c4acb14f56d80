// attn: layer normalisation.
//
//   out = gamma (x - mean) / sqrt(variance + eps) + beta          Ba, Kiros & Hinton 2016, per token, over its features
//
//   attn::layer_norm(x, out);                       // Eigen matrices [length, dim]; out may be x
//   attn::layer_norm(x, out, {.gamma = g, .beta = b}, {.eps = 1e-6f}, threads);
//
// Shapes   x and out [B, L, D], gamma and beta [D]. float, double, or Eigen::half / Eigen::bfloat16 in memory with
//          float arithmetic.
// Cost     a few operations a number; scratch: gamma, beta and a row per thread.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/detail/norm_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct layer_norm_weights {
  view_field<const S, 1> gamma{}, beta{};   // 1 and 0 unless given
};

template <class S>
struct layer_norm_options {
  /// Added to the variance.
  compute_type<S> eps = compute_type<S>(1e-5);
};

template <viewable X, viewable O, class Weights = layer_norm_weights<element_of<const X&>>,
          class Options = layer_norm_options<element_of<const X&>>>
void layer_norm(const X& x, O&& out, Weights&& weights = {}, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_norm<S>("layer_norm", true, 1, from, to, detail::weights_of<layer_norm_weights<S>, true>(weights),
                       detail::options_or_default<layer_norm_options<S>>(options).eps,
                       detail::execution_of(exec, options, weights));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_norm<S>(const char*, bool, idx_t, const tensor_view<const S, 3>&,                        \
  const tensor_view<S, 3>&, const layer_norm_weights<S>&, compute_type<S>, execution&)
#include <attn/core/detail/compiled.hpp>
