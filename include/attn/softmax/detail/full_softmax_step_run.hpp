// attn: the driver of full_softmax over caches of all element types.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/full_softmax_run.hpp>
#include <attn/softmax/detail/scattered_stream.hpp>

#define ATTN_RUN_OVER(S, C) void run_full_softmax(const softmax_call<S, no_score, C>&)
#include <attn/core/detail/compiled.hpp>
