// attn: rows of keys and values read once and in place, for a few queries: the two products of streaming.hpp.
//
//   rows                        queries and weights              sums
//   float, double, half, fp8    compute_type                     compute_type
//   bf16                        the same, or bf16 where the processor multiplies pairs (bf16_pair.hpp); in float.
//                               Queries are multiplied unscaled, so that those of bf16 elements lose nothing
//   eight bits (quantised.hpp)  16-bit integers, which err by 2^-16 of the largest; exact
//   four or eight, by channel   the same, in channel_stream.hpp
//
// Scores are sums along the rows of k, added across registers at the end, of keys in eight bits across groups of four
// lanes (quantised_stream.hpp). The output is a weighted sum of the rows of v. Both products handle R queries at a time.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/softmax/detail/listed_rows.hpp>

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align"

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether rows of so many columns are read in whole packets: the last one ends with the last column.
template <class T>
constexpr bool in_whole_packets(idx_t cols) {
  return cols % width<T> == 0 || cols > width<T>;
}
/// Whether the same rows are also read in pairs of numbers; their layout alone decides which kernel reads them.
template <class P>
constexpr bool in_whole_pairs(idx_t cols) {
  constexpr idx_t w = width<P>, all = numbers_of<P> * w;
  return numbers_of<P> > 1 && (cols % all == 0 || (cols % w != 0 && cols > all));
}

/// Calls f(integral_constant<int, R>) with the number of rows that are taken next, where `rows` are left: four, two or
/// one. Three that are left are taken together, if so asked: they read rows as nearly in order as four do (float, D
/// 128: 0.62 of the time of two and one). So are eight, and six that are left, where there are registers for their sums
/// (eight, D 128: 0.7 of the time).
template <class T, bool together = false, class F>
ATTN_INLINE void with_row_count(idx_t rows, F&& f) {
  constexpr int most = (std::min)(4, width<T>);
  if constexpr (together && registers >= 32 && width<T> >= 16) {
    if (rows >= 8) return f(std::integral_constant<int, 8>{});
    if (rows == 6) return f(std::integral_constant<int, 6>{});
  }
  if (rows >= most) return f(std::integral_constant<int, most>{});
  if constexpr (most > 2) {
    if constexpr (together)
      if (rows == 3) return f(std::integral_constant<int, 3>{});
    if (rows >= 2) return f(std::integral_constant<int, 2>{});
  }
  f(std::integral_constant<int, 1>{});
}
template <class T, bool together = false>
int row_count(idx_t rows) {
  int count = 0;
  with_row_count<T, together>(rows, [&](auto R) { count = R; });
  return count;
}
/// Runs f(r, integral_constant<int, R>) over all rows, so many at a time.
template <class T, bool together = false, class F>
void by_rows(idx_t rows, F&& f) {
  idx_t r = 0;
  while (r < rows) with_row_count<T, together>(rows - r, [&](auto R) { f(r, R), r += R; });
}

template <class Rows>
using row_element = std::remove_cvref_t<decltype(*std::declval<const Rows&>().row(0))>;

/// The type, besides T, in which queries are multiplied with rows of C.
template <class T, class C>
using stream_operand = std::conditional_t<coded<C>, code_pair,
                                          std::conditional_t<std::same_as<T, double>, T, product_type<C>>>;

/// R queries: row r is data + r * stride, scaled, padded with zeros. Beside it the same queries as operands for rows in
/// fewer bits, and the factors of sums of those.
template <class T, class C>
struct stream_row {
  const T* data;
  idx_t stride;
  stream_operand<T, C>* operands;  // written by the scores of rows with scales for each channel (channel_stream.hpp)
  idx_t operand_stride;
  const float* factors;

  stream_row from(int r) const {
    return {data + r * stride, stride, operands + r * operand_stride, operand_stride, factors + r};
  }
};

/// scores[r][j] = factor q_r . k_j for R rows, with arbitrary values in the scores just beyond the last key: width<T>
/// sums at a time, each along a register, then all added across at once. Some keys at a time share the queries, but one
/// or two queries read one key after another: processors fetch by themselves only what is read in order (one query,
/// D 128, four packets each of four keys in turn: 0.8 of the time from a cache, 1.14 from memory).
template <class P, int R, class Rows, class Prefetcher>
void row_scores(const P* q, idx_t q_stride, sum_type<P> factor, const Rows& k, sum_type<P>* scores,
                const Prefetcher& prefetcher) {
  using T = sum_type<P>;
  Prefetcher values = prefetcher;  // by its members: an argument would be copied in larger parts than it was written
  constexpr int places = static_cast<int>(std::bit_ceil(unsigned(R))), keys = width<T> / places;
  constexpr int few = (std::min)(keys, R > 4 ? 2 : R > 2 ? 4 : 1);
  constexpr bool in_order = !fetches_listed_rows<Prefetcher>;
  constexpr idx_t step = numbers_of<P> * width<T>;
  // The last packet, where it is not whole, without the numbers that the one before has too.
  const idx_t whole = k.cols / step * step;
  using number = std::conditional_t<numbers_of<P> == 1, T, Eigen::bfloat16>;
  using bits = std::conditional_t<numbers_of<P> == 1, typename float_bits<T>::integer, std::int16_t>;
  const idx_t row_bytes = k.cols * idx_t(sizeof *k.row(0));
  const lane_mask<T> rest = last_numbers<T, bits>(k.cols - whole);
  packet<P> last[array_size<R>] = {};  // GCC 16 warns of it otherwise
  if (whole < k.cols)
    for (int r = 0; r < R; ++r) {
      std::memcpy(&last[r], reinterpret_cast<const char*>(q + r * q_stride) + (k.cols - step) * idx_t(sizeof(number)),
                  sizeof last[r]);
      last[r] = keep<T>(last[r], rest);
    }
  // Four or six queries leave no registers for them (0.8 and 0.7 of the time); of eight GCC makes worse code by this.
  const packet<P>* const last_of = R == 4 || R == 6 ? left_in_memory(last) : last;
  for (idx_t j = 0; j < k.rows; j += keys) {
    packet<T> sums[width<T>];
    const int some_keys = few == 1 ? static_cast<int>(std::min<idx_t>(keys, k.rows - j)) : keys;
    for (int first = 0; first < some_keys; first += few) {
      packet<T> some[array_size<R>][array_size<few>];
      unroll<R>([&](auto r) { unroll<few>([&](auto n) { some[r][n] = zero<T>(); }); });
      decltype(k.row(0)) row[array_size<few>];
      for (int n = 0; n < few; ++n) row[n] = k.row((std::min)(j + first + n, k.rows - 1));
      const auto load_numbers = [&](auto n, idx_t d) __attribute__((always_inline)) {
        packet<P> x;
        if constexpr (numbers_of<P> == 1)
          x = load_as<T>(row[n] + d);
        else
          std::memcpy(&x, row[n] + d, sizeof x);
        return loaded_once(x);
      };
      [[maybe_unused]] const char* lines = nullptr;
      if constexpr (in_order) lines = values.next(few * row_bytes, row[0]);
      for (idx_t d = 0; d < whole; d += step) {
        if constexpr (in_order)
          for (int n = 0; n < few; ++n) __builtin_prefetch(lines + n * row_bytes + d * idx_t(sizeof *row[0]), 0, 2);
        packet<P> query[array_size<R>];
        unroll<R>([&](auto r) {
          query[r] = load<P>(q + r * q_stride + d / numbers_of<P>);
          if constexpr (few > 1) query[r] = loaded_once(query[r]);
        });
        unroll<few>([&](auto n) {
          const packet<P> x = load_numbers(n, d);
          unroll<R>([&](auto r) { some[r][n] = multiply_add<P>(query[r], x, some[r][n]); });
        });
      }
      if (whole < k.cols)
        unroll<few>([&](auto n) {
          const packet<P> x = keep<T>(load_numbers(n, k.cols - step), rest);
          unroll<R>([&](auto r) { some[r][n] = multiply_add<P>(last_of[r], x, some[r][n]); });
        });
      unroll<R>([&](auto r) { unroll<few>([&](auto n) { sums[r * keys + first + n] = some[r][n]; }); });
    }
    for (int r = 0; r < R; ++r)
      for (int n = some_keys; n < keys; ++n) sums[r * keys + n] = zero<T>();
    for (int n = R * keys; n < width<T>; ++n) sums[n] = zero<T>();  // three queries leave one place
    alignas(64) T lanes[width<T>];
    store<T>(lanes, mul(sums_across<T>(sums), broadcast<T>(factor)));
    for (int r = 0; r < R; ++r) std::copy_n(lanes + r * keys, keys, scores + r * stream_tile + j);
  }
}

template <int R, class T, class C, class Rows, class Prefetcher>
void stream_scores(const stream_row<T, C>& q, const Rows& k, T* scores, const Prefetcher& values) {
  using P = stream_operand<T, C>;
  if constexpr (std::same_as<row_element<Rows>, C> && numbers_of<P> > 1)
    if (in_whole_pairs<P>(k.cols))
      return row_scores<P, R>(q.operands, q.operand_stride, q.factors[0], k, scores, values);
  row_scores<T, R>(q.data, q.stride, T(1), k, scores, values);
}

/// columns(col, to, to_stride, N) for all columns of R rows of `out`, in N packets, up to Most: it reads what is in
/// `out` from column col on, and writes to `to`. The last packet, where it is not whole, ends with the last column; it
/// comes first and is written to other memory, because the one before has some of its columns.
template <int R, int Packet, int Most, class T, class F>
ATTN_INLINE void by_columns(idx_t cols, T* out, idx_t out_stride, F&& columns) {
  const idx_t whole = cols / Packet * Packet;
  alignas(64) T last[array_size<R * Packet>] = {};
  if (whole < cols) columns(cols - Packet, last, idx_t(Packet), std::integral_constant<int, 1>{});
  idx_t col = 0;
  for (; col + Most * Packet <= whole; col += Most * Packet)
    columns(col, out + col, out_stride, std::integral_constant<int, Most>{});
  if constexpr (constexpr int half = Most / 2; half > 1)
    for (; col + half * Packet <= whole; col += half * Packet)
      columns(col, out + col, out_stride, std::integral_constant<int, half>{});
  for (; col < whole; col += Packet) columns(col, out + col, out_stride, std::integral_constant<int, 1>{});
  for (int r = 0; r < R && whole < cols; ++r)
    std::copy_n(last + r * Packet, Packet, out + r * out_stride + cols - Packet);
}

/// out[r] = out[r] * rescale[r] + sum_j weights[r][j] v_j for R rows. Where `zeros` says that a weight may be 0, values
/// of weight 0 are skipped, because they may be NaN. Where there are more columns than registers for their sums, these
/// are left in memory after some rows, so that values are read nearly in order (4 queries, D 128: 0.65 of the time);
/// more than four queries have too many sums for that, and with 16 registers four have.
template <class T, int R, class Rows, class Prefetcher>
void row_output(const T* weights, bool zeros, const T* rescale, const Rows& v, T* out, idx_t out_stride,
                const Prefetcher& prefetcher) {
  Prefetcher keys = prefetcher;
  constexpr bool few_registers = registers < 32;
  constexpr int most = few_registers ? (R == 1 ? 8 : R <= 3 ? 4 : 2) : R <= 3 ? 8 : R <= 6 ? 4 : 3;
  constexpr bool in_parts = few_registers ? R <= 3 : R > 1 && R <= 4, at_use = R == 1 && few_registers;
  constexpr idx_t most_cols = 256, rows_of_part = R == 1 ? 16 : 4;
  [[maybe_unused]] alignas(64) T sums[array_size<R>][array_size<in_parts ? most_cols + width<T> : 1>];
  // The last packet, where it is not whole, as in by_columns(); its sums come after all others.
  alignas(64) T of_last[array_size<R * width<T>>] = {};
  const idx_t whole = v.cols / width<T> * width<T>;
  const auto columns = [&](idx_t begin, idx_t end, [[maybe_unused]] idx_t at, idx_t col, T* to, idx_t to_stride,
                           auto vectors) {
    constexpr int N = vectors.value;
    packet<T> acc[array_size<R>][array_size<N>];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { acc[r][n] = zero<T>(); }); });
    if constexpr (in_parts)
      if (begin > 0)
        unroll<R>([&](auto r) {
          unroll<N>([&](auto n) { acc[r][n] = load<T>(sums[r] + at + n * width<T>); });
        });
    for (idx_t j = begin; j < end; ++j) {
      const auto x = v.row(j) + col;
      constexpr idx_t bytes = N * width<T> * idx_t(sizeof *v.row(0));
      prefetch_next(keys, bytes, x);
      packet<T> value[array_size<N>];
      const auto load_value = [&](auto n) __attribute__((always_inline)) { return load_as<T>(x + n * width<T>); };
      if constexpr (!at_use) unroll<N>([&](auto n) { value[n] = loaded_once(load_value(n)); });
      unroll<R>([&](auto r) {
        const T weight = weights[r * stream_tile + j];
        if (zeros && weight == T(0)) return;
        unroll<N>([&](auto n) {
          if constexpr (at_use) value[n] = load_value(n);
          acc[r][n] = fma(broadcast<T>(weight), value[n], acc[r][n]);
        });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        if constexpr (in_parts)
          if (end < v.rows) return store<T>(sums[r] + at + n * width<T>, acc[r][n]);
        const packet<T> before = load<T>(out + r * out_stride + col + n * width<T>);
        store<T>(to + r * to_stride + n * width<T>, fma(before, broadcast<T>(rescale[r]), acc[r][n]));
      });
    });
  };
  // One copy for the two places that need it.
  const auto one_packet = [&](idx_t begin, idx_t end, idx_t at, idx_t col, T* to, idx_t to_stride)
      __attribute__((noinline)) { columns(begin, end, at, col, to, to_stride, std::integral_constant<int, 1>{}); };
  const idx_t at_once = in_parts && v.cols > most * width<T> ? rows_of_part : std::max<idx_t>(1, v.rows);
  for (idx_t first = 0, last; first < whole; first = last) {
    last = in_parts ? (std::min)(whole, first + most_cols) : whole;
    for (idx_t begin = 0; begin < v.rows; begin += at_once) {
      const idx_t end = (std::min)(begin + at_once, v.rows);
      idx_t col = first;
      const auto from = [&](idx_t at, auto vectors) {
        columns(begin, end, at - first, at, out + at, out_stride, vectors);
      };
      if (last == whole && whole < v.cols)
        one_packet(begin, end, most_cols, v.cols - width<T>, of_last, width<T>);
      for (; col + most * width<T> <= last; col += most * width<T>) from(col, std::integral_constant<int, most>{});
      if constexpr (most > 4)
        for (; col + 4 * width<T> <= last; col += 4 * width<T>) from(col, std::integral_constant<int, 4>{});
      for (; col < last; col += width<T>) one_packet(begin, end, col - first, col, out + col, out_stride);
    }
  }
  for (int r = 0; r < R && whole < v.cols; ++r)
    std::copy_n(of_last + r * width<T>, width<T>, out + r * out_stride + v.cols - width<T>);
}

/// The same by pairs of rows: in two packets of each row, even columns are combined with even ones and odd columns with
/// odd ones. Whether `zeros` is set because of another row changes no bit of a row's result.
template <int R, class Rows, class Prefetcher>
void pair_output(const float* weights, bool zeros, const float* rescale, const Rows& v, float* out, idx_t out_stride,
                 Prefetcher keys) {
  constexpr int w = width<float>;
  alignas(64) bf16_pair pairs[array_size<R>][array_size<stream_tile / 2>];
  for (int r = 0; r < R; ++r) lanes_to_pairs(weights + r * stream_tile, v.rows, pairs[r]);
  const auto columns = [&](idx_t col, float* to, idx_t to_stride, auto vectors) {
    constexpr int N = vectors.value;
    packet<float> even[array_size<R>][array_size<N>], odd[array_size<R>][array_size<N>];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { even[r][n] = odd[r][n] = zero<float>(); }); });
    for (idx_t j = 0; j < v.rows; j += 2) {
      const Eigen::bfloat16* const x = v.row(j) + col;
      constexpr idx_t bytes = N * 2 * 2 * w * idx_t(sizeof *x);  // of two rows
      prefetch_next(keys, bytes, x);
      const Eigen::bfloat16* const y = j + 1 < v.rows ? v.row(j + 1) + col : nullptr;
      packet<bf16_pair> low[array_size<N>], high[array_size<N>];
      unroll<N>([&](auto n) {
        word_lanes a, b{};
        std::memcpy(&a, x + n * 2 * w, sizeof a);
        if (y) std::memcpy(&b, y + n * 2 * w, sizeof b);
        low[n] = bits_as<packet<float>>((a & 0xffffu) | b << 16);
        high[n] = bits_as<packet<float>>(a >> 16 | (b & 0xffff0000u));
      });
      unroll<R>([&](auto r) {
        const bf16_pair pair = pairs[r][j / 2];
        const packet<bf16_pair> weight = broadcast<bf16_pair>(pair);
        if (const std::uint32_t seen = zeros ? seen_by(pair) : ~0u; seen != ~0u) {
          unroll<N>([&](auto n) {
            const word_lanes of_even = bits_as<word_lanes>(low[n]) & seen, of_odd = bits_as<word_lanes>(high[n]) & seen;
            even[r][n] = multiply_add<bf16_pair>(bits_as<packet<float>>(of_even), weight, even[r][n]);
            odd[r][n] = multiply_add<bf16_pair>(bits_as<packet<float>>(of_odd), weight, odd[r][n]);
          });
          return;
        }
        unroll<N>([&](auto n) {
          even[r][n] = multiply_add<bf16_pair>(low[n], weight, even[r][n]);
          odd[r][n] = multiply_add<bf16_pair>(high[n], weight, odd[r][n]);
        });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        constexpr auto first = [](int i) { return i / 2 + i % 2 * width<float>; };
        constexpr auto second = [](int i) { return (width<float> + i) / 2 + i % 2 * width<float>; };
        const float* const o = out + r * out_stride + col + n * 2 * w;
        float* const result = to + r * to_stride + n * 2 * w;
        const packet<float> factor = broadcast<float>(rescale[r]);
        store<float>(result, fma(load<float>(o), factor, shuffle<float>(even[r][n], odd[r][n], first)));
        store<float>(result + w, fma(load<float>(o + w), factor, shuffle<float>(even[r][n], odd[r][n], second)));
      });
    });
  };
  by_columns<R, 2 * w, (registers < 32 ? 1 : R > 1 ? 2 : 4)>(v.cols, out, out_stride, columns);
}

/// Rows that are taken together, at most.
inline constexpr idx_t rows_together = 8;

/// Properties of some rows of weights.
template <class T>
struct weight_range {
  bool zeros = false;             // whether a weight may be 0
  T largest[rows_together] = {};  // in a row; only for rows in codes
};

/// Multiplies weights with the factors of the rows of v, where they have any; rows of a matrix have none.
template <class Rows>
struct value_factors {
  static constexpr bool in_codes = false;
  explicit value_factors(const Rows&) {}
  template <class P>
  const P& times(const P& weight, idx_t) const {
    return weight;
  }
};

template <int R, class T, class Rows, class Prefetcher>
void stream_output(const T* weights, const weight_range<T>& range, const T* rescale, const Rows& v, T* out,
                   idx_t out_stride, const Prefetcher& keys) {
  if constexpr (numbers_of<stream_operand<T, row_element<Rows>>> > 1)
    if (in_whole_pairs<stream_operand<T, row_element<Rows>>>(v.cols))
      return pair_output<R>(weights, range.zeros, rescale, v, out, out_stride, keys);
  row_output<T, R>(weights, range.zeros, rescale, v, out, out_stride, keys);
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
