// attn: what the backward passes of attention by a pattern (pattern.hpp) share.
#pragma once

#include <attn/softmax/detail/pattern_softmax_run.hpp>
#include <attn/softmax/detail/sparse_backward.hpp>
#include <attn/softmax/softmax_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class ScoreBackward>
void run_pattern_softmax_backward(softmax_backward_call<S, Score, ScoreBackward>& call,
                                  std::span<const pattern_ref> patterns) {
  run_plan_backward(call, plan_of(call.forward, patterns));
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pattern_softmax_backward(softmax_backward_call<S, no_score, no_score_backward>&,          \
  std::span<const pattern_ref>)
#include <attn/core/detail/compiled.hpp>
