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
// Logits of tokens of an unfinished segment have gradient 0.
//
// Shapes   as the forward call's; out and options.lse are what it wrote, d_out as out, d_lse as lse. Gradients have the
//          shapes of what they are of; dk and dv are summed over the query heads of a group, those of the layer norms
//          over batch, heads and tokens, of sinks over the batch.
// Cost     B H (6 D + 4 Dv) operations for every visible key of a query, 6 B H (D + Dv) for every token and compressed
//          key it goes into; without lse, 2 B H D more for every visible key. Scratch, per key head in progress: about
//          3 Lk (D + Dv) numbers, and in every query head for n compressed keys 5 to 12 times n (D + Dv).
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
#pragma once

#include <attn/low_rank/detail/long_short_backward_call.hpp>
#include <attn/low_rank/long_short.hpp>

namespace attn::inline ATTN_ISA {

/// The gradients long_short_backward writes: those given. S is the element type of the call.
template <class S>
struct long_short_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  /// [B, H, Lk, r]
  view_field<S> logits{};
  /// [D]
  view_field<real, 1> local_gamma{}, local_beta{}, global_gamma{}, global_beta{};
  /// [H]
  view_field<real, 1> sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  view_field<const real, 3> d_lse{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

namespace detail {

/// The check that other operators do not need: no two views of the call overlap.
template <class S, class Call>
void check_long_short_backward(const Call& call, const tensor_view<const S>& logits, const long_short_gradients<S>& g,
                               const long_short_options<S>& given) {
  using T = compute_type<S>;
  backward_views views;
  views.gradient("the gradient of q", g.q, "q", call.q);
  views.gradient("the gradient of k", g.k, "k", call.k);
  views.gradient("the gradient of v", g.v, "v", call.v);
  views.gradient("the gradient of logits", g.logits, "logits", logits);
  const auto list = [&](const char* name, const tensor_view<T, 1>& gradient, const char* of, std::span<const T> x) {
    views.gradient(name, gradient, of, list_layout<T>(x));
  };
  list("the gradient of local_gamma", g.local_gamma, "local_gamma", given.local_gamma);
  list("the gradient of local_beta", g.local_beta, "local_beta", given.local_beta);
  list("the gradient of global_gamma", g.global_gamma, "global_gamma", given.global_gamma);
  list("the gradient of global_beta", g.global_beta, "global_beta", given.global_beta);
  list("the gradient of sinks", g.sinks, "sinks", given.sinks);
  views.read("out", call.out);
  views.read("d_out", call.d_out);
  views.read("lse", given.lse);
  views.read("d_lse", g.d_lse);
  views.check(call.forward.check);
}

}  // namespace detail

/// The gradients of long_short. See the top of the file.
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
  detail::call_softmax_backward<long_short_options>(
      "long_short_backward", q, k, v, out, d_out, gradients, options, none, none_backward, exec,
      [&](auto& call, const auto& given) {
        detail::check_long_short_backward<S>(call, weights, gradients, given);
        detail::attention_views<S> views{
            .q = call.q, .k = call.k, .v = call.v, .out = {}, .shape = call.shape, .lengths = call.lengths()};
        const auto compressed =
            detail::checked_long_short<S>(call.forward.check, views, weights, given, tensor_view<S>());
        const auto recompute = [&](const auto& forward) {
          detail::attention_views<S> without_values{.q = forward.q,
                                                    .k = forward.k,
                                                    .v = forward.v,
                                                    .out = forward.out,
                                                    .shape = forward.shape,
                                                    .lengths = forward.lengths};
          detail::long_short_call<S>{.views = without_values,
                                     .logits = weights,
                                     .sinks = given.sinks,
                                     .lse = forward.lse,
                                     .maximum = forward.maximum,
                                     .terms = compressed.terms,
                                     .local = compressed.local,
                                     .global = compressed.global,
                                     .causal = compressed.causal,
                                     .causal_segment = compressed.causal_segment,
                                     .left = compressed.left,
                                     .right = compressed.right,
                                     .block = compressed.block}
              .run(forward.exec);
        };
        const detail::long_short_wanted<S> wanted{.k = gradients.k,
                                                  .v = gradients.v,
                                                  .logits = gradients.logits,
                                                  .local_gamma = gradients.local_gamma,
                                                  .local_beta = gradients.local_beta,
                                                  .global_gamma = gradients.global_gamma,
                                                  .global_beta = gradients.global_beta};
        call.run(2.7 * compressed.scores() * call.shape.operations_per_score(), recompute, [&](const auto& in) {
          detail::long_short_backward_call<S, std::remove_cvref_t<decltype(in)>>{
              .in = in, .forward = compressed, .wanted = wanted}
              .run(in.forward.exec);
        });
      });
}

}  // namespace attn::inline ATTN_ISA
