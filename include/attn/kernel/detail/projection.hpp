// attn: features made of W x: what performer and rfa share.
#pragma once

#include <attn/core/detail/sin_cos.hpp>
#include <attn/kernel/detail/kernel_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// W is [features, dim], for all heads or one of several, packed once per call; bf16 numbers also as pairs without
/// rounding, so that products with bf16 tokens are exact.
template <class T>
struct projected_features : feature_map<T> {
  const kernel_call<T>& call;
  const stored_tensor<T>& w = call.projection;
  const idx_t matrices = w.extents[1], rows = w.extents[2], dim = w.extents[3];
  T *packed = nullptr, packed_factor = T(1);  // W times packed_factor
  bf16_pair* packed_pairs = nullptr;

  projected_features(const kernel_call<T>& c, idx_t features_per_row) : call(c) {
    this->features = rows * features_per_row;
    this->scratch_size = (dim + 1 + (paired() ? operands<bf16_pair>(dim) : 0)) * kernel_chunk;
    this->operations = 2 * rows * dim + 10 * this->features;
    this->shared = matrices == 1;
  }

  bool paired() const { return has_pairs<T> && w.access->paired; }
  idx_t matrix_size() const { return round_up(rows, tile_rows) * dim; }
  idx_t matrix_pairs() const { return round_up(rows, tile_rows) * row_operands<bf16_pair>(dim); }
  void layout(arena& memory, idx_t) override {
    packed = memory.allocate<T>(matrices * matrix_size());
    if (paired()) packed_pairs = memory.allocate<bf16_pair>(matrices * matrix_pairs());
  }
  /// Of a worker's scratch memory, after the columns of a block and a number for each of its tokens.
  bf16_pair* pairs_in(T* work) const {
    return packed_pairs ? reinterpret_cast<bf16_pair*>(work + (dim + 1) * kernel_chunk) : nullptr;
  }

  /// W times `times`.
  void pack(T times) {
    packed_factor = times;
    for (idx_t h = 0; h < matrices; ++h)
      for (idx_t r = 0; r < rows; r += tile_rows) {
        const idx_t some = std::min<idx_t>(tile_rows, rows - r);
        w.access->pack_rows(w.head(0, h), r, some, times, packed + h * matrix_size() + r * dim);
        if (packed_pairs)
          w.access->pack_row_pairs(w.head(0, h), r, some,
                                   packed_pairs + h * matrix_pairs() + r * row_operands<bf16_pair>(dim));
      }
  }

  /// phi[r][t] = packed_factor W_r x_t for the lanes [0, lanes) of columns [dim][chunk]; writes up to tile_rows rows
  /// beyond. Where `pairs` is given, scratch memory, columns are bf16 numbers.
  void project(idx_t item_head, const T* columns, idx_t lanes, T* phi, bf16_pair* pairs = nullptr) const {
    const idx_t matrix = item_head % call.heads / (call.heads / matrices);
    const auto multiply = [&]<class P>(const P* left, idx_t left_depth, const P* right, const auto& finish) {
      for (idx_t r = 0; r < rows; r += tile_rows)
        products_of_rows<P, kernel_chunk, true>(
            rows - r, packed_rows<P>{left + r * left_depth}, right, panel_width<P>, 0,
            round_up(lanes, panel_width<T>), operands<P>(dim),
            [&](auto m, idx_t t, const auto& x) { store<T>(phi + (r + m) * kernel_chunk + t, finish(x)); });
    };
    if constexpr (has_pairs<T>)
      if (pairs) {
        rows_to_pairs(columns, dim, round_up(lanes, panel_width<T>), kernel_chunk, pairs);
        return multiply(packed_pairs + matrix * matrix_pairs(), row_operands<bf16_pair>(dim),
                        static_cast<const bf16_pair*>(pairs),
                        [&](const packet<T>& x) { return mul(x, broadcast<T>(packed_factor)); });
      }
    multiply(packed + matrix * matrix_size(), dim, columns, [](const packet<T>& x) { return x; });
  }

 protected:
  ~projected_features() = default;
};

/// Rows [0, rows) of phi become sines of their numbers times factor[t], the next ones the cosines; 1 without `factor`.
template <class T>
void sines_of(T* phi, idx_t rows, idx_t lanes, const T* factor) {
  for (idx_t r = 0; r < rows; ++r)
    for (idx_t t = 0; t < lanes; t += width<T>) {
      T* const at = phi + r * kernel_chunk + t;
      packet<T> sine, cosine;
      sin_cos<T>(factor ? mul(load<T>(at), load<T>(factor + t)) : load<T>(at), sine, cosine);
      store<T>(at, sine), store<T>(at + rows * kernel_chunk, cosine);
    }
}

/// squares[t] = sum over d of columns[d][t]^2.
template <class T>
void sum_squares(const T* columns, idx_t dim, idx_t lanes, T* squares) {
  for (idx_t t = 0; t < lanes; t += width<T>) {
    packet<T> sum = zero<T>();
    for (idx_t d = 0; d < dim; ++d) {
      const packet<T> x = load<T>(columns + d * kernel_chunk + t);
      sum = fma(x, x, sum);
    }
    store<T>(squares + t, sum);
  }
}

/// Tokens whose squares are not finite are multiplied by powers[t], a power of two that takes their numbers below
/// 2^exponent, others by 1. Returns whether there were any.
template <class T>
[[gnu::noinline]] bool shorten_tokens(T* columns, idx_t dim, idx_t lanes, const T* squares, int exponent, T* powers) {
  bool any = false;
  std::fill_n(powers, lanes, T(1));
  for (idx_t t = 0; t < lanes; ++t) {
    if (squares[t] < std::numeric_limits<T>::infinity()) continue;
    T size = 0;
    for (idx_t d = 0; d < dim; ++d) size = (std::max)(size, std::abs(columns[d * kernel_chunk + t]));
    int own = 0;
    if (!(size < std::numeric_limits<T>::infinity())) continue;
    std::frexp(size, &own);
    if (own <= exponent) continue;
    any = true, powers[t] = std::ldexp(T(1), exponent - own);
    for (idx_t d = 0; d < dim; ++d) columns[d * kernel_chunk + t] *= powers[t];
  }
  return any;
}
template <class T>
bool has_long_tokens(const T* squares, idx_t lanes) {
  packet<T> any = zero<T>();
  for (idx_t t = 0; t < lanes; t += width<T>)
    any = (max)(any, if_less(load<T>(squares + t), broadcast<T>(std::numeric_limits<T>::infinity()), zero<T>(),
                           broadcast<T>(T(1))));
  return max_lanes(any) > T(0);
}

}}}  // namespace attn::ATTN_ISA::detail
