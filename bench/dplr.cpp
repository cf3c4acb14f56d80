// Recurrences: diagonal plus low rank.
#include <attn/kernel/dplr_backward.hpp>
#include <attn/kernel/dplr_step.hpp>

#include <cmath>
#include <memory>
#include <vector>

#include "inputs.hpp"
#include "kernel.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// a, b and log decays of channels as RWKV-7 has them: b is -a, of unit norm, times rates.
struct dplr_numbers {
  std::shared_ptr<std::vector<element>> rows;
  input a, b;
  attn::tensor_view<const real> log_decay;

  dplr_numbers(idx_t heads, idx_t length, idx_t dim)
      : log_decay(drawn_numbers<real>(role::log_decay, static_cast<std::size_t>(heads * length * dim)),
                  {1, heads, length, dim}) {
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

}  // namespace

void add_dplr(family& kernels) {
  kernels.operators.push_back(dplr_entry());
  kernels.decoders.push_back(
      {.name = "dplr_decode",
       .exact = false,
       .uses = {},
       .flops = recurrent_step_flops,
       .cache_bytes = recurrent_state_bytes,
       .prepare = dplr_stream,
       .approximates = false,
       .rewritten = true});
}

}  // namespace bench::inline ATTN_BENCH_TYPE
