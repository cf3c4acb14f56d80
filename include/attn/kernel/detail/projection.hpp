// attn: W x for a chunk of tokens, W [features, dim] packed once per call.
#pragma once

#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct packed_projection {
  T* memory = nullptr;
  index heads = 0, count = 0, dim = 0;

  index size() const { return round_up(count, tile_rows) * dim; }

  /// w [1, heads, features, dim]
  static packed_projection layout(arena& memory, const stored_tensor<T>& w) {
    packed_projection p{nullptr, w.extents[1], w.extents[2], w.extents[3]};
    p.memory = memory.allocate<T>(p.heads * p.size() + width<T>);
    return p;
  }

  /// W times `factor`. Heads in ascending order: what is written beyond one is overwritten by the next.
  void pack(const stored_tensor<T>& w, T factor) const {
    for (index h = 0; h < heads; ++h)
      for (index r = 0; r < count; r += tile_rows)
        w.access->pack_rows(w.head(0, h), r, std::min<index>(tile_rows, count - r), factor,
                            memory + h * size() + r * dim);
  }

  /// phi[r][t] = factor W_r x_t for the lanes [0, lanes) of columns [dim][chunk]; writes up to tile_rows rows beyond.
  void apply(index head, const T* columns, index lanes, T* phi) const {
    for (index r = 0; r < count; r += tile_rows)
      for (index t = 0; t < lanes; t += panel_width<T>)
        with_tile_height(std::min<index>(tile_rows, count - r), [&](auto M) {
          tile_product<T, M.value, 2, kernel_chunk>(packed_rows<T>{memory + head * size() + r * dim}, columns + t, dim,
                                                    [&](auto m, auto half, const auto& x) {
                                                      store<T>(phi + (r + m) * kernel_chunk + t + half * width<T>, x);
                                                    });
        });
  }
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
