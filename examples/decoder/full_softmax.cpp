// Exact attention over caches whose pages all layers take from one pool, of elements of several types.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include "attention.hpp"

namespace decoder {

template <class S>
attentions full_attentions(const shape& sizes, idx_t items, idx_t tokens) {
  constexpr idx_t page_tokens = 16;
  const auto pool = std::make_shared<attn::page_pool<S>>(attn::page_pool_extents{
      .pages = sizes.layers * items * (tokens / page_tokens + 1), .page_tokens = page_tokens, .heads = sizes.kv_heads,
      .dim = sizes.head_dim});
  attentions made{[=] { return pool->pages() - pool->free_pages(); }, {}};
  for (idx_t n = 0; n < sizes.layers; ++n) {
    const auto cache = std::make_shared<attn::paged_cache<S>>(*pool, items);
    made.layers.push_back(attention_over(
        cache, [](auto& c, auto q, auto k, auto v, auto out, const auto& lengths, const auto& t, auto& exec) {
          attn::full_softmax_step(c, q, k, v, out, {.lengths = lengths, .rotary = t.rotary(), .mask = t.mask()}, exec);
        }));
    made.layers.back().keep = [=](idx_t item, const std::vector<idx_t>& kept) { cache->keep(item, kept); };
  }
  return made;
}

template attentions full_attentions<float>(const shape&, idx_t, idx_t);
template attentions full_attentions<Eigen::bfloat16>(const shape&, idx_t, idx_t);
template attentions full_attentions<std::int8_t>(const shape&, idx_t, idx_t);
template attentions full_attentions<attn::int4>(const shape&, idx_t, idx_t);

}  // namespace decoder
