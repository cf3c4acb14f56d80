// attn: the driver of selected_keys: by blocks, which the queries that name one attend together, or by rows.
#pragma once

#include <attn/softmax/detail/selected_plan.hpp>
#include <attn/softmax/detail/selected_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S, class Score>
void run_selected_keys(const softmax_call<S, Score>& call, const selected_lists& lists) {
  if (lists.block >= listed_names::least_block)
    run_plan(call, selected_plan_of(call, lists));
  else
    run_selected_keys_step(call, lists);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_selected_keys(const softmax_call<S, no_score>&, const selected_lists&)
#include <attn/core/detail/compiled.hpp>
