// attn: strided and fixed attention.
//
//   out_i = softmax attention (full_softmax.hpp) over two sets of keys, l the stride, p the query's position:
//   strided   the keys less than l away, |p - j| < l, and every l-th one from the query on, (p - j) mod l = 0
//   fixed     the keys of the query's own block of l, and the last c positions of every block, j mod l >= l - c
//   with causal, of these the keys up to p                               Child et al. 2019, "Sparse Transformers"
//
//   attn::strided(q, k, v, out, {.stride = 64, .causal = true});
//   attn::strided(q, k, v, out, {.kind = attn::strided_kind::fixed, .stride = 64, .summary = 4});
//
// Shapes   as full_softmax, and so are the values for which `out` is finite.
// Cost     2 B H (D + Dv) operations for every visible key of a query: about 2 l + Lk / l keys per query for strided, l
//          + c Lk / l for fixed, half of it when causal. Scratch as pattern_softmax.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/pattern_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Every stride-th key, counted from the query, without the query's own.
struct residue_pattern {
  idx_t stride = 64;

  idx_t query_sets(const pattern_shape& s) const { return (std::min)(stride, s.queries); }
  position_range queries(const pattern_shape& s, idx_t set) const { return {s.first_position() + set, s.keys, stride}; }
  void keys(const pattern_shape& s, idx_t set, auto&& see) const {
    const idx_t p = s.first_position() + set;
    if (stride < (std::max)(s.queries, s.keys))
      see.except_self(position_range{p - detail::floor_div(p, stride) * stride, s.keys, stride});
  }
};

namespace detail {
template <>
inline constexpr bool disjoint_keys<residue_pattern> = true;
}  // namespace detail

/// The last `summary` positions of every block of `stride`, and those of the query's own block.
struct fixed_pattern {
  idx_t stride = 64, summary = 1;

  /// Rows of several blocks share the summaries, which are gathered once per query set.
  static idx_t blocks_per_set(idx_t l) { return std::max<idx_t>(1, 4 * detail::max_rows / l); }

  idx_t query_sets(const pattern_shape& s) const {
    const idx_t l = s.clamped(stride);
    return detail::ceil_div(s.blocks(l) - s.first_block(l), blocks_per_set(l));
  }
  /// In causal calls the last rows see most keys: they go first.
  position_range queries(const pattern_shape& s, idx_t set) const {
    const idx_t l = s.clamped(stride), m = blocks_per_set(l);
    const idx_t block = s.first_block(l) + (query_sets(s) - 1 - set) * m;
    return {block * l, (block + m) * l};
  }
  void keys(const pattern_shape& s, idx_t set, auto&& see) const {
    const idx_t l = s.clamped(stride), blocks = s.blocks(l);
    const idx_t own = (std::min)(stride - summary, l);  // keys of a block that only its own queries see
    see(queries(s, set), [l, own](idx_t p) {
      const idx_t begin = detail::floor_div(p, l) * l;
      return position_range{begin, begin + own};
    });
    if (l - own < blocks)
      for (idx_t j = own; j < l; ++j) see(position_range{j, s.keys, l});
    else
      for (idx_t block = 0; block < blocks; ++block) see(position_range{block * l + own, (block + 1) * l});
  }
};

/// The pattern of strided.
constexpr auto strided_pattern(idx_t stride) {
  return joined_patterns<window_pattern, residue_pattern>{{stride - 1, stride - 1}, {stride}};
}

enum class strided_kind { strided, fixed };

/// Options of strided for elements of type S: those of pattern_softmax, and
template <class S>
struct strided_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_pattern;

  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  strided_kind kind = strided_kind::strided;
  /// l, >= 1.
  idx_t stride = 64;
  /// c, for fixed: from 0 to l.
  idx_t summary = 1;
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

namespace detail {

/// body(pattern) for the pattern the options of a call describe. Throws std::invalid_argument for options that do not
/// fit.
template <class Options, class Body>
void with_strided_pattern(const validator& check, const Options& options, const Body& body) {
  check.at_least("stride", 1, options.stride);
  if (options.kind == strided_kind::strided) return body(strided_pattern(options.stride));
  check.at_least("summary", 0, options.summary);
  if (options.summary > options.stride) check.fail({"summary <= stride ", options.stride}, options.summary);
  body(fixed_pattern{.stride = options.stride, .summary = options.summary});
}

}  // namespace detail

/// Strided or fixed attention; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = strided_options<element_of<const Q&>>,
          class Score = detail::no_score>
void strided(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
             execution_ref exec = {}) {
  const auto call = detail::checked_call<strided_options>("strided", q, k, v, out, options, score, exec);
  detail::with_strided_pattern(call.check, call.options, [&](const auto& pattern) {
    detail::run_pattern_softmax(call, detail::patterns_of(pattern));
  });
}

}}  // namespace attn::ATTN_ISA
