// Recurrences: linear attention with log decays, the delta rule.
#include <attn/kernel/delta_rule_backward.hpp>
#include <attn/kernel/delta_rule_step.hpp>
#include <attn/kernel/linear_backward.hpp>

#include <iterator>
#include <memory>

#include "inputs.hpp"
#include "kernel.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// beta, and the log decays of tokens or, with so many, of their channels.
struct delta_numbers {
  attn::tensor_view<const real, 3> beta;
  attn::tensor_view<const real> log_decay;

  delta_numbers(idx_t heads, idx_t length, idx_t channels)
      : beta(drawn_numbers<real>(role::rate, static_cast<std::size_t>(heads * length)), {1, heads, length}),
        log_decay(drawn_numbers<real>(role::log_decay, static_cast<std::size_t>(heads * length * channels)),
                  {1, heads, length, channels}) {}
};
constexpr real unit_norm_eps = real(1e-6);

/// Products of keys with keys and queries, the solve, and three products with the state: causal by nature.
double delta_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v);
  return static_cast<double>(p.heads) * (6 * n * dim * dim_v + 2 * chunk_scores(p) * (2 * dim + 2 * dim_v));
}
/// Backward: each product twice, and the forward ones again.
double delta_backward_flops(const problem& p) { return 3 * delta_flops(p); }

template <bool Channels>
runner run_delta_rule(const problem& p) {
  return [x = delta_numbers(p.heads, p.length, Channels ? p.dim : 1)](input q, input k, input v, output out,
                                                                      attn::execution& exec) {
    attn::delta_rule(q, k, v, out, {.beta = x.beta, .log_decay = x.log_decay, .unit_norm_eps = unit_norm_eps}, exec);
  };
}
template <bool Channels>
training_runner train_delta_rule(const problem& p) {
  return {{},
          [x = delta_numbers(p.heads, p.length, Channels ? p.dim : 1)](const training_views& y, attn::execution& exec) {
            attn::delta_rule_backward(y.q, y.k, y.v, y.d_out, {.q = y.dq, .k = y.dk, .v = y.dv},
                                      {.beta = x.beta, .log_decay = x.log_decay, .unit_norm_eps = unit_norm_eps}, exec);
          }};
}
template <bool Channels>
operator_entry delta_rule_entry(std::string name, const char* colour) {
  return {.name = std::move(name),
          .colour = colour,
          .cost = growth::linear,
          .has_causal = false,
          .exact = false,
          .uses = {},
          .flops = delta_flops,
          .prepare = run_delta_rule<Channels>,
          .approximates = false,
          .backward = {delta_backward_flops, train_delta_rule<Channels>}};
}

/// As many heads of queries as the state has: those of values.
std::unique_ptr<stream> delta_rule_stream(const problem& p) {
  const delta_numbers x(p.heads, 1, 1);
  return make_stream(
      attn::delta_rule_state<element>({.heads = p.heads, .dim = p.dim, .value_dim = p.dim_v}),
      [](auto&, input, input) {},
      [x](auto& state, input q, input, input, output out, attn::execution& exec) {
        attn::delta_rule_step(state, q, q, q, out,
                              {.beta = x.beta, .log_decay = x.log_decay, .unit_norm_eps = unit_norm_eps}, exec);
      });
}

problem causal(problem p) {
  p.causal = true;
  return p;
}

template <bool Channels>
operator_entry linear_decay_entry(std::string name, const char* colour) {
  return {.name = std::move(name),
          .colour = colour,
          .cost = growth::linear,
          .has_causal = false,
          .exact = false,
          .uses = {},
          .flops = [](const problem& p) { return kernel_flops(causal(p), 0, static_cast<double>(p.dim)); },
          .prepare = [](const problem& p) -> runner {
            return [x = delta_numbers(p.heads, p.length, Channels ? p.dim : 1)](input q, input k, input v, output out,
                                                                                attn::execution& exec) {
              attn::linear(q, k, v, out, {.causal = true, .normalise = false, .log_decay = x.log_decay},
                           attn::feature_maps::identity{}, exec);
            };
          },
          .approximates = false,
          .backward = {[](const problem& p) { return kernel_backward_flops(causal(p), 0, static_cast<double>(p.dim)); },
                       [](const problem& p) -> training_runner {
                         return {{},
                                 [x = delta_numbers(p.heads, p.length, Channels ? p.dim : 1)](const training_views& y,
                                                                                              attn::execution& exec) {
                                   attn::linear_backward(y.q, y.k, y.v, y.d_out, {.q = y.dq, .k = y.dk, .v = y.dv},
                                                         {.causal = true, .normalise = false, .log_decay = x.log_decay},
                                                         attn::feature_maps::identity{}, exec);
                                 }};
                       }}};
}

}  // namespace

void add_recurrences(family& kernels) {
  const operator_entry entries[] = {linear_decay_entry<false>("linear_decay", "#66c2a4"),
                                    linear_decay_entry<true>("linear_channel_decay", "#1b9e91"),
                                    delta_rule_entry<false>("delta_rule", "#9fb800"),
                                    delta_rule_entry<true>("delta_rule_channel_decay", "#5f7a1f")};
  kernels.operators.insert(kernels.operators.end(), std::begin(entries), std::end(entries));
  kernels.decoders.push_back(
      {.name = "delta_rule_decode",
       .exact = false,
       .uses = {},
       .flops = recurrent_step_flops,
       .cache_bytes = recurrent_state_bytes,
       .prepare = delta_rule_stream,
       .approximates = false,
       .rewritten = true});
}

}  // namespace bench::inline ATTN_BENCH_TYPE
