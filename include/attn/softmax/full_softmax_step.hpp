// attn: decoding with a cache of keys and values.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t);      // one token, or a chunk: what causal full_softmax gives
//   attn::full_softmax_step(cache, q, k, v, out, {.lengths = n});               // a chunk of another length for each item
//   attn::paged_cache<float> cache(pool, batch);               // pages of one pool in its place: paged_cache.hpp
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which are at
// the last n positions, to all tokens up to their own: the last n rows of one causal full_softmax over the whole
// sequence. Options are those of full_softmax: it is always causal; of the chunk item b has its first lengths[b] tokens,
// and the rest is padding; `bias` is [B or 1, H or 1, n or 1, cache.tokens() with the new ones]; in `score` i and j are
// positions since the start.
//
// Cost     up to four tokens: one reading of the cache, and scratch memory that does not depend on its size. Longer
//          chunks are attended as full_softmax does.
// Throws   std::invalid_argument for shapes or options that do not fit, for query_lengths and key_lengths, which are the
//          cache's, and for first_position, before anything, the cache included, changes.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {
namespace detail {

/// kv_cache, paged_cache.
template <class Cache>
concept key_value_cache = requires(Cache& cache, std::span<const index> lengths) {
  typename Cache::value_type;
  { cache.pages() } -> std::same_as<page_tables>;
  cache.forget(index(), lengths);
};

}  // namespace detail

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. The cache is a kv_cache
/// or a paged_cache. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = full_softmax_options<typename Cache::value_type>, class Score = detail::no_score>
void full_softmax_step(Cache& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                       Score&& score = {}, execution_ref exec = {}) {
  static_assert(std::same_as<typename Cache::value_type, element_of<const Q&>>,
                "attn: the cache and q must have one element type");
  detail::call_softmax<full_softmax_options>(
      "full_softmax_step", q, k, v, out, options, score, exec, [&](auto& call, const auto& given) {
        cache.check_tokens(call.check, call.k, call.v, given.lengths);
        call.check.equal("query length = key length", call.shape.keys, call.shape.queries);
        if (!given.query_lengths.empty() || !given.key_lengths.empty())
          call.check.fail("lengths of the chunk, since the cache has those of the keys", "query_lengths or key_lengths");
        if (given.first_position) call.check.fail("no first_position, since the queries are at the last tokens", "one");
        const index count = call.shape.queries;
        call.lengths.full_keys = call.shape.keys = cache.tokens_after(count, given.lengths);
        detail::check_bias(call, given.bias);
        for (const auto& [name, view] : std::initializer_list<detail::validator::named_view>{
                 {"q", call.q}, {"out", call.out}, {"bias", given.bias}, {"lse", given.lse}})
          cache.no_alias(call.check, name, view);
        cache.append(call.k, call.v, {given.lengths});
        call.lengths.given_keys = cache.lengths();
        call.k = cache.keys(), call.v = cache.values(), call.pages = cache.pages();
        call.causal = true;
        try {
          detail::full_call{call}.run();
        } catch (...) {  // of the score function, or no memory
          cache.forget(count, given.lengths);
          throw;
        }
      });
}

}  // namespace attn::inline ATTN_ISA
