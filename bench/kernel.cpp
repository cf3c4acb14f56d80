// Kernel attention: feature maps instead of softmax, a state of constant size. Those with rates and log decays, by one
// recurrence, are in recurrences.cpp.
#include <attn/kernel/linear_backward.hpp>
#include <attn/kernel/linear_step.hpp>
#include <attn/kernel/performer_backward.hpp>
#include <attn/kernel/performer_step.hpp>
#include <attn/kernel/rfa_backward.hpp>
#include <attn/kernel/rfa_step.hpp>

#include <memory>

#include "kernel.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// Of a decoded token: keys and values have p.kv_heads heads, queries p.heads.
double step_flops(const problem& p, double projected, double features) {
  return static_cast<double>(p.heads + p.kv_heads) *
         (2 * static_cast<double>(p.dim) * projected + 2 * features * static_cast<double>(p.dim_v));
}

/// S, z and, where features have them, log scales are read and written.
double state_bytes(const problem& p, double features, bool log_scaled = false) {
  return 2 * sizeof(element) * features * static_cast<double>((p.dim_v + (log_scaled ? 2 : 1)) * p.kv_heads);
}

double rows(const problem& p) { return static_cast<double>(p.set.features); }
double feature_bytes(const problem& p) { return sizeof(element) * rows(p) * static_cast<double>(p.dim); }
attn::tensor<element, 3> draw(const problem& p) {
  return attn::draw_features<element>(p.set.features, p.dim, {.seed = 7});
}

attn::kernel_state_extents extents_of(const problem& p) {
  return {.heads = p.kv_heads, .features = p.set.features, .value_dim = p.dim_v};
}

std::unique_ptr<stream> linear_stream(const problem& p) {
  return make_stream(
      attn::linear_state<element>({.heads = p.kv_heads, .features = p.dim, .value_dim = p.dim_v}),
      [](auto& state, input k, input v) { state.append(k, v); },
      [](auto& state, input q, input k, input v, output out, attn::execution& exec) {
        attn::linear_step(state, q, k, v, out, exec);
      });
}
std::unique_ptr<stream> performer_stream(const problem& p) {
  const auto w = draw(p);
  return make_stream(
      attn::performer_state<element>(extents_of(p)), [w](auto& state, input k, input v) { state.append(k, v, w); },
      [w](auto& state, input q, input k, input v, output out, attn::execution& exec) {
        attn::performer_step(state, q, k, v, out, w, exec);
      });
}
std::unique_ptr<stream> rfa_stream(const problem& p) {
  const auto w = draw(p);
  return make_stream(
      attn::rfa_state<element>(extents_of(p)), [w](auto& state, input k, input v) { state.append(k, v, w); },
      [w](auto& state, input q, input k, input v, output out, attn::execution& exec) {
        attn::rfa_step(state, q, k, v, out, w, exec);
      });
}

training_runner train_linear(const problem& p) {
  return {{}, [causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::linear_backward(x.q, x.k, x.v, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, {.causal = causal}, exec);
          }};
}
training_runner train_performer(const problem& p) {
  return {{}, [w = draw(p), causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::performer_backward(x.q, x.k, x.v, w, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, {.causal = causal},
                                     exec);
          }};
}
training_runner train_rfa(const problem& p) {
  return {{}, [w = draw(p), causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::rfa_backward(x.q, x.k, x.v, w, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, {.causal = causal}, exec);
          }};
}

}  // namespace

family kernel_family() {
  family kernels{
      .title = "kernels",
      .operators =
          {{.name = "linear",
            .colour = "#2e8b3d",
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
            .approximates = false,
            .backward = {[](const problem& p) { return kernel_backward_flops(p, 0, static_cast<double>(p.dim)); },
                         train_linear}},
           {.name = "performer",
            .colour = "#7cb518",
            .cost = growth::linear,
            .has_causal = true,
            .exact = false,
            .uses = {"features"},
            .flops = [](const problem& p) { return kernel_flops(p, rows(p), rows(p)); },
            .prepare = [](const problem& p) -> runner {
              return [w = draw(p), causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
                attn::performer(q, k, v, out, w, {.causal = causal}, exec);
              };
            },
            .parameter_bytes = feature_bytes,
            .backward = {[](const problem& p) { return kernel_backward_flops(p, rows(p), rows(p)); }, train_performer},
            .settings = settings_of(&flags::features, {64, 128, 512, 1024})},
           {.name = "rfa",
            .colour = "#0f5c2e",
            .cost = growth::linear,
            .has_causal = true,
            .exact = false,
            .uses = {"features"},
            .flops = [](const problem& p) { return kernel_flops(p, rows(p), 2 * rows(p)); },
            .prepare = [](const problem& p) -> runner {
              return [w = draw(p), causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
                attn::rfa(q, k, v, out, w, {.causal = causal}, exec);
              };
            },
            .parameter_bytes = feature_bytes,
            .approximates = false,
            .backward = {[](const problem& p) { return kernel_backward_flops(p, rows(p), 2 * rows(p)); }, train_rfa}}},
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
                    .rewritten = true}}
  };
  add_recurrences(kernels), add_dplr(kernels);
  return kernels;
}

}  // namespace bench::inline ATTN_BENCH_TYPE
