// Kernel attention: feature maps instead of softmax, a state of constant size.
#include <attn/kernel/linear_step.hpp>
#include <attn/kernel/performer_step.hpp>
#include <attn/kernel/rfa_step.hpp>

#include <algorithm>

#include "table.hpp"

namespace bench {
namespace {

/// W x for queries and keys; then features into the sums, out of the sums, and, causal, the triangle of a chunk among
/// itself: not in the formula, but in the way it is computed by chunks, which is credited for it.
double kernel_flops(const problem& p, double projected, double features) {
  const auto n = static_cast<double>(p.length), heads = static_cast<double>(p.heads);
  const auto dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v);
  constexpr index chunk = attn::detail::kernel_chunk;
  const auto full = static_cast<double>(p.length / chunk), rest = static_cast<double>(p.length % chunk);
  const double pairs = full * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2;
  return heads * (4 * n * dim * projected + 4 * n * features * dim_v + (p.causal ? 2 * pairs * (features + dim_v) : 0));
}

/// Of a decoded token: keys and values have p.kv_heads heads, queries p.heads.
double step_flops(const problem& p, double projected, double features) {
  return static_cast<double>(p.heads + p.kv_heads) *
         (2 * static_cast<double>(p.dim) * projected + 2 * features * static_cast<double>(p.dim_v));
}

/// S, z and, where features have them, levels are read and written.
double state_bytes(const problem& p, double features, bool leveled = false) {
  return 2 * sizeof(float) * features * static_cast<double>((p.dim_v + (leveled ? 2 : 1)) * p.kv_heads);
}

double rows(const problem& p) { return static_cast<double>(p.set.features); }
double feature_bytes(const problem& p) { return sizeof(float) * rows(p) * static_cast<double>(p.dim); }
attn::random_features<float> draw(const problem& p) {
  return attn::draw_features<float>(p.set.features, p.dim, {.seed = 7});
}

/// Step is called as step(state, q, k, v, out, exec).
template <class State, class Step>
struct kernel_stream final : stream {
  State state;
  Step take;

  kernel_stream(State s, Step t) : state(std::move(s)), take(std::move(t)) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<kernel_stream>(*this); }
  void feed(input k, input v) override {  // no queries, no answers
    attn::execution serial;
    take(state, {nullptr, {k.extent(0), 0, k.extent(2), k.extent(3)}}, k, v,
         {nullptr, {v.extent(0), 0, v.extent(2), v.extent(3)}}, serial);
  }
  void step(input q, input k, input v, output out, attn::execution& exec) override { take(state, q, k, v, out, exec); }
  void rewind(index) override {}
};

template <class State, class Step>
std::unique_ptr<stream> make_stream(State state, Step step) {
  return std::make_unique<kernel_stream<State, Step>>(std::move(state), std::move(step));
}

std::unique_ptr<stream> linear_stream(const problem& p) {
  return make_stream(attn::linear_state<float>(p.kv_heads, p.dim, p.dim_v),
                     [](auto& state, input q, input k, input v, output out, attn::execution& exec) {
                       attn::linear_step(state, q, k, v, out, {}, exec);
                     });
}
std::unique_ptr<stream> performer_stream(const problem& p) {
  return make_stream(attn::performer_state<float>(p.kv_heads, p.set.features, p.dim_v),
                     [w = draw(p)](auto& state, input q, input k, input v, output out, attn::execution& exec) {
                       attn::performer_step(state, q, k, v, out, w, {}, exec);
                     });
}
std::unique_ptr<stream> rfa_stream(const problem& p) {
  return make_stream(attn::rfa_state<float>(p.kv_heads, p.set.features, p.dim_v),
                     [w = draw(p)](auto& state, input q, input k, input v, output out, attn::execution& exec) {
                       attn::rfa_step(state, q, k, v, out, w, {}, exec);
                     });
}

}  // namespace

family kernel_family() {
  return {
      .operators = {{.name = "linear",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {},
                     .flops = [](const problem& p) { return kernel_flops(p, 0, static_cast<double>(p.dim)); },
                     .prepare = [](const problem& p) -> runner {
                       return [causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
                         attn::linear(q, k, v, out, {.causal = causal}, exec);
                       };
                     },
                     .approximates = false},
                    {.name = "performer",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"features"},
                     .flops = [](const problem& p) { return kernel_flops(p, rows(p), rows(p)); },
                     .prepare = [](const problem& p) -> runner {
                       return [w = draw(p), causal = p.causal](input q, input k, input v, output out,
                                                               attn::execution& exec) {
                         attn::performer(q, k, v, out, w, {.causal = causal}, exec);
                       };
                     },
                     .parameter_bytes = feature_bytes},
                    {.name = "rfa",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"features"},
                     .flops = [](const problem& p) { return kernel_flops(p, rows(p), 2 * rows(p)); },
                     .prepare = [](const problem& p) -> runner {
                       return [w = draw(p), causal = p.causal](input q, input k, input v, output out,
                                                               attn::execution& exec) {
                         attn::rfa(q, k, v, out, w, {.causal = causal}, exec);
                       };
                     },
                     .parameter_bytes = feature_bytes,
                     .approximates = false}},
      .decoders = {{.name = "linear_decode",
                    .exact = false,
                    .uses = {},
                    .flops = [](const problem& p) { return step_flops(p, 0, static_cast<double>(p.dim)); },
                    .cache_bytes = [](const problem& p) { return state_bytes(p, static_cast<double>(p.dim)); },
                    .prepare = linear_stream,
                    .approximates = false,
                    .rewritten = true},
                   {.name = "performer_decode",
                    .exact = false,
                    .uses = {"features"},
                    .flops = [](const problem& p) { return step_flops(p, rows(p), rows(p)); },
                    .cache_bytes = [](const problem& p) { return state_bytes(p, rows(p), true); },
                    .prepare = performer_stream,
                    .rewritten = true},
                   {.name = "rfa_decode",
                    .exact = false,
                    .uses = {"features"},
                    .flops = [](const problem& p) { return step_flops(p, rows(p), 2 * rows(p)); },
                    .cache_bytes = [](const problem& p) { return state_bytes(p, 2 * rows(p)); },
                    .prepare = rfa_stream,
                    .approximates = false,
                    .rewritten = true}},
  };
}

}  // namespace bench
