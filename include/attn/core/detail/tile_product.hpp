// attn: the register-blocked product, in which operators spend most of their time.
//
//   C[m, n] = sum over k of A[m, k] * B[k, n]
//
// One tile of C, tile_rows x panel_width<T>, stays in registers while k runs: per step two vectors of B are loaded and
// tile_rows numbers of A broadcast, so nearly every instruction is a multiply-add. Every element of C is one sequence
// of multiply-adds in the order of k, whatever the tile: how rows and columns are divided into tiles changes no bit of
// the result. The operands are those of packing.hpp.
//
//   1. tile_product    one tile
//   2. panel_products  the tiles of some rows, panel by panel; products_of_rows chooses the height of the tiles
//   3. seen_product    a tile in which rows skip numbers
#pragma once

#include <attn/core/detail/unit_product.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Packets of a tile at most: with the matrix unit two adjacent panels, so that the left operand is read once for both.
template <class P>
inline constexpr int tile_packets = rows_for_matrix_unit<P> ? 4 : 2;
/// The columns of such a tile.
template <class P>
inline constexpr idx_t widest_tile = tile_packets<P> * width<P>;

/// acc[m][n] = sum over k < depth of a(m, k) * panel[k][n] for M rows and N vectors; done(m, n, sum) takes each result.
/// The rows of the panel lie Stride numbers apart. The third and fourth vector are those of the panel that begins
/// `next` numbers later.
template <class T, int M, int N, int Stride = panel_width<T>, class A, class Done>
[[gnu::flatten]] ATTN_INLINE void tile_product(A a, const T* panel, idx_t depth, Done&& done,
                                               [[maybe_unused]] idx_t next = 0) {
  const auto by_vectors = [&]<int Count>(std::integral_constant<int, Count>, const T* b_panel, idx_t begin,
                                         const auto& first, const auto& take) {
    // In one lambda for all of the tile: a lambda for each element would take several times as long to compile.
    [&]<int... At, int... J>(std::integer_sequence<int, At...>, std::integer_sequence<int, J...>)
        __attribute__((always_inline)) {
      packet<sum_type<T>> acc[array_size<M * Count>] = {first(At / Count, At % Count)...};
      for (idx_t from = begin, to = depth; from < depth; from = to) {
        if constexpr (chunk_of<A> > 0) to = (std::min)(depth, from + chunk_of<A>);
        if constexpr (requires { a.fetch(from, to); }) a.fetch(from, to);
        const auto left = left_from<T>(a, from);
        for (idx_t k = from; k < to; ++k) {
          const packet<T> b[array_size<Count>] = {load<T>(b_panel + k * Stride + J * width<T>)...};
          ((acc[At] = multiply_add<T>(broadcast<T>(left.at(At / Count, k)), b[At % Count], acc[At])), ...);
        }
      }
      (take(At / Count, At % Count, acc[At]), ...);
    }(std::make_integer_sequence<int, M * Count>{}, std::make_integer_sequence<int, Count>{});
  };
  const auto nothing = [](int, int) __attribute__((always_inline)) { return zero<sum_type<T>>(); };
  static_assert(N <= tile_packets<T>);
#if ATTN_HAS_AMX
  if constexpr (rows_for_matrix_unit<T>)
    if (const idx_t whole = depth / unit_pairs * unit_pairs; whole > 0 && prepare_matrix_unit()) {
      static_assert(width<float> == unit_columns && M <= unit_rows);
      alignas(64) float sums[array_size<unit_rows * N * unit_columns>];
      unit_product<N, Stride, T, A>{a, panel, next}.run(whole, sums, N * unit_columns);
      const auto sum = [&](int m, int n) __attribute__((always_inline)) {
        return load<float>(sums + (N * m + n) * unit_columns);
      };
      if (whole == depth) {
        unroll<M>([&](auto m) { unroll<N>([&](auto n) { done(m, n, sum(m, n)); }); });
        return;
      }
      by_vectors(std::integral_constant<int, (std::min)(N, 2)>{}, panel, whole, sum, done);
      if constexpr (N > 2)
        by_vectors(std::integral_constant<int, 2>{}, panel + next, whole,
                   [&](int m, int n) __attribute__((always_inline)) { return sum(m, n + 2); },
                   [&](auto m, auto n, const auto& x) { done(m, n + 2, x); });
      return;
    }
#endif
  by_vectors(std::integral_constant<int, (std::min)(N, 2)>{}, panel, 0, nothing, done);
  if constexpr (N > 2)
    by_vectors(std::integral_constant<int, 2>{}, panel + next, 0, nothing,
               [&](auto m, auto n, const auto& x) { done(m, n + 2, x); });
}

/// tile_product of columns [first, end), `first` being that of a panel: done(m, col, sum) takes each vector of them.
/// Panels lie `next` numbers apart. Where Whole, `end` is a multiple of their width.
template <class T, int M, int Stride = panel_width<T>, bool Whole = false, class A, class Done>
ATTN_INLINE void panel_products(A a, const T* panels, idx_t next, idx_t first, idx_t end, idx_t depth, Done&& done) {
  constexpr idx_t wide = panel_width<T>;
  for (idx_t col = first; col < end;) {
    const T* const panel = panels + col / wide * next;
    const auto take = [&](auto m, auto n, const auto& x) { done(m, col + n * width<T>, x); };
    if constexpr (tile_packets<T> > 2)
      if (Whole ? col + wide < end : col + wide + width<T> < end) {
        tile_product<T, M, 4, Stride>(a, panel, depth, take, next);
        col += 2 * wide;
        continue;
      }
    if (Whole || col + width<T> < end)
      tile_product<T, M, 2, Stride>(a, panel, depth, take);
    else if constexpr (!Whole)
      tile_product<T, M, 1, Stride>(a, panel, depth, take);
    col += wide;
  }
}

/// Calls f(integral_constant<int, M>) with the tile height M that holds `rows` <= tile_rows rows.
template <class F>
ATTN_INLINE void with_tile_height(idx_t rows, F&& f) {
  if (rows > 2 * tile_step)
    f(std::integral_constant<int, tile_rows>{});
  else if (rows > tile_step)
    f(std::integral_constant<int, 2 * tile_step>{});
  else
    f(std::integral_constant<int, tile_step>{});
}

/// panel_products of `rows` <= tile_rows rows.
template <class T, int Stride = panel_width<T>, bool Whole = false, class A, class Done>
ATTN_INLINE void products_of_rows(idx_t rows, A a, const T* panels, idx_t next, idx_t first, idx_t end, idx_t depth,
                                  const Done& done) {
  if (rows > 2 * tile_step)
    panel_products<T, tile_rows, Stride, Whole>(a, panels, next, first, end, depth, done);
  else if (rows > tile_step)
    panel_products<T, 2 * tile_step, Stride, Whole>(a, panels, next, first, end, depth, done);
  else
    panel_products<T, tile_step, Stride, Whole>(a, panels, next, first, end, depth, done);
}

/// take(m, half, sum) takes row m < rows of a product, one or two packets of a panel, without the numbers that seen(m,
/// k), a mask of pair k, excludes. The sums are those of tile_product, to the last bit. Depth is the largest that
/// occurs.
template <idx_t Depth, class T, class Left, class Seen, class Take>
[[gnu::noinline]] void seen_product(const Left& left, idx_t rows, const T* panel, idx_t packets, idx_t depth,
                                    const Seen& seen, Take&& take) {
  constexpr idx_t wide = panel_width<T>;
  alignas(64) T part[array_size<Depth * wide>];
  for (idx_t m = 0; m < rows; ++m) {
    for (idx_t k = 0; k < depth; ++k) {
      const std::uint32_t mask = seen(m, k);
      for (idx_t at = k * wide; at < k * wide + packets * width<float>; ++at) part[at] = {panel[at].bits & mask};
    }
    const auto of_row = [&](auto row, auto half, const auto& x) {
      if (row == m) take(m, half, x);
    };
    with_tile_height(rows, [&](auto M) {
      if (packets == 2)
        tile_product<T, M.value, 2>(left, part, depth, of_row);
      else
        tile_product<T, M.value, 1>(left, part, depth, of_row);
    });
  }
}

}}}  // namespace attn::ATTN_ISA::detail
