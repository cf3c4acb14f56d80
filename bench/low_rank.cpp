// Attention by way of fewer keys: projections and landmarks.
#include <attn/low_rank/linformer_backward.hpp>
#include <attn/low_rank/long_short_backward.hpp>
#include <attn/low_rank/nystrom_backward.hpp>

#include <algorithm>
#include <cmath>

#include "flops.hpp"
#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

// The projection of keys and values, and softmax over `rank` of them.
double linformer_flops(const problem& p) {
  return 2 * score_flops(p, static_cast<double>(p.length) * static_cast<double>(p.set.rank));
}

// Landmarks over the keys, queries over the landmarks, and between them the inverse: four products an iteration, or a
// singular value decomposition.
double nystrom_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), m = static_cast<double>(p.set.landmarks);
  if (n <= m) return score_flops(p, n * n);
  const auto iterations = static_cast<double>(attn::nystrom_options<element>{}.iterations);
  const double inverse = (p.set.exact_inverse ? 21 : iterations * 4 * 2) * m * m * m;
  return 2 * score_flops(p, n * m) + score_flops(p, m * m) + inverse * static_cast<double>(p.heads);
}

double projection_bytes(const problem& p) {
  return 2.0 * sizeof(element) * static_cast<double>(p.set.rank) * static_cast<double>(p.length);
}

// One E and one F for all heads. Drawn as the library draws them where the error is measured; for longer sequences,
// which are only timed, that would take minutes, and ready-made numbers serve, their size taken out by the scale.
runner prepare_linformer(const problem& p) {
  constexpr idx_t longest_drawn = 4096;
  if (p.length > longest_drawn) {
    const auto count = static_cast<std::size_t>(p.set.rank * p.length);
    const element* numbers = drawn_numbers<element>(role::parameter, 2 * count);
    const attn::tensor_view<const element, 3> e(numbers, {1, p.set.rank, p.length}), f(numbers + count, e.extents());
    const real scale = 1 / std::sqrt(static_cast<real>(p.dim * p.set.rank));
    return [=](input q, input k, input v, output out, attn::execution& exec) {
      attn::linformer(q, k, v, out, e, f, {.scale = scale}, exec);
    };
  }
  return [e = attn::draw_projection<element>(p.set.rank, p.length, {.seed = 1}),
          f = attn::draw_projection<element>(p.set.rank, p.length, {.seed = 2})](input q, input k, input v, output out,
                                                                                 attn::execution& exec) {
    attn::linformer(q, k, v, out, e, f, {}, exec);
  };
}

runner prepare_nystrom(const problem& p) {
  const auto inverse = p.set.exact_inverse ? attn::pseudo_inverse::exact : attn::pseudo_inverse::per_head;
  return [inverse, m = p.set.landmarks](input q, input k, input v, output out, attn::execution& exec) {
    attn::nystrom(q, k, v, out, {.landmarks = m, .inverse = inverse}, exec);
  };
}

constexpr idx_t compressed_keys = 64, longest_segment = 1024;

// Every token goes into the compressed keys; a query sees those, and its window. Causal, the sequence is compressed by
// segments, and a query sees those that are over.
double long_short_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), r = static_cast<double>(compressed_keys);
  const auto w = static_cast<double>(std::min(p.set.window, p.length - 1)),
             segment = static_cast<double>(longest_segment);
  const double one_side = n * w - w * (w + 1) / 2, segments = std::floor(n / segment);
  const double compressed = p.causal ? r * (segments * (n + 1) - segment * segments * (segments + 1) / 2) : n * r;
  return score_flops(p, n * r + n + one_side * (p.causal ? 1 : 2) + compressed);
}

double logits_bytes(const problem& p) {
  return static_cast<double>(sizeof(element) * static_cast<std::size_t>(p.heads * p.length * compressed_keys));
}

runner prepare_long_short(const problem& p) {
  const auto count = static_cast<std::size_t>(p.heads * p.length * compressed_keys);
  const input logits(drawn_numbers<element>(role::parameter, count), {1, p.heads, p.length, compressed_keys});
  return [=, w = p.set.window, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::long_short(q, k, v, out, logits,
                     {.causal = causal, .left = w, .right = w, .segment = causal ? longest_segment : 0}, exec);
  };
}

// Softmax over `rank` keys, and of both projections the gradients of what is projected and of the projection.
double linformer_backward_flops(const problem& p) {
  const double one = linformer_flops(p) / 2;
  return five_for_two(one, p) + 2 * one;
}

training_runner train_linformer(const problem& p) {
  const auto count = static_cast<std::size_t>(p.set.rank * p.length);
  const element* numbers = drawn_numbers<element>(role::parameter, 2 * count);
  const attn::tensor_view<const element, 3> e(numbers, {1, p.set.rank, p.length}), f(numbers + count, e.extents());
  const real scale = 1 / std::sqrt(static_cast<real>(p.dim * p.set.rank));
  element* const gradients = result_memory<element>(2 * count, parameter_slot);
  const attn::tensor_view<element, 3> de(gradients, e.extents()), df(gradients + count, e.extents());
  return {[=](const training_views& x, attn::execution& exec) {
            attn::linformer(x.q, x.k, x.v, x.out, e, f, {.scale = scale, .lse = x.lse}, exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::linformer_backward(x.q, x.k, x.v, x.out, e, f, x.d_out,
                                     {.q = x.dq, .k = x.dk, .v = x.dv, .e = de, .f = df},
                                     {.scale = scale, .lse = x.lse}, exec);
          }};
}

// Both softmaxes from inputs alone: queries over landmarks with the five products, landmarks over keys with those and
// with their values and scores once more; fifteen products of an iteration's four twice forward and back.
double nystrom_backward_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), m = static_cast<double>(p.set.landmarks);
  if (n <= m) return five_for_two(score_flops(p, n * n), p);
  const auto iterations = static_cast<double>(attn::nystrom_options<element>{}.iterations);
  const double inverse = (p.set.exact_inverse ? 21 + 12 : iterations * (4 + 8) * 2) * m * m * m;
  return 2 * five_for_two(score_flops(p, n * m), p) + score_flops(p, n * m) + five_for_two(score_flops(p, m * m), p) +
         inverse * static_cast<double>(p.heads);
}

training_runner train_nystrom(const problem& p) {
  const auto inverse = p.set.exact_inverse ? attn::pseudo_inverse::exact : attn::pseudo_inverse::per_head;
  return {{}, [inverse, m = p.set.landmarks](const training_views& x, attn::execution& exec) {
            attn::nystrom_backward(x.q, x.k, x.v, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv},
                                   {.landmarks = m, .inverse = inverse}, exec);
          }};
}

// Of the compression four products where the forward pass has two: the gradients of what is summed and of its weights.
double long_short_backward_flops(const problem& p) {
  const double compression = score_flops(p, static_cast<double>(p.length) * static_cast<double>(compressed_keys));
  return 2 * compression + five_for_two(long_short_flops(p) - compression, p);
}

training_runner train_long_short(const problem& p) {
  const auto count = static_cast<std::size_t>(p.heads * p.length * compressed_keys);
  const input logits(drawn_numbers<element>(role::parameter, count), {1, p.heads, p.length, compressed_keys});
  const attn::tensor_view<element> d_logits(result_memory<element>(count, parameter_slot), logits.extents());
  const auto options = [w = p.set.window, causal = p.causal](const training_views& x) {
    return attn::long_short_options<element>{
        .causal = causal, .left = w, .right = w, .segment = causal ? longest_segment : 0, .lse = x.lse};
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::long_short(x.q, x.k, x.v, x.out, logits, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::long_short_backward(x.q, x.k, x.v, x.out, logits, x.d_out,
                                      {.q = x.dq, .k = x.dk, .v = x.dv, .logits = d_logits}, options(x), exec);
          }};
}

}  // namespace

family low_rank_family() {
  return {
      .title = "low rank",
      .operators = {{.name = "linformer",
                     .colour = "#e07b00",
                     .cost = growth::linear,
                     .has_causal = false,
                     .exact = false,
                     .uses = {"rank"},
                     .flops = linformer_flops,
                     .prepare = prepare_linformer,
                     .parameter_bytes = projection_bytes,
                     .backward = {linformer_backward_flops, train_linformer},
                     .settings = settings_of(&flags::rank, {64, 128, 512}),
                     .has_fast = true},
                    {.name = "nystrom",
                     .colour = "#a04000",
                     .cost = growth::linear,
                     .has_causal = false,
                     .exact = false,
                     .uses = {"landmarks", "exact-inverse"},
                     .flops = nystrom_flops,
                     .prepare = prepare_nystrom,
                     .backward = {nystrom_backward_flops, train_nystrom},
                     .settings = settings_of(&flags::landmarks, {16, 32, 128, 256, 512}),
                     .has_fast = true},
                    {.name = "long_short",
                     .colour = "#f2b134",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"window"},
                     .flops = long_short_flops,
                     .prepare = prepare_long_short,
                     .parameter_bytes = logits_bytes,
                     .backward = {long_short_backward_flops, train_long_short},
                     .has_fast = true}},
      .decoders = {},
  };
}

}  // namespace bench::inline ATTN_BENCH_TYPE
