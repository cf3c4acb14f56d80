// Rotary positions, of the queries: bound by memory.
#include <attn/core/rotary.hpp>

#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

double numbers(const problem& p) { return static_cast<double>(p.length * p.heads * p.dim); }

runner prepare_rotary(const problem&) {
  return [](input q, input, input, output out, attn::execution& exec) { attn::rotary(q, out, {}, exec); };
}

training_runner train_rotary(const problem&) {
  return {{}, [](const training_views& x, attn::execution& exec) {
            attn::rotary_backward(x.d_out, {.x = x.dq}, {}, exec);
          }};
}

}  // namespace

family rotary_family() {
  return {.title = "layers",
          .operators = {{.name = "rotary",
                         .colour = "#7f7f7f",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {},
                         .flops = [](const problem& p) { return 3 * numbers(p); },
                         .prepare = prepare_rotary,
                         .approximates = false,
                         .moved_bytes = [](const problem& p) { return 2 * sizeof(element) * numbers(p); },
                         .backward = {[](const problem& p) { return 3 * numbers(p); }, train_rotary}}},
          .decoders = {}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
