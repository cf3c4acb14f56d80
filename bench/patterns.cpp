// Exact softmax by patterns, by hashing, over the blocks queries choose, and over neighbours on a grid.
#include <attn/softmax/bigbird_backward.hpp>
#include <attn/softmax/block_backward.hpp>
#include <attn/softmax/lsh_backward.hpp>
#include <attn/softmax/neighborhood_backward.hpp>
#include <attn/softmax/strided_backward.hpp>
#include <attn/softmax/topk_blocks_backward.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include <algorithm>
#include <cmath>
#include <memory>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// Of every pair of the pattern.
template <attn::key_pattern Pattern>
double pattern_flops(const problem& p, const Pattern& pattern) {
  double scores = 0;
  for (idx_t h = 0; h < p.heads; ++h) {
    const attn::pattern_shape s{.head = h, .queries = p.length, .keys = p.length, .causal = p.causal};
    scores += static_cast<double>(attn::count_pairs(pattern, s));
  }
  return 2.0 * scores * static_cast<double>(p.dim + p.dim_v);
}

constexpr idx_t bigbird_block = 64;

attn::tensor<idx_t, 3> random_table(const problem& p) {
  return attn::draw_random_blocks((p.length + bigbird_block - 1) / bigbird_block, p.set.random,
                                  {.seed = 1, .heads = p.heads, .causal = p.causal});
}

runner prepare_block(const problem& p) {
  return [b = p.set.block, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::block(q, k, v, out, {.causal = causal, .size = b, .neighbours = 1}, exec);
  };
}

runner prepare_strided(const problem& p) {
  return [l = p.set.stride, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::strided(q, k, v, out, {.causal = causal, .stride = l}, exec);
  };
}

runner prepare_fixed(const problem& p) {
  return [l = p.set.stride, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::strided(q, k, v, out, {.causal = causal, .kind = attn::strided_kind::fixed, .stride = l, .summary = 1}, exec);
  };
}

runner prepare_bigbird(const problem& p) {
  return [causal = p.causal, random = random_table(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::bigbird(q, k, v, out, {.causal = causal, .size = bigbird_block, .random = random}, exec);
  };
}

constexpr idx_t lsh_buckets = 64, lsh_chunk = 64;

/// Share of the keys of the chunk before that a causal query sees. Tokens are sorted by bucket, then position: a key
/// some places before is earlier, unless a bucket begins in between and the key is later in its own.
double earlier(double chunk, double bucket) {
  double share = 0;
  for (double back = 1; back < 2 * chunk; ++back)
    share += (chunk - std::abs(back - chunk)) / (chunk * chunk) * (1 - std::fmod(back / bucket, 1));
  return share;
}

/// Hashes, and for every round the scores of a chunk with itself, but for a query's own key, and with the one before.
/// Causal: one direction of each pair of a chunk, and what is earlier in the chunk before.
double lsh_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), c = static_cast<double>(std::min(lsh_chunk, p.length));
  const double before = p.causal ? earlier(c, n / lsh_buckets) : 1;
  const double seen = n * (c - 1) * (p.causal ? 0.5 : 1) + (n - c) * c * before;
  const double hashes = n * static_cast<double>(p.dim * lsh_buckets / 2);
  return 2.0 * static_cast<double>(p.set.rounds * p.heads) * (seen * static_cast<double>(p.dim + p.dim_v) + hashes);
}

attn::tensor<real> rotations_of(const problem& p) {
  return attn::draw_rotations<real>(p.set.rounds, p.dim, lsh_buckets, {.seed = 1, .heads = p.heads});
}

/// Unscaled, as published.
attn::lsh_options<element> lsh_settings(const problem& p) {
  return {.causal = p.causal, .rounds = p.set.rounds, .buckets = lsh_buckets, .chunk = lsh_chunk, .scaled = false};
}

/// Queries are keys: k is not looked at.
runner prepare_lsh(const problem& p) {
  return
      [o = lsh_settings(p), rotations = rotations_of(p)](input q, input, input v, output out, attn::execution& exec) {
        auto options = o;
        options.rotations = rotations;
        attn::lsh(q, v, out, options, exec);
      };
}

double block_flops(const problem& p) {
  return pattern_flops(p, attn::block_pattern{.size = p.set.block, .neighbours = 1});
}

double strided_flops(const problem& p) { return pattern_flops(p, attn::strided_pattern(p.set.stride)); }

double fixed_flops(const problem& p) {
  return pattern_flops(p, attn::fixed_pattern{.stride = p.set.stride, .summary = 1});
}

double bigbird_flops(const problem& p) {
  const auto random = random_table(p);
  return pattern_flops(p, attn::bigbird_pattern{.size = bigbird_block, .random = random});
}

template <double (*Forward)(const problem&)>
double backward_flops(const problem& p) {
  return five_for_two(Forward(p), p);
}

training_runner train_block(const problem& p) {
  const auto options = [b = p.set.block, causal = p.causal](const training_views& x) {
    return attn::block_options<element>{.causal = causal, .size = b, .neighbours = 1, .lse = x.lse};
  };
  return {[=](const training_views& x, attn::execution& exec) { attn::block(x.q, x.k, x.v, x.out, options(x), exec); },
          [=](const training_views& x, attn::execution& exec) {
            attn::block_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x), exec);
          }};
}

training_runner train_strided(const problem& p, attn::strided_kind kind) {
  const auto options = [l = p.set.stride, causal = p.causal, kind](const training_views& x) {
    return attn::strided_options<element>{.causal = causal, .kind = kind, .stride = l, .summary = 1, .lse = x.lse};
  };
  return {
      [=](const training_views& x, attn::execution& exec) { attn::strided(x.q, x.k, x.v, x.out, options(x), exec); },
      [=](const training_views& x, attn::execution& exec) {
        attn::strided_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x), exec);
      }};
}

training_runner train_bigbird(const problem& p) {
  const auto table = std::make_shared<const attn::tensor<idx_t, 3>>(random_table(p));
  const auto options = [table, causal = p.causal](const training_views& x) {
    return attn::bigbird_options<element>{.causal = causal, .size = bigbird_block, .random = *table, .lse = x.lse};
  };
  return {
      [=](const training_views& x, attn::execution& exec) { attn::bigbird(x.q, x.k, x.v, x.out, options(x), exec); },
      [=](const training_views& x, attn::execution& exec) {
        attn::bigbird_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x), exec);
      }};
}

/// As forward, with the products of five for two; hashes once more.
double lsh_backward_flops(const problem& p) {
  const double hashes = 2.0 * static_cast<double>(p.set.rounds * p.heads) * static_cast<double>(p.length) *
                        static_cast<double>(p.dim * lsh_buckets / 2);
  return five_for_two(lsh_flops(p) - hashes, p) + hashes;
}

training_runner train_lsh(const problem& p) {
  const auto rotations = std::make_shared<const attn::tensor<real>>(rotations_of(p));
  const auto options = [rotations, o = lsh_settings(p)](const training_views& x) {
    auto with_lse = o;
    with_lse.rotations = *rotations;
    with_lse.lse = x.lse;
    return with_lse;
  };
  return {[=](const training_views& x, attn::execution& exec) { attn::lsh(x.q, x.v, x.out, options(x), exec); },
          [=](const training_views& x, attn::execution& exec) {
            attn::lsh_backward(x.q, x.v, x.out, x.d_out, {.q = x.dq, .v = x.dv}, options(x), exec);
          }};
}

/// Pairs of query and key, and of query and block sum: for queries [from, length).
struct topk_scores {
  double keys = 0, sums = 0;

  topk_scores(const problem& p, idx_t from) {
    for (idx_t i = from; i < p.length; ++i) {
      const idx_t earlier = i / p.set.block, chosen = std::min(earlier, p.set.topk - 1);
      keys += static_cast<double>(chosen * p.set.block + i % p.set.block + 1);
      if (earlier > chosen) sums += static_cast<double>(earlier);
    }
  }
  double choice_flops(const problem& p) const { return 2 * sums * static_cast<double>(p.dim * p.heads); }
};

double topk_flops(const problem& p) {
  const topk_scores scores(p, 0);
  return score_flops(p, scores.keys) + scores.choice_flops(p);
}
double topk_backward_flops(const problem& p) {
  const topk_scores scores(p, 0);
  return five_for_two(score_flops(p, scores.keys), p) + scores.choice_flops(p);
}

attn::topk_blocks_options<element> topk_settings(const problem& p) {
  return {.block = p.set.block, .topk = p.set.topk};
}

runner prepare_topk(const problem& p) {
  return [o = topk_settings(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::topk_blocks(q, k, v, out, o, exec);
  };
}

training_runner train_topk(const problem& p) {
  const auto options = [o = topk_settings(p)](const training_views& x) {
    auto with_lse = o;
    with_lse.lse = x.lse;
    return with_lse;
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::topk_blocks(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::topk_blocks_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x),
                                       exec);
          }};
}

struct topk_stream final : stream {
  attn::topk_blocks_cache<element> cache;
  idx_t topk;

  explicit topk_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}, {.block = p.set.block}), topk(p.set.topk) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<topk_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::topk_blocks_step(cache, q, k, v, out, {.topk = topk}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

double topk_step_flops(const problem& p) {
  const topk_scores scores(p, p.length - 1);
  return score_flops(p, scores.keys) + scores.choice_flops(p);
}
/// The sums, once for the heads that share them, and what every head chooses.
double topk_step_bytes(const problem& p) {
  const topk_scores scores(p, p.length - 1);
  return sizeof(element) * (scores.sums * static_cast<double>(p.dim * p.kv_heads) +
                            scores.keys * static_cast<double>((p.dim + p.dim_v) * p.heads));
}
double topk_cache_bytes(const problem& p) {
  return sizeof(element) * static_cast<double>(p.kv_heads) *
         static_cast<double>(p.length * (p.dim + p.dim_v) + p.length / p.set.block * p.dim);
}

/// The length as a grid whose axes differ as little as its divisors do, and as much of the kernel as fits.
attn::neighborhood_options<element> neighborhood_settings(const problem& p) {
  std::vector<idx_t> grid, kernel;
  idx_t rest = p.length;
  for (idx_t left = p.set.axes; left > 0; --left) {
    const double root = std::pow(static_cast<double>(rest), 1 / static_cast<double>(left));
    idx_t n = left == 1 ? rest : static_cast<idx_t>(root + 1e-6);
    while (rest % n != 0) --n;
    grid.push_back(n), kernel.push_back(std::min(n, p.set.kernel)), rest /= n;
  }
  using list = std::span<const idx_t>;
  return {.grid = attn::per_axis(list(grid)), .kernel = attn::per_axis(list(kernel))};
}

double neighborhood_flops(const problem& p) {
  const auto o = neighborhood_settings(p);
  double keys = static_cast<double>(p.length);
  for (idx_t a = 0; a < o.kernel.axes(); ++a) keys *= static_cast<double>(o.kernel[a]);
  return score_flops(p, keys);
}

runner prepare_neighborhood(const problem& p) {
  return [o = neighborhood_settings(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::neighborhood(q, k, v, out, o, exec);
  };
}

training_runner train_neighborhood(const problem& p) {
  const auto options = [o = neighborhood_settings(p)](const training_views& x) {
    auto with_lse = o;
    with_lse.lse = x.lse;
    return with_lse;
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::neighborhood(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::neighborhood_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x),
                                        exec);
          }};
}

}  // namespace

std::vector<decode_entry> pattern_decoders() {
  return {{.name = "topk_blocks_decode",
           .exact = false,
           .uses = {"block", "topk"},
           .flops = topk_step_flops,
           .cache_bytes = topk_step_bytes,
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<topk_stream>(p); },
           .state_bytes = topk_cache_bytes}};
}

std::vector<operator_entry> pattern_operators() {
  return {{.name = "block",
           .colour = "#0b4f8a",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {"block"},
           .flops = block_flops,
           .prepare = prepare_block,
           .backward = {backward_flops<block_flops>, train_block},
           .settings = settings_of(&flags::block, {16, 32, 64, 256})},
          {.name = "strided",
           .colour = "#56b4e9",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"stride"},
           .flops = strided_flops,
           .prepare = prepare_strided,
           .backward = {backward_flops<strided_flops>,
                        [](const problem& p) { return train_strided(p, attn::strided_kind::strided); }}},
          {.name = "fixed",
           .colour = "#7d93b2",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"stride"},
           .flops = fixed_flops,
           .prepare = prepare_fixed,
           .backward = {backward_flops<fixed_flops>,
                        [](const problem& p) { return train_strided(p, attn::strided_kind::fixed); }}},
          {.name = "bigbird",
           .colour = "#00838f",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {"random"},
           .flops = bigbird_flops,
           .prepare = prepare_bigbird,
           .backward = {backward_flops<bigbird_flops>, train_bigbird},
           .settings = settings_of(&flags::random, {0, 1, 6, 9})},
          {.name = "lsh",
           .colour = "#5c6bc0",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {"rounds"},
           .flops = lsh_flops,
           .prepare = prepare_lsh,
           .shared_keys = true,
           .backward = {lsh_backward_flops, train_lsh},
           .settings = settings_of(&flags::rounds, {1, 2, 8})},
          {.name = "topk_blocks",
           .colour = "#8d6e63",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"block", "topk"},
           .flops = topk_flops,
           .prepare = prepare_topk,
           .backward = {topk_backward_flops, train_topk},
           .settings = settings_of(&flags::topk, {2, 4, 6}),
           .only_causal = true},
          {.name = "neighborhood",
           .colour = "#2e7d6b",
           .cost = growth::linear,
           .has_causal = false,
           .exact = false,
           .uses = {"axes", "kernel"},
           .flops = neighborhood_flops,
           .prepare = prepare_neighborhood,
           .backward = {backward_flops<neighborhood_flops>, train_neighborhood},
           .settings = settings_of(&flags::kernel, {7, 21, 31})}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
