// attn: the driver of neighborhood_backward.
#pragma once

#include <attn/softmax/detail/neighborhood_run.hpp>
#include <attn/softmax/detail/sparse_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S, class Score, class ScoreBackward>
void run_neighborhood_backward(softmax_backward_call<S, Score, ScoreBackward>& call, const grid_axes& grid) {
  call.furthest = (std::max)(call.furthest, call.d_relative_bias.extent(1));  // distances are those of the table
  with_grid(call.forward, grid, [&](const neighborhood_plan& plan) { run_plan_backward(call, plan); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_neighborhood_backward(softmax_backward_call<S, no_score, no_score_backward>&,             \
  const grid_axes&)
#include <attn/core/detail/compiled.hpp>
