// attn: normalisation of every head by itself, as RWKV (ln_x) and RetNet normalise what their heads give.
//
//   out = gamma (x - mean) / sqrt(variance + eps) + beta           Wu & He 2018, per token, over the D channels of each
//                                                                  head; variance without Bessel's correction
//   attn::group_norm(x, out, {}, {.heads = 8});             // Eigen matrices [length, heads * dim]; out may be x
//   attn::group_norm(x, out, {.gamma = g, .beta = b}, {.heads = 8, .eps = 64e-5f}, threads);        // RWKV-7
//
// Shapes   x and out [B, L, H D], gamma and beta [H D]: head h is channels h D to h D + D - 1, so an operator's out in
//          memory [batch, length, head, dim] is an x. float, double, or Eigen::half / Eigen::bfloat16 in memory with
//          float arithmetic.
// Cost     that of layer_norm, which it is for one head: a few operations a number; scratch: gamma, beta and a token
//          per thread.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/layer_norm.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
using group_norm_weights = layer_norm_weights<S>;   // gamma and beta, 1 and 0 unless given

template <class S>
struct group_norm_options {
  idx_t heads = 1;
  /// Added to the variance.
  compute_type<S> eps = compute_type<S>(1e-5);
};

template <viewable X, viewable O, class Weights = group_norm_weights<element_of<const X&>>,
          class Options = group_norm_options<element_of<const X&>>>
void group_norm(const X& x, O&& out, Weights&& weights = {}, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& given = detail::options_or_default<group_norm_options<S>>(options);
  detail::call_norm<S>("group_norm", true, given.heads, from, to,
                       detail::weights_of<group_norm_weights<S>, true>(weights), given.eps,
                       detail::execution_of(exec, options, weights));
}

}}  // namespace attn::ATTN_ISA
