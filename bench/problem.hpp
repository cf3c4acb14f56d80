// attn_bench: what an operator is run on.
#pragma once

#include <attn/core/threads.hpp>
#include <attn/core/tensor_view.hpp>

#include "flags.hpp"

namespace bench {

using attn::idx_t;

/// One shape an operator is run at: q [1, heads, length, dim], k and v [1, kv_heads, length, dim or dim_v].
struct problem {
  idx_t length, heads, kv_heads, dim, dim_v;
  bool causal;
  const flags& set;
};

enum class growth { linear, quadratic };

}  // namespace bench
