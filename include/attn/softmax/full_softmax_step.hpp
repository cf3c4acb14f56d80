// attn: decoding with a cache of keys and values.
//
//   attn::kv_cache<float> cache(batch, kv_heads, 64);
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t);      // one token, or a chunk: what causal full_softmax gives
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which stand
/// at the end, to all tokens up to their own: the last n rows of one causal full_softmax over the whole sequence. In
/// `score` i and j count from the start of the sequence; `bias` is [B or 1, H or 1, n or 1, cache size with the n new
/// tokens]. Lengths are refused: items of a batch go in step. Up to four tokens cost one reading of the cache and
/// scratch memory that does not depend on its size; longer chunks are attended as full_softmax does. Throws
/// std::invalid_argument before anything, the cache included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  detail::require_score<Score, compute_type<S>>();
  const detail::validator check("full_softmax_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  cache.check_tokens(check, keys, values);
  check.equal("query length = key length", keys.extent(2), queries.extent(2));
  if (!options.lengths.empty() || !options.query_lengths.empty() || !options.key_lengths.empty())
    check.fail("no lengths, since all items of a batch go in step", "some");
  full_softmax_options<S> causal = options;
  causal.causal = true;
  const index before = cache.size();
  // What the attention would refuse it refuses before the cache changes, against views of the coming shape.
  auto all = [&](const tensor_view<const S>& part) {
    return tensor_view<const S>(
        part.data(), {part.extent(0), part.extent(1), part.extent(2) ? before + part.extent(2) : 0, part.extent(3)},
        {part.stride(0), part.stride(1), 0, part.stride(3)});
  };
  const auto [shape, lengths] = detail::check_full_softmax<S>(check, queries, all(keys), all(values), to, causal);
  check.no_alias("out", to, "k", keys);
  check.no_alias("out", to, "v", values);
  check.no_alias("lse", options.lse, "k", keys);
  check.no_alias("lse", options.lse, "v", values);
  for (const auto& [what, x] : std::initializer_list<std::pair<const char*, detail::memory_layout>>{
           {"q", queries}, {"out", to}, {"bias", options.bias}, {"lse", options.lse}})
    cache.no_alias(check, what, x);
  cache.append(keys, values);
  try {
    detail::run_full_softmax(queries, cache.keys(), cache.values(), to, causal, shape, lengths, score, exec, before);
  } catch (...) {
    cache.truncate(before);
    throw;
  }
}

template <element S, viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, Score&& score) {
  execution serial;
  full_softmax_step(cache, q, k, v, out, options, score, serial);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, execution& exec) {
  full_softmax_step(cache, q, k, v, out, options, detail::no_score{}, exec);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options = {}) {
  execution serial;
  full_softmax_step(cache, q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
