// What kernel.cpp, recurrences.cpp and dplr.cpp, which are compiled at the same time, have in common.
#pragma once

#include <attn/kernel/linear.hpp>

#include <memory>
#include <utility>

#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {

/// Each adds the operators and decoders of its file.
void add_recurrences(family& kernels);
void add_dplr(family& kernels);

/// Pairs of a query and a key of its chunk that it sees.
inline double chunk_scores(const problem& p) {
  constexpr idx_t chunk = attn::detail::kernel_chunk;
  const auto full = static_cast<double>(p.length / chunk), rest = static_cast<double>(p.length % chunk);
  return full * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2;
}

/// W x for queries and keys; then features into the sums, out of the sums, and, causal, the triangle of a chunk among
/// itself: not in the formula, but in the way it is computed by chunks, which is credited for it.
inline double kernel_flops(const problem& p, double projected, double features) {
  const auto n = static_cast<double>(p.length), heads = static_cast<double>(p.heads);
  const auto dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v);
  const double scores = p.causal ? 2 * chunk_scores(p) * (features + dim_v) : 0;
  return heads * (4 * n * dim * projected + 4 * n * features * dim_v + scores);
}

/// W x again and W^T back; five products with the sums of keys and of queries where the forward pass has two, and as
/// many with the triangle.
inline double kernel_backward_flops(const problem& p, double projected, double features) {
  const auto n = static_cast<double>(p.length), heads = static_cast<double>(p.heads);
  const auto dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v);
  const double scores = p.causal ? 2 * chunk_scores(p) * (3 * features + 2 * dim_v) : 0;
  return heads * (8 * n * dim * projected + 10 * n * features * dim_v + scores);
}

/// Of a step that reads a state of [dim, dim_v] and writes it again.
inline double recurrent_step_flops(const problem& p) { return 8.0 * static_cast<double>(p.heads * p.dim * p.dim_v); }
inline double recurrent_state_bytes(const problem& p) {
  return 2.0 * sizeof(element) * static_cast<double>(p.heads * p.dim * p.dim_v);
}

/// Append is called as append(state, k, v), Step as step(state, q, k, v, out, exec).
template <class State, class Append, class Step>
struct kernel_stream final : stream {
  State state;
  Append append;
  Step take;

  kernel_stream(State s, Append a, Step t) : state(std::move(s)), append(std::move(a)), take(std::move(t)) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<kernel_stream>(*this); }
  void feed(input k, input v) override { append(state, k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override { take(state, q, k, v, out, exec); }
  void rewind(idx_t) override {}
};

template <class State, class Append, class Step>
std::unique_ptr<stream> make_stream(State state, Append append, Step step) {
  return std::make_unique<kernel_stream<State, Append, Step>>(std::move(state), std::move(append), std::move(step));
}

}  // namespace bench::inline ATTN_BENCH_TYPE
