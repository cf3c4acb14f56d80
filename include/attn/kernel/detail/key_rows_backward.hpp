// attn: the backward pass of keys in bidirectional calls where features are computed number by number: rows stay rows.
//
// d phi(k_j) = R v_j + y and d v_j = R^T phi(k_j) need no vector whose lanes are tokens: v_j and phi(k_j) are left
// operands in place, R^T is computed once per head. Compared with chunk_backward.hpp that saves three transpositions
// per chunk, 6 % of linear_backward at a dim of 64.
#pragma once

#include <attn/kernel/detail/sums_kernel_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The left operand of a product as rows of any stride.
template <class P>
struct strided_rows {
  const P* data;
  idx_t stride;
  ATTN_INLINE P at(int m, idx_t k) const { return data[m * stride + k]; }
};

template <class T>
struct key_rows_scratch {
  T *phi = nullptr, *d = nullptr, *values = nullptr;  // [chunk][stride], [chunk][stride], [chunk][value_stride]
  idx_t stride = 0, value_stride = 0;
  operand_pairs operands{};

  static key_rows_scratch layout(arena& memory, idx_t features, idx_t dim_v, const operand_pairs& operands) {
    key_rows_scratch x;
    x.stride = round_up(features, panel_width<T>), x.value_stride = round_up(dim_v, panel_width<T>);
    for (T** each : {&x.phi, &x.d}) *each = memory.allocate<T>(kernel_chunk * x.stride);
    x.values = memory.allocate<T>(kernel_chunk * x.value_stride);
    x.operands = operands;
    return x;
  }
};

/// R^T, as the sums of `dim_v` features and values of `features` numbers.
template <class T>
void transpose_sums(const kernel_sums<T>& from, kernel_sums<T>& to) {
  constexpr idx_t w = width<T>, wide = panel_width<T>;
  for (idx_t r = 0; r < from.features; r += w)
    for (idx_t d = 0; d < from.dim_v; d += w) {
      packet<T> square[array_size<w>];
      const T* const panel = from.panel(d / wide * wide) + d % wide;
      for (idx_t n = 0; n < w; ++n) square[n] = load<T>(panel + (std::min)(r + n, from.features - 1) * wide);
      transpose<T>(square);
      T* const at = to.panel(r / wide * wide) + r % wide;
      for (idx_t n = 0; n < (std::min)(w, from.dim_v - d); ++n) store<T>(at + (d + n) * wide, square[n]);
    }
}

/// done(t, c, x) takes x = sum over k < depth of rows[t][k] S[k][c], a packet at a time, for t up to a multiple of
/// tile_step.
template <class T, class Done>
void rows_times_sums(const T* rows, idx_t stride, idx_t count, const kernel_sums<T>& sums, row_prefetcher<>& prefetch,
                     const operand_pairs& pairs, Done&& done) {
  const auto convert = [&](auto* left, auto* right) {
    for (idx_t t = 0; t < count; ++t) {
      lanes_to_pairs(rows + t * stride, round_up(sums.features, width<T>), left + t * stride / 2);
      if (sums.features % 2) left[(t * stride + sums.features) / 2].bits &= 0xffff;  // beside the last, anything
    }
    panels_to_pairs(sums.values, sums.features, sums.rows(), sums.dim_v, right);
  };
  const auto multiply = [&]<class P>(const P* left, const P* values) {
    const idx_t row = stride / numbers_of<P>;
    for (idx_t t = 0; t < count; t += tile_rows) {
      prefetch.next(rows_per_sums_tile * ceil_div(sums.dim_v, panel_width<T>));
      products_of_rows<P, panel_width<P>, true>(
          count - t, strided_rows<P>{left + t * row, row}, values, operands<P>(sums.rows()) * panel_width<P>, 0,
          round_up(sums.dim_v, panel_width<P>), operands<P>(sums.features),
          [&](auto m, idx_t col, const auto& x) { done(t + m, col, x); });
    }
  };
  multiply_as(pairs, rows, static_cast<const T*>(sums.values), convert, multiply);
}

/// Keys [begin, begin + count); `later` are R and y, `later_t` R^T.
template <class T>
void attend_key_rows(const sums_kernel_backward<T>& in, idx_t b, idx_t h, idx_t begin, idx_t count,
                     const kernel_sums<T>& later, const kernel_sums<T>& later_t, const key_rows_scratch<T>& s,
                     const stored_gradient_head<T>& to_k, const stored_gradient_head<T>& to_v,
                     row_prefetcher<>& prefetch) {
  const kernel_call<T>& call = in.forward;
  const idx_t kv = call.kv_head(h), rows = later.rows();
  in.map->key_rows(call.k.head(b, kv), begin, count, s.phi, s.stride);
  if (to_k) {
    const auto values = call.v.head(b, kv);
    const T* from = s.values;
    idx_t stride = s.value_stride;
    if (values.access->computes && values.col_stride == 1 && count % tile_step == 0)
      from = reinterpret_cast<const T*>(values.row(begin)), stride = values.row_stride / static_cast<idx_t>(sizeof(T));
    else
      for (idx_t t = 0; t < count; ++t) values.read_row(begin + t, s.values + t * stride);
    rows_times_sums(from, stride, count, later_t, prefetch, s.operands, [&](idx_t t, idx_t r, const auto& x) {
      if (r < rows) store<T>(s.d + t * s.stride + r, add(x, load<T>(later.weights + r)));
    });
    in.map->back_rows(s.phi, s.d, count * s.stride);
    to_k.store_rows(s.d, s.stride, begin, count);
  }
  if (!to_v) return;
  const bool direct = to_v.takes_panels() && count % tile_step == 0;
  T* const dv = direct ? reinterpret_cast<T*>(to_v.row(begin)) : s.values;
  const idx_t stride = direct ? to_v.row_stride / static_cast<idx_t>(sizeof(T)) : s.value_stride;
  rows_times_sums(s.phi, s.stride, count, later, prefetch, s.operands,
                  [&](idx_t t, idx_t d, const auto& x) { store<T>(dv + t * stride + d, x); });
  if (!direct) to_v.store_rows(s.values, s.value_stride, begin, count);
}

}}}  // namespace attn::ATTN_ISA::detail
