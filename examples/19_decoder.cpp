// A decoder in the shape of Llama (RMS norm, rotary positions, grouped queries, SwiGLU) that serves many prompts at
// once: a prompt that ends makes room for the next one, prompts are read in chunks while others decode, and all of them
// share the pages of a common beginning. The tokens are the same as those of one prompt at a time.
//
// With --operator=full it also decodes speculatively: what followed the last two tokens where they occurred before is
// fed as a tree of drafts, in one step with a mask; of the tree the caches keep the branch that the model takes. The
// tokens are the same again, in fewer rounds.
//
//   19_decoder [--operator=full|window|topk_blocks|multipole|linear] [--weights=DIR]
//
// Without weights, which decoder/weights.hpp describes, they are random, and the text is noise.
#include <attn/attn.hpp>

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string_view>

#include "decoder/weights.hpp"

namespace decoder {

using view = attn::tensor_view<const float>;
using out_view = attn::tensor_view<float>;
using sequence = attn::tensor_view<float, 3>;  // [batch, length, width]

const shape sizes;
const attn::rotary_options<float> positions{.base = 10000};

// Tokens for an item: a chunk of its text, or the last token of it and a tree of drafts that may follow.
struct fed_tokens {
  std::vector<int> tokens;
  std::vector<idx_t> parents;  // of a tree: the token before each one, -1 for the first; of a chunk: empty

  idx_t size() const { return std::ssize(tokens); }
  bool is_tree() const { return !parents.empty(); }
};

// Where the tokens of a step are and what they see, if some of them are trees: a draft is at the place that it has in
// its branch, and sees what was fed before and its branch.
class tree_options {
 public:
  tree_options(const std::vector<fed_tokens>& fed, const std::vector<idx_t>& before, idx_t length) {
    if (std::none_of(fed.begin(), fed.end(), [](const fed_tokens& x) { return x.is_tree(); })) return;
    const idx_t items = std::ssize(fed);
    idx_t keys = 0;
    for (idx_t b = 0; b < items; ++b) keys = std::max(keys, before[b] + fed[b].size());
    extents_ = {items, 1, length, keys};
    places_.assign(items * length, 0);
    seen_.assign(items * length * keys, 0);
    for (idx_t b = 0; b < items; ++b)
      for (idx_t t = 0; t < fed[b].size(); ++t) {
        const idx_t row = b * length + t, parent = fed[b].is_tree() ? fed[b].parents[t] : t - 1;
        places_[row] = parent < 0 ? before[b] : places_[b * length + parent] + 1;
        std::uint8_t* const seen = &seen_[row * keys];
        if (parent < 0) std::fill_n(seen, before[b], 1);
        else std::copy_n(&seen_[(b * length + parent) * keys], keys, seen);
        seen[before[b] + t] = 1;
      }
  }

  attn::rotary_options<float> rotary() const {
    attn::rotary_options<float> options = positions;
    if (!places_.empty()) options.positions = {places_.data(), {extents_[0], extents_[2]}};
    return options;
  }
  attn::mask_view mask() const {
    if (seen_.empty()) return {};
    return attn::tensor_view<const std::uint8_t>(seen_.data(), extents_);
  }

 private:
  std::array<idx_t, 4> extents_{};
  std::vector<idx_t> places_;
  std::vector<std::uint8_t> seen_;
};

// What a layer attends with: a cache or state of several items, and the step that feeds it.
struct attention {
  std::function<void(view q, view k, view v, out_view out, const std::vector<idx_t>& lengths, const tree_options& trees,
                     attn::execution&)>
      step;
  std::function<void(idx_t from, idx_t to)> copy_item;
  std::function<void(idx_t item)> reset;
  std::function<void(idx_t item, const std::vector<idx_t>& positions)> keep;
};

template <class Cache, class Step>
attention attention_over(std::shared_ptr<Cache> cache, Step step) {
  attention made{
      [=](auto q, auto k, auto v, auto out, const auto& n, const auto& trees, auto& exec) {
        step(*cache, q, k, v, out, n, trees, exec);
      },
      [=](idx_t from, idx_t to) { cache->copy_item(from, to); }, [=](idx_t item) { cache->reset(item); }, {}};
  if constexpr (requires { cache->keep(0, {}); })
    made.keep = [=](idx_t item, const std::vector<idx_t>& kept) { cache->keep(item, kept); };
  return made;
}

attention make_attention(std::string_view name, idx_t items, attn::page_pool<float>& pool) {
  const attn::state_extents extents{.batch = items, .heads = sizes.kv_heads, .dim = sizes.head_dim};
  if (name == "full")
    return attention_over(std::make_shared<attn::paged_cache<float>>(pool, items),
                          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto& t, auto& exec) {
                            attn::full_softmax_step(cache, q, k, v, out,
                                                    {.lengths = n, .rotary = t.rotary(), .mask = t.mask()}, exec);
                          });
  if (name == "window")
    return attention_over(
        std::make_shared<attn::sliding_window_cache<float>>(extents, attn::sliding_window_cache_options{.left = 32}),
        [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto&, auto& exec) {
          attn::sliding_window_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
        });
  if (name == "topk_blocks")
    return attention_over(
        std::make_shared<attn::topk_blocks_cache<float>>(extents, attn::topk_blocks_cache_options{.block = 16}),
        [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto&, auto& exec) {
          attn::topk_blocks_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
        });
  if (name == "multipole")
    return attention_over(std::make_shared<attn::multipole_cache<float>>(
                              extents, attn::multipole_cache_options{.exact = 32, .segment = 64}),
                          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto&, auto& exec) {
                            attn::multipole_step(cache, q, k, v, out, {.lengths = n, .rotary = positions}, exec);
                          });
  if (name == "linear")
    return attention_over(std::make_shared<attn::linear_state<float>>(attn::kernel_state_extents{
                              items, sizes.kv_heads, sizes.head_dim, sizes.head_dim}),
                          [](auto& state, auto q, auto k, auto v, auto out, const auto& n, const auto&, auto& exec) {
                            attn::linear_step(state, q, k, v, out, {.lengths = n}, exec);
                          });
  throw std::runtime_error("--operator: expected full, window, topk_blocks, multipole or linear");
}

// A model and the sequences in progress, its batch items.
class engine {
 public:
  engine(const weights& w, std::string_view operator_name, idx_t items, attn::page_pool<float>& pool)
      : weights_(w), items_(items), tokens_(items, 0) {
    for (idx_t n = 0; n < sizes.layers; ++n) layers_.push_back(make_attention(operator_name, items, pool));
  }

  // Item b takes fed[b], if any; gives the likeliest token after each of those.
  std::vector<std::vector<int>> feed(const std::vector<fed_tokens>& fed) {
    std::vector<idx_t> lengths;
    for (const fed_tokens& x : fed) lengths.push_back(x.size());
    const idx_t length = *std::max_element(lengths.begin(), lengths.end()), rows = items_ * length;
    const tree_options trees(fed, tokens_, length);
    matrix x = matrix::Zero(rows, sizes.width()), normed(rows, sizes.width()), mixed(rows, sizes.width());
    for (idx_t b = 0; b < items_; ++b)
      for (idx_t t = 0; t < lengths[b]; ++t) x.row(b * length + t) = weights_.embedding.row(fed[b].tokens[t]);
    const auto by_item = [&](matrix& m) { return sequence(m.data(), {items_, length, m.cols()}); };

    for (std::size_t n = 0; n < layers_.size(); ++n) {
      const layer_weights& w = weights_.layers[n];
      const auto attend = [&](auto q, auto k, auto v, auto out, attn::execution& exec) {
        layers_[n].step(q, k, v, out, lengths, trees, exec);
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

    matrix logits(rows, sizes.vocabulary);
    attn::rms_norm(x, normed);
    attn::project(normed, logits, {.weight = weights_.embedding}, exec_);
    std::vector<std::vector<int>> next(items_);
    for (idx_t b = 0; b < items_; ++b) {
      next[b].resize(lengths[b]);
      for (idx_t t = 0; t < lengths[b]; ++t) logits.row(b * length + t).maxCoeff(&next[b][t]);
      tokens_[b] += lengths[b];
    }
    return next;
  }
  void copy_item(idx_t from, idx_t to) {
    for (attention& layer : layers_) layer.copy_item(from, to);
    tokens_[to] = tokens_[from];
  }
  void reset(idx_t item) {
    for (attention& layer : layers_) layer.reset(item);
    tokens_[item] = 0;
  }
  // Of the `count` tokens that an item took last only those of a branch remain.
  void keep(idx_t item, idx_t count, const std::vector<idx_t>& branch) {
    std::vector<idx_t> kept(tokens_[item] - count);
    std::iota(kept.begin(), kept.end(), 0);
    for (idx_t n : branch) kept.push_back(tokens_[item] - count + n);
    for (attention& layer : layers_) layer.keep(item, kept);
    tokens_[item] = std::ssize(kept);
  }

 private:
  const weights& weights_;
  idx_t items_;
  std::vector<idx_t> tokens_;  // of the items
  std::vector<attention> layers_;
  attn::execution exec_{2};
};

struct request {
  std::vector<int> tokens;  // the prompt, then what follows it
  idx_t wanted = 0;         // tokens in the end
  idx_t fed = 0;
};

constexpr idx_t chunk = 16;  // tokens of a prompt that are read at a time

idx_t child_of(const fed_tokens& tree, idx_t parent, int token) {
  for (idx_t n = parent + 1; n < tree.size(); ++n)
    if (tree.parents[n] == parent && tree.tokens[n] == token) return n;
  return -1;
}

// The last token of a text and a tree of drafts: up to four tokens that followed the last two where those occurred
// before, the latest places first. (A small model would guess better.)
fed_tokens with_drafts(const std::vector<int>& text) {
  constexpr idx_t most = 12, depth = 4;
  fed_tokens tree{{text.back()}, {-1}};
  const idx_t last = std::ssize(text) - 1;
  for (idx_t at = last - 1; at > 0 && tree.size() <= most; --at) {
    if (text[at] != text[last] || text[at - 1] != text[last - 1]) continue;
    idx_t node = 0;
    for (idx_t n = at + 1; n <= std::min(at + depth, last) && tree.size() <= most; ++n) {
      idx_t child = child_of(tree, node, text[n]);
      if (child < 0) {
        child = tree.size();
        tree.tokens.push_back(text[n]), tree.parents.push_back(node);
      }
      node = child;
    }
  }
  return tree;
}

struct served {
  idx_t rounds = 0, drafts = 0, accepted = 0;
};

// Serves all requests, `slots` of them at a time, each after the common beginning.
served serve(engine& model, idx_t slots, const std::vector<int>& beginning, std::vector<request>& requests,
             bool drafts) {
  std::vector<fed_tokens> fed(slots + 1);
  for (std::size_t at = 0; at < beginning.size(); at += chunk) {  // the last item keeps the beginning for all others
    const auto end = std::min(at + chunk, beginning.size());
    fed[slots].tokens.assign(beginning.begin() + at, beginning.begin() + end);
    model.feed(fed);
  }
  fed[slots] = {};
  std::vector<request*> active(slots, nullptr);
  std::size_t waiting = 0;
  for (served all;; ++all.rounds) {
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r && waiting < requests.size()) {
        r = &requests[waiting++];
        model.copy_item(slots, slot);
      }
      fed[slot] = {};
      if (!r) continue;
      const idx_t count = std::min<idx_t>(chunk, std::ssize(r->tokens) - r->fed);
      if (drafts && count == 1) fed[slot] = with_drafts(r->tokens);
      else fed[slot].tokens.assign(r->tokens.begin() + r->fed, r->tokens.begin() + r->fed + count);
      r->fed += count;
    }
    if (std::all_of(active.begin(), active.end(), [](const request* r) { return !r; })) return all;
    const std::vector<std::vector<int>> next = model.feed(fed);
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r || r->fed < std::ssize(r->tokens)) continue;  // of a prompt's chunks, the last one says what follows
      if (fed[slot].is_tree()) {  // along the drafts that are what follows
        std::vector<idx_t> branch = {0};
        for (idx_t n = 0; std::ssize(r->tokens) + 1 < r->wanted; branch.push_back(n)) {
          n = child_of(fed[slot], n, next[slot][n]);
          if (n < 0) break;
          r->tokens.push_back(fed[slot].tokens[n]);
        }
        model.keep(slot, fed[slot].size(), branch);
        r->fed += std::ssize(branch) - 1;
        r->tokens.push_back(next[slot][branch.back()]);
        all.drafts += fed[slot].size() - 1, all.accepted += std::ssize(branch) - 1;
      } else {
        r->tokens.push_back(next[slot].back());
      }
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
  const auto serve_all = [&](idx_t slots, bool drafts = false) {
    attn::page_pool<float> pool({.pages = sizes.layers * (slots + 1) * 12, .page_tokens = 16, .heads = sizes.kv_heads,
                                 .dim = sizes.head_dim});
    std::vector<request> all = requests;
    const auto start = std::chrono::steady_clock::now();
    engine model(all_weights, operator_name, slots + 1, pool);
    const served of = serve(model, slots, beginning, all, drafts);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::size_t tokens = 0;
    for (const request& r : all) tokens += r.tokens.size();
    std::printf("%td at a time: %zu tokens of %zu prompts in %td rounds, %.0f tokens a second; pages kept: %td\n",
                slots, tokens, all.size(), of.rounds, double(tokens) / seconds.count(),
                pool.pages() - pool.free_pages());
    if (drafts) std::printf("%td drafts in trees, of which %td were what follows\n", of.drafts, of.accepted);
    return all;
  };
  const std::vector<request> together = serve_all(4), alone = serve_all(1);
  const auto compare = [&](const std::vector<request>& others, const char* what) {
    bool same = true;
    for (std::size_t n = 0; n < alone.size(); ++n) same &= others[n].tokens == alone[n].tokens;
    std::printf("the same tokens as %s: %s\n", what, same ? "yes" : "no");
    return same;
  };
  bool same = compare(together, "one prompt at a time");
  if (operator_name == "full") same &= compare(serve_all(4, true), "without drafts");  // the step that takes a mask
  return same ? 0 : 1;
}

}  // namespace decoder

int main(int argc, char** argv) try {
  return decoder::run({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
