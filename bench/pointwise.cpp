// Weights without a softmax.
#include <attn/softmax/pointwise_backward.hpp>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

double pointwise_flops(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return score_flops(p, p.causal ? n * (n + 1) / 2 : n * n);
}
double pointwise_backward_flops(const problem& p) { return five_for_two(pointwise_flops(p), p); }

/// Sigmoid attention as it is trained, at this length.
attn::pointwise_options<element> pointwise_settings(const problem& p) {
  return {.causal = p.causal, .shift = -std::log(static_cast<real>(std::max<idx_t>(1, p.length)))};
}

runner prepare_pointwise(const problem& p) {
  return [o = pointwise_settings(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::pointwise(q, k, v, out, o, exec);
  };
}

training_runner train_pointwise(const problem& p) {
  return {[o = pointwise_settings(p)](const training_views& x, attn::execution& exec) {
            attn::pointwise(x.q, x.k, x.v, x.out, o, exec);
          },
          [o = pointwise_settings(p)](const training_views& x, attn::execution& exec) {
            attn::pointwise_backward(x.q, x.k, x.v, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, o, exec);
          }};
}

}  // namespace

std::vector<operator_entry> pointwise_operators() {
  return {{.name = "pointwise",
           .colour = "#455a64",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {},
           .flops = pointwise_flops,
           .prepare = prepare_pointwise,
           .approximates = false,
           .backward = {pointwise_backward_flops, train_pointwise},
           .has_fast = true}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
