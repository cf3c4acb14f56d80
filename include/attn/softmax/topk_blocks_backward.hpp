// attn: the gradients of topk_blocks.
//
//   attn::topk_blocks(q, k, v, out, {.block = 128, .topk = 3, .lse = lse});
//   attn::topk_blocks_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv},
//                              {.block = 128, .topk = 3, .lse = lse});
//
// The formulas of full_softmax_backward.hpp over the visible keys of topk_blocks.hpp. The choice of blocks has no
// gradient; it is computed again, with the same result.
//
// Shapes   q, k, v, out, the options: as the forward call's; out and options.lse are what it wrote. d_out as out,
//          d_lse as lse. Gradients have the shapes of what they are of; dk and dv are summed over the query heads of a
//          group.
// Cost     2 (3 D + 2 Dv) operations for every visible key of a query, and the choice; without lse, the forward call
//          without values too. Scratch, per key head in progress: Lq D numbers, the packed keys and values, and
//          Lk (D + Dv) numbers, up to four times that for long sequences.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// A row that sees no key has gradient 0. score_backward(s, d, batch, head, i, j) gives d times the derivative of
// score(s, batch, head, i, j) by s.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
#pragma once

#include <attn/softmax/detail/sparse_backward.hpp>
#include <attn/softmax/topk_blocks.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients topk_blocks_backward computes: those given. S is the element type of the call.
template <class S>
struct topk_blocks_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  /// [H]
  view_field<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  view_field<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// The gradients of topk_blocks. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = topk_blocks_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void topk_blocks_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                          const topk_blocks_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                          Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<topk_blocks_options>("topk_blocks_backward", q, k, v, out, d_out, gradients,
                                                                 options, score, score_backward, exec);
  const auto blocks = detail::check_topk(call.forward, call.options);
  detail::differentiate_planned(call, detail::topk_plan_of(call.forward, blocks));
}

}}  // namespace attn::ATTN_ISA
