// attn: the gradients of long_short.
//
//   attn::long_short(q, k, v, out, logits, {.left = 128, .right = 128, .lse = lse}, threads);
//   attn::long_short_backward(q, k, v, out, logits, d_out, {.q = dq, .k = dk, .v = dv, .logits = dp},
//                             {.left = 128, .right = 128, .lse = lse}, threads);
//
// Queries, the keys of windows and the compressed ones, K' and V', have the gradients of softmax attention
// (full_softmax_backward.hpp), which go through the layer norms where there are any. With P = softmax over tokens of
// the logits:
//   dk_t += sum_c P_tc dK'_c,  dv_t += sum_c P_tc dV'_c,
//   dlogits_tc = P_tc (k_t . dK'_c + v_t . dV'_c - K'_c . dK'_c - V'_c . dV'_c).
// Logits of tokens of an unfinished segment have gradient 0, and so have keys, values and logits that key_mask hides.
//
// Shapes   as the forward call's; out and options.lse are what it wrote, d_out as out, d_lse as lse. Gradients have the
//          shapes of what they are of; dk and dv are summed over the query heads of a group, those of the layer norms
//          over batch, heads and tokens, of sinks over the batch.
// Cost     B H (6 D + 4 Dv) operations for every visible key of a query, 6 B H (D + Dv) for every token and compressed
//          key it goes into; without lse, 2 B H D more for every visible key. Scratch, per key head in progress: about
//          3 Lk (D + Dv) numbers, and in every query head for n compressed keys 5 to 12 times n (D + Dv).
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
#pragma once

#include <attn/low_rank/detail/long_short_backward_run.hpp>
#include <attn/low_rank/long_short.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct long_short_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k;

  view_field<S> q{}, k{}, v{};
  view_field<S> logits{};  // [B, H, Lk, r]
  view_field<real, 1> local_gamma{}, local_beta{}, global_gamma{}, global_beta{};  // [D]
  view_field<real, 1> sinks{};  // [H]
  view_field<const real, 3> d_lse{};  // read, not written: the gradient of lse, [B, H, Lq]
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable O, viewable L, viewable D,
          class Options = long_short_options<element_of<const Q&>>>
void long_short_backward(const Q& q, const K& k, const V& v, const O& out, const L& logits, const D& d_out,
                         const long_short_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const Q&>;
  static_assert(std::same_as<element_of<const L&>, S>, "attn: logits must have the element type of q, k and v");
  const tensor_view<const S> weights = as_view(logits);
  detail::no_score none;
  detail::no_score_backward none_backward;
  auto call = detail::checked_backward_call<long_short_options>("long_short_backward", q, k, v, out, d_out, gradients,
                                                                options, none, none_backward, exec);
  const auto& given = call.options;
  const detail::seen_lengths lengths(given.key_mask, call.shape.batch, call.forward.lengths, call.forward.exec);
  const auto forward = detail::checked_long_short<S>(call.views, call.shape, call.forward, weights, given);
  call.views.gradient("logits", gradients.logits, weights);
  call.views.gradient("local_gamma", gradients.local_gamma, detail::list_layout(given.local_gamma));
  call.views.gradient("local_beta", gradients.local_beta, detail::list_layout(given.local_beta));
  call.views.gradient("global_gamma", gradients.global_gamma, detail::list_layout(given.global_gamma));
  call.views.gradient("global_beta", gradients.global_beta, detail::list_layout(given.global_beta));
  detail::run_long_short_backward(call, forward,
                                  {gradients.logits, gradients.local_gamma, gradients.local_beta,
                                   gradients.global_gamma, gradients.global_beta});
}

}}  // namespace attn::ATTN_ISA
