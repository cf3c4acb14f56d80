// attn: the gradients of multipole.
//
//   attn::multipole(q, k, v, out, {.lse = lse}, threads);
//   attn::multipole_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.lse = lse}, threads);
//
// Clusters and the keys taken are constants: they are computed again as in the forward pass. Queries, the keys taken,
// those of the own segment and the means of what is left of clusters have the gradients of softmax attention
// (full_softmax_backward.hpp); each of the n members that are left of a cluster gets 1 / n of the gradient of its mean,
// in keys and in values. What their spread adds to the score of a cluster, whose gradient is d, gives the score of the
// mean query with each member j the gradient d (e^r_j / sum e^r - 1 / n), and by it the key, and the queries of which
// that is the mean. With causal, the gradient of a query therefore depends on rows of d_out and keys after its own, but
// on none more than block - 1 + lookback - 1 after it.
//
// Shapes   as the forward call's; out and options.lse are what it wrote, d_out as out, d_lse as lse. Gradients have the
//          shapes of what they are of; dk and dv are summed over the query heads of a group, that of sinks over the
//          batch.
// Cost     B H (6 D + 4 Dv) operations for every visible key or cluster of a query, and what the forward call takes to
//          cluster and choose, and 4 D for each of Lq Lk / block scores of mean queries; without lse, 2 B H D more for
//          every one of them. Scratch: that of the forward call, per key head in progress (Lk + clusters) (D + Dv)
//          numbers for every 2048 queries, up to eight times, and D for each of its queries, and for each block; per
//          thread 131072 numbers, but at least 12 Lk.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
#pragma once

#include <attn/low_rank/detail/multipole_backward_run.hpp>
#include <attn/low_rank/multipole.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multipole_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k;

  view_field<S> q{}, k{}, v{};
  view_field<real, 1> sinks{};  // [H]
  view_field<const real, 3> d_lse{};  // read, not written: the gradient of lse, [B, H, Lq]
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = multipole_options<element_of<const Q&>>>
void multipole_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                        const multipole_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::no_score none;
  detail::no_score_backward none_backward;
  auto call = detail::checked_backward_call<multipole_options>("multipole_backward", q, k, v, out, d_out, gradients,
                                                               options, none, none_backward, exec);
  const auto clustering =
      detail::checked_multipole<S>(call.views, call.k, call.v, call.shape, call.lengths(), call.options);
  detail::run_multipole_backward(call, clustering);
}

}}  // namespace attn::ATTN_ISA
