// Native sparse attention (NSA, Yuan et al. 2025) from parts of the library. A query attends the means of the blocks so
// far; the blocks that its heads find in these, together with the first, its own and the one before it; and a window of
// the latest keys. Gates add the three up. As published, blocks are chosen for the query heads of a key head together.
#include <attn/core/tensor.hpp>
#include <attn/layers/pooled_tokens.hpp>
#include <attn/softmax/attention_weights.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/sliding_window.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <vector>

#include "support/inputs.hpp"

using attn::idx_t, support::floats;  // [batch, heads, tokens, dim]

struct nsa_options {
  idx_t block = 64, count = 8, window = 512;  // keys of a block; blocks selected, the three that always are among them
};

// The means of complete blocks.
floats block_means(const floats& x, idx_t block) {
  floats means({x.extent(0), x.extent(1), x.extent(2) / block, x.extent(3)});
  attn::pooled_tokens(x, means, {.window = block});
  return means;
}

// For each query and key head the first block, the query's own, the one before it, and those whose means have the
// largest weights, summed over the heads of the group: [batch, key heads, tokens, count].
attn::tensor<std::int32_t> select_blocks(const floats& weights, idx_t key_heads, const nsa_options& o) {
  const idx_t group = weights.extent(1) / key_heads;
  attn::tensor<std::int32_t> blocks({weights.extent(0), key_heads, weights.extent(2), o.count}, -1);
  for (idx_t b = 0; b < blocks.extent(0); ++b)
    for (idx_t kv = 0; kv < key_heads; ++kv)
      for (idx_t i = 0; i < blocks.extent(2); ++i) {
        std::set<idx_t> chosen = {0, std::max<idx_t>(0, i / o.block - 1), i / o.block};
        std::vector<std::pair<float, idx_t>> others;
        for (idx_t c = 0; (c + 1) * o.block <= i + 1; ++c) {
          float weight = 0;
          for (idx_t h = kv * group; h < (kv + 1) * group; ++h) weight += weights(b, h, i, c);
          if (!chosen.count(c)) others.push_back({-weight, c});
        }
        std::sort(others.begin(), others.end());
        for (const auto& [weight, c] : others)
          if (idx_t(chosen.size()) < o.count) chosen.insert(c);
        std::copy(chosen.begin(), chosen.end(), &blocks(b, kv, i, 0));
      }
  return blocks;
}

// gates: three numbers for each query, [3, heads, tokens, 1], for one batch item.
void native_sparse_attention(const floats& q, const floats& k, const floats& v, const floats& gates, floats& out,
                             const nsa_options& o, attn::execution& exec) {
  const idx_t heads = q.extent(1), tokens = q.extent(2);
  const floats keys = block_means(k, o.block), values = block_means(v, o.block);
  floats compressed(out.extents()), selected(out.extents()), window(out.extents());
  attn::tensor<float, 3> lse({1, heads, tokens});
  // A query sees the means of the blocks that end before or with it.
  const attn::full_softmax_options<float> of_means{.causal = true, .first_position = 0, .span = o.block, .lse = lse};
  attn::full_softmax(q, keys, values, compressed, of_means, exec);
  floats weights({1, heads, tokens, keys.extent(2)});
  attn::attention_weights(q, keys, {}, weights, of_means, exec);
  const auto blocks = select_blocks(weights, k.extent(1), o);
  attn::selected_keys(q, k, v, selected, blocks, {.causal = true, .block = o.block}, exec);
  attn::sliding_window(q, k, v, window, {.causal = true, .left = o.window - 1}, exec);
  for (idx_t n = 0, row = 0; n < out.size(); ++n, row = n / out.extent(3))
    out.data()[n] = gates.data()[row] * compressed.data()[n] + gates.data()[heads * tokens + row] * selected.data()[n] +
                    gates.data()[2 * heads * tokens + row] * window.data()[n];
}

int main() {
  constexpr idx_t heads = 8, key_heads = 2, tokens = 4096, dim = 64;
  const floats q = support::random({1, heads, tokens, dim}), k = support::random({1, key_heads, tokens, dim}),
               v = support::random(k.extents());
  floats gates = support::random({3, heads, tokens, 1}), out(q.extents()), full = out;
  for (float& gate : support::vector(gates)) gate = 1 / (1 + std::exp(-gate));
  attn::execution exec;
  const double exact = support::milliseconds([&] { attn::full_softmax(q, k, v, full, {.causal = true}, exec); });
  std::printf("%td tokens, %td heads over %td, full_softmax: %.0f ms\n", tokens, heads, key_heads, exact);
  for (const idx_t count : {4, 8, 16}) {
    const nsa_options o{.count = count};
    const double sparse = support::milliseconds([&] { native_sparse_attention(q, k, v, gates, out, o, exec); });
    std::printf("%3td blocks of %td and a window of %td: %.0f ms\n", count, o.block, o.window, sparse);
  }

  // With all blocks selected and the other gates closed it is full softmax.
  std::fill_n(gates.data(), gates.size(), 0.0f);
  std::fill_n(gates.data() + heads * tokens, heads * tokens, 1.0f);
  native_sparse_attention(q, k, v, gates, out, {.count = tokens / 64}, exec);
  const double error = support::relative_error(out, full);
  std::printf("all blocks: off full_softmax by %.1e\n", error);
  return error <= 1e-5 ? 0 : 1;
}
