// attn: the backward pass of softmax attention between few rows (landmarks, projected keys) and many tokens.
//
// Weights P and gradients of scores dS of a block of tokens are [row][token]: whichever side the softmax runs over, the
// weights of a block stay in the caches, and every product has strides that are known at compile time:
//
//   scores     S = X Y^T, dP = U V^T      rows as tiles, tokens as columns of panels
//   of rows    dX += dS Y, dU += P V      tokens as rows of panels
//   of tokens  dY = dS^T X, dV = P^T U    rows as rows of panels
//
//   backward_of_queries   tokens are queries: the softmax runs over the rows, and needs nothing from the forward call
//   backward_of_keys      tokens are keys: the softmax runs over all tokens, its maxima and sums are given
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/low_rank/detail/panel_product.hpp>
#include <attn/low_rank/detail/attend_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t few_rows_block = 128;                 // tokens taken at a time, a multiple of the panel width
inline constexpr int few_rows_stride = few_rows_block + 16;  // rows of a tile fall into different cache sets

/// to[r] = factor times the sum over k < depth of left(r, k) b(k, .) for r < rows, or to[r] += that. b lies in panels
/// of `capacity` rows; rows of `to` are whole packets. Capacity and depth count operands P; of numbers the factor is 1.
template <class P, class Left>
[[gnu::noinline]] void block_product(const Left& left, idx_t rows, const P* b, idx_t capacity, idx_t cols, idx_t depth,
                                     sum_type<P>* to, idx_t stride, bool accumulate,
                                     [[maybe_unused]] sum_type<P> factor = 1) {
  using T = sum_type<P>;
  panel_product<P>(left, rows, b, capacity, cols, depth, [&](idx_t r, idx_t col, const auto& sum) {
    T* const c = to + r * stride + col;
    packet<T> x = sum;
    if constexpr (numbers_of<P> > 1) x = mul(x, broadcast<T>(factor));
    if (r < rows) store<T>(c, accumulate ? add(load<T>(c), x) : x);
  });
}

/// Memory for `rows` rows of weights converted to operands P, where P is not the type of the weights.
template <class P>
P* operand_weights(arena& memory, idx_t rows) {
  return memory.allocate<P>(numbers_of<P> > 1 ? operands<P>(round_up(rows, tile_rows) * few_rows_stride) + tile_rows
                                              : 0);
}

/// Rows of x from `begin` on.
template <class S>
matrix_view<S> from_row(matrix_view<S> x, idx_t begin) {
  x.data = x.row(begin);
  return x;
}

/// Few rows [count][dim] as operands P: tiles [dim][tile_rows], and panels.
template <class P>
struct few_rows {
  using T = sum_type<P>;

  P *tiles = nullptr, *panels = nullptr;
  idx_t count = 0, dim = 0, capacity = 0;
  T factor = T(1);  // of scores, where it is not in the tiles

  static few_rows layout(arena& memory, idx_t most, idx_t dim) {
    const idx_t capacity = operands<P>(most) * numbers_of<P>;
    return {memory.allocate<P>(round_up(most, tile_rows) * row_operands<P>(dim)),
            memory.allocate<P>(operands<P>(capacity) * round_up(dim, panel_width<T>)), 0, dim, capacity};
  }

  /// Rows which[0], which[1], ... of x; for scores they are multiplied by `times`.
  template <class S>
  void pack(const matrix_view<const S>& x, idx_t rows, T times, const index_map& which = {}) {
    count = rows;
    if constexpr (numbers_of<P> > 1) factor = std::exchange(times, T(1));
    for (idx_t r = 0; r < count; r += tile_rows)
      pack_rows<P>([&](idx_t i) { return x.row(which[r + i]); }, std::min<idx_t>(tile_rows, count - r), dim,
                   x.col_stride, times, tiles + r * row_operands<P>(dim));
    pack_panels<P>([&](idx_t i) { return x.row(which[i]); }, 0, count, dim, x.col_stride, panels, capacity);
  }

  /// to[row][token] = products with `tokens` tokens, packed as columns, or to[row][token] += that.
  void scores(const P* columns, idx_t tokens, T* to, idx_t stride = few_rows_stride, bool accumulate = false) const {
    block_product<P>([&](idx_t r) { return packed_rows<P>{tiles + r * row_operands<P>(dim)}; }, count, columns,
                     operands<P>(dim), tokens, operands<P>(dim), to, stride, accumulate, factor);
  }
  /// to[token] = sum over rows of weights[row][token] row, or to[token] += that. `memory` is operand_weights().
  void weighted_sums(const T* weights, idx_t tokens, T* to, idx_t stride, bool accumulate,
           [[maybe_unused]] P* memory = nullptr) const {
    const P* left = nullptr;
    if constexpr (numbers_of<P> > 1)
      rows_to_pairs(weights, count, round_up(tokens, width<T>), few_rows_stride, memory), left = memory;
    else
      left = weights;
    block_product<P>([&](idx_t r) { return left_operand<P, 1, few_rows_stride>{left + r}; }, tokens, panels,
                     operands<P>(capacity), dim, operands<P>(count), to, stride, accumulate);
  }
};

/// A block of tokens as operands P: as columns and as rows of panels.
template <class P>
struct block_tokens {
  using T = sum_type<P>;

  P *columns = nullptr, *panels = nullptr;
  idx_t count = 0, dim = 0;

  static block_tokens layout(arena& memory, idx_t dim) {
    return {memory.allocate<P>(few_rows_block * operands<P>(dim)),
            memory.allocate<P>(operands<P>(few_rows_block) * round_up(dim, panel_width<T>)), 0, dim};
  }
  /// Tokens [begin, begin + tokens) of x.
  template <class S>
  void pack(const matrix_view<const S>& x, idx_t begin, idx_t tokens, bool as_columns, bool as_rows) {
    count = tokens;
    const auto row = [&](idx_t i) { return x.row(begin + i); };
    if (as_columns) pack_panels_across<P>(row, count, dim, x.col_stride, columns);
    if (as_rows) pack_panels<P>(row, 0, count, dim, x.col_stride, panels, few_rows_block);
  }
  /// to[row] += sum over tokens of weights[row][token] token. `memory` is operand_weights().
  void add_mix(const T* weights, idx_t rows, T* to, idx_t stride, [[maybe_unused]] P* memory = nullptr) const {
    constexpr int step = few_rows_stride / numbers_of<P>;
    const P* left = nullptr;
    if constexpr (numbers_of<P> > 1) {
      for (idx_t r = 0; r < rows; ++r)
        lanes_to_pairs(weights + r * few_rows_stride, round_up(count, width<T>), memory + r * step);
      left = memory;
    } else {
      left = weights;
    }
    block_product<P>([&](idx_t r) { return left_operand<P, step, 1>{left + r * step}; }, rows, panels,
                     operands<P>(few_rows_block), dim, operands<P>(count), to, stride, true);
  }
};

/// Scratch of one worker: a block of tokens, x and y (queries and d_out, or keys and values), and its weights.
template <class P>
struct few_rows_scratch {
  using T = sum_type<P>;

  block_tokens<P> x, y;
  T *weights = nullptr, *d_scores = nullptr;  // [rows][few_rows_stride]
  P* operands = nullptr;                      // of either

  static few_rows_scratch layout(arena& memory, idx_t rows, idx_t dim, idx_t dim_v) {
    const idx_t size = round_up(rows, tile_rows) * few_rows_stride;
    return {block_tokens<P>::layout(memory, dim), block_tokens<P>::layout(memory, dim_v), memory.allocate<T>(size),
            memory.allocate<T>(size), operand_weights<P>(memory, rows)};
  }
};

/// Columns of scores become weights, softmax over `rows` rows, and d, unless it is null, dS = P (dP - sum of P dP +
/// d_lse). d_lse, if given, has one number for each token.
template <class T>
[[gnu::noinline]] void softmax_columns(T* s, T* d, idx_t rows, idx_t tokens, const T* d_lse) {
  for (idx_t t = 0; t < tokens; t += width<T>) {
    packet<T> highest = load<T>(s + t);
    for (idx_t r = 1; r < rows; ++r) highest = (max)(highest, load<T>(s + r * few_rows_stride + t));
    packet<T> sum = zero<T>(), dot = zero<T>();
    for (idx_t r = 0; r < rows; ++r) {
      T* const at = s + r * few_rows_stride + t;
      const packet<T> weight = exp2_weight<T>(sub(load<T>(at), highest));
      store<T>(at, weight);
      sum = add(sum, weight);
      if (d) dot = fma(weight, load<T>(d + r * few_rows_stride + t), dot);
    }
    const packet<T> share = div(broadcast<T>(T(1)), sum);
    packet<T> delta = mul(dot, share);
    if (d_lse) delta = sub(delta, load<T>(d_lse + t));
    for (idx_t r = 0; r < rows; ++r) {
      T *const at = s + r * few_rows_stride + t, *const by = d + r * few_rows_stride + t;
      const packet<T> weight = mul(load<T>(at), share);
      store<T>(at, weight);
      if (d) store<T>(by, mul(weight, sub(load<T>(by), delta)));
    }
  }
}

/// Rows of scores become weights 2^(s - maximum), and d, unless it is null, weights times (dP - delta): the division of
/// the weights by their sum is already in the rows of the tiles of d_out, and in delta.
template <class T>
[[gnu::noinline]] void softmax_rows(T* s, T* d, idx_t rows, idx_t tokens, const T* maximum, const T* delta) {
  for (idx_t r = 0; r < rows; ++r, s += few_rows_stride, d = d ? d + few_rows_stride : d) {
    const packet<T> highest = broadcast<T>(maximum[r]), less = broadcast<T>(delta[r]);
    for (idx_t t = 0; t < tokens; t += width<T>) {
      const packet<T> weight = exp2_weight<T>(sub(load<T>(s + t), highest));
      store<T>(s + t, weight);
      if (d) store<T>(d + t, mul(weight, sub(load<T>(d + t), less)));
    }
  }
}

/// Where the gradients of tokens that are queries are stored; null: not computed. Sums are without the scale.
template <class T>
struct query_sums {
  T *queries = nullptr, *keys = nullptr, *values = nullptr;  // [token of the block][], [row][], [row][]
  idx_t stride = 0, stride_v = 0;                            // of queries and keys, of values
};

/// Tokens [begin, begin + count) of q attend to few keys and values; tiles hold the keys times the scale in base 2.
template <class P, class S>
void backward_of_queries(const matrix_view<const S>& q, const matrix_view<const S>& d_out, idx_t begin, idx_t count,
                         const few_rows<P>& keys, const few_rows<P>& values, const sum_type<P>* d_lse,
                         few_rows_scratch<P>& s, const query_sums<sum_type<P>>& to) {
  const bool scores = to.queries || to.keys;
  s.x.pack(q, begin, count, true, to.keys);
  s.y.pack(d_out, begin, count, scores, to.values);
  keys.scores(s.x.columns, count, s.weights);
  if (scores) values.scores(s.y.columns, count, s.d_scores);
  softmax_columns(s.weights, scores ? s.d_scores : nullptr, keys.count, count, d_lse);
  if (to.queries) keys.weighted_sums(s.d_scores, count, to.queries, to.stride, false, s.operands);
  if (to.keys) s.x.add_mix(s.d_scores, keys.count, to.keys, to.stride, s.operands);
  if (to.values) s.y.add_mix(s.weights, values.count, to.values, to.stride_v, s.operands);
}

/// Few queries that have attended to many keys: their tiles hold them times the scale in base 2; d_out and delta are
/// divided by the sum of their weights.
template <class P>
struct attended_rows {
  using T = sum_type<P>;

  few_rows<P> queries, d_out;
  T *maximum = nullptr, *delta = nullptr;

  static attended_rows layout(arena& memory, idx_t most, idx_t dim, idx_t dim_v) {
    return {few_rows<P>::layout(memory, most, dim), few_rows<P>::layout(memory, most, dim_v), memory.allocate<T>(most),
            memory.allocate<T>(most)};
  }
};

/// The gradients of the tokens packed in s, keys and values; s.x has its columns, s.y too where gradients of scores are
/// wanted, and s.x has its rows where gradients of the queries are, those of hidden keys 0. Sums are without the scale.
template <class P, class T = sum_type<P>>
void backward_of_keys(const attended_rows<P>& from, const seen_range& seen, few_rows_scratch<P>& s, T* d_keys,
                      idx_t stride, T* d_values, idx_t stride_v, T* d_queries, bool accumulate) {
  const bool scores = d_keys || d_queries;
  const idx_t tokens = s.x.count, rows = from.queries.count;
  from.queries.scores(s.x.columns, tokens, s.weights);
  if (scores) from.d_out.scores(s.y.columns, tokens, s.d_scores);
  softmax_rows(s.weights, scores ? s.d_scores : nullptr, rows, tokens, from.maximum, from.delta);
  for (idx_t t = 0; seen && d_queries && t < tokens; ++t)  // the rows of hidden keys are not used but by the queries
    for (idx_t r = 0; seen.hides(t) && r < rows; ++r) s.d_scores[r * few_rows_stride + t] = T(0);
  if (d_values) from.d_out.weighted_sums(s.weights, tokens, d_values, stride_v, accumulate, s.operands);
  if (d_keys) from.queries.weighted_sums(s.d_scores, tokens, d_keys, stride, accumulate, s.operands);
  if (d_queries) s.x.add_mix(s.d_scores, rows, d_queries, stride, s.operands);
}

}}}  // namespace attn::ATTN_ISA::detail
