// attn: steps 1 and 4 of blockwise attention (blockwise.hpp) for one tile of rows, with keys and values read where they
// lie: packing them would take longer than the products. Sums have the order that they have over packed keys, to the
// last bit.
#pragma once

#include <attn/softmax/detail/packed_keys.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Keys and values of the drivers that may read them where they lie: packed, or the rows of every slot. The kernel is
/// compiled for the rows with these alone.
template <class T>
struct row_keys : packed_keys<T> {
  using number = std::conditional_t<numbers_of<T> == 1, T, Eigen::bfloat16>;

  /// Given where nothing is packed: the row of every slot, and of those that come next. Rows of values are whole
  /// packets.
  const number *const *key_rows = nullptr, *const *value_rows = nullptr;

  static row_keys layout(arena& memory, idx_t slot_count, idx_t dim, idx_t dim_v) {
    return {packed_keys<T>::layout(memory, slot_count, dim, dim_v)};
  }
  const T* value_row(idx_t slot) const {
    if constexpr (std::same_as<T, number>)
      if (value_rows) return value_rows[slot];
    return packed_keys<T>::value_row(slot);
  }
  idx_t value_stride() const { return value_rows ? packed_keys<T>::wide : packed_keys<T>::value_stride(); }
  /// Of rows in place it is not known: their products see to it.
  bool all_finite(idx_t begin, idx_t end) const { return value_rows || packed_keys<T>::all_finite(begin, end); }
};
template <class Keys>
inline constexpr bool may_be_rows = false;
template <class P>
inline constexpr bool may_be_rows<row_keys<P>> = !rows_for_matrix_unit<P>;

/// Values are taken so many slots at a time, which stay in the first-level cache.
inline constexpr idx_t values_together = 32;
/// Slots beyond the last that the lists of rows have: rows that are fetched.
inline constexpr idx_t slots_ahead = 64;

/// The rows of x of slots [begin, end), into `rows`; those after slot `last` are its row.
template <class Rows, class S>
[[gnu::noinline]] void list_rows(const Rows& x, const index_map& positions, idx_t begin, idx_t end, idx_t last,
                                 const S** rows) {
  for (idx_t slot = begin; slot < end; ++slot) rows[slot] = x.row(positions[(std::min)(slot, last)]);
}

/// Step 1: products of M rows and slots [first, first + count), both multiples of a vector. The rows of the next packet
/// of slots are fetched line by line meanwhile (one token, 4 heads a key head, 128 channels, Zen 4: 0.45 of the time).
template <class P, int M>
void scores_in_place(const P* queries, const row_keys<P>& keys, idx_t first, idx_t count, sum_type<P>* scores,
                     idx_t score_stride) {
  using T = sum_type<P>;
  using number = typename row_keys<P>::number;
  constexpr int w = width<T>;
  const row_chunks<P> left{queries};
  const idx_t depth = operands<P>(keys.dim);
  for (idx_t n = 0; n < count; n += w) {
    const number* const* const rows = keys.key_rows + first + n;
    const row_pointers<P, number> some([&](idx_t i) { return rows[i]; }, 0, w);
    packet<T> acc[array_size<M>];
    for (packet<T>& x : acc) x = zero<T>();
    const number *const *next = rows + w, *const *const next_end = next + w;
    idx_t line = 0;
    for (idx_t k = 0; k < depth; k += w) {
      packet<P> square[array_size<w>];
      load_across(square, some, k * numbers_of<P>, keys.dim, 1);
      const auto part = left_from<P>(left, k);
      const auto add_column = [&](idx_t j) __attribute__((always_inline)) {
        if (next != next_end) {
          __builtin_prefetch(*next + line, 0, 3);
          line += idx_t(cache_line / sizeof(number));
          if (line >= keys.dim) line = 0, ++next;
        }
        unroll<M>([&](auto m) { acc[m] = multiply_add<P>(broadcast<P>(part.at(m, k + j)), square[j], acc[m]); });
      };
      if (k + w <= depth)  // as a loop: 1.06 of the time (one token, 4 heads a key head, 1024 keys)
        unroll<w>(add_column);
      else
        for (idx_t j = 0; j < depth - k; ++j) add_column(j);
    }
    for (int m = 0; m < M; ++m) store<T>(scores + m * score_stride + n, acc[m]);
  }
}

/// The operands of values at `col` of the slots of pair k, or of slot k.
template <class P>
ATTN_INLINE packet<P> value_operands(const typename row_keys<P>::number* const* rows, idx_t k, idx_t col) {
  if constexpr (numbers_of<P> == 1)
    return load<P>(rows[k] + col);
  else
    return pair_lanes(load_bf16(rows[2 * k] + col), load_bf16(rows[2 * k + 1] + col));
}

/// The sum of one row over its weights that are not 0.
template <class P, class Left>
[[gnu::noinline]] packet<sum_type<P>> seen_values(const Left& left, int m,
                                                  const typename row_keys<P>::number* const* rows, idx_t depth,
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
/// even. left.at(m, k) are the weights. Some columns and slots at a time: sums wait in memory meanwhile.
template <class P, int M, class Left>
void output_in_place(const Left& left, const sum_type<P>* rescale, const row_keys<P>& keys, idx_t low, idx_t high,
                     sum_type<P>* out, idx_t out_stride) {
  using T = sum_type<P>;
  constexpr int most = registers >= 32 ? (M <= 4 ? 4 : 2) : (M <= 2 ? 4 : M <= 4 ? 2 : 1);  // packets of a pass
  constexpr idx_t columns = 8 * width<T>;
  const auto* const* const rows = keys.value_rows + low;
  const idx_t depth = operands<P>(high - low), together = operands<P>(values_together);
  alignas(64) T sums[array_size<M * columns>];
  for (idx_t first = 0; first < keys.dim_v; first += columns) {
    const idx_t end = (std::min)(first + columns, keys.dim_v);
    const auto pass = [&]<int N>(std::integral_constant<int, N>, idx_t col, idx_t begin, idx_t stop) {
      packet<T> acc[array_size<M>][array_size<N>];
      T* const from = sums + col - first;
      unroll<M>([&](auto m) {
        unroll<N>([&](auto n) { acc[m][n] = begin == 0 ? zero<T>() : load<T>(from + m * columns + n * width<T>); });
      });
      for (idx_t k = begin; k < stop; ++k) {
        for (idx_t of = 0; of < numbers_of<P>; ++of)
          prefetch_bytes<cache_level::first>(
              reinterpret_cast<const char*>(rows[numbers_of<P> * (k + together) + of] + col),
              N * width<T> * static_cast<idx_t>(sizeof(*rows[0])));
        packet<P> b[array_size<N>];
        unroll<N>([&](auto n) { b[n] = value_operands<P>(rows, k, col + n * width<T>); });
        unroll<M>([&](auto m) {
          const packet<P> a = broadcast<P>(left.at(m, k));
          unroll<N>([&](auto n) { acc[m][n] = multiply_add<P>(a, b[n], acc[m][n]); });
        });
      }
      unroll<M>([&](auto m) {
        unroll<N>([&](auto n) { store<T>(from + m * columns + n * width<T>, acc[m][n]); });
      });
    };
    for (idx_t begin = 0; begin < depth; begin += together) {
      const idx_t stop = (std::min)(begin + together, depth);
      idx_t col = first;
      for (; col + most * width<T> <= end; col += most * width<T>)
        pass(std::integral_constant<int, most>{}, col, begin, stop);
      for (; col < end; col += width<T>) pass(std::integral_constant<int, 1>{}, col, begin, stop);
    }
    packet<T> trace = zero<T>();  // NaN where a sum is not finite
    for (int m = 0; m < M; ++m)
      for (idx_t col = first; col < end; col += width<T>)
        trace = fma(load<T>(sums + m * columns + col - first), zero<T>(), trace);
    const bool finite = sum_lanes(trace) == T(0);
    for (int m = 0; m < M; ++m)
      for (idx_t col = first; col < end; col += width<T>) {
        T* const o = out + m * out_stride + col;
        const packet<T> sum =
            finite ? load<T>(sums + m * columns + col - first) : seen_values<P>(left, m, rows, depth, col);
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), sum));
      }
  }
}

}}}  // namespace attn::ATTN_ISA::detail
