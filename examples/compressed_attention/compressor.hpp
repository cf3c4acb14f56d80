// Keys that stand for several tokens each, made token by token or from a prompt at once.
#pragma once

#include <attn/core/rotary.hpp>
#include <attn/layers/pooled_tokens_step.hpp>
#include <attn/layers/rms_norm.hpp>

#include "../support/inputs.hpp"

// The dims that are rotated, the last ones.
inline auto last_dims(const attn::tensor_view<float>& x, attn::idx_t rotated = 32) {
  return x.slice(3, x.extent(3) - rotated, rotated);
}

// DeepSeek-V4's compressor: what it is of a layer, and the keys so far.
struct compressor {
  attn::idx_t dim, span;  // of a key; tokens of a key
  bool overlap;
  attn::idx_t channels = overlap ? 2 * dim : dim;
  attn::tensor<float, 3> bias = support::random<attn::tensor<float, 3>>({1, span, channels});
  std::vector<double> frequencies = attn::rotary_linear(32, {.factor = 1.0 / double(span)});  // every span-th position
  attn::pooled_tokens_state<float> state{{.channels = channels, .window = span, .overlap = overlap, .logits = true}};
  attn::kv_cache<float> keys{{.dim = dim}, {.values_in_keys = true}};  // the values are the keys

  // Takes the tokens that follow, whose logits are behind them, and keeps the keys that they complete. The norm of the
  // model may have weights. A key is rotated to the position of its first token.
  void feed(const attn::tensor_view<const float>& x) {
    const attn::idx_t first = state.windows(0);
    support::matrix made(state.rows(x.extent(2)), dim);
    attn::pooled_tokens_step(state, x.slice(3, 0, channels), made,
                             {.logits = x.slice(3, channels, channels), .bias = bias});
    attn::rms_norm(made, made);
    attn::rotary(last_dims(made), last_dims(made),
                 {.first_position = first, .interleaved = true, .frequencies = frequencies});
    keys.append(made, made);
  }
};
