// attn: the gradients of the scores of a chunk (chunk_decay.hpp) of rows x, such as queries, and columns y, such as
// keys:
//
//   dx_i = sum_(j <= i) dP_ij y_j e^(gamma_i - gamma_j)
//   dy_j = sum_(i >= j) dP_ij x_i e^(gamma_i - gamma_j)
//
// of all rows and columns at once, which share the decays: by the rule that adds queries and keys; by the rule that
// corrects queries and, for j < i, keys again, both with keys; by the rule of low rank q and a with k and b.
//
// The gradient of the decays is computed from x_i dx_i and y_j dy_j: that of gamma_i is the sum of the former less that
// of the latter. Entries of dP outside its triangle may have any value.
#pragma once

#include <attn/kernel/detail/chunk_decay.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows or columns of scores, and where their gradients are added.
template <class T>
struct score_side {
  panels<T> x, dx;
  idx_t count;
};

/// The rows, the last of them strictly after their columns if `Strict`; the columns; and for each of both dP as [i][j],
/// overwritten with decays per token, and memory for its transpose.
template <int Rows, int Columns, bool Strict, class T>
struct score_gradients {
  const chunk_decay<T>& decay;
  const score_scratch<T>& s;
  score_side<T> rows[array_size<Rows>], columns[array_size<Columns>];
  panels<T> d[array_size<Rows>][array_size<Columns>], d_t[array_size<Rows>][array_size<Columns>];
  bool of_first_rows, of_others;

  void run() const {
    const idx_t dim = decay.dim, all = rows[0].count;
    if (all <= 0) return;
    each_pair([&](auto r, auto c) {
      const panels<T> p = d[r][c];
      const idx_t count = rows[r].count;
      if (decay.kind == decay_kind::token && (of_others || (r == 0 && of_first_rows)))
        each_packet(
            count, count, [&](idx_t i, idx_t j, const auto& x) { return mul(x, decay.between(i, j)); }, p, p);
      if (of_rows(r)) transpose_panels(p, count, count, d_t[r][c]);
    });
    if (decay.kind == decay_kind::channel) {
      for (idx_t block = 0; block < all; block += score_block) {
        if (block > 0) before_block(block);
        for (idx_t col = 0; col < dim; col += width<T>) in_block(block, (std::min)(block + score_block, all), col);
      }
      return;
    }
    each_pair([&](auto r, auto c) {
      const idx_t count = rows[r].count;
      constexpr triangle up_to = strict(r) ? triangle::before : triangle::up_to;
      constexpr triangle from = strict(r) ? triangle::after : triangle::from;
      if (of_rows(r)) triangle_product<up_to>(d_t[r][c], count, columns[c].x, dim, add_to(rows[r].dx));
      if (of_others) triangle_product<from>(d[r][c], count, rows[r].x, dim, add_to(columns[c].dx));
    });
  }

 private:
  static constexpr bool strict(idx_t r) { return Strict && r == Rows - 1; }
  bool of_rows(idx_t r) const { return r == 0 ? of_first_rows : of_others; }
  idx_t count_of(idx_t r, idx_t block) const { return (std::min)(score_block, rows[r].count - block); }
  template <class F>
  ATTN_INLINE static void each_pair(F&& f) {
    unroll_constants<Rows>([&](auto r) { unroll_constants<Columns>([&](auto c) { f(r, c); }); });
  }

  /// Scores of the rows of a block and the tokens before it.
  void before_block(idx_t block) const {
    const idx_t dim = decay.dim;
    s.load_factors(decay, block, count_of(0, block));
    for (idx_t r = 0; r < Rows && of_others; ++r)
      s.load_rows(rows[r].x, block, count_of(r, block), dim, s.block_rows[r]);
    for (idx_t c = 0; c < Columns; ++c) {
      s.load_columns(decay, columns[c].x, block);
      for (idx_t r = 0; r < Rows; ++r)
        if (of_rows(r))
          product(d_t[r][c].from_col(block), count_of(r, block), s.columns, dim, block,
                  [&](idx_t row, idx_t col, const packet<T>& sum) {
                    T* const sums = rows[r].dx.at(block + row, col);
                    store<T>(sums, fma(sum, load<T>(s.factors.at(row, col)), load<T>(sums)));
                  });
      if (!of_others) continue;
      product(d[0][c].from_row(block), block, s.block_rows[0], dim, count_of(0, block), write_to(s.d_columns));
      for (idx_t r = 1; r < Rows; ++r)
        product(d[r][c].from_row(block), block, s.block_rows[r], dim, count_of(r, block), add_to(s.d_columns));
      for (idx_t col = 0; col < dim; col += width<T>) {
        packet<T> factor = broadcast<T>(T(1));
        for (idx_t j = block - 1; j >= 0; --j) {
          T* const to = columns[c].dx.at(j, col);
          store<T>(to, fma(factor, load<T>(s.d_columns.at(j, col)), load<T>(to)));
          factor = mul(factor, load<T>(decay.gate.at(j, col)));
        }
      }
    }
  }

  /// Scores within a block, for the channels from col on.
  void in_block(idx_t block, idx_t end, idx_t col) const {
    const auto at = [&](const panels<T>& x, idx_t t) { return load<T>(x.at(t, col)); };
    for (idx_t j = block; j < end; ++j) {
      packet<T> factor = broadcast<T>(T(1)), of_j[array_size<Columns>], y[array_size<Columns>];
      unroll<Columns>([&](auto c) {
        y[c] = at(columns[c].x, j);
        of_j[c] = of_others ? at(columns[c].dx, j) : zero<T>();
      });
      for (idx_t i = j; i < end; ++i) {
        if (i > j) factor = mul(factor, at(decay.gate, i));
        packet<T> later[array_size<Columns>], by_rows[array_size<Columns>];
        unroll<Columns>([&](auto c) { later[c] = mul(factor, y[c]), by_rows[c] = zero<T>(); });
        unroll<Rows>([&](auto r) {
          if ((strict(r) && i == j) || i >= rows[r].count || !(of_others || of_rows(r))) return;
          const packet<T> x = at(rows[r].x, i);
          packet<T> dx = of_rows(r) ? at(rows[r].dx, i) : zero<T>();
          unroll<Columns>([&](auto c) {
            const packet<T> p = broadcast<T>(*d[r][c].at(i, j));
            dx = fma(p, later[c], dx);
            by_rows[c] = r == 0 ? mul(p, x) : fma(p, x, by_rows[c]);
          });
          if (of_rows(r)) store<T>(rows[r].dx.at(i, col), dx);
        });
        unroll<Columns>([&](auto c) { of_j[c] = fma(factor, by_rows[c], of_j[c]); });
      }
      for (idx_t c = 0; c < Columns && of_others; ++c) store<T>(columns[c].dx.at(j, col), of_j[c]);
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
