// attn: the gradients of the pairs of a chunk through the decays between their tokens:
//
//   P_ij = sum_d x_id y_jd e^(gamma_id - gamma_jd), j <= i
//   dx_i += sum_j dP_ij y_j e^(..)        dy_j += sum_i dP_ij x_i e^(..)
//
// As in the forward pass (delta_pairs.hpp), the decay between two tokens is the product of those in between, at most 1
// and never divided. For blocks of 16 rows and the columns before them it is factored at the beginning of the block;
// pairs within a block are computed one by one. Entries of dP outside the triangle may have any value. The gradient of
// gamma_i is x_i dx_i - y_i dy_i.
#pragma once

#include <attn/kernel/detail/delta_pairs.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct channel_decay_backward {
  const delta_decay<T>& decay;
  const delta_pair_scratch<T>& s;
  panels<T> x, y, d, d_t;  // [token][dim]; dP [i][j], overwritten with decays per token, and its transpose
  panels<T> dx, dy;        // [token][dim]
  idx_t count;
  bool of_x, of_y;

  void run() const {
    if (count <= 0 || !(of_x || of_y)) return;
    if (decay.kind == decay_kind::token)
      each_packet(
          count, count, [&](idx_t i, idx_t j, const auto& p) { return mul(p, decay.of_pair(i, j)); }, d, d);
    if (of_x) transpose_panels(d, count, count, d_t);
    if (decay.kind == decay_kind::channel) {
      for (idx_t block = 0; block < count; block += pair_block) {
        if (block > 0) before_block(block, std::min(pair_block, count - block));
        for (idx_t col = 0; col < decay.dim; col += width<T>)
          in_block(block, std::min(block + pair_block, count), col);
      }
      return;
    }
    if (of_x) triangle_product<triangle::up_to>(d_t, count, y, decay.dim, add_to(dx));
    if (of_y) triangle_product<triangle::from>(d, count, x, decay.dim, add_to(dy));
  }

 private:
  /// Pairs of the rows of a block and the columns before it.
  void before_block(idx_t block, idx_t rows) const {
    s.load_columns(decay, y, block);
    s.load_factors(decay, block, rows);
    if (of_x)
      product(d_t.from_col(block), rows, s.columns, decay.dim, block,
              [&](idx_t row, idx_t col, const packet<T>& sum) {
                if (row >= rows) return;
                T* const to = dx.at(block + row, col);
                store<T>(to, fma(sum, load<T>(s.factors.at(row, col)), load<T>(to)));
              });
    if (!of_y) return;
    s.load_rows(x, block, rows, decay.dim, s.q_rows);
    product(d.from_row(block), block, s.q_rows, decay.dim, rows, write_to(s.d_columns));
    for (idx_t col = 0; col < decay.dim; col += width<T>) {
      packet<T> factor = broadcast<T>(T(1));
      for (idx_t j = block - 1; j >= 0; --j) {
        T* const to = dy.at(j, col);
        store<T>(to, fma(factor, load<T>(s.d_columns.at(j, col)), load<T>(to)));
        factor = mul(factor, load<T>(decay.gate.at(j, col)));
      }
    }
  }

  /// Pairs within a block, for the channels from col on.
  void in_block(idx_t block, idx_t end, idx_t col) const {
    const auto at = [&](const panels<T>& m, idx_t t) { return load<T>(m.at(t, col)); };
    for (idx_t j = block; j < end; ++j) {
      packet<T> factor = broadcast<T>(T(1)), of_j = of_y ? at(dy, j) : zero<T>();
      for (idx_t i = j; i < end; ++i) {
        if (i > j) factor = mul(factor, at(decay.gate, i));
        const packet<T> p = mul(broadcast<T>(*d.at(i, j)), factor);
        if (of_x) store<T>(dx.at(i, col), fma(p, at(y, j), at(dx, i)));
        if (of_y) of_j = fma(p, at(x, i), of_j);
      }
      if (of_y) store<T>(dy.at(j, col), of_j);
    }
  }
};

}  // namespace attn::inline ATTN_ISA::detail
