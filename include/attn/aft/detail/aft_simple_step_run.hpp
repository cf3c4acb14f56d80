// attn: the driver of aft_simple's step.
#pragma once

#include <attn/aft/detail/aft_simple_run.hpp>
#include <attn/aft/detail/aft_step_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
void run_aft_simple_step(const aft_tensors<compute_type<S>>& call, aft_items<S>& state, execution& exec) {
  const auto limit = exec.limit_threads(call.work(20 * static_cast<double>(call.length)));
  exec.for_each(call.batch * call.heads, [&](idx_t n, int) {
    const auto head = call.head(n);
    simple_rows<compute_type<S>, S, true>(head, call.gate, 0, head.length, call.parts(), state.sums(n));
    call.clear_padding(head, head.length, call.length);
  });
  state.advance(call.length, call.lengths);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_aft_simple_step(const aft_tensors<compute_type<S>>&, aft_items<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
