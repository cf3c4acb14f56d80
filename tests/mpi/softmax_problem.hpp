#pragma once
#include <optional>

#include "parts.hpp"

namespace testing {

// Sequences whose scores have every term there is.
template <class S>
struct problem {
  using T = attn::compute_type<S>;
  struct choice {
    bool causal = false, terms = false, score = false, lse = true;
    idx_t queries = 70, keys = 70, kv_heads = 2;
  };

  explicit problem(const choice& c, std::uint64_t seed = 1)
      : chosen(c), q(cast<S>(random_normal(seed, 2, 4, c.queries, 9))),
        k(cast<S>(random_normal(seed + 1, 2, c.kv_heads, c.keys, 9))),
        v(cast<S>(random_normal(seed + 2, 2, c.kv_heads, c.keys, 12))) {}

  template <class Options>
  Options options() const {
    Options o;
    o.causal = chosen.causal;
    if (chosen.terms) o.scale = T(0.4), o.softcap = T(1.5), o.alibi_slopes = slopes, o.sinks = sinks;
    return o;
  }
  static T score(T s, idx_t b, idx_t h, idx_t i, idx_t j) {
    return (i * 3 + j * 5 + h) % 11 == 0 ? -std::numeric_limits<T>::infinity()
                                         : s * T(0.5) + T(0.01) * static_cast<T>(b + i - j);
  }
  static T score_backward(T, T d, idx_t, idx_t h, idx_t i, idx_t j) {
    return (i * 3 + j * 5 + h) % 11 == 0 ? T(0) : d * T(0.5);
  }

  choice chosen;
  tensor<S> q, k, v;
  std::vector<T> slopes = {T(0.05), T(0.025), T(0.0125), 0};
  std::vector<T> sinks = {T(0.3), -1, 2, -std::numeric_limits<T>::infinity()};
};

}  // namespace testing
