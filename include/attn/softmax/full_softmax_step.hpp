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
// Throws   std::invalid_argument for shapes or options that do not fit, and for lengths, query_lengths and key_lengths,
//          since all items of a batch have the same number of tokens, before anything, the cache included, changes.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the file.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<S>,
          class Score = detail::no_score>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                       Score&& score = {}, execution_ref exec = {}) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  using T = compute_type<S>;
  full_softmax_options<S> chosen = detail::options_or_default<full_softmax_options<S>>(options);
  auto&& scored = detail::callable_or_default<detail::no_score>(score);
  detail::require_score<decltype(scored), T>();
  const detail::validator check("full_softmax_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  detail::attention_shape shape = detail::check_attention(check, queries, keys, values, to);
  cache.check_tokens(check, keys, values);
  check.equal("query length = key length", shape.keys, shape.queries);
  if (!chosen.lengths.empty() || !chosen.query_lengths.empty() || !chosen.key_lengths.empty())
    check.fail("no lengths, since all items of a batch have the same number of tokens", "some");
  chosen.causal = true;
  const index before = cache.tokens();
  shape.keys += before;
  detail::check_full_softmax(check, shape, chosen, queries, keys, values, to);
  for (const auto& [what, x] : std::initializer_list<std::pair<const char*, detail::memory_layout>>{
           {"q", queries}, {"out", to}, {"bias", chosen.bias}, {"lse", chosen.lse}})
    cache.no_alias(check, what, x);
  cache.append(keys, values);
  try {
    detail::full_call<S, std::remove_reference_t<decltype(scored)>>{
        .q = queries,
        .k = cache.keys(),
        .v = cache.values(),
        .out = to,
        .options = chosen,
        .shape = shape,
        .lengths = {.full_queries = shape.queries, .full_keys = shape.keys},
        .terms = detail::terms_of<T>(chosen, shape.dim, &scored)}
        .run(detail::execution_of(exec, options, score));
  } catch (...) {  // of the score function, or no memory
    cache.truncate(before);
    throw;
  }
}

}  // namespace attn::inline ATTN_ISA
