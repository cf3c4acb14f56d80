// attn: the driver of lists of keys over caches of all element types.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/scattered_stream.hpp>
#include <attn/softmax/detail/selected_rows.hpp>

#define ATTN_RUN_OVER(S, C) void run_selected_keys_step(const softmax_call<S, no_score, C>&, const selected_lists&)
#include <attn/core/detail/compiled.hpp>
