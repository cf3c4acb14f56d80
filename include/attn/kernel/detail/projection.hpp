// attn: features made of W x: what performer and rfa share.
#pragma once

#include <attn/kernel/detail/engine.hpp>

namespace attn::inline ATTN_ISA::detail {

/// W is [features, dim], for all heads or one of several, packed once per call.
template <class T>
struct projected_features : feature_map<T> {
  const kernel_call<T>& call;
  const stored_tensor<T>& w = call.projection;
  const index matrices = w.extents[1], rows = w.extents[2], dim = w.extents[3];
  T* packed = nullptr;

  projected_features(const kernel_call<T>& c, index features_per_row) : call(c) {
    this->features = rows * features_per_row;
    this->scratch_size = (dim + 1) * kernel_chunk;
    this->operations = 2 * rows * dim + 10 * this->features;
    this->shared = matrices == 1;
  }

  index matrix_size() const { return round_up(rows, tile_rows) * dim; }
  void layout(arena& memory, index) override {
    packed = memory.allocate<T>(matrices * matrix_size() + width<T>);
  }

  /// W times `factor`. Matrices in ascending order: what is written beyond one is overwritten by the next.
  void pack(T factor) const {
    for (index h = 0; h < matrices; ++h)
      for (index r = 0; r < rows; r += tile_rows)
        w.access->pack_rows(w.head(0, h), r, std::min<index>(tile_rows, rows - r), factor,
                            packed + h * matrix_size() + r * dim);
  }

  /// phi[r][t] = factor W_r x_t for the lanes [0, lanes) of columns [dim][chunk]; writes up to tile_rows rows beyond.
  void project(index pair, const T* columns, index lanes, T* phi) const {
    const T* const matrix = packed + pair % call.heads / (call.heads / matrices) * matrix_size();
    for (index r = 0; r < rows; r += tile_rows)
      for (index t = 0; t < lanes; t += panel_width<T>)
        with_tile_height(std::min<index>(tile_rows, rows - r), [&](auto M) {
          tile_product<T, M.value, 2, kernel_chunk>(packed_rows<T>{matrix + r * dim}, columns + t, dim,
                                                    [&](auto m, auto half, const auto& x) {
                                                      store<T>(phi + (r + m) * kernel_chunk + t + half * width<T>, x);
                                                    });
        });
  }

 protected:
  ~projected_features() = default;
};

/// squares[t] = sum over d of columns[d][t]^2.
template <class T>
void sum_squares(const T* columns, index dim, index lanes, T* squares) {
  for (index t = 0; t < lanes; t += width<T>) {
    packet<T> sum = zero<T>();
    for (index d = 0; d < dim; ++d) {
      const packet<T> x = load<T>(columns + d * kernel_chunk + t);
      sum = fma(x, x, sum);
    }
    store<T>(squares + t, sum);
  }
}

}  // namespace attn::inline ATTN_ISA::detail
