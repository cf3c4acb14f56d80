// attn: decoding with multipole: a token reads clusters and the keys it chooses, not the whole cache.
//
//   attn::multipole_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::multipole_step(cache, q_t, k_t, v_t, out_t);          // one token, or a chunk
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], each of which
// chooses separately. The result is the last n rows of a causal multipole over the whole sequence with block = 1 and
// the cache's exact, clusters, candidate_clusters, segment, iterations and seed. (Of keys of equal rank in several
// clusters of a segment, those of the first cluster are taken first.) Keys outside the candidate clusters are not read:
// their clusters have no part of the score for the spread of their keys, there as here.
//
// Cost     per token and query head: 2 (D + Dv) operations for every cluster and for every key of the own segment and
//          of those taken, 2 D for every key of the candidate clusters. Clusters are read once for the query heads of a
//          key head. In addition, k-means once every `segment` tokens. Scratch per thread: about 7 numbers per token so
//          far, and 1 per cluster and query head.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
#pragma once

#include <attn/low_rank/detail/multipole_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step; the settings of the choice are the cache's.
template <class S>
struct multipole_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::rotary | detail::fields::softcap |
                                     detail::fields::sinks | detail::fields::lse;

  /// As in multipole_options; lse is [B, H, n].
  std::optional<real> scale{};
  /// Item b has the first lengths[b] tokens of the chunk, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  /// Rotates the new queries and keys to their positions, which follow the item's tokens so far, before anything else.
  std::optional<rotary_options<S>> rotary{};
  std::optional<real> softcap{};
  list_view<real> sinks{};
  view_field<real, 3> lse{};
};

/// Feeds n tokens and attends their queries; options and execution may each be left out. See the top of the file.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = multipole_step_options<S>>
void multipole_step(multipole_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                    execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  detail::no_score none;
  auto call = detail::checked_call<multipole_step_options>("multipole_step", q, k, v, out, options, none, exec);
  auto& tokens = detail::check_step(call, cache);
  detail::cache_step(call, tokens, [&] { detail::run_multipole_step<S>(call, tokens); });
}

}}  // namespace attn::ATTN_ISA
