// Fourier mixing. It has no heads: it is timed on what a model's tokens are before they are split into heads, one
// matrix [length, heads * dim].
#include <attn/fourier/fnet_backward.hpp>

#include <cmath>

#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// A real transform of n numbers takes 2.5 n log2(n) operations, and half of the rows and half of the columns need one.
double mixing_flops(const problem& p) {
  const auto length = static_cast<double>(p.length), channels = static_cast<double>(p.heads * p.dim);
  return 1.25 * length * channels * (std::log2(length) + std::log2(channels));
}

/// q's memory holds as many numbers as the matrix.
runner prepare_fnet(const problem& p) {
  return [channels = p.heads * p.dim](input q, input, input, output out, attn::execution& exec) {
    const std::array<idx_t, 4> shape = {1, 1, q.extent(2), channels};
    attn::fnet(input(q.data(), shape), output(out.data(), shape), {}, exec);
  };
}

/// Its own adjoint.
training_runner train_fnet(const problem& p) {
  return {{}, [channels = p.heads * p.dim](const training_views& x, attn::execution& exec) {
            const std::array<idx_t, 4> shape = {1, 1, x.q.extent(2), channels};
            attn::fnet_backward(input(x.d_out.data(), shape), {.x = output(x.dq.data(), shape)}, {}, exec);
          }};
}

}  // namespace

family fourier_family() {
  return {.title = "Fourier",
          .operators = {{.name = "fnet",
                         .colour = "#d1344b",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {},
                         .flops = mixing_flops,
                         .prepare = prepare_fnet,
                         .approximates = false,
                         .backward = {mixing_flops, train_fnet}}},
          .decoders = {}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
