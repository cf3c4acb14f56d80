// attn: the drivers of pointwise over caches of all element types, which have the tokens of the queries.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/pointwise_run.hpp>
#include <attn/softmax/detail/scattered_stream.hpp>
#include <attn/softmax/detail/sliding_window_step_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class F, class C>
void run_pointwise_step(const softmax_call<S, F, C>& call, idx_t left) {
  if (left == unlimited) return run_full_softmax(call);
  run_sliding_window_step(call, sliding_window_options<S>{.causal = true, .left = left});
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pointwise_step(const softmax_call<S, pointwise_function<compute_type<S>>>&, idx_t)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_OVER(S, C) void run_pointwise_step(                                                                   \
  const softmax_call<S, pointwise_function<compute_type<S>>, C>&, idx_t)
#include <attn/core/detail/compiled.hpp>
