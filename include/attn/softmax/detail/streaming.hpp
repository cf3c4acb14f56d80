// attn: exact softmax attention of a few queries, as in decoding: a second kernel beside blockwise.hpp.
//
// With few queries packing the keys does not pay, because the cost is that of reading keys and values once. So they are
// read in place: scores are dot products along the rows of k, the output is a weighted sum of the rows of v, both for
// up to four queries at a time; all query heads of one key head are computed together.
//
// Measured against packing blocks of keys (few_queries.hpp; one Zen 4 core, D 128, 16384 keys, 8 key heads): four
// queries take 0.6 of its time in float and 0.4 in bf16, with 32 query heads 1.3 and 0.9; eight take 0.8, 0.5, 1.5,
// 1.1.
//
// Keys are divided into chunks of stream_chunk, each with a softmax of its own, which are merged in order. Threads may
// share the chunks of one head; the result does not depend on which thread computes which chunk.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/key_span.hpp>
#include <attn/softmax/detail/stream_rows.hpp>
#include <attn/softmax/detail/stream_weights.hpp>
#include <attn/softmax/detail/tile_skip.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t stream_chunk = 2048;  // keys with a softmax of their own

/// The query of a row, at position query + shift. It leaves out tiles as tile_skip::limit says.
struct stream_query {
  idx_t batch, head, query, shift;
  double skip = -1;
};

/// Queries of one key head, and memory to attend them. They are multiplied with rows of elements C. No bit of a row's
/// result depends on other rows, so that those of several batch items may be attended together.
template <class T, class C = T>
struct stream_queries {
  using P = stream_operand<T, C>;
  static constexpr bool in_codes = coded<C>;
  static constexpr bool twice = !std::same_as<P, T>;  // whether they are also stored as operands for rows in fewer bits

  idx_t rows = 0, dim = 0, stride = 0;
  stream_query* of = nullptr;            // [rows]
  T* data = nullptr;                     // [rows][stride], scaled, padded with zeros
  T* relative = nullptr;                 // the same of the queries of relative keys
  P* operands = nullptr;                 // [rows][stride / 2]
  float* factors = nullptr;              // [rows]
  T* scores = nullptr;                   // [rows][stream_tile]
  T *keys = nullptr, *values = nullptr;  // a tile in T, padded, where it cannot be read in place
  bool rotated = false;                  // whether the rows in codes are rotated keys (hadamard.hpp)

  static stream_queries layout(arena& memory, idx_t rows, idx_t dim, idx_t dim_v, bool with_relative = false) {
    constexpr idx_t codes = 8;  // in a word (channel_stream.hpp)
    const idx_t stride = round_up(dim, std::max<idx_t>(2 * width<T>, codes)), few = twice ? rows : 0;
    T* const data = memory.allocate<T>(rows * stride);
    return {.rows = rows, .dim = dim, .stride = stride, .of = memory.allocate<stream_query>(rows), .data = data,
            .relative = with_relative ? memory.allocate<T>(rows * stride) : data,
            .operands = memory.allocate<P>(few * stride / 2), .factors = memory.allocate<float>(few),
            .scores = memory.allocate<T>(rows * stream_tile), .keys = memory.allocate<T>(stream_tile_of<C> * stride),
            .values = memory.allocate<T>(stream_tile_of<C> * round_up(dim_v, width<T>))};
  }

  template <class S>
  void begin(const tensor_view<const S>& q, const tensor_view<const S>& relative_queries, const stream_query& first,
             idx_t count, idx_t per_head, T factor) {
    rows = 0;
    add(q, relative_queries, first, count, per_head, factor);
  }
  /// Adds `count` rows, times `factor`: `per_head` queries from that of `first` on, of the heads from its head on; and
  /// the queries of relative keys, where they are others.
  template <class S>
  void add(const tensor_view<const S>& q, const tensor_view<const S>& relative_queries, const stream_query& first,
           idx_t count, idx_t per_head, T factor) {
    const idx_t begin = std::exchange(rows, rows + count);
    for (idx_t r = begin; r < rows; ++r) {
      const idx_t n = r - begin;
      of[r] = {first.batch, first.head + n / per_head, first.query + n % per_head, first.shift, first.skip};
      if (relative != data) {
        T* const row = load(relative_queries ? relative_queries : q, r, relative);
        for (idx_t d = 0; d < stride; d += width<T>)
          store<T>(row + d, mul(detail::load<T>(row + d), broadcast<T>(factor)));
      }
      T* const row = load(q, r, data);
      if constexpr (in_codes)
        if (rotated) rotate_row(row, dim);
      if constexpr (numbers_of<P> > 1) {
        lanes_to_pairs(row, stride, operands + r * stride / 2);
        factors[r] = factor;
      }
      for (idx_t d = 0; d < stride; d += width<T>)
        store<T>(row + d, mul(detail::load<T>(row + d), broadcast<T>(factor)));
      if constexpr (in_codes) {
        float largest = 0;  // a NaN, if there is one
        for (idx_t d = 0; d < dim; ++d)
          if (!(std::abs(row[d]) <= largest) && largest == largest) largest = std::abs(row[d]);
        factors[r] = round_to_codes(row, stride, largest, row_format<C>::code_most(dim),
                                    operands + r * stride / 2);
      }
    }
  }
  /// Rows [first, first + count).
  stream_queries part(idx_t first, idx_t count) const {
    stream_queries some = *this;
    some.rows = count, some.of += first, some.data += first * stride, some.relative += first * stride;
    if (twice) some.operands += first * stride / 2, some.factors += first;
    return some;
  }
  template <class Score>
  score_terms<T, Score> terms_of(const score_terms<T, Score>& terms, idx_t r) const {
    return terms.for_head(of[r].batch, of[r].head, of[r].shift);
  }
  const T* relative_row(idx_t r) const { return relative + r * stride; }
  stream_row<T, C> row(idx_t r) const {
    if constexpr (!twice) return {data + r * stride, stride, nullptr, 0, nullptr};
    return {data + r * stride, stride, operands + r * stride / 2, stride / 2, factors + r};
  }

 private:
  /// Row r of the queries, into row r of `to`, unscaled.
  template <class S>
  T* load(const tensor_view<const S>& q, idx_t r, T* to) const {
    const matrix_view<const S> x = head_of(q, of[r].batch, of[r].head);
    T* const row = to + r * stride;
    for (idx_t d = 0; d < stride; d += width<T>)
      store<T>(row + d, load_part<T>(x.row(of[r].query) + d * x.col_stride, x.col_stride, dim - d));
    return row;
  }
};

/// The first `count` rows converted into `buffer`; padded where they are shorter than a packet, else with the columns
/// they have, so that sums have the same order as where they are read in place.
template <class T, class Rows>
matrix_view<const T> converted_rows(const Rows& x, idx_t count, T* buffer) {
  const idx_t stride = round_up(x.cols, width<T>);
  for (idx_t r = 0; r < count; ++r)
    for (idx_t c = 0; c < stride; c += width<T>)
      store<T>(buffer + r * stride + c, load_part<T>(x.row(r) + c * x.col_stride, x.col_stride, x.cols - c));
  return {buffer, count, in_whole_packets<T>(x.cols) ? x.cols : stride, stride, 1};
}

/// The same of rows in codes.
template <class T, class Rows>
matrix_view<const T> expanded_rows(const Rows& x, idx_t count, T* buffer) {
  const idx_t stride = round_up(x.cols, width<T>);
  for (idx_t r = 0; r < count && stride != x.cols; ++r) store<T>(buffer + (r + 1) * stride - width<T>, zero<T>());
  x.expand(0, count, buffer, stride);
  return {buffer, count, stride, stride, 1};
}

/// The same of any rows.
template <class T, class Rows>
[[gnu::noinline]] matrix_view<const T> number_rows(const Rows& x, idx_t count, T* buffer) {
  if constexpr (requires { x.expand(0, count, buffer, 0); })
    return expanded_rows(x, count, buffer);
  else
    return converted_rows(x, count, buffer);
}

/// Calls f(tile) with the first `count` rows, of whole packets: in place and in their own type where their layout
/// allows it, else converted into `buffer` and padded.
template <class T, class S, class F>
void with_whole_packets(const matrix_view<const S>& x, idx_t count, T* buffer, bool, F&& f) {
  if (x.col_stride != 1 || !in_whole_packets<T>(x.cols)) return f(converted_rows(x, count, buffer));
  f(matrix_view<const S>{x.data, count, x.cols, x.row_stride, 1});
}
template <class T, class S, class F>
void with_whole_packets(const listed_rows<S>& x, idx_t count, T* buffer, bool, F&& f) {
  if (x.col_stride != 1 || !in_whole_packets<T>(x.cols)) return f(converted_rows(x, count, buffer));
  f(listed_rows<S>{x.at, count, x.cols, 1});
}
/// Rows in codes are used in place too, but for those in a tail, and for values that are stored as keys.
template <class T, class Rows, class Layout, class F>
void with_scattered_rows(const Rows& x, const Layout& layout, bool in_place, idx_t count, T* buffer, F&& f) {
  if constexpr (width<T> >= 4)
    if (in_place) return f(scattered_rows<std::remove_cvref_t<decltype(*x.block(0))>>(x, layout, count));
  f(expanded_rows(x, count, buffer));
}
template <class T, class Rows, class F>
  requires requires(const Rows& x) { x.step; }
void with_whole_packets(const Rows& x, idx_t count, T* buffer, bool keys, F&& f) {
  const bool in_place = x.layout.of_keys == keys && in_whole_packets<T>(x.cols) && !in_tail(x);
  if (in_place && x.step == 1) return f(tile_of(x, count));
  with_scattered_rows(x, x.layout, in_place, count, buffer, f);
}
template <class T, class C, class F>
void with_whole_packets(const listed_codes<C>& x, idx_t count, T* buffer, bool keys, F&& f) {
  const auto first = x.of->from(x.list[0]);
  if (x.adjacent(count)) return with_whole_packets(first, count, buffer, keys, f);
  with_scattered_rows(x, first.layout,
                      first.layout.of_keys == keys && in_whole_packets<T>(x.cols) && !in_tail(first), count, buffer, f);
}

/// Whether the mask hides the tile of rows from `begin` on from every query.
template <class T, class C, class Score>
bool hidden_from_all(const stream_queries<T, C>& q, const index_map& positions, idx_t begin, idx_t count,
                     const score_terms<T, Score>& terms) {
  for (idx_t r = 0; r < q.rows; ++r)
    if (q.terms_of(terms, r).seen(q.of[r].query, count, positions, begin) != mask_coverage::none) return false;
  return true;
}

/// The contiguous rows from j on.
template <class Rows>
auto rows_from(const Rows& x, idx_t j) {
  if constexpr (requires { x.from(j); }) {
    return x.from(j);
  } else {
    Rows rest = x;
    if constexpr (requires { x.at; })
      rest.at += j;
    else if constexpr (requires { x.list; })
      rest.list += j;
    else if constexpr (requires { x.step; })  // in codes
      rest.first += j * x.step;
    else
      rest.data = x.row(j);
    rest.rows -= j;
    return rest;
  }
}

/// What a pass over keys is for: their weights; the same, of tiles that have been counted before; or only to raise the
/// maxima of rows, by which keys that are attended later are left out.
enum class stream_pass { weights, again, maxima };

/// Attends the queries to rows [begin, end) of k and v, which are at positions[row]; where causal, a query sees those
/// up to its own position. `terms` is of any head. Rows are cache_rows, matrices or those in codes; the next call
/// begins with those from `end` up to `wanted_next`: the last tile prefetches some of them (decoding from int8: 0.92 of
/// the time).
template <class T, class C, class Rows, class Score>
[[gnu::noinline]] void attend_stream(const stream_queries<T, C>& q, const Rows& k, const Rows& v,
                                     const index_map& positions, idx_t begin, idx_t end,
                                     const score_terms<T, Score>& terms, const key_limit& limit,
                                     const online_softmax<T>& state, idx_t wanted_next = 0,
                                     stream_pass pass = stream_pass::weights) {
  constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
  constexpr idx_t tile = stream_tile_of<C>;
  const idx_t last = (std::max)(end, wanted_next);
  const bool any_terms = terms.any(), leaves_out = terms.skip.given() || pass == stream_pass::maxima;
  // Rows that one query reads in order, or two short ones, the processor fetches by itself, from their first lines on;
  // it is hindered where more are fetched here (float: 1.2 times the time). Long ones of bf16 pairs too (D 128: 0.84 of
  // the time; D 64: 1.6), but not those of half (D 192: 1.06).
  constexpr bool listed = requires { k.at; } || requires { k.list; };
  constexpr bool of_float = sizeof(C) >= sizeof(float), in_pairs = numbers_of<stream_operand<T, C>> > 1;
  const idx_t row_bytes = q.dim * idx_t(sizeof(C));
  const bool by_itself = !listed && ((of_float && (q.rows == 1 || (q.rows == 2 && row_bytes <= 512))) ||
                                     (in_pairs && q.rows == 1 && row_bytes >= 256));
  const idx_t prefetched =
      by_itself ? ceil_div(idx_t(1024 / sizeof(C)), std::max<idx_t>(1, q.dim)) : tile;
  // Each of the rows prefetches its part of what is needed next: processors stall where too many lines are pending.
  const auto part = [&](idx_t fetched, idx_t row) {
    return fetched <= 0 || row == 0 ? 0 : row == q.rows ? fetched : fetched * row / q.rows;
  };
  idx_t looked_at = 0, left_out = 0;
  bool keeps_tiles = pass != stream_pass::maxima;  // that a row keeps the tile
  for (idx_t count; begin < end; begin += count) {
    const auto k_rows = rows_from(k, begin), v_rows = rows_from(v, begin);
    count = alike(v_rows, alike(k_rows, (std::min)({tile, end - begin, k_rows.rows})));
    const idx_t padded = round_up(count, width<T>), next = begin + count;
    const auto next_rows = next < last ? rows_from(k, next) : decltype(rows_from(k, next)){};
    const idx_t wanted = same_rows(k_rows, v_rows) ? 0 : (std::min)(count, prefetched),
                fetched = (std::min)({prefetched, last - next, next_rows.rows});
    const idx_t looked_at_before = looked_at, left_out_before = left_out;
    if (terms.mask && hidden_from_all(q, positions, begin, count, terms)) continue;
    with_whole_packets<T>(k_rows, count, q.keys, true, [&](const auto& keys) {
      for (idx_t r = 0, rows; r < q.rows; r += rows) {
        rows = row_count<T, !listed>(q.rows - r);
        const auto prefetcher = keeps_tiles ? prefetcher_of(v_rows, part(wanted, r), part(wanted, r + rows))
                                            : prefetcher_of(next_rows, part(fetched, r), part(fetched, r + rows));
        with_row_count<T, !listed>(rows, [&](auto R) {
          stream_scores<R.value>(q.row(r), keys, q.scores + r * stream_tile, prefetcher);
        });
      }
    });
    matrix_view<const T> key_rows{};
    if (terms.by_position) {
      key_rows = number_rows<T>(k_rows, count, q.keys);
      if constexpr (coded<C>)
        for (idx_t n = 0; q.rotated && n < count; ++n) rotate_row_back(q.keys + n * key_rows.row_stride, q.dim);
    }
    const auto seen_by = [&](idx_t r) {
      return std::clamp(limit.end(q.of[r].query + q.of[r].shift, begin + count) - begin, idx_t(0), count);
    };
    // Applies the terms to the scores of row r.
    const auto complete = [&](idx_t r) {
      T* const s = q.scores + r * stream_tile;
      const auto [b, h, i, shift, skip] = q.of[r];
      const idx_t seen = seen_by(r);
      if (terms.by_distance && seen > 0)
        terms.by_distance.add_one_by_one(q.relative_row(r), 1, s, seen, h, i + shift, positions, begin);
      if (terms.by_position && seen > 0)
        terms.by_position.add_one_by_one(key_rows, terms.query_factor(), s, seen, h, i + shift, positions, begin);
      if (any_terms && seen > 0) terms.for_head(b, h, shift).apply(s, seen, i, positions, begin);
      std::fill(s + seen, s + padded, minus_infinity);
    };
    with_whole_packets<T>(v_rows, count, q.values, false, [&](const auto& values) {
      using factors = value_factors<std::remove_cvref_t<decltype(values)>>;
      const factors of_values(values);
      // Turns scores of row r0 + n into weights without a softmax.
      const auto weigh = [&](idx_t r0, idx_t n, weight_range<T>& range, T* sums, T* rescale) {
        T* const s = q.scores + (r0 + n) * stream_tile;
        if constexpr (makes_weights<Score>) terms.score->weigh(s, padded, T(1));
        packet<T> smallest = broadcast<T>(T(1)), largest = zero<T>(), sum = zero<T>();
        for (idx_t j = 0; j < padded; j += width<T>) {
          const packet<T> times = of_values.times(load<T>(s + j), j);
          store<T>(s + j, times);
          smallest = (min)(smallest, abs(times)), largest = (max)(largest, abs(times)), sum = add(sum, times);
        }
        range.largest[n] = std::isnan(sum_lanes(sum)) ? sum_lanes(sum) : max_lanes(largest);
        range.zeros |= !(min_lanes(smallest) >= (std::numeric_limits<T>::min)());
        state.maximum[r0 + n] = rescale[n] = 0, sums[n] = 1;
      };
      // The same with a softmax, where the row does not leave them out: then all are 0. Returns whether it has weights.
      const auto weigh_kept = [&](idx_t r0, idx_t n, weight_range<T>& range, T* sums, T* rescale) {
        const idx_t r = r0 + n;
        T *const s = q.scores + r * stream_tile, *const maximum = state.maximum + r;
        packet<T> largest = broadcast<T>(minus_infinity);
        for (idx_t j = 0; j < padded; j += width<T>) largest = (max)(largest, load<T>(s + j));
        const T highest = (std::max)(*maximum, max_lanes(largest));
        if (pass == stream_pass::maxima) {
          *maximum = highest;
          return false;
        }
        if (const T skip = static_cast<T>(q.of[r].skip); skip >= 0) {
          const T threshold = highest == minus_infinity ? std::numeric_limits<T>::lowest() : highest - skip;
          const bool kept = any_reaches(s, padded, T(1), threshold);
          const idx_t sees = seen_by(r) > 0;
          looked_at += sees, left_out += sees && !kept;
          if (!kept) {
            std::fill_n(s, padded, T(0));
            range.zeros = true, sums[n] = rescale[n] = 0;
            return false;
          }
        }
        softmax_weights<1, C>(s, padded, of_values, maximum, range.zeros, range.largest + n, sums + n, rescale + n);
        return true;
      };
      // The weights of some rows, and the factors of their sums so far. Returns whether there are any.
      const auto weights_of = [&](idx_t r0, idx_t rows, weight_range<T>& range,
                                  T* rescale) __attribute__((noinline)) {
        T sums[rows_together] = {};
        bool kept = true;
        for (idx_t n = 0; n < rows; ++n) complete(r0 + n);
        if constexpr (makes_weights<Score>) {
          for (idx_t n = 0; n < rows; ++n) weigh(r0, n, range, sums, rescale);
        } else if (leaves_out) {
          kept = false;
          for (idx_t n = 0; n < rows; ++n) kept |= weigh_kept(r0, n, range, sums, rescale);
        } else {
          by_rows<T>(rows, [&](idx_t n, auto R) {
            softmax_weights<R.value, C>(q.scores + (r0 + n) * stream_tile, padded, of_values, state.maximum + r0 + n,
                                        range.zeros, range.largest + n, sums + n, rescale + n);
          });
        }
        for (idx_t n = 0; terms.dropout && !makes_weights<Score> && n < rows; ++n) {
          const auto [b, h, i, shift, skip] = q.of[r0 + n];
          if (const idx_t seen = seen_by(r0 + n); seen > 0) {
            terms.for_head(b, h, shift).drop(q.scores + (r0 + n) * stream_tile, seen, i, positions, begin);
            range.zeros = true, range.largest[n] *= T(terms.dropout.factor());
          }
        }
        store<T>(rescale, exp2_weight<T>(load<T>(rescale)));
        for (idx_t n = 0; n < rows; ++n) state.sum[r0 + n] = state.sum[r0 + n] * rescale[n] + sums[n];
        return kept;
      };
      for (idx_t r0 = 0, rows; r0 < q.rows; r0 += rows) {
        rows = row_count<T, !listed>(q.rows - r0);
        alignas(64) T rescale[width<T>] = {};
        weight_range<T> range;
        const bool kept = weights_of(r0, rows, range, rescale);
        auto prefetcher = prefetcher_of(next_rows, part(fetched, r0), part(fetched, r0 + rows));
        if (kept)
          with_row_count<T, !listed>(rows, [&](auto R) {
            static_assert(R.value <= (std::min)(idx_t(width<T>), rows_together));
            stream_output<R.value>(q.scores + r0 * stream_tile, range, rescale, values, state.row(r0), state.stride,
                                   prefetcher);
          });
        else if (keeps_tiles)
          prefetcher.fetch_all();
      }
    });
    keeps_tiles = left_out == left_out_before || left_out - left_out_before < looked_at - looked_at_before;
  }
  if (pass == stream_pass::weights) terms.skip.count(looked_at, left_out);
}

}}}  // namespace attn::ATTN_ISA::detail
