// attn: strided and fixed attention.
//
//   out_i = softmax attention (full_softmax.hpp) over two sets of keys, l the stride, p the query's position:
//   strided   the keys less than l away, |p - j| < l, and every l-th one from the query on, (p - j) mod l = 0
//   fixed     the keys of the query's own block of l, and the last c positions of every block, j mod l >= l - c
//   with causal, only those up to p: the last l keys, and so on.         Child et al. 2019, "Sparse Transformers"
//
//   attn::strided(q, k, v, out, {.stride = 64, .causal = true});
//   attn::strided(q, k, v, out, {.kind = attn::strided_kind::fixed, .stride = 64, .summary = 4});
//
// Shapes   as full_softmax.
// Cost     2 B H (D + Dv) operations for every pair of query and key it sees: about 2 l + Lk / l keys a query for
//          strided, l + c Lk / l for fixed, half of it when causal. Scratch as pattern_softmax.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/pattern_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// The keys from `left` before to `right` after the query.
struct window_pattern {
  index left = 128, right = 128;

  /// Several blocks of rows share the keys between them.
  static constexpr index rows = 4 * detail::max_rows;

  index groups(const sequence& s) const { return detail::ceil_div(s.queries, rows); }
  position_range queries(const sequence& s, index group) const {
    const index begin = s.first() + group * rows;
    return {begin, begin + rows};
  }
  void keys(const sequence& s, index group, auto&& see) const {
    const index all = s.queries + s.keys, before = std::min(left, all), after = std::min(right, all);
    const position_range own = queries(s, group);
    see(position_range{own.begin - before, own.end + after}, [before, after](index p) {
      return position_range{p - before, p + after + 1};
    });
  }
};

/// Every stride-th key, counted from the query, but for the query's own.
struct residue_pattern {
  index stride = 64;

  index groups(const sequence& s) const { return std::min(stride, s.queries); }
  position_range queries(const sequence& s, index group) const { return {s.first() + group, s.keys, stride}; }
  void keys(const sequence& s, index group, auto&& see) const {
    const index p = s.first() + group;
    if (stride < std::max(s.queries, s.keys))
      see.others(position_range{p - detail::floor_div(p, stride) * stride, s.keys, stride});
  }
};

/// The last `summary` positions of every block of `stride`, and those of the query's own block.
struct fixed_pattern {
  index stride = 64, summary = 1;

  /// A stride longer than the sequence says no more than it.
  index stride_in(const sequence& s) const { return std::max<index>(1, std::min(stride, s.queries + s.keys)); }
  /// Keys of a block that only its own queries see.
  index own_in(const sequence& s) const { return std::min(stride - summary, stride_in(s)); }

  /// Rows of several blocks share the summaries, which are gathered once a group.
  index blocks_a_group(const sequence& s) const { return std::max<index>(1, 4 * detail::max_rows / stride_in(s)); }
  index first_block(const sequence& s) const { return detail::floor_div(s.first(), stride_in(s)); }

  index groups(const sequence& s) const {
    return detail::ceil_div(detail::ceil_div(s.keys, stride_in(s)) - first_block(s), blocks_a_group(s));
  }
  /// The last rows see most when causal: they go first.
  position_range queries(const sequence& s, index group) const {
    const index l = stride_in(s), m = blocks_a_group(s);
    const index block = first_block(s) + (groups(s) - 1 - group) * m;
    return {block * l, (block + m) * l};
  }
  void keys(const sequence& s, index group, auto&& see) const {
    const index l = stride_in(s), own = own_in(s), blocks = detail::ceil_div(s.keys, l);
    see(queries(s, group), [l, own](index p) {
      const index begin = detail::floor_div(p, l) * l;
      return position_range{begin, begin + own};
    });
    if (l - own < blocks)
      for (index j = own; j < l; ++j) see(position_range{j, s.keys, l});
    else
      for (index block = 0; block < blocks; ++block) see(position_range{block * l + own, (block + 1) * l});
  }
};

/// What strided attends by.
constexpr auto strided_pattern(index stride) {
  return joined_patterns<window_pattern, residue_pattern>{{stride - 1, stride - 1}, {stride}};
}

enum class strided_kind { strided, fixed };

/// Options of strided for elements of type S.
template <class S>
struct strided_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  strided_kind kind = strided_kind::strided;
  /// l, >= 1.
  index stride = 64;
  /// c of fixed, from 0 to l.
  index summary = 1;
  /// Nothing after the query's own position.
  bool causal = false;
  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// ALiBi: -slope |distance of positions|, one slope a head.
  list_view<real> alibi_slopes{};
  /// A logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

template <class S, class Score>
void strided(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
             const tensor_view<const S>& v, const tensor_view<S>& out, const strided_options<S>& options, Score& score,
             execution& exec) {
  const auto common = common_options<S>(options);
  const auto [shape, lengths] = check_pattern_softmax(check, q, k, v, out, common);
  check.at_least("stride", 1, options.stride);
  if (options.kind == strided_kind::strided)
    return run_pattern_softmax(check, q, k, v, out, strided_pattern(options.stride), common, shape, lengths, score, exec);
  check.at_least("summary", 0, options.summary);
  if (options.summary > options.stride) check.fail(text({"summary <= stride ", options.stride}), options.summary);
  run_pattern_softmax(check, q, k, v, out, fixed_pattern{options.stride, options.summary}, common, shape, lengths, score,
                      exec);
}

}  // namespace detail

/// Strided or fixed attention; `score(s, batch, head, i, j)` may replace the score s of query row i and key row j,
/// after every other term; -infinity masks the key.
template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void strided(const Q& q, const K& k, const V& v, O&& out, const strided_options<element_of<const Q&>>& options,
             Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  detail::strided<S>(detail::validator("strided"), as_view(q), as_view(k), as_view(v), as_view(out), options, score, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void strided(const Q& q, const K& k, const V& v, O&& out, const strided_options<element_of<const Q&>>& options,
             Score&& score) {
  execution serial;
  strided(q, k, v, out, options, score, serial);
}

template <viewable Q, viewable K, viewable V, viewable O>
void strided(const Q& q, const K& k, const V& v, O&& out, const strided_options<element_of<const Q&>>& options,
             execution& exec) {
  strided(q, k, v, out, options, detail::no_score{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void strided(const Q& q, const K& k, const V& v, O&& out, const strided_options<element_of<const Q&>>& options = {}) {
  execution serial;
  strided(q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
