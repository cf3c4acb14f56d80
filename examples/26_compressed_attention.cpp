// DeepSeek-V4's compressed attention (2026) from parts of the library. A query attends, under one softmax with a sink,
// to the last 128 tokens and to keys that stand for several tokens each: in CSA to those of 4 tokens that an indexer
// chooses, in HCA to all of 128 tokens. The values are the keys. A prompt, its gradient, and the same token by token.
#include <attn/attn.hpp>

#include <cstdio>

#include "compressed_attention/compressor.hpp"

using attn::idx_t, support::floats, support::random, support::vector;  // floats: [1, heads, tokens, dim]
using rank_3 = attn::tensor<float, 3>;
constexpr idx_t tokens = 2048, head_count = 8, head_dim = 64, index_heads = 4, index_dim = 32, window = 128;

// What a layer projects its tokens to. Queries, index queries and kv are normed and rotated; w weighs index heads.
struct projected {
  attn::tensor_view<const float> q, kv, x, q_idx, x_idx;
  attn::tensor_view<const float, 3> w;
  projected token(idx_t t) const {
    const auto at = [t](const auto& all) { return all.slice(2, t, 1); };
    return {at(q), at(kv), at(x), at(q_idx), at(x_idx), w.slice(1, t, 1)};
  }
};

struct compressed_attention {
  idx_t span, topk;  // topk 0: HCA
  compressor main{head_dim, span, topk > 0}, index{index_dim, span, true};
  attn::sliding_window_cache<float> near{{.dim = head_dim}, {.left = window - 1}};
  std::vector<float> sinks = std::vector<float>(head_count, 0.5f);
  attn::tensor<std::int32_t> lists{};  // of the last call

  // The tokens that follow, a prompt or one.
  void attend(const projected& t, const attn::tensor_view<float>& out, const attn::tensor_view<float, 3>& lse) {
    const idx_t first = near.tokens(0), count = out.extent(2);
    floats far({1, head_count, count, head_dim});
    rank_3 far_lse({1, head_count, count});
    main.feed(t.x), index.feed(t.x_idx);
    attn::sliding_window_step(near, t.q, t.kv, t.kv, out, {.sinks = sinks, .lse = lse});
    if (topk) {
      lists = attn::tensor<std::int32_t>({1, 1, count, topk});
      attn::lightning_indexer_cached(index.keys, t.q_idx, lists,
                                     {.first_position = first, .span = span, .topk = topk, .w = t.w});
      attn::selected_keys_cached(main.keys, t.q, far, lists, {.first_position = first, .span = span, .lse = far_lse});
    } else {
      attn::full_softmax_cached(main.keys, t.q, far, {.first_position = first, .span = span, .lse = far_lse});
    }
    attn::merge_softmax(out, lse, far, far_lse);
    attn::rotary_backward(last_dims(out), {.x = last_dims(out)}, {.first_position = first, .interleaved = true});
  }
  // Of a prompt: the gradients of both parts, with the merged out and lse, are those of the merged result.
  void backward(const projected& t, floats out, rank_3& lse, floats d_out, floats& dq, floats& dkv, floats& d_keys) {
    const auto keys = main.keys.keys();
    floats dv(dkv.extents()), d_values(d_keys.extents());
    for (floats* x : {&out, &d_out}) attn::rotary(last_dims(*x), last_dims(*x), {.interleaved = true});
    attn::sliding_window_backward(t.q, t.kv, t.kv, out, d_out, {.q = dq, .k = dkv, .v = dv},
                                  {.causal = true, .left = window - 1, .sinks = sinks, .lse = lse});
    if (topk)
      attn::selected_keys_backward(t.q, keys, keys, out, lists, d_out,
                                   {.q = dq, .k = d_keys, .v = d_values, .accumulate = true},
                                   {.causal = true, .first_position = 0, .span = span, .lse = lse});
    else
      attn::full_softmax_backward(t.q, keys, keys, out, d_out,
                                  {.q = dq, .k = d_keys, .v = d_values, .accumulate = true},
                                  {.causal = true, .first_position = 0, .span = span, .lse = lse});
    vector(dkv) += vector(dv), vector(d_keys) += vector(d_values);
  }
};

int main() {
  floats q = random({1, head_count, tokens, head_dim}), kv = random({1, 1, tokens, head_dim}), full(q.extents()),
         q_idx = random({1, index_heads, tokens, index_dim});
  for (floats* x : {&q, &kv, &q_idx}) attn::rotary(last_dims(*x), last_dims(*x), {.interleaved = true});
  std::printf("%td tokens, %td heads over 1, full_softmax: %.0f ms\n", tokens, head_count,
              support::milliseconds([&] { attn::full_softmax(q, kv, kv, full, {.causal = true}); }));
  const rank_3 w = random<rank_3>({1, tokens, index_heads});
  for (const bool csa : {true, false}) {
    const compressed_attention fresh{csa ? 4 : 128, csa ? 128 : 0};
    compressed_attention prompt = fresh, decoder = fresh;
    const floats x = random({1, 1, tokens, 2 * fresh.main.channels}), x_idx = random({1, 1, tokens, 4 * index_dim});
    const projected all{q, kv, x, q_idx, x_idx, w};
    floats out(q.extents()), decoded = out, dq = q, dkv = kv, d_keys({1, 1, tokens / fresh.span, head_dim});
    rank_3 lse({1, head_count, tokens}), lse_t({1, head_count, 1});
    const double whole = support::milliseconds([&] { prompt.attend(all, out, lse); });
    const double steps = support::milliseconds([&] {
      for (idx_t t = 0; t < tokens; ++t) decoder.attend(all.token(t), decoded.view().slice(2, t, 1), lse_t);
    });
    // The derivative of |out|^2 / 2 along q and kv: by the gradient, and where they grow and shrink by half a percent.
    const double back = support::milliseconds([&] { prompt.backward(all, out, lse, out, dq, dkv, d_keys); });
    const auto grown = [&](float h) {
      floats q_h = q, kv_h = kv, o = out;
      vector(q_h) *= 1 + h, vector(kv_h) *= 1 + h;
      compressed_attention(fresh).attend({q_h, kv_h, x, q_idx, x_idx, w}, o, rank_3({1, head_count, tokens}).view());
      return support::product(o, o) / 2;
    };
    const double slope = (grown(0.005f) - grown(-0.005f)) / 0.01, error = support::relative_error(decoded, out),
                 off = std::abs((support::product(dq, q) + support::product(dkv, kv)) / slope - 1);
    std::printf("%s of %td tokens a key: %.0f ms; %.0f us a step, off by %.1e; gradient: %.0f ms, off by %.1e\n",
                csa ? "CSA" : "HCA", fresh.span, whole, 1000 * steps / tokens, error, back, off);
    if (error > (csa ? 3e-3 : 1e-5) || off > 1e-3) return 1;  // of keys that score all but alike CSA may choose either
  }
}
