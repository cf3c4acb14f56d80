// attn: which keys a block of queries of multipole takes exactly: those with the largest max over probes g of
// x_g.(k_j - mean of the keys), x_g the mean of some of its queries. Of equal ranks the earlier key is taken; NaN is
// the lowest rank.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

#include <numeric>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Integers in the order of the floats they represent; -0 is 0.
template <class T>
struct ordered_bits {
  using integer = typename float_bits<T>::integer;
  using natural = std::make_unsigned_t<integer>;
  static constexpr natural sign = natural(1) << (8 * sizeof(T) - 1);

  static natural of(T x) {
    const natural bits = std::bit_cast<natural>(x + T(0));  // -0 becomes 0
    return bits & sign ? ~bits : bits | sign;
  }
  static T number(natural key) { return std::bit_cast<T>(key & sign ? key ^ sign : ~key); }
};

/// How many of n numbers are at least t.
template <class T>
idx_t count_from(const T* x, idx_t n, T t) {
  const packet<T> one = broadcast<T>(T(1)), least = broadcast<T>(t);
  packet<T> sums[4] = {zero<T>(), zero<T>(), zero<T>(), zero<T>()};
  idx_t i = 0, count = 0;
  for (; i + 4 * width<T> <= n; i += 4 * width<T>)
    unroll<4>([&](auto u) { sums[u] = add(sums[u], if_less(load<T>(x + i + u * width<T>), least, zero<T>(), one)); });
  for (; i < n; ++i) count += x[i] >= t;
  return count + static_cast<idx_t>(sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3]))));
}

/// The k-th largest of n numbers, 1 <= k <= n, none of which is NaN: bisection over their bits, a few dozen passes that
/// count.
template <class T>
T kth_largest(const T* x, idx_t n, idx_t k) {
  using bits = ordered_bits<T>;
  T low = x[0], high = x[0];
  for (idx_t i = 1; i < n; ++i) low = (std::min)(low, x[i]), high = (std::max)(high, x[i]);
  auto least = bits::of(low), most = bits::of(high);  // count_from(least) >= k
  while (least < most) {
    const auto middle = static_cast<typename bits::natural>(most - (most - least) / 2);
    if (count_from(x, n, bits::number(middle)) >= k)
      least = middle;
    else
      most = static_cast<typename bits::natural>(middle - 1);
  }
  return bits::number(least);
}

/// Writes the indices of the `count` largest of n numbers in ascending order; of equal numbers the earlier are taken.
/// Returns how many. `buffer` holds n numbers, `chosen` n indices.
///
/// The count-th largest of the maxima of disjoint sets is at most the count-th largest of all numbers: smaller numbers
/// are dropped at once.
template <class T>
idx_t choose_largest(const T* x, idx_t n, idx_t count, T* buffer, idx_t* chosen) {
  if (count >= n) {
    std::iota(chosen, chosen + n, idx_t(0));
    return n;
  }
  if (count <= 0) return 0;
  T least = -std::numeric_limits<T>::infinity();
  const idx_t packets = n / width<T>, height = std::clamp<idx_t>(n / (2 * count), 1, 16), sets = packets / height;
  if (height > 1 && sets * width<T> >= count) {
    for (idx_t g = 0; g < sets; ++g) {
      packet<T> highest = load<T>(x + g * height * width<T>);
      for (idx_t p = 1; p < height; ++p) highest = (max)(highest, load<T>(x + (g * height + p) * width<T>));
      store<T>(buffer + g * width<T>, highest);
    }
    least = kth_largest(buffer, sets * width<T>, count);
  }
  idx_t found = 0;
  const auto look = [&](idx_t i) {
    chosen[found] = i;
    found += x[i] >= least;
  };
  idx_t i = 0;
  for (; i + width<T> <= n; i += width<T>)
    if (max_lanes(load<T>(x + i)) >= least)
      for (idx_t lane = 0; lane < width<T>; ++lane) look(i + lane);
  for (; i < n; ++i) look(i);

  for (idx_t r = 0; r < found; ++r) buffer[r] = x[chosen[r]];
  const T last = kth_largest(buffer, found, count);
  idx_t more = 0;
  for (idx_t r = 0; r < found; ++r) more += buffer[r] > last;
  idx_t equals = count - more, kept = 0;
  for (idx_t r = 0; r < found; ++r) {
    if (buffer[r] < last || (buffer[r] == last && equals-- <= 0)) continue;
    chosen[kept++] = chosen[r];
  }
  return kept;
}

/// The probes of some blocks of queries, packed as rows of a product with the keys.
template <class T>
struct probe_rows {
  idx_t dim = 0, rows = 0;
  T* means = nullptr;      // [rows][padded dim]
  T* packed = nullptr;     // per tile [dim][tile_rows]
  T* offset = nullptr;     // per row: x_g . mean of the keys
  T* share = nullptr;      // per row: of the mean of all queries of the block's probes; 0 for rows that fill a tile
  idx_t* block = nullptr;  // per row: of the blocks

  static probe_rows layout(arena& memory, idx_t rows, idx_t dim) {
    const idx_t padded = round_up(rows, tile_rows);
    return {dim,
            0,
            memory.allocate<T>(rows * round_up(dim, width<T>)),
            memory.allocate<T>(padded * dim),
            memory.allocate<T>(padded),
            memory.allocate<T>(padded),
            memory.allocate<idx_t>(padded)};
  }

  /// Appends the mean of queries [begin, end), of the `all` of the block's probes, times `sign`.
  template <class S>
  void add(const matrix_view<const S>& q, idx_t begin, idx_t end, idx_t all, T sign, idx_t of_block) {
    const idx_t stride = round_up(dim, width<T>);
    T* const to = means + rows * stride;
    std::fill_n(to, stride, T(0));
    for (idx_t i = begin; i < end; ++i) {
      const S* const row = q.row(i);
      for (idx_t d = 0; d < dim; d += width<T>)
        store<T>(to + d,
                 attn::detail::add(load<T>(to + d), load_part<T>(row + d * q.col_stride, q.col_stride, dim - d)));
    }
    for (idx_t d = 0; d < dim; ++d) to[d] = to[d] * sign / static_cast<T>(end - begin);
    share[rows] = static_cast<T>(end - begin) / static_cast<T>(all);
    block[rows++] = of_block;
  }

  /// The mean of all queries of a block's probes, times the sign of add().
  void block_mean(idx_t of_block, T* mean) const {
    const idx_t stride = round_up(dim, width<T>);
    std::fill_n(mean, dim, T(0));
    for (idx_t r = 0; r < rows; ++r)
      for (idx_t d = 0; d < dim && block[r] == of_block; ++d) mean[d] += share[r] * means[r * stride + d];
  }
  /// Its product with the mean of the keys.
  T block_offset(idx_t of_block) const {
    T sum = 0;
    for (idx_t r = 0; r < rows; ++r)
      if (block[r] == of_block) sum += share[r] * offset[r];
    return sum;
  }

  /// Prepares for rank(): `sum` is the sum of `keys` keys.
  void finish(const T* sum, idx_t keys) const {
    const idx_t stride = round_up(dim, width<T>);
    for (idx_t r = 0; r < rows; ++r) {
      T dot = 0;
      for (idx_t d = 0; d < dim; ++d) dot += means[r * stride + d] * sum[d];
      offset[r] = dot / static_cast<T>(keys);
    }
    for (idx_t r = rows; r < round_up(rows, tile_rows); ++r)
      offset[r] = offset[rows - 1], share[r] = T(0), block[r] = block[rows - 1];
    for (idx_t r = 0; r < rows; r += tile_rows)
      pack_rows<T>([&](idx_t n) { return means + (r + n) * stride; }, std::min<idx_t>(tile_rows, rows - r), dim, 1,
                   T(1), packed + r * dim);
  }

  /// ranks[block][j] for keys [0, keys), which lie in panels; `ranks` has rows of `stride` numbers, whole panels.
  /// `mean_ranks`, if given, are those by the means of all queries of the blocks' probes.
  void rank(const T* panels, idx_t keys, T* ranks, idx_t stride, T* mean_ranks = nullptr) const {
    constexpr idx_t wide = panel_width<T>;
    for (idx_t j = 0; j < keys; j += wide)
      for (idx_t r = 0; r < rows; r += tile_rows)
        with_tile_height(rows - r, [&](auto M) {
          alignas(64) T products[M.value * wide];
          tile_product<T, M.value, 2>(packed_rows<T>{packed + r * dim}, panels + j * dim, dim,
                                      [&](auto m, auto n, const auto& x) {
                                        store<T>(products + m * wide + n * width<T>, x);
                                      });
          take_ranks(products, r, M.value, ranks + j, stride, mean_ranks ? mean_ranks + j : nullptr);
        });
  }

 private:
  /// A panel of keys and rows [r, r + count). Unrolled within the tile product it is 6.8 KB of code instead of 2, and
  /// no faster.
  [[gnu::noinline]] void take_ranks(const T* products, idx_t r, idx_t count, T* ranks, idx_t stride,
                                    T* mean_ranks) const {
    packet<T> most[2] = {}, mean[2] = {};  // of the rows of a block so far; GCC 13 does not see that these are written
    for (idx_t row = r; row < r + count; ++row, products += panel_width<T>) {
      const idx_t at = block[row] * stride;
      const bool first = row == 0 || block[row - 1] < block[row],
                 done = row + 1 == r + count || block[row + 1] > block[row];
      unroll<2>([&](auto n) {
        const idx_t lane = n * width<T>;
        if (first)
          most[n] = broadcast<T>(-std::numeric_limits<T>::infinity()), mean[n] = zero<T>();
        else if (row == r)
          most[n] = load<T>(ranks + at + lane), mean[n] = mean_ranks ? load<T>(mean_ranks + at + lane) : zero<T>();
        const packet<T> rank = sub(load<T>(products + lane), broadcast<T>(offset[row]));
        most[n] = if_less(most[n], rank, rank, most[n]);  // NaN is not larger
        if (mean_ranks) mean[n] = fma(rank, broadcast<T>(share[row]), mean[n]);
        if (!done) return;
        store<T>(ranks + at + lane, most[n]);
        if (mean_ranks) store<T>(mean_ranks + at + lane, mean[n]);
      });
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
