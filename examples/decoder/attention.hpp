// What the layers of a decoder attend with: a cache or state of several items, and the step that feeds it.
#pragma once

#include <attn/core/cache_elements.hpp>
#include <attn/kernel/linear_step.hpp>
#include <attn/low_rank/multipole_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include <functional>
#include <memory>

#include "drafts.hpp"

namespace decoder {

using view = attn::tensor_view<const float>;
using out_view = attn::tensor_view<float>;

struct attention {
  std::function<void(view q, view k, view v, out_view out, const std::vector<idx_t>& lengths, const tree_options& trees,
                     attn::execution&)>
      step;
  std::function<void(idx_t from, idx_t to)> copy_item;
  std::function<void(const std::vector<idx_t>& order)> reorder;
  std::function<void(idx_t item)> reset;
  std::function<void(idx_t item, const std::vector<idx_t>& positions)> keep;
};

// Those of all layers, and how many pages they have taken of the pool that they share, which outlives them.
struct attentions {
  std::function<idx_t()> pages = [] { return 0; };
  std::vector<attention> layers;
};

template <class Cache, class Step>
attention attention_over(std::shared_ptr<Cache> cache, Step step) {
  return {[=](auto q, auto k, auto v, auto out, const auto& n, const auto& trees, auto& exec) {
            step(*cache, q, k, v, out, n, trees, exec);
          },
          [=](idx_t from, idx_t to) { cache->copy_item(from, to); },
          [=](const std::vector<idx_t>& order) { cache->reorder(order); }, [=](idx_t item) { cache->reset(item); }, {}};
}

// Exact attention over pages of elements S, for `tokens` tokens of each item: in full_softmax.cpp, which takes as long
// to compile as all else.
template <class S>
attentions full_attentions(const shape& sizes, idx_t items, idx_t tokens);

inline attentions make_attentions(const std::string& name, const std::string& elements, const shape& sizes, idx_t items,
                                  idx_t tokens) {
  if (name == "full") {
    if (elements == "float") return full_attentions<float>(sizes, items, tokens);
    if (elements == "bf16") return full_attentions<Eigen::bfloat16>(sizes, items, tokens);
    if (elements == "int8") return full_attentions<std::int8_t>(sizes, items, tokens);
    if (elements == "int4") return full_attentions<attn::int4>(sizes, items, tokens);
    throw std::runtime_error("full: expected caches of float, bf16, int8 or int4; found " + elements);
  }
  const attn::state_extents extents{.batch = items, .heads = sizes.kv_heads, .dim = sizes.head_dim};
  const auto layer = [&]() -> attention {
    if (name == "window")
      return attention_over(
          std::make_shared<attn::sliding_window_cache<float>>(extents, attn::sliding_window_cache_options{.left = 32}),
          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto& t, auto& exec) {
            attn::sliding_window_step(cache, q, k, v, out, {.lengths = n, .rotary = t.rotary()}, exec);
          });
    if (name == "topk_blocks")
      return attention_over(
          std::make_shared<attn::topk_blocks_cache<float>>(extents, attn::topk_blocks_cache_options{.block = 16}),
          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto& t, auto& exec) {
            attn::topk_blocks_step(cache, q, k, v, out, {.lengths = n, .rotary = t.rotary()}, exec);
          });
    if (name == "multipole")
      return attention_over(
          std::make_shared<attn::multipole_cache<float>>(
              extents, attn::multipole_cache_options{.exact = 32, .segment = 64}),
          [](auto& cache, auto q, auto k, auto v, auto out, const auto& n, const auto& t, auto& exec) {
            attn::multipole_step(cache, q, k, v, out, {.lengths = n, .rotary = t.rotary()}, exec);
          });
    if (name == "linear")
      return attention_over(std::make_shared<attn::linear_state<float>>(attn::kernel_state_extents{
                                items, sizes.kv_heads, sizes.head_dim, sizes.head_dim}),
                            [](auto& state, auto q, auto k, auto v, auto out, const auto& n, const auto&, auto& exec) {
                              attn::linear_step(state, q, k, v, out, {.lengths = n}, exec);
                            });
    throw std::runtime_error("--operator: expected full, window, topk_blocks, multipole or linear; found " + name);
  };
  if (elements != "float") throw std::runtime_error(name + ": expected caches of float; found " + elements);
  attentions made;
  for (idx_t n = 0; n < sizes.layers; ++n) made.layers.push_back(layer());
  return made;
}

}  // namespace decoder
