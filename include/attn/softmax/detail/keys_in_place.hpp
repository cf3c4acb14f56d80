// attn: steps 1 and 4 of blockwise attention (blockwise.hpp) for one tile of rows, with keys and values read where they
// lie: packing them would take longer than the products. Sums have the order that they have over packed keys, to the
// last bit.
#pragma once

#include <attn/softmax/detail/packed_keys.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How far ahead rows are fetched: keys while others are multiplied, and values.
inline constexpr idx_t keys_ahead = 2, values_ahead = 8;

/// Step 1: products of M rows and slots [first, first + count), both multiples of a vector.
template <class P, int M>
void scores_in_place(const P* queries, const packed_keys<P>& keys, idx_t first, idx_t count, sum_type<P>* scores,
                     idx_t score_stride) {
  using T = sum_type<P>;
  constexpr int w = width<T>;
  const packed_rows<P> left{queries};
  const idx_t depth = operands<P>(keys.dim);
  for (idx_t n = 0; n < count; n += w) {
    const auto* const* const rows = keys.key_rows + first + n;
    const row_pointers<P, typename packed_keys<P>::number> some([&](idx_t i) { return rows[i]; }, 0, w);
    packet<T> acc[M];
    for (packet<T>& x : acc) x = zero<T>();
    for (idx_t k = 0; k < depth; k += w) {
      // In the order of memory: whole rows, some in each step.
      for (idx_t i = k * w / depth; i < (std::min)((k + w) * w / depth, idx_t(w)); ++i)
        prefetch_bytes<cache_level::first>(reinterpret_cast<const char*>(rows[keys_ahead * w + i]),
                                           keys.dim * static_cast<idx_t>(sizeof(*rows[0])));
      packet<P> square[w];
      load_across(square, some, k * numbers_of<P>, keys.dim, 1);
      const auto add_column = [&](auto j) __attribute__((always_inline)) {
        unroll<M>([&](auto m) { acc[m] = multiply_add<P>(broadcast<P>(left.at(m, k + j)), square[j], acc[m]); });
      };
      if (k + w <= depth)
        unroll<w>(add_column);
      else
        for (idx_t j = 0; j < depth - k; ++j) add_column(j);
    }
    for (int m = 0; m < M; ++m) store<T>(scores + m * score_stride + n, acc[m]);
  }
}

/// The operands of values at `col` of the slots of pair k, or of slot k.
template <class P>
ATTN_INLINE packet<P> value_operands(const typename packed_keys<P>::number* const* rows, idx_t k, idx_t col) {
  if constexpr (numbers_of<P> == 1)
    return load<P>(rows[k] + col);
  else
    return pair_lanes(load_bf16(rows[2 * k] + col), load_bf16(rows[2 * k + 1] + col));
}

/// The sum of one row over its weights that are not 0.
template <class P, class Left>
[[gnu::noinline]] packet<sum_type<P>> seen_values(const Left& left, int m,
                                                  const typename packed_keys<P>::number* const* rows, idx_t depth,
                                                  idx_t col) {
  packet<sum_type<P>> x = zero<sum_type<P>>();
  for (idx_t k = 0; k < depth; ++k) {
    const P weight = left.at(m, k);
    packet<P> values = value_operands<P>(rows, k, col);
    if constexpr (numbers_of<P> == 1) {
      if (weight == P(0)) continue;
    } else {
      P pairs[array_size<width<P>>];
      store<P>(pairs, values);
      for (P& pair : pairs) pair.bits &= seen_by(weight);
      values = load<P>(pairs);
    }
    x = multiply_add<P>(broadcast<P>(weight), values, x);
  }
  return x;
}

/// Step 4: out[m] = out[m] * rescale[m] + weights of M rows times the values of slots [low, high); of pairs both are
/// even. left.at(m, k) are the weights.
template <class P, int M, class Left>
void output_in_place(const Left& left, const sum_type<P>* rescale, const packed_keys<P>& keys, idx_t low, idx_t high,
                     sum_type<P>* out, idx_t out_stride) {
  using T = sum_type<P>;
  constexpr int most = registers >= 32 ? (M <= 4 ? 4 : 2) : (M <= 2 ? 4 : M <= 4 ? 2 : 1);  // packets of a pass
  const auto* const* const rows = keys.value_rows + low;
  const idx_t depth = operands<P>(high - low);
  const auto pass = [&]<int N>(std::integral_constant<int, N>, idx_t col) {
    packet<T> acc[M][N];
    unroll<M>([&](auto m) { unroll<N>([&](auto n) { acc[m][n] = zero<T>(); }); });
    for (idx_t k = 0; k < depth; ++k) {
      if (col == 0)
        for (idx_t of = 0; of < numbers_of<P>; ++of)
          prefetch_bytes<cache_level::first>(
              reinterpret_cast<const char*>(rows[numbers_of<P> * (k + values_ahead) + of]),
              keys.dim_v * static_cast<idx_t>(sizeof(*rows[0])));
      packet<P> b[N];
      unroll<N>([&](auto n) { b[n] = value_operands<P>(rows, k, col + n * width<T>); });
      unroll<M>([&](auto m) {
        const packet<P> a = broadcast<P>(left.at(m, k));
        unroll<N>([&](auto n) { acc[m][n] = multiply_add<P>(a, b[n], acc[m][n]); });
      });
    }
    packet<T> trace = zero<T>();  // NaN where a sum is not finite
    unroll<M>([&](auto m) { unroll<N>([&](auto n) { trace = fma(acc[m][n], zero<T>(), trace); }); });
    if (!(sum_lanes(trace) == T(0))) [[unlikely]]
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = seen_values<P>(left, m, rows, depth, col + n * width<T>);
    unroll<M>([&](auto m) {
      unroll<N>([&](auto n) {
        T* const o = out + m * out_stride + col + n * width<T>;
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), acc[m][n]));
      });
    });
  };
  idx_t col = 0;
  for (; col + most * width<T> <= keys.dim_v; col += most * width<T>) pass(std::integral_constant<int, most>{}, col);
  for (; col < keys.dim_v; col += width<T>) pass(std::integral_constant<int, 1>{}, col);
}

}}}  // namespace attn::ATTN_ISA::detail
