// DeepSeek-V4's compressed attention (2026) from parts of the library. A query attends, under one softmax with a sink,
// to the last 128 tokens and to keys that stand for several tokens each: in CSA to those of 4 tokens that an indexer
// chooses, in HCA to all of 128 tokens. The values are the keys. Prompts at once, and token by token from caches.
#include <attn/core/rotary.hpp>
#include <attn/core/tensor.hpp>
#include <attn/layers/pooled_tokens_step.hpp>
#include <attn/layers/rms_norm.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/merge_softmax.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

using attn::idx_t;
using floats = attn::tensor<float>;                     // [1, heads, tokens, dim]
using view_of_tokens = attn::tensor_view<const float>;  // of some of the tokens
using floats_3 = attn::tensor<float, 3>;

constexpr idx_t heads = 8, dim = 64, index_heads = 4, index_dim = 32, rotated = 32, window = 128;

std::mt19937 source(1);
std::normal_distribution<float> normal;
template <int Rank = 4>
attn::tensor<float, Rank> random(const typename attn::tensor<float, Rank>::extents_type& extents) {
  attn::tensor<float, Rank> x(extents);
  std::generate_n(x.data(), x.size(), [] { return normal(source); });
  return x;
}
auto last_dims(floats& x) { return x.view().slice(3, x.extent(3) - rotated, rotated); }

// Makes keys that stand for `span` tokens each: what it is of a layer, and the keys so far.
struct compressor {
  idx_t key_dim, value_dim, span;
  bool overlap;
  idx_t channels = overlap ? 2 * key_dim : key_dim;
  floats_3 bias = random<3>({1, span, channels});
  attn::pooled_tokens_state<float> state{{.channels = channels, .window = span, .overlap = overlap, .logits = true}};
  attn::kv_cache<float> keys{{.dim = key_dim, .value_dim = value_dim}, {.values_in_keys = true}};

  // The norm of the model may have weights. A key is rotated to its first token.
  void finish(floats& pooled, idx_t first_window) const {
    const attn::tensor_view<float, 3> sequence(pooled.data(), {1, pooled.extent(2), key_dim});
    attn::rms_norm(sequence, sequence);
    std::vector<idx_t> positions;
    for (idx_t w = 0; w < pooled.extent(2); ++w) positions.push_back((first_window + w) * span);
    const attn::tensor_view<const idx_t, 2> of_windows(positions.data(), {1, pooled.extent(2)});
    attn::rotary(last_dims(pooled), last_dims(pooled), {.positions = of_windows, .interleaved = true});
  }
  floats whole(const view_of_tokens& x, const view_of_tokens& logits) const {
    floats pooled({1, 1, x.extent(2) / span, key_dim});
    attn::pooled_tokens(x, pooled, {.window = span, .overlap = overlap, .logits = logits, .bias = bias});
    finish(pooled, 0);
    return pooled;
  }
  void step(const view_of_tokens& x, const view_of_tokens& logits) {
    floats pooled({1, 1, state.rows(x.extent(2)), key_dim});
    const idx_t first_window = state.windows(0);
    attn::pooled_tokens_step(state, x, pooled, {.logits = logits, .bias = bias});
    finish(pooled, first_window);
    keys.append(pooled, pooled.view().slice(3, 0, value_dim));
  }
};

// What a layer projects its tokens to. Queries, index queries and kv are normed and rotated.
struct projected {
  view_of_tokens q, kv, x, logits, x_idx, logits_idx, q_idx;
  attn::tensor_view<const float, 3> w;  // weights of the index heads
};

struct compressed_attention {
  idx_t span, topk;  // topk 0: HCA
  compressor main{dim, dim, span, topk > 0}, index{index_dim, 0, span, true};
  attn::sliding_window_cache<float> near{{.dim = dim}, {.left = window - 1}};
  std::vector<float> sinks = std::vector<float>(heads, 0.5f);

  // Merges both parts, and rotates values back by the positions of the queries.
  static void finish(floats& out, floats_3& lse, const floats& far, const floats_3& far_lse, idx_t first) {
    attn::merge_softmax(out, lse, far, far_lse);
    attn::rotary_backward(last_dims(out), {.x = last_dims(out)}, {.first_position = first, .interleaved = true});
  }
  void whole(const projected& t, floats& out) {
    const floats keys = main.whole(t.x, t.logits);
    floats far(out.extents());
    floats_3 lse({1, heads, out.extent(2)}), far_lse = lse;
    attn::sliding_window(t.q, t.kv, t.kv, out, {.causal = true, .left = window - 1, .sinks = sinks, .lse = lse});
    if (topk) {
      attn::tensor<std::int32_t> lists({1, 1, out.extent(2), topk});
      attn::lightning_indexer(t.q_idx, index.whole(t.x_idx, t.logits_idx), lists,
                              {.causal = true, .first_position = 0, .span = span, .topk = topk, .w = t.w});
      attn::selected_keys(t.q, keys, keys, far, lists,
                          {.causal = true, .first_position = 0, .span = span, .lse = far_lse});
    } else {
      attn::full_softmax(t.q, keys, keys, far, {.causal = true, .first_position = 0, .span = span, .lse = far_lse});
    }
    finish(out, lse, far, far_lse, 0);
  }
  // The tokens that follow, one or a chunk.
  void step(const projected& t, floats& out) {
    const idx_t first = near.tokens(0);
    floats far(out.extents());
    floats_3 lse({1, heads, out.extent(2)}), far_lse = lse;
    main.step(t.x, t.logits);
    attn::sliding_window_step(near, t.q, t.kv, t.kv, out, {.sinks = sinks, .lse = lse});
    if (topk) {
      attn::tensor<std::int32_t> lists({1, 1, out.extent(2), topk});
      index.step(t.x_idx, t.logits_idx);
      attn::lightning_indexer_cached(index.keys, t.q_idx, lists,
                                     {.first_position = first, .span = span, .topk = topk, .w = t.w});
      attn::selected_keys_cached(main.keys, t.q, far, lists, {.first_position = first, .span = span, .lse = far_lse});
    } else {
      attn::full_softmax_cached(main.keys, t.q, far, {.first_position = first, .span = span, .lse = far_lse});
    }
    finish(out, lse, far, far_lse, first);
  }
};

int main() {
  constexpr idx_t tokens = 2048;
  floats q = random({1, heads, tokens, dim}), kv = random({1, 1, tokens, dim}), full(q.extents());
  floats q_idx = random({1, index_heads, tokens, index_dim});
  for (floats* x : {&q, &kv, &q_idx}) attn::rotary(last_dims(*x), last_dims(*x), {.interleaved = true});
  const auto milliseconds = [](auto&& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  std::printf("%td tokens, %td heads over 1, full_softmax: %.0f ms\n", tokens, heads,
              milliseconds([&] { attn::full_softmax(q, kv, kv, full, {.causal = true}); }));
  bool right = true;
  for (const bool chosen : {true, false}) {
    compressed_attention layer{chosen ? 4 : 128, chosen ? 128 : 0};
    const idx_t channels = layer.main.channels;
    const floats x = random({1, 1, tokens, channels}), z = random(x.extents());
    const floats x_idx = random({1, 1, tokens, 2 * index_dim}), z_idx = random(x_idx.extents());
    const floats_3 w = random<3>({1, tokens, index_heads});
    floats out(q.extents()), row({1, heads, 1, dim});
    const double whole = milliseconds([&] { layer.whole({q, kv, x, z, x_idx, z_idx, q_idx, w}, out); });
    double error = 0, size = 0;
    const double steps = milliseconds([&] {
      for (idx_t t = 0; t < tokens; ++t) {
        const auto at = [&](const floats& all) { return all.view().slice(2, t, 1); };
        layer.step({at(q), at(kv), at(x), at(z), at(x_idx), at(z_idx), at(q_idx), w.view().slice(1, t, 1)}, row);
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t d = 0; d < dim; ++d)
            error += std::pow(row(0, h, 0, d) - out(0, h, t, d), 2), size += std::pow(out(0, h, t, d), 2);
      }
    });
    std::printf("%s of %td tokens a key: %.0f ms, %.0f us a step, which is off by %.1e\n", layer.topk ? "CSA" : "HCA",
                layer.span, whole, 1000 * steps / tokens, std::sqrt(error / size));
    right = right && error <= 1e-5 * size;  // where index scores are as good as equal another key may be chosen
  }
  return right ? 0 : 1;
}
