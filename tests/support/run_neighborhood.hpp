#pragma once
// Runs a problem through neighborhood.
#include "reference/neighborhood.hpp"
#include "support/call_neighborhood.hpp"
#include "support/run_pattern.hpp"

namespace testing {

using neighborhood_problem = problem<reference::neighborhood_options>;

template <class S>
struct library_form<S, reference::neighborhood_options> : compiled_neighborhood<S> {
  static void set(const reference::neighborhood_options& from, attn::neighborhood_options<S>& to) {
    const auto numbers = [](const std::vector<idx_t>& list) { return attn::per_axis(std::span(list)); };
    to.grid = numbers(from.grid), to.kernel = numbers(from.kernel), to.stride = numbers(from.stride);
    to.dilation = numbers(from.dilation), to.causal_axes = numbers(from.causal_axes), to.shift = numbers(from.shift);
  }
};

template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_neighborhood_options<N>& o) {
  return reference::neighborhood(q, k, v, o);
}
inline reference::result expected(const neighborhood_problem& p) {
  return reference::neighborhood(p.q, p.k, p.v, p.options);
}

inline idx_t tokens_of(const std::vector<idx_t>& grid) {
  idx_t tokens = 1;
  for (idx_t n : grid) tokens *= n;
  return tokens;
}

// A bias for every offset.
inline tensor<double> offset_table(const std::vector<idx_t>& kernel, idx_t heads, std::uint64_t seed = 9) {
  idx_t entries = 1;
  for (idx_t k : kernel) entries *= 2 * k - 1;
  return random_normal(seed, 1, 1, heads, entries);
}

// Unit-normal tokens of a grid, as S holds them.
template <class S>
neighborhood_problem neighborhood_of(problem_shape shape, const reference::neighborhood_options& options,
                                     std::uint64_t seed = 1) {
  shape.queries = shape.keys = tokens_of(options.grid);
  auto p = random_problem<neighborhood_problem>(shape, seed);
  p.options = options;
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  round_options<S>(p.options);
  return p;
}

// Grids of all kinds: one to three axes, strides, dilations that leave residues of different lengths, causal axes,
// shifts, windows with and without; strips of several rows, and of one.
inline const std::vector<reference::neighborhood_options>& grids() {
  static const auto all = [] {
    std::vector<reference::neighborhood_options> list;
    const auto add = [&](std::vector<idx_t> grid, std::vector<idx_t> kernel, std::vector<idx_t> stride = {},
                         std::vector<idx_t> dilation = {}, std::vector<idx_t> causal = {},
                         std::vector<idx_t> shift = {}) {
      reference::neighborhood_options o;
      o.grid = grid, o.kernel = kernel, o.stride = stride, o.dilation = dilation, o.causal_axes = causal;
      o.shift = shift;
      list.push_back(o);
    };
    add({65}, {9});
    add({131}, {8}, {3}, {}, {1});
    add({50}, {6}, {5}, {8});
    add({40}, {10}, {10}, {}, {}, {4});
    add({7, 9}, {3, 4});
    add({8, 12}, {4, 4}, {4, 4}, {}, {}, {2, 1});
    add({12, 8}, {4, 4}, {4, 4});
    add({11, 13}, {5, 3}, {2, 3}, {2, 4}, {0, 1});
    add({9, 10}, {9, 3}, {1, 2}, {}, {1, 0}, {0, 7});
    add({30, 3}, {7, 3});
    add({6, 5}, {1, 5});
    add({5, 6}, {5, 1}, {}, {}, {1, 1});
    add({3, 31}, {3, 13}, {3, 1}, {1, 2}, {}, {1, 3});
    add({4, 5, 6}, {3, 3, 3});
    add({4, 6, 5}, {2, 3, 5}, {2, 3, 1}, {}, {}, {1, 0, 2});
    add({5, 7, 4}, {2, 3, 2}, {1, 2, 2}, {2, 1, 2}, {1, 0, 0}, {0, 3, 0});
    add({1, 1, 1}, {1, 1, 1});
    add({6, 1, 20}, {3, 1, 20});
    return list;
  }();
  return all;
}

}  // namespace testing
