// attn: multipole attention: the keys that matter most exactly, all others as clusters. For trained models.
//
//   Keys are grouped into clusters. A block of queries takes the `exact` keys j with the largest
//     max over g of x_g.(k_j - mean of the keys),   x_g: means of `probe` of its queries each, times the scale's sign
//   (of equal ones the earlier; NaN is the lowest) exactly. The members of every cluster that were not taken become one
//   key: the mean of their keys with the mean of their values. To its score is added
//     log sum e^(r_j - mean r)   over the n members j left,   r_j: the score of key j with the mean of these queries
//   which is log n, and what the spread of the members adds for that mean query. One softmax runs over all of these.
//   The mean of the keys is that of all keys that may be taken: with causal, those of the earlier segments that the
//   block sees. softcap changes scores, r_j among them, but not the choice, whose products are not capped.
//   Every query head chooses separately. Where no keys are ranked, it is log n alone: with exact = 0, and in clusters
//   outside candidate_clusters.
//                                 after Hooper et al. 2025, "Multipole Attention for Efficient Long Context Reasoning",
//                                 and Vyas et al. 2020, "Fast transformers with clustered attention"
//   Clusters are those of k-means, from keys drawn by a seed, or the caller's. With causal, keys are divided into
//   segments: a query sees the keys of its own segment exactly; earlier segments are clustered separately, and `exact`
//   keys are taken from these. Nothing depends on later tokens: a block chooses by the `lookback` queries up to its
//   first one. With block = 1, and the same settings otherwise, the result is that of multipole_step.
//
//   attn::multipole(q, k, v, out);
//   attn::multipole(q, k, v, out, {.exact = 384, .probe = 16});   // half the error
//   attn::multipole(q, k, v, out, {.causal = true});
//
// Shapes   as full_softmax.
// Result   zeros where a query sees no key, and lse the sink, -infinity without one. Keys and values must be finite:
//          taking an infinite one out of its cluster leaves NaN there.
// Cost     per head 2 (D + Dv) operations for each of Lq (exact + clusters) scores, causal Lq (exact + segment / 2 +
//          clusters Lk / (2 segment)); 2 D for each of Lq Lk / probe scores, causal Lq Lk lookback / (2 block probe),
//          and, per key head, for each of Lk clusters (iterations + 1); an exponential for each of Lq Lk / block keys,
//          causal half of that. Scratch per key head, one at a time or as many as keep the threads busy: about
//          Lk (D + 3) numbers and 3 (D + Dv) for each cluster and 1024 keys, causal 5 (D + Dv) for each cluster; per
//          thread: about 18 Lk + (exact + clusters + segment) (D + Dv).
// Values   `out` is finite where |v| times the number of keys that a row sees is below the largest number of the
//          compute type (float: 3.4e38), for sums precede the division.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/low_rank/detail/multipole_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multipole_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::softcap |
                                     detail::fields::sinks | detail::fields::lse;

  std::optional<real> scale{};  // factor of q.k; 1 / sqrt(D) unless given
  bool causal = false;  // a query sees no key after its own position
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  idx_t exact = 192;  // keys a block of queries takes exactly, >= 0; all keys where there are fewer
  /// Number of clusters, >= 0, with causal of every segment; 64 unless given, with causal 8. With 0 the other keys are
  /// not seen.
  std::optional<idx_t> clusters{};
  /// Queries that choose together, >= 1; 96 unless given, with causal 128. A smaller block has smaller errors and costs
  /// more.
  std::optional<idx_t> block{};
  /// Number of queries in each mean by which a block chooses, >= 1. Use fewer where queries differ much.
  idx_t probe = 32;
  /// Causal only: by how many queries, up to its first one, a block chooses, >= 1; min(32, block) unless given.
  std::optional<idx_t> lookback{};
  /// If not 0, keys are chosen only from so many clusters, those with the largest max over g of x_g.(mean of the
  /// cluster - mean of the keys). If 0, or without clusters, all keys are candidates.
  idx_t candidate_clusters = 0;
  std::optional<idx_t> segment{};  // causal only: tokens of a segment, >= 1; 256 unless given
  /// Steps of k-means, >= 0, and the seed of the keys it starts from.
  idx_t iterations = 1;
  std::uint64_t seed = 0;
  /// In place of k-means: the cluster of every key, 0 ... clusters - 1, with causal within its segment, [B, Hkv, Lk].
  /// Padding is not read.
  view_field<const idx_t, 3> assignment{};
  std::optional<real> softcap{};  // c tanh(s / c) on scale q.k
  list_view<real> sinks{};  // a logit per head that joins the denominator and has no value
  view_field<real, 3> lse{};  // written if given: the natural logarithm of the denominator, sink included, [B, H, Lq]
};

namespace detail {

inline void check_assignment(call_views& check, const attention_shape& s, const sequence_lengths& lengths,
                             const tensor_view<const idx_t, 3>& assignment, idx_t clusters) {
  if (!assignment) return;
  if (clusters == 0) check.fail("clusters > 0 with an assignment", 0);
  check.read("assignment", assignment, {{"assignment batch = key batch", s.batch},
                                        {"assignment heads = key heads", s.kv_heads},
                                        {"assignment length = key length", s.keys}});
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t h = 0; h < s.kv_heads; ++h)
      for (idx_t j = 0; j < lengths.keys(b); ++j)
        if (const idx_t c = assignment(b, h, j); c < 0 || c >= clusters)
          check.fail({"assignment from 0 to ", clusters - 1}, c);
}

/// The clusters of a call whose own options are checked here.
template <class S>
multipole_clustering<S> checked_multipole(call_views& check, const tensor_view<const S>& k,
                                          const tensor_view<const S>& v, const attention_shape& s,
                                          const sequence_lengths& lengths, const multipole_options<S>& given) {
  const bool causal = given.causal;
  const idx_t block = given.block.value_or(causal ? 128 : 96);
  multipole_settings o{.causal = causal, .assigned = bool(given.assignment), .block = block, .probe = given.probe,
                       .exact = given.exact, .clusters = given.clusters.value_or(causal ? 8 : 64),
                       .candidate_clusters = given.candidate_clusters, .segment = given.segment.value_or(256),
                       .lookback = given.lookback.value_or(std::min<idx_t>(32, block)), .iterations = given.iterations,
                       .seed = given.seed};
  check_multipole_settings(check, o);
  check.at_least("block", 1, o.block);
  check.at_least("probe", 1, o.probe);
  if (causal) check.at_least("lookback", 1, o.lookback);
  if (!causal && given.lookback) check.fail("a lookback with causal only", *given.lookback);
  if (!causal && given.segment) check.fail("a segment with causal only", *given.segment);
  check_assignment(check, s, lengths, given.assignment, o.clusters);
  // Settings beyond what can occur have the same result as the largest that can, and are clamped.
  o.lookback = (std::min)(o.lookback, std::max<idx_t>(1, s.queries));
  o.probe = (std::min)(o.probe, causal ? o.lookback : o.block);
  o.exact = (std::min)(o.exact, (std::numeric_limits<idx_t>::max)() / 4);
  o.segment = (std::min)(o.segment, std::max<idx_t>(1, s.keys));
  o.block = (std::min)(o.block, causal ? o.segment : std::max<idx_t>(1, s.queries));
  if (o.clusters == 0) o.candidate_clusters = 0;
  if (!o.assigned) o.clusters = (std::min)(o.clusters, causal ? o.segment : std::max<idx_t>(1, s.keys));
  // Members are 32-bit numbers.
  constexpr idx_t most_keys = (std::numeric_limits<std::int32_t>::max)() - panel_width<compute_type<S>>;
  if (s.keys > most_keys) check.fail({"key length <= ", most_keys}, s.keys);
  check.fits("clusters", {o.segments(s.keys) + o.parts(s.keys), o.clusters, s.dim + s.dim_v + 1});
  return {.o = o, .k = k, .v = v, .assignment = given.assignment, .shape = s, .lengths = lengths};
}

}  // namespace detail

template <viewable Q, viewable K, viewable V, viewable O, class Options = multipole_options<element_of<const Q&>>>
void multipole(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::no_score none;
  auto call = detail::checked_call<multipole_options>("multipole", q, k, v, out, options, none, exec);
  detail::run_multipole(
      call, detail::checked_multipole<S>(call.views, call.k, call.v, call.shape, call.lengths, call.options));
}

}}  // namespace attn::ATTN_ISA
