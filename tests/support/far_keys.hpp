#pragma once
// Inputs of which it is clear what skip-softmax leaves out, and a call of any operator on them.
#include "support/call.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing::far_keys {

constexpr idx_t dim = 8;

// Scores of keys in far blocks of 64 are about -`depth`, the others about 0: with a threshold of 4 it is clear which
// tiles are left out, on every processor. A far key has 1e-3 of the weight of another one.
template <class S>
struct inputs {
  idx_t batch, heads, kv_heads, queries, keys;
  double depth = 7;
  tensor<S> q, k, v;
  std::vector<std::uint8_t> near{};

  static bool is_far(idx_t j) {
    const idx_t block = j / 64;
    return block == 2 || block == 4 || block == 5 || block == 8 || block == 9 || (block > 11 && block % 4 != 3);
  }
  inputs(idx_t b, idx_t h, idx_t kv, idx_t n, idx_t m, double deep = 7)
      : batch(b), heads(h), kv_heads(kv), queries(n), keys(m), depth(deep) {
    tensor<double> q0 = random_normal(1, b, h, n, dim), k0 = random_normal(2, b, kv, m, dim);
    for (double& x : q0.data) x *= 0.25;
    for (double& x : k0.data) x *= 0.5;
    for (idx_t r = 0; r < b * h * n; ++r) q0.data[static_cast<std::size_t>(r * dim)] = 1;
    for (idx_t r = 0; r < b * kv * m; ++r) k0.data[static_cast<std::size_t>(r * dim)] = is_far(r % m) ? -depth : 0;
    q = cast<S>(q0), k = cast<S>(k0), v = cast<S>(random_normal(3, b, kv, m, dim));
    for (idx_t j = 0; j < m; ++j) near.push_back(!is_far(j));
  }
  attn::tensor_view<const std::uint8_t, 2> near_keys() const { return {near.data(), {1, keys}}; }
};

template <class S>
struct result {
  tensor<S> out;
  tensor<real<S>> lse;
  bool operator==(const result&) const = default;
};

template <class S, class Operator, class Options>
result<S> run(const inputs<S>& x, Options options, attn::execution& exec) {
  result<S> r{tensor<S>(x.batch, x.heads, x.queries, dim), tensor<real<S>>(x.batch, x.heads, x.queries, 1)};
  options.scale = real<S>(1);
  options.lse = row_view(r.lse);
  Operator::call(view(x.q), view(x.k), view(x.v), view(r.out), options, {}, exec);
  return r;
}

}  // namespace testing::far_keys
