// attn: block attention.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys whose block is near the query's: positions p and j with
//   |floor(p / b) - floor(j / b)| <= n; or, per head, over the one block that a table names for the query's.
//                  Qiu et al. 2019, "Blockwise Self-Attention"; banded blocks from Parmar 2018 and Roy 2020 on
//
//   attn::block(q, k, v, out, {.size = 128, .neighbours = 1});
//   attn::block(q, k, v, out, {.size = 128, .permutation = key_block_of});
//
// Shapes   as full_softmax; permutation [H or 1, blocks], blocks = Lk / b rounded up.
// Cost     2 B H (D + Dv) operations for every pair of query and key it sees, (2 n + 1) b keys a query. Scratch as
//          pattern_softmax: about Lk (D + Dv) numbers, less where blocks see only themselves.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/pattern_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Which query sees which keys in block attention.
struct block_pattern {
  index size = 128, neighbours = 1;
  tensor_view<const index, 2> permutation{};

  /// Numbers larger than the sequence say no more than it.
  index size_in(const sequence& s) const { return std::clamp<index>(size, 1, std::max<index>(1, s.queries + s.keys)); }
  index neighbours_in(const sequence& s) const { return std::clamp<index>(neighbours, 0, s.queries + s.keys); }

  /// Small blocks go several to a group.
  index blocks_a_group(const sequence& s) const {
    return permutation ? 1 : std::max<index>(1, detail::max_rows / size_in(s));
  }
  index first_block(const sequence& s) const { return detail::floor_div(s.first(), size_in(s)); }

  index groups(const sequence& s) const {
    return detail::ceil_div(detail::ceil_div(s.keys, size_in(s)) - first_block(s), blocks_a_group(s));
  }
  position_range queries(const sequence& s, index group) const {
    const index b = size_in(s), m = blocks_a_group(s), block = first_block(s) + group * m;
    return {block * b, (block + m) * b};
  }
  void keys(const sequence& s, index group, auto&& see) const {
    const index b = size_in(s), n = neighbours_in(s), block = first_block(s) + group * blocks_a_group(s);
    if (!permutation) {
      const position_range own = queries(s, group);
      see(position_range{own.begin - n * b, own.end + n * b}, [b, n](index p) {
        const index of_query = detail::floor_div(p, b);
        return position_range{(of_query - n) * b, (of_query + n + 1) * b};
      });
    } else if (block >= 0 && block < permutation.extent(1)) {
      const index named = permutation(permutation.extent(0) == 1 ? 0 : s.head, block);
      if (named >= 0) see(position_range{named * b, (named + 1) * b});
    }
  }
};

/// Options of block for elements of type S.
template <class S>
struct block_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// b, >= 1: positions [0, b) are the first block, and so on.
  index size = 128;
  /// n, >= 0: blocks seen on each side of the query's own.
  index neighbours = 1;
  /// Instead of them: the one key block each query block sees, [H or 1, blocks], -1 for none. One that begins beyond
  /// the length is empty.
  tensor_view<const index, 2> permutation{};
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
void block(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
           const tensor_view<S>& out, const block_options<S>& options, Score& score, execution& exec) {
  const auto common = common_options<S>(options);
  const auto [shape, lengths] = check_pattern_softmax(check, q, k, v, out, common);
  check.at_least("block size", 1, options.size);
  check.at_least("neighbours", 0, options.neighbours);
  if (options.permutation) {
    const auto& table = options.permutation;
    const index blocks = ceil_div(shape.keys, options.size);
    check.readable("permutation", table);
    check.broadcasts("permutation heads", shape.heads, table.extent(0));
    check.equal("permutation blocks = key blocks", blocks, table.extent(1));
    for (index h = 0; h < table.extent(0); ++h)
      for (index a = 0; a < blocks; ++a)
        if (table(h, a) < -1 || table(h, a) >= blocks)
          check.fail(text({"permutation entries from -1 to ", blocks - 1}), table(h, a));
    check.no_alias("out", out, "permutation", table);
    check.no_alias("lse", options.lse, "permutation", table);
  }
  run_pattern_softmax(check, q, k, v, out, block_pattern{options.size, options.neighbours, options.permutation}, common,
                      shape, lengths, score, exec);
}

}  // namespace detail

/// Block attention; `score(s, batch, head, i, j)` may replace the score s of query row i and key row j,
/// after every other term; -infinity masks the key.
template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void block(const Q& q, const K& k, const V& v, O&& out, const block_options<element_of<const Q&>>& options,
           Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  detail::block<S>(detail::validator("block"), as_view(q), as_view(k), as_view(v), as_view(out), options, score, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void block(const Q& q, const K& k, const V& v, O&& out, const block_options<element_of<const Q&>>& options,
           Score&& score) {
  execution serial;
  block(q, k, v, out, options, score, serial);
}

template <viewable Q, viewable K, viewable V, viewable O>
void block(const Q& q, const K& k, const V& v, O&& out, const block_options<element_of<const Q&>>& options,
           execution& exec) {
  block(q, k, v, out, options, detail::no_score{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void block(const Q& q, const K& k, const V& v, O&& out, const block_options<element_of<const Q&>>& options = {}) {
  execution serial;
  block(q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
