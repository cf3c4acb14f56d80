// attn: what the backward passes of attention by a pattern (pattern.hpp) share.
#pragma once

#include <attn/softmax/detail/pattern_softmax_run.hpp>
#include <attn/softmax/detail/sparse_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of softmax attention by a pattern: those given. S is the element type of the call.
template <class S>
struct pattern_gradients {
  using real = compute_type<S>;

  tensor_view<S> q{}, k{}, v{};
  /// As relative_bias: [H or 1, 2R + 1].
  view_field<real, 2> relative_bias{};
  /// [H]
  tensor_view<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  tensor_view<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

namespace detail {

template <class S, class Score, class ScoreBackward>
void run_pattern_softmax_backward(softmax_backward_call<S, Score, ScoreBackward>& call,
                                  std::span<const pattern_ref> patterns) {
  run_plan_backward(call, plan_of(call.forward, patterns));
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_pattern_softmax_backward(softmax_backward_call<S, no_score, no_score_backward>&,          \
  std::span<const pattern_ref>)
#include <attn/core/detail/compiled.hpp>
