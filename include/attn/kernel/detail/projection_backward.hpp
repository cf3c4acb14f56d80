// attn: the backward pass of features made of W x: what performer and rfa share.
#pragma once

#include <attn/kernel/detail/features_backward.hpp>
#include <attn/kernel/detail/projection.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct projected_features_backward : feature_map_backward<T> {
  const projected_features<T>& features;
  const idx_t rows = features.rows, dim = features.dim;
  T* packed = nullptr;  // W^T

  explicit projected_features_backward(const projected_features<T>& f) : features(f) {
    this->scratch_size = features.scratch_size + panels_size();
  }

  idx_t matrix_size() const { return round_up(dim, tile_rows) * rows; }
  void layout(arena& memory, idx_t) override {
    packed = memory.allocate<T>(features.matrices * matrix_size());
  }

  /// W^T times `factor`; as projected_features::pack.
  void pack(T factor) const {
    for (idx_t h = 0; h < features.matrices; ++h) {
      stored_matrix<T> w = features.w.head(0, h);
      std::swap(w.rows, w.cols);
      const idx_t stride = w.row_stride / w.access->size;
      w.row_stride = w.col_stride * w.access->size;
      w.col_stride = stride;
      for (idx_t d = 0; d < dim; d += tile_rows)
        w.access->pack_rows(w, d, std::min<idx_t>(tile_rows, dim - d), factor, packed + h * matrix_size() + d * rows);
    }
  }

  /// to[d][t] = factor sum over r of W_rd du[r][t]; writes up to tile_rows rows beyond.
  void project_back(idx_t item_head, const T* du, idx_t lanes, T* to) const {
    const idx_t matrix = item_head % features.call.heads / (features.call.heads / features.matrices);
    const T* const from = packed + matrix * matrix_size();
    for (idx_t d = 0; d < dim; d += tile_rows)
      for (idx_t t = 0; t < lanes; t += panel_width<T>)
        with_tile_height(std::min<idx_t>(tile_rows, dim - d), [&](auto M) {
          tile_product<T, M.value, 2, kernel_chunk>(packed_rows<T>{from + d * rows}, du + t, rows,
                                                    [&](auto m, auto half, const auto& x) {
                                                      store<T>(to + (d + m) * kernel_chunk + t + half * width<T>, x);
                                                    });
        });
  }

  /// dw[r][d] += sum over the tokens of du[r][t] factor[t] columns[d][t], the factor 1 unless given; `panels` is
  /// scratch.
  void add_features(const tokens_back<T>& x, T* du, const T* columns, const T* factor, T* panels,
                    kernel_sums<T>& dw) const {
    constexpr idx_t w = width<T>, wide = panel_width<T>;
    for (idx_t r = 0; r < rows; ++r) std::fill_n(du + r * kernel_chunk, x.first, T(0));
    for (idx_t t = 0; t < x.rows.lanes; t += w)
      for (idx_t d = 0; d < dim; d += w) {
        packet<T> square[array_size<w>];
        for (idx_t n = 0; n < w; ++n) {
          const T* const from = columns + (std::min)(d + n, dim - 1) * kernel_chunk + t;
          square[n] = factor ? mul(load<T>(from), load<T>(factor + t)) : load<T>(from);
        }
        transpose<T>(square);
        T* const to = panels + d / wide * wide * kernel_chunk + d % wide;
        for (idx_t n = 0; n < w; ++n) store<T>(to + (t + n) * wide, square[n]);
      }
    for (idx_t t = 0; t < x.first; ++t)
      for (idx_t d = 0; d < dim; d += w)
        store<T>(panels + d / wide * wide * kernel_chunk + t * wide + d % wide, zero<T>());
    const idx_t lanes = kernel_sums<T>::lanes(rows);
    T* const ones = panels + kernel_chunk * round_up(dim, wide);
    std::fill_n(ones, lanes, T(1));
    row_prefetcher<> prefetch;
    add_values(dw, du, panels, x.rows.count, ones, prefetch);
  }
  idx_t panels_size() const { return kernel_chunk * round_up(dim, panel_width<T>) + kernel_sums<T>::lanes(rows); }

 protected:
  ~projected_features_backward() = default;
};

}}}  // namespace attn::ATTN_ISA::detail
