// attn: exact softmax attention.
//
//   out_i = sum_j softmax_j(s_ij) v_j,   s_ij = softcap(scale q_i.k_j) + bias_ij + t_(j - p_i) - slope |p_i - j|
//                                               + c_(p_i) - c_j, c the running sums of log_decay
//                                                              Vaswani et al. 2017, "Attention is all you need"
//
//   attn::full_softmax(q, k, v, out);                          // Eigen matrices [length, dim]: one head
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax(q, k, v, out, {}, [](float s, auto b, auto h, auto i, auto j) { return i - j < 9 ? s : s - 1; });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float sums; where the processor multiplies bf16 numbers,
//          weights of bf16 values are rounded to bf16. Query i is at position p_i = i + Lk - Lq (true lengths), so that
//          the last query is at the last key; or at i + first_position.
// Cost     2 B H Lq Lk (D + Dv) operations, half of it when causal. Scratch: the packed keys and values of one key head
//          (or of as many as fill the threads), about Lk (D + Dv) numbers; never Lq x Lk. With up to 64 queries, as in
//          the steps of a cache, keys are read in place or packed by blocks, and scratch does not depend on Lk.
// Result   A row that sees no key is 0 and its lse the sink, -infinity without one, as in rows of padding. Scores must
//          be finite in the compute type, those beyond 2.3e38 in size count as that (double: 1.2e308); -infinity masks
//          the key. Over 524288 keys of which one has .99 of the weight, out and lse err by less than 2e-5 in float.
// Values   `out` is finite where |v| times the number of keys that a row sees is below the largest number of the
//          compute type (float: 3.4e38), for sums precede the division.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// A score function score(s, batch, head, i, j) may replace the score s after every other term; -infinity masks the key.
// i is the position of the query (which may be negative or beyond the keys), j that of the key. It is inlined. It is
// called in no particular order, from all threads of the execution at once, and not for keys that causal or lengths
// hide. Its exceptions are passed on and leave out partly written.
#pragma once

#include <attn/softmax/detail/full_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of full_softmax for elements of type S.
template <class S>
struct full_softmax_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::first_position |
                                     detail::fields::span | detail::fields::all_terms;

  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Query i sees the keys up to its position.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Position of the first query among its keys, for all batch items or for each, which may be negative or beyond them;
  /// Lk - Lq (true lengths) unless given. merge_softmax() combines the results over several sets of keys.
  first_positions first_position{};
  /// Tokens that a key stands for, >= 1: key s is seen from position (s + 1) span - 1 on (DeepSeek-V4; pooled_tokens.hpp
  /// makes such keys). More than 1 only with causal and first_position, and without terms of the distance, log_decay
  /// and alibi_slopes.
  idx_t span = 1;
  /// Added to the scores: [B or 1, H or 1, Lq or 1, Lk]; -infinity masks a key.
  view_field<const real> bias{};
  /// Relative keys r [H or 1, 2R + 1, D]: the product becomes q_i.k_j + q'_i.r[clamp(j - p_i, -R, R) + R], with q' =
  /// relative_queries [B, H, Lq, D], q unless given (Shaw 2018; Transformer-XL, Conformer: q = query + u, q' = query +
  /// v). Scratch: up to (Lq + Lk) D numbers for each head of r; one product of Lq x Lk x D more.
  view_field<const real, 3> relative_keys{};
  view_field<const S> relative_queries{};
  /// Position queries r' [H or 1, 2R + 1, D]: + k_j.r'[clamp(j - p_i, -R, R) + R], what relative_keys are for queries
  /// (He 2021, "DeBERTa", position to content; deberta_relative.hpp spreads its buckets). The two R may differ. Scratch:
  /// up to 1.4 (Lq + Lk) D numbers for each head of r'; one product of Lq x Lk x D more.
  view_field<const real, 3> position_queries{};
  /// Added to the scores by distance: entry clamp(j - p_i, -R, R) + R of [H or 1, 2R + 1]; R may exceed the lengths
  /// (relative_bias.hpp expands the buckets of T5). -infinity masks a key.
  view_field<const real, 2> relative_bias{};
  /// Forgetting (Lin 2025, "Forgetting Transformer"): key j loses the weight of the log decays of the positions from
  /// j + 1 to the query's, <= 0, [B, H, Lk]; one below -1e9 hides what is before it. Only where causal. Scratch: 16
  /// bytes each.
  view_field<const real, 3> log_decay{};
  /// Which keys a query sees, in addition to causal and lengths: [B or 1, H or 1, Lq or 1, Lk] of bool or bytes
  /// (mask_view.hpp).
  mask_view mask{};
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes.
  key_mask_view key_mask{};
  /// c tanh(s / c) on scale q.k, before bias and ALiBi.
  std::optional<real> softcap{};
  /// ALiBi (Press 2021): -slope |distance of positions|, one finite slope per head.
  list_view<real> alibi_slopes{};
  /// Attention sinks: a logit per head that joins the denominator and has no value. Finite, or -infinity for none.
  list_view<real> sinks{};
  /// Drops weights after the softmax (dropout.hpp).
  dropout_options dropout{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  view_field<real, 3> lse{};
  /// Leaves out tiles whose scores lie so far below the largest that their queries have met so far (skip-softmax): by
  /// the natural logarithm, >= 0, or by the key length, > 0. Counted in `skipped`, if given (skipped_tiles.hpp).
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Exact softmax attention; options, score and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = detail::no_score>
void full_softmax(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
                  execution_ref exec = {}) {
  const auto call = detail::checked_call<full_softmax_options, detail::invariant_form::rows>("full_softmax", q, k, v,
                                                                                             out, options, score, exec);
  detail::run_full_softmax(call);
}

}}  // namespace attn::ATTN_ISA
