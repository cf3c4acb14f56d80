// attn: lightning_indexer token by token, with a cache of the keys of the indexer.
//
//   attn::kv_cache<float> index_cache({.batch = batch, .dim = 32, .value_dim = 0});        // one head, no values
//   attn::lightning_indexer_step(index_cache, q_idx, k_idx, indices, {.topk = 2048, .w = w_t});
//   attn::selected_keys_step(cache, q, k, v, out, indices);
//
// Appends k [B, 1, n, DI] to the cache, then writes for the n queries q [B, HI, n, DI], which are at the last n
// positions, the keys (or blocks of keys) with the largest scores among the tokens up to their own: the last n rows of
// one causal lightning_indexer over the whole sequence, [B, 1, n, topk]. With `lengths`, item b has only the first
// lengths[b] tokens of the chunk; rows of padding are -1.
//
// lightning_indexer_cached writes the lists of n queries over the keys that a cache has, which stays as it is: for caches
// of pooled keys (pooled_tokens_step.hpp), which have one for every span tokens.
//   attn::lightning_indexer_cached(index_cache, q_idx, indices, {.first_position = tokens_before, .span = 4});
//
// The cache is a kv_cache or paged_cache with one head and a value_dim of 0. Its elements may have fewer bits than the
// tokens (kv_cache.hpp); queries are then rounded too (full_softmax_step.hpp).
//
// Cost     2 B HI n tokens DI operations, and for each of up to four queries one reading of the cache. Scratch: 12 topk
//          candidates per thread and list.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/lightning_indexer_step_run.hpp>
#include <attn/softmax/lightning_indexer.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step for elements of type S, as in lightning_indexer_options.
template <class S>
struct lightning_indexer_step_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  /// Item b has the first lengths[b] tokens of the chunk, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  idx_t topk = 2048, block = 1, local_blocks = 0, first_blocks = 0;
  bool per_head = false;
  indexer_activation activation = indexer_activation::relu;
  /// w is [B, n, HI], scores of the shape of indices.
  view_field<const real, 3> w{};
  view_field<real> scores{};
};

/// Options of a call over what is cached, for elements of type S, as in lightning_indexer_options.
template <class S>
struct lightning_indexer_cached_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  /// Item b has the first lengths[b] queries, the rest is padding; all of them unless given.
  list_view<idx_t> lengths{};
  /// Of the first query; the queries are at the last n positions of their item unless given.
  first_positions first_position{};
  idx_t span = 1, topk = 2048, block = 1, local_blocks = 0, first_blocks = 0;
  bool per_head = false, tail = false;
  indexer_activation activation = indexer_activation::relu;
  view_field<const real, 3> w{};
  view_field<real> scores{};
};

/// Feeds n tokens and writes what their queries choose. The cache is a kv_cache or a paged_cache.
template <detail::key_value_cache Cache, viewable Q, viewable K,
          class Options = lightning_indexer_step_options<element_of<const Q&>>>
void lightning_indexer_step(Cache& cache, const Q& q, const K& k, const index_output& indices, Options&& options = {},
                            execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::require_one_element_type<const Q&, const K&, const K&, tensor_view<S>>();
  const auto& given = detail::options_or_default<lightning_indexer_step_options<S>>(options);
  detail::call_views views("lightning_indexer_step");
  auto& tokens = detail::step_access::of(cache);
  detail::check_stores<typename Cache::value_type, S>();
  auto call = detail::indexer_call_of<S>(views, as_view(q), as_view(k), indices, given, {.limit = {.causal = true}},
                                         detail::plain_execution_of("lightning_indexer_step", exec, options));
  views.equal("cache value dim", 0, tokens.value_dim());
  const tensor_view<const S> values = call.k.slice(3, 0, 0);
  tokens.check_tokens(views, call.k, values, given.lengths);
  views.equal("query length = key length", call.shape.keys, call.shape.queries);
  tokens.list_memory(views);
  detail::append_and(tokens, call.k, values, given.lengths, [&] {
    detail::set_keys_of_cache(call, tokens, given.lengths);
    detail::run_lightning_indexer_step(call, tokens.keys(), tokens.pages());
  });
}

/// Writes what the queries q [B, HI, n, DI] choose among the keys of a kv_cache or a paged_cache.
template <detail::key_value_cache Cache, viewable Q,
          class Options = lightning_indexer_cached_options<element_of<const Q&>>>
void lightning_indexer_cached(const Cache& cache, const Q& q, const index_output& indices, Options&& options = {},
                              execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<lightning_indexer_cached_options<S>>(options);
  detail::call_views views("lightning_indexer_cached");
  const auto& tokens = detail::step_access::of(cache);
  detail::check_stores<typename Cache::value_type, S>();
  const tensor_view<const S> no_keys(nullptr, {tokens.batch(), tokens.heads(), 0, tokens.dim()});
  auto call = detail::indexer_call_of<S>(views, as_view(q), no_keys, indices, given,
                                         {{true, given.span}, given.first_position, given.tail},
                                         detail::plain_execution_of("lightning_indexer_cached", exec, options));
  detail::check_length_list(views, "lengths", given.lengths, call.shape.batch, call.shape.queries);
  tokens.list_memory(views);
  detail::set_keys_of_cache(call, tokens, given.lengths);
  detail::run_lightning_indexer_step(call, tokens.keys(), tokens.pages());
}

}}  // namespace attn::ATTN_ISA
