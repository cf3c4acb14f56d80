// Exact softmax by patterns, and by hashing.
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/lsh.hpp>
#include <attn/softmax/strided.hpp>

#include <algorithm>
#include <cmath>

#include "table.hpp"

namespace bench {
namespace {

/// One product with the key and one with the value for every pair of the pattern.
template <attn::key_pattern Pattern>
double pattern_flops(const problem& p, const Pattern& pattern) {
  double pairs = 0;
  for (index h = 0; h < p.heads; ++h) {
    const attn::pattern_shape s{.head = h, .queries = p.length, .keys = p.length, .causal = p.causal};
    pairs += static_cast<double>(attn::count_pairs(pattern, s));
  }
  return 2.0 * pairs * static_cast<double>(p.dim + p.dim_v);
}

constexpr index bigbird_block = 64, random_blocks = 3;

attn::tensor<index, 3> random_table(const problem& p) {
  return attn::draw_random_blocks((p.length + bigbird_block - 1) / bigbird_block, random_blocks,
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

constexpr index lsh_buckets = 64, lsh_chunk = 64;

/// Share of the keys of the chunk before that a causal query sees. Tokens are sorted by bucket, then position: a key
/// some places before is earlier, unless a bucket begins in between and the key is later in its own.
double earlier(double chunk, double bucket) {
  double share = 0;
  for (double back = 1; back < 2 * chunk; ++back)
    share += (chunk - std::abs(back - chunk)) / (chunk * chunk) * (1 - std::fmod(back / bucket, 1));
  return share;
}

/// Hashes, and for every round the pairs of a chunk with itself, but for a query's own key, and with the one before.
/// Causal: one direction of each pair of a chunk, and what is earlier in the chunk before.
double lsh_flops(const problem& p) {
  const auto n = static_cast<double>(p.length), c = static_cast<double>(std::min(lsh_chunk, p.length));
  const double before = p.causal ? earlier(c, n / lsh_buckets) : 1;
  const double seen = n * (c - 1) * (p.causal ? 0.5 : 1) + (n - c) * c * before;
  const double hashes = n * static_cast<double>(p.dim * lsh_buckets / 2);
  return 2.0 * static_cast<double>(p.set.rounds * p.heads) * (seen * static_cast<double>(p.dim + p.dim_v) + hashes);
}

/// Queries are keys: k is not looked at.
runner prepare_lsh(const problem& p) {
  return [causal = p.causal, rounds = p.set.rounds,
          rotations = attn::draw_rotations<float>(p.set.rounds, p.dim, lsh_buckets, {.seed = 1, .heads = p.heads})](
             input q, input, input v, output out, attn::execution& exec) {
    attn::lsh(q, v, out,
              {.causal = causal, .rounds = rounds, .buckets = lsh_buckets, .chunk = lsh_chunk, .rotations = rotations},
              exec);
  };
}

}  // namespace

std::vector<operator_entry> pattern_operators() {
  return {{.name = "block",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {"block"},
           .flops =
               [](const problem& p) {
                 return pattern_flops(p, attn::block_pattern{.size = p.set.block, .neighbours = 1});
               },
           .prepare = prepare_block},
          {.name = "strided",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"stride"},
           .flops = [](const problem& p) { return pattern_flops(p, attn::strided_pattern(p.set.stride)); },
           .prepare = prepare_strided},
          {.name = "fixed",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"stride"},
           .flops =
               [](const problem& p) {
                 return pattern_flops(p, attn::fixed_pattern{.stride = p.set.stride, .summary = 1});
               },
           .prepare = prepare_fixed},
          {.name = "bigbird",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {},
           .flops =
               [](const problem& p) {
                 const auto random = random_table(p);
                 return pattern_flops(p, attn::bigbird_pattern{.size = bigbird_block, .random = random});
               },
           .prepare = prepare_bigbird},
          {.name = "lsh",
           .cost = growth::linear,
           .has_causal = true,
           .exact = false,
           .uses = {"rounds"},
           .flops = lsh_flops,
           .prepare = prepare_lsh,
           .approximates = false}};
}

}  // namespace bench
