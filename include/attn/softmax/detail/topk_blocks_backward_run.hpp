// attn: the driver of topk_blocks_backward.
#pragma once

#include <attn/softmax/detail/sparse_backward.hpp>
#include <attn/softmax/detail/topk_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S, class Score, class ScoreBackward>
void run_topk_blocks_backward(softmax_backward_call<S, Score, ScoreBackward>& call, const topk_shape& blocks) {
  run_plan_backward(call, topk_plan_of(call.forward, blocks));
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_topk_blocks_backward(softmax_backward_call<S, no_score, no_score_backward>&,              \
  const topk_shape&)
#include <attn/core/detail/compiled.hpp>
