// attn: exact softmax attention over the keys a pattern names, yours or one of the library's.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys the query sees
//
// pattern.hpp says how a pattern is written.
//
//   attn::pattern_softmax(q, k, v, out, paragraphs{starts});
//   attn::pattern_softmax(q, k, v, out, attn::joined_patterns{paragraphs{starts}, mine}, {.causal = true});
//
// Shapes   as full_softmax, and so are the values for which `out` is finite.
// Cost     2 (D + Dv) operations for every key that a query sees, and one pass over the keys. Scratch: the packed keys
//          and values of a query set, per thread; where query sets share most of their keys, those of one key head (or
//          of as many as fill the threads), about Lk (D + Dv) numbers. For joined patterns, where rows of out cannot
//          hold unfinished sums (16-bit types, strides, dims that are no multiple of a vector), Lq Dv more for every
//          head in progress.
// Throws   std::invalid_argument for shapes or options that do not fit, for a pattern whose query sets do not contain
//          every query exactly once, for lists that do not ascend or begin below 0, and for ranges of of_query() whose
//          step is not 1 (evaluated for the first query of a set), before anything is written.
#pragma once

#include <attn/softmax/detail/pattern_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of pattern_softmax for elements of type S.
template <class S>
struct pattern_softmax_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_pattern;

  /// As in full_softmax_options; mask: which keys of the pattern a query sees.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  mask_view mask{};
  key_mask_view key_mask{};
  view_field<const real, 2> relative_bias{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Attention by a pattern; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Pattern,
          class Options = pattern_softmax_options<element_of<const Q&>>, class Score = detail::no_score>
void pattern_softmax(const Q& q, const K& k, const V& v, O&& out, const Pattern& pattern, Options&& options = {},
                     Score&& score = {}, execution_ref exec = {}) {
  static_assert(key_pattern<Pattern>,
                "attn: a pattern has query_sets(shape), queries(shape, set) and keys(shape, set, see): pattern.hpp");
  auto call = detail::checked_call<pattern_softmax_options>("pattern_softmax", q, k, v, out, options, score, exec);
  detail::run_pattern_softmax(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
