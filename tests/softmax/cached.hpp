#pragma once
// Three sequences of four heads over two, for tests of what attends a cache.
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing::cached_tests {

inline constexpr idx_t batch = 3, heads = 4, kv_heads = 2, dim = 20, value_dim = 12, room = 64;
inline const attn::state_extents extents{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};

struct inputs {
  tensor<float> q, k, v;
  inputs(std::uint64_t seed, idx_t count)
      : q(cast<float>(random_normal(seed, batch, heads, count, dim))),
        k(cast<float>(random_normal(seed + 1, batch, kv_heads, count, dim))),
        v(cast<float>(random_normal(seed + 2, batch, kv_heads, count, value_dim))) {}
};

struct results {
  tensor<float> out, lse;
  explicit results(idx_t count) : out(batch, heads, count, value_dim, 7), lse(batch, heads, count, 1, 7) {}
  attn::tensor_view<float, 3> lse_view() { return {lse.data.data(), {batch, heads, lse.length()}}; }
  bool operator==(const results& x) const { return out.data == x.out.data && lse.data == x.lse.data; }
};

}  // namespace testing::cached_tests
