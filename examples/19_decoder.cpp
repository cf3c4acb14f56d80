// A decoder in the shape of Llama (RMS norm, rotary positions, grouped queries, SwiGLU) that serves many prompts at once:
// a prompt that ends makes room for the next one, prompts are read in chunks while others decode, and all of them share
// the pages of a common beginning. The tokens are the same as those of one prompt at a time.
//
//   19_decoder [--operator=full|window|topk_blocks|multipole|linear] [--weights=DIR]
//
// Without weights, which decoder/weights.hpp describes, they are random, and the text is noise.
#include <attn/attn.hpp>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string_view>

#include "decoder/weights.hpp"

namespace decoder {

using view = attn::tensor_view<const float>;
using out_view = attn::tensor_view<float>;
using sequence = attn::tensor_view<float, 3>;  // [batch, length, width]

const shape sizes;
const attn::rotary_options<float> positions{.base = 10000};

// What a layer attends with: a cache or state of several items, and the step that feeds it.
struct attention {
  std::function<void(view q, view k, view v, out_view out, const std::vector<idx_t>& lengths, attn::execution&)> step;
  std::function<void(idx_t from, idx_t to)> copy_item;
  std::function<void(idx_t item)> reset;
};

template <class Cache, class Step>
attention attention_over(std::shared_ptr<Cache> cache, Step step) {
  return {[=](auto q, auto k, auto v, auto out, const auto& n, auto& exec) { step(*cache, q, k, v, out, n, exec); },
          [=](idx_t from, idx_t to) { cache->copy_item(from, to); }, [=](idx_t item) { cache->reset(item); }};
}

attention make_attention(std::string_view name, idx_t items, attn::page_pool<float>& pool) {
  const attn::state_extents extents{.batch = items, .heads = sizes.kv_heads, .dim = sizes.head_dim};
  if (name == "full")
    return attention_over(std::make_shared<attn::paged_cache<float>>(pool, items),
                          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, auto& exec) {
                            attn::full_softmax_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
                          });
  if (name == "window")
    return attention_over(
        std::make_shared<attn::sliding_window_cache<float>>(extents, attn::sliding_window_cache_options{.left = 32}),
        [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, auto& exec) {
          attn::sliding_window_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
        });
  if (name == "topk_blocks")
    return attention_over(
        std::make_shared<attn::topk_blocks_cache<float>>(extents, attn::topk_blocks_cache_options{.block = 16}),
        [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, auto& exec) {
          attn::topk_blocks_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
        });
  if (name == "multipole")
    return attention_over(std::make_shared<attn::multipole_cache<float>>(
                              extents, attn::multipole_cache_options{.exact = 32, .segment = 64}),
                          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, auto& exec) {
                            attn::multipole_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
                          });
  if (name == "linear")
    return attention_over(std::make_shared<attn::linear_state<float>>(attn::kernel_state_extents{
                              items, sizes.kv_heads, sizes.head_dim, sizes.head_dim}),
                          [](auto& state, auto q, auto k, auto v, auto out, const auto& n, auto& exec) {
                            attn::linear_step(state, q, k, v, out, {.lengths = n}, exec);
                          });
  throw std::runtime_error("--operator: expected full, window, topk_blocks, multipole or linear");
}

// A model and the sequences in progress, its batch items.
class engine {
 public:
  engine(const weights& w, std::string_view operator_name, idx_t items, attn::page_pool<float>& pool)
      : weights_(w), items_(items) {
    for (idx_t n = 0; n < sizes.layers; ++n) layers_.push_back(make_attention(operator_name, items, pool));
  }

  // Item b takes the tokens of chunks[b], if any; gives its likeliest next token, or -1.
  std::vector<int> feed(const std::vector<std::vector<int>>& chunks) {
    std::vector<idx_t> lengths;
    for (const auto& chunk : chunks) lengths.push_back(std::ssize(chunk));
    const idx_t length = *std::max_element(lengths.begin(), lengths.end()), rows = items_ * length;
    matrix x = matrix::Zero(rows, sizes.width()), normed(rows, sizes.width()), mixed(rows, sizes.width());
    for (idx_t b = 0; b < items_; ++b)
      for (idx_t t = 0; t < lengths[b]; ++t) x.row(b * length + t) = weights_.embedding.row(chunks[b][t]);
    const auto by_item = [&](matrix& m) { return sequence(m.data(), {items_, length, m.cols()}); };

    for (std::size_t n = 0; n < layers_.size(); ++n) {
      const layer_weights& w = weights_.layers[n];
      const auto attend = [&](auto q, auto k, auto v, auto out, attn::execution& exec) {
        layers_[n].step(q, k, v, out, lengths, exec);
      };
      attn::rms_norm(x, normed);
      attn::multi_head(by_item(normed), by_item(mixed),
                       {.query = w.query, .key = w.key, .value = w.value, .output = w.output}, attend,
                       {.heads = sizes.heads, .kv_heads = sizes.kv_heads}, exec_);
      x += mixed;
      attn::rms_norm(x, normed);
      attn::feed_forward(normed, mixed, {.up = w.up, .down = w.down, .gate = w.gate},
                         {.activation = attn::activation::silu}, exec_);
      x += mixed;
    }

    std::vector<int> next(chunks.size(), -1);
    matrix last(items_, sizes.width()), logits(items_, sizes.vocabulary);
    for (idx_t b = 0; b < items_; ++b) last.row(b) = x.row(b * length + std::max<idx_t>(lengths[b], 1) - 1);
    attn::rms_norm(last, last);
    attn::project(last, logits, {.weight = weights_.embedding}, exec_);
    for (idx_t b = 0; b < items_; ++b)
      if (lengths[b] > 0) logits.row(b).maxCoeff(&next[b]);
    return next;
  }
  void copy_item(idx_t from, idx_t to) {
    for (attention& layer : layers_) layer.copy_item(from, to);
  }
  void reset(idx_t item) {
    for (attention& layer : layers_) layer.reset(item);
  }

 private:
  const weights& weights_;
  idx_t items_;
  std::vector<attention> layers_;
  attn::execution exec_{2};
};

struct request {
  std::vector<int> tokens;  // the prompt, then what follows it
  idx_t wanted = 0;         // tokens in the end
  idx_t fed = 0;
};

constexpr idx_t chunk = 16;  // tokens of a prompt that are read at a time

// Serves all requests, `slots` of them at a time, each after the common beginning. Returns how many rounds it took.
idx_t serve(engine& model, idx_t slots, const std::vector<int>& beginning, std::vector<request>& requests) {
  std::vector<std::vector<int>> chunks(slots + 1);
  for (std::size_t at = 0; at < beginning.size(); at += chunk) {  // the last item keeps the beginning for all others
    const auto end = std::min(at + chunk, beginning.size());
    chunks[slots].assign(beginning.begin() + at, beginning.begin() + end);
    model.feed(chunks);
  }
  chunks[slots].clear();
  std::vector<request*> active(slots, nullptr);
  std::size_t waiting = 0;
  for (idx_t rounds = 0;; ++rounds) {
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r && waiting < requests.size()) {
        r = &requests[waiting++];
        model.copy_item(slots, slot);
      }
      chunks[slot].clear();
      if (!r) continue;
      const idx_t count = std::min<idx_t>(chunk, std::ssize(r->tokens) - r->fed);
      chunks[slot].assign(r->tokens.begin() + r->fed, r->tokens.begin() + r->fed + count);
      r->fed += count;
    }
    if (std::all_of(active.begin(), active.end(), [](const request* r) { return !r; })) return rounds;
    const std::vector<int> next = model.feed(chunks);
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r || r->fed < std::ssize(r->tokens)) continue;  // of a prompt's chunks, the last one says what follows
      r->tokens.push_back(next[slot]);
      if (std::ssize(r->tokens) < r->wanted) continue;
      model.reset(slot);
      r = nullptr;
    }
  }
}

int run(const std::vector<std::string_view>& arguments) {
  std::string operator_name = "full", folder;
  for (const std::string_view argument : arguments) {
    if (argument.starts_with("--operator=")) operator_name = argument.substr(11);
    else if (argument.starts_with("--weights=")) folder = argument.substr(10);
    else throw std::runtime_error("usage: 19_decoder [--operator=NAME] [--weights=DIR]");
  }
  const weights all_weights = make_weights(sizes, folder);
  const std::string text = "You are a helpful assistant. Answer in one sentence. ";
  const std::vector<int> beginning(text.begin(), text.end());
  std::vector<request> requests;
  for (const std::string prompt : {"What is attention?", "Name a bird.", "Why?",
                                   "How long is the Danube, and where does it begin?", "2 + 2 =",
                                   "Tell me a short story about a fox who reads.", "Hi", "Which year?"})
    requests.push_back({{prompt.begin(), prompt.end()}, std::ssize(prompt) + 24 + 8 * std::ssize(requests), 0});

  // One pool for all layers: 4 prompts at a time take at most what is needed for 4 sequences and the beginning.
  const auto serve_all = [&](idx_t slots) {
    attn::page_pool<float> pool({.pages = sizes.layers * (slots + 1) * 12, .page_tokens = 16, .heads = sizes.kv_heads,
                                 .dim = sizes.head_dim});
    std::vector<request> all = requests;
    const auto start = std::chrono::steady_clock::now();
    engine model(all_weights, operator_name, slots + 1, pool);
    const idx_t rounds = serve(model, slots, beginning, all);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::size_t tokens = 0;
    for (const request& r : all) tokens += r.tokens.size();
    std::printf("%td at a time: %zu tokens of %zu prompts in %td rounds, %.0f tokens a second; pages kept: %td\n",
                slots, tokens, all.size(), rounds, double(tokens) / seconds.count(), pool.pages() - pool.free_pages());
    return all;
  };
  const std::vector<request> together = serve_all(4), alone = serve_all(1);
  bool same = true;
  for (std::size_t n = 0; n < alone.size(); ++n) same &= together[n].tokens == alone[n].tokens;
  std::printf("the same tokens as one prompt at a time: %s\n", same ? "yes" : "no");
  return same ? 0 : 1;
}

}  // namespace decoder

int main(int argc, char** argv) try {
  return decoder::run({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
