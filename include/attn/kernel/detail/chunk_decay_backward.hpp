// attn: the gradients of the scores of a chunk (chunk_decay.hpp), P of queries and, by the rule that corrects, A of
// keys:
//
//   dq_i = sum_(j <= i) dP_ij k_j e^(gamma_i - gamma_j)
//   dk_i = sum_(j < i) dA_ij k_j e^(..) by rows, and by columns
//   dk_j = sum_(i > j) dA_ij k_i e^(..) + sum_(i >= j) dP_ij q_i e^(..)
//
// The two parts of dk are stored separately, because the gradient of the decays is computed from their difference:
// that of gamma_i is q_i dq_i + k_i (dk_i by rows - dk_i by columns). Entries of dP and dA outside their triangles may
// have any value.
#pragma once

#include <attn/kernel/detail/chunk_decay.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Inputs of the gradients of scores, dP and dA as [i][j], overwritten with decays per token, and where they are added:
/// to those of q, and to those of k by the rows and by the columns of the scores. Without `OfKeys` there is no A.
template <bool OfKeys, class T>
struct score_gradients {
  const chunk_decay<T>& decay;
  const score_scratch<T>& s;
  panels<T> q, k, dp, dp_t, da, da_t, dq, dk_row, dk_col;
  idx_t count;
  bool of_queries, of_keys;

  void run() const {
    if (count <= 0) return;
    if (decay.kind == decay_kind::token) {
      if (of_queries || of_keys) times_decays(dp);
      if (OfKeys && of_keys) times_decays(da);
    }
    if (of_queries) transpose_panels(dp, count, count, dp_t);
    if (OfKeys && of_keys) transpose_panels(da, count, count, da_t);
    const idx_t dim = decay.dim;
    if (decay.kind == decay_kind::channel) {
      for (idx_t block = 0; block < count; block += score_block) {
        if (block > 0) before_block(block, std::min(score_block, count - block));
        for (idx_t col = 0; col < dim; col += width<T>) in_block(block, std::min(block + score_block, count), col);
      }
      return;
    }
    if (of_queries) triangle_product<triangle::up_to>(dp_t, count, k, dim, add_to(dq));
    if (!of_keys) return;
    if constexpr (OfKeys) {
      triangle_product<triangle::before>(da_t, count, k, dim, add_to(dk_row));
      triangle_product<triangle::after>(da, count, k, dim, add_to(dk_col));
    }
    triangle_product<triangle::from>(dp, count, q, dim, add_to(dk_col));
  }

 private:
  void times_decays(const panels<T>& d) const {
    each_packet(
        count, count, [&](idx_t i, idx_t j, const auto& x) { return mul(x, decay.between(i, j)); }, d, d);
  }

  /// Scores of the rows of a block and the tokens before it.
  void before_block(idx_t block, idx_t rows) const {
    const idx_t dim = decay.dim;
    s.load_columns(decay, k, block);
    s.load_factors(decay, block, rows);
    const auto add_rows = [&](const panels<T>& d, const panels<T>& to) {
      product(d.from_col(block), rows, s.columns, dim, block, [&](idx_t row, idx_t col, const packet<T>& sum) {
        T* const sums = to.at(block + row, col);
        store<T>(sums, fma(sum, load<T>(s.factors.at(row, col)), load<T>(sums)));
      });
    };
    if (of_queries) add_rows(dp_t, dq);
    if (!of_keys) return;
    s.load_rows(q, block, rows, dim, s.q_rows);
    product(dp.from_row(block), block, s.q_rows, dim, rows, write_to(s.d_columns));
    if constexpr (OfKeys) {
      add_rows(da_t, dk_row);
      s.load_rows(k, block, rows, dim, s.k_rows);
      product(da.from_row(block), block, s.k_rows, dim, rows, add_to(s.d_columns));
    }
    for (idx_t col = 0; col < dim; col += width<T>) {
      packet<T> factor = broadcast<T>(T(1));
      for (idx_t j = block - 1; j >= 0; --j) {
        T* const to = dk_col.at(j, col);
        store<T>(to, fma(factor, load<T>(s.d_columns.at(j, col)), load<T>(to)));
        factor = mul(factor, load<T>(decay.gate.at(j, col)));
      }
    }
  }

  /// Scores within a block, for the channels from col on.
  void in_block(idx_t block, idx_t end, idx_t col) const {
    const auto at = [&](const panels<T>& x, idx_t t) { return load<T>(x.at(t, col)); };
    for (idx_t j = block; j < end; ++j) {
      packet<T> factor = broadcast<T>(T(1)), of_j = of_keys ? at(dk_col, j) : zero<T>();
      for (idx_t i = j; i < end; ++i) {
        if (i > j) factor = mul(factor, at(decay.gate, i));
        const packet<T> key = mul(factor, at(k, j)), p = broadcast<T>(*dp.at(i, j));
        if (of_queries) store<T>(dq.at(i, col), fma(p, key, at(dq, i)));
        if (!of_keys) continue;
        packet<T> by_rows = mul(p, at(q, i));
        if constexpr (OfKeys)
          if (i > j) {
            const packet<T> a = broadcast<T>(*da.at(i, j));
            by_rows = fma(a, at(k, i), by_rows);
            store<T>(dk_row.at(i, col), fma(a, key, at(dk_row, i)));
          }
        of_j = fma(factor, by_rows, of_j);
      }
      if (of_keys) store<T>(dk_col.at(j, col), of_j);
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
