// attn: decoding with a cache of keys and values.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t);      // one token, or a chunk: what causal full_softmax gives
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which are at
// the last n positions, to all tokens up to their own: the last n rows of one causal full_softmax over the whole
// sequence. Options are those of full_softmax: it is always causal; `bias` is [B or 1, H or 1, n or 1, cache tokens with
// the n new ones]; in `score` i and j are positions since the start.
//
// Cost     up to four tokens: one reading of the cache, and scratch memory that does not depend on its size. Longer
//          chunks are attended as full_softmax does.
// Throws   std::invalid_argument for shapes or options that do not fit, for lengths, query_lengths and key_lengths, since
//          all items of a batch have the same number of tokens, and for first_position, before anything, the cache
//          included, changes.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the file.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<S>,
          class Score = detail::no_score>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                       Score&& score = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  detail::call_softmax<full_softmax_options>(
      "full_softmax_step", q, k, v, out, options, score, exec, [&](auto& call, const auto& given) {
        cache.check_tokens(call.check, call.k, call.v);
        call.check.equal("query length = key length", call.shape.keys, call.shape.queries);
        if (!given.lengths.empty() || !given.query_lengths.empty() || !given.key_lengths.empty())
          call.check.fail("no lengths, since all items of a batch have the same number of tokens", "some");
        if (given.first_position) call.check.fail("no first_position, since the queries are at the last tokens", "one");
        const index before = cache.tokens();
        call.lengths.full_keys = call.shape.keys += before;
        detail::check_bias(call, given.bias);
        for (const auto& [name, view] : std::initializer_list<detail::validator::named_view>{
                 {"q", call.q}, {"out", call.out}, {"bias", given.bias}, {"lse", given.lse}})
          cache.no_alias(call.check, name, view);
        cache.append(call.k, call.v);
        call.k = cache.keys();
        call.v = cache.values();
        call.causal = true;
        try {
          detail::full_call{call}.run();
        } catch (...) {  // of the score function, or no memory
          cache.truncate(before);
          throw;
        }
      });
}

}  // namespace attn::inline ATTN_ISA
