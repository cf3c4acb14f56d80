// attn: block attention.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys whose block is near the query's: positions p and j with
//   |floor(p / b) - floor(j / b)| <= n; or, per head, over the one key block that a table assigns to the query's block.
//                  Qiu et al. 2019, "Blockwise Self-Attention"; banded blocks from Parmar 2018 and Roy 2020 on
//
//   attn::block(q, k, v, out, {.size = 128, .neighbours = 1});
//   attn::block(q, k, v, out, {.size = 128, .permutation = key_block_of});
//
// Shapes   as full_softmax; permutation [H or 1, blocks], blocks = Lk / b rounded up.
// Cost     2 B H (D + Dv) operations for every visible key of a query, (2 n + 1) b keys per query. Scratch as
//          pattern_softmax: about Lk (D + Dv) numbers, less where blocks see only themselves.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/pattern_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Which query sees which keys in block attention.
struct block_pattern {
  idx_t size = 128, neighbours = 1;
  view_field<const idx_t, 2> permutation{};

  /// Small blocks share a query set.
  idx_t blocks_per_set(idx_t b) const { return permutation ? 1 : std::max<idx_t>(1, detail::max_rows / b); }

  idx_t query_sets(const pattern_shape& s) const {
    const idx_t b = s.clamped(size);
    return detail::ceil_div(s.blocks(b) - s.first_block(b), blocks_per_set(b));
  }
  position_range queries(const pattern_shape& s, idx_t set) const {
    const idx_t b = s.clamped(size), m = blocks_per_set(b), block = s.first_block(b) + set * m;
    return {block * b, (block + m) * b};
  }
  void keys(const pattern_shape& s, idx_t set, auto&& see) const {
    const idx_t b = s.clamped(size), n = std::clamp<idx_t>(neighbours, 0, s.queries + s.keys),
                block = s.first_block(b) + set * blocks_per_set(b);
    if (!permutation) {
      const position_range own = queries(s, set);
      see(position_range{own.begin - n * b, own.end + n * b}, [b, n](idx_t p) {
        const idx_t of_query = detail::floor_div(p, b);
        return position_range{(of_query - n) * b, (of_query + n + 1) * b};
      });
    } else if (block >= 0 && block < permutation.extent(1)) {
      const idx_t key_block = permutation(permutation.extent(0) == 1 ? 0 : s.head, block);
      if (key_block >= 0) see(position_range{key_block * b, (key_block + 1) * b});
    }
  }
};

/// Options of block for elements of type S: those of pattern_softmax, and
template <class S>
struct block_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_pattern;

  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// b, >= 1: positions [0, b) are the first block, and so on.
  idx_t size = 128;
  /// n, >= 0: blocks seen on each side of the query's own.
  idx_t neighbours = 1;
  /// In place of neighbours: the one key block that each query block sees, [H or 1, blocks], -1 for none. One that
  /// begins beyond the length is empty.
  view_field<const idx_t, 2> permutation{};
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

/// The pattern the options of a call describe. Throws std::invalid_argument for options that do not fit.
template <class Options>
block_pattern block_pattern_of(call_views& views, const attention_shape& shape, const Options& options) {
  const auto& table = options.permutation;
  views.at_least("block size", 1, options.size);
  views.at_least("neighbours", 0, options.neighbours);
  const idx_t blocks = ceil_div(shape.keys, options.size);
  views.option("permutation", table,
               {{"permutation heads", shape.heads, or_one}, {"permutation blocks = key blocks", blocks}});
  for (idx_t h = 0; h < table.extent(0); ++h)
    for (idx_t a = 0; a < blocks; ++a)
      if (table(h, a) < -1 || table(h, a) >= blocks)
        views.fail({"permutation entries from -1 to ", blocks - 1}, table(h, a));
  return {.size = options.size, .neighbours = options.neighbours, .permutation = table};
}

}  // namespace detail

/// Block attention; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = block_options<element_of<const Q&>>,
          class Score = detail::no_score>
void block(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
           execution_ref exec = {}) {
  auto call = detail::checked_call<block_options>("block", q, k, v, out, options, score, exec);
  const auto pattern = detail::block_pattern_of(call.views, call.shape, call.options);
  detail::run_pattern_softmax(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
