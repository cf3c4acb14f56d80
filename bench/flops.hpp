// attn_bench: operations of softmax attention, shared by the families.
#pragma once

#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {

/// One product with the key and one with the value for every pair of a query and a key, in every head.
inline double score_flops(const problem& p, double scores) {
  return 2.0 * scores * static_cast<double>((p.dim + p.dim_v) * p.heads);
}

/// The backward pass has five products (scores, gradients of weights, of queries, keys and values) where the forward
/// pass has two.
inline double five_for_two(double forward, const problem& p) {
  return forward * static_cast<double>(3 * p.dim + 2 * p.dim_v) / static_cast<double>(p.dim + p.dim_v);
}

}  // namespace bench::ATTN_BENCH_TYPE
