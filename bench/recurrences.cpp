// Recurrences: linear attention with log decays, the delta rule, diagonal plus low rank.
#include <attn/kernel/delta_rule_backward.hpp>
#include <attn/kernel/delta_rule_step.hpp>
#include <attn/kernel/dplr_backward.hpp>
#include <attn/kernel/dplr_step.hpp>
#include <attn/kernel/linear_backward.hpp>

#include <cmath>
#include <iterator>
#include <memory>
#include <vector>

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

double delta_state_bytes(const problem& p) {
  return 2.0 * sizeof(element) * static_cast<double>(p.heads * p.dim * p.dim_v);
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

/// a, b and log decays of channels as RWKV-7 has them: b is -a, of unit norm, times rates.
struct dplr_numbers {
  std::shared_ptr<std::vector<element>> rows;
  input a, b;
  attn::tensor_view<const real> log_decay;

  dplr_numbers(idx_t heads, idx_t length, idx_t dim) : log_decay(delta_numbers(heads, length, dim).log_decay) {
    const auto count = static_cast<std::size_t>(heads * length * dim), size = static_cast<std::size_t>(dim);
    rows = std::make_shared<std::vector<element>>(2 * count);
    const element* const normal = drawn_numbers<element>(role::parameter, count);
    const real* const rates = drawn_numbers<real>(role::rate, count);
    for (std::size_t row = 0; row < count; row += size) {
      real squares = 0;
      for (std::size_t n = row; n < row + size; ++n) squares += std::pow(static_cast<real>(normal[n]), real(2));
      for (std::size_t n = row; n < row + size; ++n) {
        const real x = static_cast<real>(normal[n]) / std::sqrt(squares);
        (*rows)[n] = static_cast<element>(-x), (*rows)[count + n] = static_cast<element>(x * rates[n]);
      }
    }
    a = {rows->data(), {1, heads, length, dim}}, b = {rows->data() + count, {1, heads, length, dim}};
  }
};

/// Twice as many products of rows, and twice as many of values, as the delta rule has; four with the state.
double dplr_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v);
  return static_cast<double>(p.heads) * (8 * n * dim * dim_v + 8 * chunk_scores(p) * (dim + dim_v));
}
training_runner train_dplr(const problem& p) {
  const auto count = static_cast<std::size_t>(p.heads * p.length * p.dim);
  element* const gradients = result_memory<element>(2 * count, parameter_slot);
  return {{}, [x = dplr_numbers(p.heads, p.length, p.dim), gradients, count](const training_views& y,
                                                                            attn::execution& exec) {
            attn::dplr_backward(y.q, y.k, y.v, x.a, x.b, y.d_out,
                                {.q = y.dq, .k = y.dk, .v = y.dv, .a = {gradients, x.a.extents()},
                                 .b = {gradients + count, x.a.extents()}},
                                {.log_decay = x.log_decay}, exec);
          }};
}
operator_entry dplr_entry() {
  return {.name = "dplr",
          .colour = "#b7d968",
          .cost = growth::linear,
          .has_causal = false,
          .exact = false,
          .uses = {},
          .flops = dplr_flops,
          .prepare = [](const problem& p) -> runner {
            return [x = dplr_numbers(p.heads, p.length, p.dim)](input q, input k, input v, output out,
                                                                attn::execution& exec) {
              attn::dplr(q, k, v, x.a, x.b, out, {.log_decay = x.log_decay}, exec);
            };
          },
          .parameter_bytes =
              [](const problem& p) { return 2.0 * sizeof(element) * static_cast<double>(p.heads * p.length * p.dim); },
          .approximates = false,
          .backward = {[](const problem& p) { return 3 * dplr_flops(p); }, train_dplr}};
}
std::unique_ptr<stream> dplr_stream(const problem& p) {
  return make_stream(
      attn::dplr_state<element>({.heads = p.heads, .dim = p.dim, .value_dim = p.dim_v}), [](auto&, input, input) {},
      [x = dplr_numbers(p.heads, 1, p.dim)](auto& state, input q, input, input, output out, attn::execution& exec) {
        attn::dplr_step(state, q, q, q, x.a, x.b, out, {.log_decay = x.log_decay}, exec);
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
                                    delta_rule_entry<true>("delta_rule_channel_decay", "#5f7a1f"), dplr_entry()};
  kernels.operators.insert(kernels.operators.end(), std::begin(entries), std::end(entries));
  kernels.decoders.push_back(
      {.name = "delta_rule_decode",
       .exact = false,
       .uses = {},
       .flops = [](const problem& p) { return 8.0 * static_cast<double>(p.heads * p.dim * p.dim_v); },
       .cache_bytes = delta_state_bytes,
       .prepare = delta_rule_stream,
       .approximates = false,
       .rewritten = true});
  kernels.decoders.push_back(
      {.name = "dplr_decode",
       .exact = false,
       .uses = {},
       .flops = [](const problem& p) { return 8.0 * static_cast<double>(p.heads * p.dim * p.dim_v); },
       .cache_bytes = delta_state_bytes,
       .prepare = dplr_stream,
       .approximates = false,
       .rewritten = true});
}

}  // namespace bench::inline ATTN_BENCH_TYPE
