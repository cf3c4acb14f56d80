#pragma once
// One case of an exact operator: inputs and options in double, to be given to the reference as they
// are and to the library in any element type.
#include "reference/full_softmax.hpp"
#include "reference/sliding_window.hpp"
#include "support/random.hpp"

namespace testing {

template <class Options>
struct problem {
  tensor<double> q, k, v;
  Options options;
};
using full_softmax_problem = problem<reference::full_softmax_options>;
using sliding_window_problem = problem<reference::sliding_window_options>;

inline reference::result expected(const full_softmax_problem& p) {
  return reference::full_softmax(p.q, p.k, p.v, p.options);
}
inline reference::result expected(const sliding_window_problem& p) {
  return reference::sliding_window(p.q, p.k, p.v, p.options);
}

struct problem_shape {
  idx_t batch = 2, heads = 4, kv_heads = 2, queries = 65, keys = 65, dim = 16, value_dim = 16;
};

// Unit-normal q, k and v.
template <class Problem>
Problem random_problem(const problem_shape& s, std::uint64_t seed = 1) {
  return {random_normal(3 * seed, s.batch, s.heads, s.queries, s.dim),
          random_normal(3 * seed + 1, s.batch, s.kv_heads, s.keys, s.dim),
          random_normal(3 * seed + 2, s.batch, s.kv_heads, s.keys, s.value_dim),
          {}};
}

}  // namespace testing
