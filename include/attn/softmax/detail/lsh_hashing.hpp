// attn: the hashes of lsh.hpp: random rotations, and the bucket of every token.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/random.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline void check_rounds(const validator& check, idx_t rounds) {
  constexpr idx_t most = idx_t(1) << 16;  // tables of a token for each round: no memory holds many more
  check.at_least("rounds", 1, rounds);
  if (rounds > most) check.fail({"rounds <= ", most}, rounds);
}
inline void check_buckets(const validator& check, idx_t buckets) {
  check.at_least("buckets", 2, buckets);
  if (buckets % 2 != 0) check.fail("an even number of buckets", buckets);
  constexpr idx_t max_buckets = idx_t(1) << 24;  // float, the compute type, represents these integers
  if (buckets > max_buckets) check.fail({"buckets <= ", max_buckets}, buckets);
}

/// Unit normal numbers of one head.
template <class T>
void fill_rotations(T* numbers, idx_t count, std::uint64_t seed, idx_t head) {
  random_numbers random(seed, static_cast<std::uint64_t>(head));
  for (idx_t n = 0; n < count; ++n) numbers[n] = static_cast<T>(random.normal());
}

/// 1 / sqrt(|x|^2 + dim eps), the factor that makes x a key; 0 where the denominator is 0.
template <class T, class S>
T key_factor(const S* x, idx_t stride, idx_t dim, T eps) {
  packet<T> squares = zero<T>();
  for (idx_t d = 0; d < dim; d += width<T>) {
    const packet<T> part = load_part<T>(x + d * stride, stride, dim - d);
    squares = fma(part, part, squares);
  }
  const T square = sum_lanes(squares) + static_cast<T>(dim) * eps;
  return square > T(0) ? T(1) / std::sqrt(square) : square == T(0) ? T(0) : square;
}

/// Packs the rotations of one head as rows for tile_product: [round][tile of columns][dim][tile_rows].
template <class T>
void pack_rotations(const tensor_view<const T>& given, idx_t head, T* packed) {
  const idx_t dim = given.extent(2), half = given.extent(3);  // buckets / 2 columns per round
  for (idx_t round = 0; round < given.extent(1); ++round) {
    const auto matrix = head_of(given, head, round);
    for (idx_t c = 0; c < half; c += tile_rows, packed += tile_rows * dim) {
      const auto column = [&](idx_t n) { return matrix.data + (c + n) * matrix.col_stride; };
      pack_rows<T>(column, std::min<idx_t>(tile_rows, half - c), dim, matrix.row_stride, T(1), packed);
    }
  }
}

/// bucket[i] = argmax [x R; -x R], the first of equal ones, for `count` keys x of a panel and one round's rotation R.
template <class T>
void hash_panel(const T* rotation, idx_t half, idx_t dim, const T* panel, idx_t count, idx_t* bucket) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  // Largest and smallest product so far, and their columns, lane by lane.
  packet<T> high[2] = {broadcast<T>(-infinity), broadcast<T>(-infinity)}, high_at[2] = {zero<T>(), zero<T>()};
  packet<T> low[2] = {broadcast<T>(infinity), broadcast<T>(infinity)}, low_at[2] = {zero<T>(), zero<T>()};
  for (idx_t c = 0; c < half; c += tile_rows)
    with_tile_height(half - c, [&](auto M) {
      tile_product<T, M.value, 2>(packed_rows<T>{rotation + c * dim}, panel, dim, [&](auto m, auto n, const auto& x) {
        const packet<T> column = broadcast<T>(static_cast<T>(c + m));
        high_at[n] = if_less(high[n], x, column, high_at[n]);
        low_at[n] = if_less(x, low[n], column, low_at[n]);
        high[n] = (max)(high[n], x);
        low[n] = (min)(low[n], x);
      });
    });
  alignas(64) T best[4][panel_width<T>];
  for (int n = 0; n < 2; ++n) {
    store<T>(best[0] + n * width<T>, high[n]);
    store<T>(best[1] + n * width<T>, high_at[n]);
    store<T>(best[2] + n * width<T>, low[n]);
    store<T>(best[3] + n * width<T>, low_at[n]);
  }
  for (idx_t i = 0; i < count; ++i) {
    const bool up = best[0][i] >= -best[2][i];
    const auto column = static_cast<idx_t>(best[up ? 1 : 3][i]);  // a tile repeats the last column, which is not larger
    bucket[i] = up ? column : half + column;
  }
}

}}}  // namespace attn::ATTN_ISA::detail
