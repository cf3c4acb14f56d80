// attn: one chunk of tokens of kernel attention: the products that take most of the time.
//
// Features of a chunk lie transposed, [feature][chunk]: a token is a lane, so maps, norms, maxima over features and
// exponentials are simple vector code, and the same memory is the left operand of one product and a panel of another.
// With the sums S, z over everything before the chunk and its own features and values:
//
//   1. out_i  = state_factor_i phi(q_i)^T S                                      chunk_tile
//   2.        + own_factor_i sum_{j <= i} score_factor_ij phi(q_i).phi(k_j) v_j   the triangle, where causal
//   3. divided by the same with ones for values
//   4. S, z   = decay S, z + sum_j phi(k_j) v_j^T                                add_keys
//
// For bf16 elements the operands are pairs of bf16 numbers where the processor multiplies those (bf16_pair.hpp):
// features, weights and a copy of the sums are rounded; maxima, sums and denominators stay in T.
//
// No row depends on a later key: panels hold later keys beside earlier ones, but each in a lane of its own, and masked
// values are overwritten, not multiplied by 0.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows prefetched while one tile is computed: so many that all rows of the next chunk are there in time.
inline constexpr idx_t rows_per_tile = 6;

/// z = decay z + sum over `count` tokens of features, each times its entry of `ones` where given; decay[r] of feature
/// r. Lanes from `count` to the next whole vector must be 0.
template <class T>
void add_weights(kernel_sums<T>& sums, const T* features, const T* ones, idx_t count, const T* decay) {
  constexpr int w = width<T>;
  for (idx_t r = 0; r < sums.features; r += w) {
    packet<T> totals[array_size<w>];
    for (int i = 0; i < w; ++i) {
      const T* row = features + (std::min)(r + i, sums.features - 1) * kernel_chunk;
      packet<T> sum = ones ? mul(load<T>(row), load<T>(ones)) : load<T>(row);
      for (idx_t t = w; t < count; t += w)
        sum = ones ? fma(load<T>(row + t), load<T>(ones + t), sum) : add(sum, load<T>(row + t));
      totals[i] = sum;
    }
    T* const z = sums.weights + r;
    store<T>(z, fma(load<T>(z), load<T>(decay + r), sums_across<T>(totals)));
  }
}

/// S = decay S + features^T values of `count` tokens, as operands P.
template <class T, class P>
void add_values(kernel_sums<T>& sums, const P* features, const P* values, idx_t count, const T* decay,
                row_prefetcher<>& prefetch) {
  constexpr int depth = kernel_chunk / numbers_of<P>;
  const idx_t cols = round_up(sums.dim_v, panel_width<T>);
  for (idx_t r = 0; r < sums.features; r += tile_rows)
    for (idx_t col = 0; col < cols; col += widest_tile<P>) {
      const idx_t end = (std::min)(col + widest_tile<P>, cols);
      prefetch.next(rows_per_tile * (end - col) / panel_width<T>);
      products_of_rows<P, panel_width<P>, true>(
          sums.features - r, left_operand<P, depth, 1>{features + r * depth}, values, depth * panel_width<P>, col, end,
          operands<P>(count), [&](auto m, idx_t c, const auto& x) {
            T* const s = &sums.value(r + m, c);
            store<T>(s, fma(load<T>(s), broadcast<T>(decay[r + m]), x));
          });
    }
  sums.empty = sums.empty && count == 0;
}

/// A denominator below this counts as 0, and its row is 0: it has lost its digits, and its inverse could overflow.
template <class T>
inline constexpr T least_denominator = 16 * (std::numeric_limits<T>::min)();

/// Rows [rows][kernel_chunk], of which `count` tokens are in use, by pairs of tokens: [rows][kernel_chunk / 2].
inline void tokens_to_pairs(const float* x, idx_t rows, idx_t count, bf16_pair* pairs) {
  for (idx_t r = 0; r < rows; ++r)
    lanes_to_pairs(x + r * kernel_chunk, round_up(count, width<float>), pairs + r * kernel_chunk / 2);
}
/// The first rows of panels [capacity][panel_width], by pairs of rows.
inline void panels_to_pairs(const float* panels, idx_t rows, idx_t capacity, idx_t cols, bf16_pair* pairs) {
  constexpr idx_t wide = panel_width<float>;
  for (idx_t col = 0; col < cols; col += wide)
    rows_to_pairs(panels + col * capacity, rows, wide, wide, pairs + col * capacity / 2);
}

/// What the products of a chunk multiply: the numbers themselves, or pairs of them. q, q_own and k_own [..][chunk] are
/// by pairs of features, k and weights [..][chunk / 2] by pairs of tokens; values and a copy of the sums in panels are
/// by pairs of rows.
template <class P>
struct chunk_operands {
  P *q = nullptr, *q_own = nullptr, *k_own = nullptr, *k = nullptr, *weights = nullptr, *values = nullptr,
    *sums = nullptr;
};

/// Scratch memory of one worker: one number per token or query of a chunk unless noted. Features for the sums (k_phi,
/// q_phi) and for the chunk itself (k_own, q_own) differ where they have log scales.
template <class T>
struct kernel_scratch {
  T *k_phi, *q_phi, *k_own, *q_own, *k_raw, *q_raw;
  T* values;         // panels [kernel_chunk][panel_width]
  T* score_factor;    // [query][key]
  T *weights, *out;  // of a tile: [tile_rows][kernel_chunk], [tile_rows][stride]
  T *row_decay, *factors, *map;
  T *k_shift, *k_max, *running_max, *gates, *decay, *q_shift, *q_max, *own_max, *den, *state_factor, *own_factor, *eps;
  T* log_weights;
  idx_t stride;
  chunk_operands<bf16_pair> pairs{};  // where elements are multiplied as such

  /// f(pairs), where there are any.
  template <class F>
  ATTN_INLINE void if_paired(F&& f) const {
    if constexpr (has_pairs<T>)
      if (pairs.q) f(pairs);
  }

  static kernel_scratch layout(arena& memory, idx_t features, idx_t dim_v, idx_t map_work, bool log_scaled,
                               bool paired = false) {
    kernel_scratch s;
    const idx_t phi = (features + tile_rows) * kernel_chunk, lanes = kernel_sums<T>::lanes(features);
    s.stride = round_up(dim_v, panel_width<T>);
    const auto allocate = [&](idx_t count, std::initializer_list<T**> arrays) {
      for (T** each : arrays) *each = memory.allocate<T>(count);
    };
    allocate(phi, {&s.k_phi, &s.q_phi});
    s.k_own = s.k_phi, s.q_own = s.q_phi;
    if (log_scaled) allocate(phi, {&s.k_own, &s.q_own, &s.k_raw, &s.q_raw});
    allocate(kernel_chunk * s.stride, {&s.values});
    allocate(kernel_chunk * kernel_chunk, {&s.score_factor});
    allocate(tile_rows * kernel_chunk, {&s.weights});
    allocate(tile_rows * s.stride, {&s.out});
    allocate(lanes, {&s.row_decay});
    allocate(2 * lanes, {&s.factors});
    allocate(map_work, {&s.map});
    allocate(kernel_chunk, {&s.k_shift, &s.k_max, &s.running_max, &s.gates, &s.decay, &s.q_shift, &s.q_max, &s.own_max,
                            &s.den, &s.state_factor, &s.own_factor, &s.eps});
    s.log_weights = s.gates;  // features with log scales have no gates
    if (!has_pairs<T> || !paired) return s;
    chunk_operands<bf16_pair>& x = s.pairs;
    const auto allocate_pairs = [&](idx_t count, std::initializer_list<bf16_pair**> arrays) {
      for (bf16_pair** each : arrays) *each = memory.allocate<bf16_pair>(count / 2);
    };
    allocate_pairs(phi, {&x.q, &x.k_own, &x.k});
    x.q_own = x.q;
    if (log_scaled) allocate_pairs(phi, {&x.q_own});
    allocate_pairs(tile_rows * kernel_chunk, {&x.weights});
    allocate_pairs(kernel_chunk * s.stride, {&x.values});
    allocate_pairs(kernel_sums<T>::value_count(features, dim_v), {&x.sums});
    return s;
  }
};

/// Converts what the queries of a chunk read to bf16 pairs: its own keys, of which there may be none, and the sums, if
/// any.
template <class T>
void pair_keys(const kernel_scratch<T>& s, idx_t features, idx_t keys, const kernel_sums<T>* sums) {
  s.if_paired([&](const auto& x) {
    if (keys > 0) rows_to_pairs(s.k_own, features, round_up(keys, panel_width<T>), kernel_chunk, x.k_own);
    if (sums) panels_to_pairs(sums->values, features, sums->rows(), sums->dim_v, x.sums);
  });
}
template <class T>
void pair_queries(const kernel_scratch<T>& s, idx_t features, idx_t count, bool keys, bool sums) {
  s.if_paired([&](const auto& x) {
    const idx_t lanes = round_up(count, width<T>);
    if (sums || s.q_own == s.q_phi) rows_to_pairs(s.q_phi, features, lanes, kernel_chunk, x.q);
    if (keys && s.q_own != s.q_phi) rows_to_pairs(s.q_own, features, lanes, kernel_chunk, x.q_own);
  });
}
template <class T>
void pair_values(const kernel_scratch<T>& s, idx_t count, idx_t dim_v) {
  s.if_paired([&](const auto& x) { panels_to_pairs(s.values, count, kernel_chunk, dim_v, x.values); });
}

/// Step 4.
template <class T>
void add_keys(kernel_sums<T>& sums, const kernel_scratch<T>& s, idx_t count, row_prefetcher<>& prefetch) {
  add_weights<T>(sums, s.k_phi, nullptr, count, s.row_decay);
  if constexpr (has_pairs<T>)
    if (s.pairs.q) {
      tokens_to_pairs(s.k_phi, sums.features, count, s.pairs.k);
      return add_values(sums, s.pairs.k, s.pairs.values, count, s.row_decay, prefetch);
    }
  add_values(sums, s.k_phi, s.values, count, s.row_decay, prefetch);
}

/// A chunk with gates: score_factor_ij = own_j g_(j+1) ... g_i, own_j = 1 or 1 - g_j; decay_i = g_0 ... g_i. Both
/// are 0 beyond `count`, where whole vectors and pairs read them.
template <class T>
void gate_factors(const T* gates, idx_t count, bool complement, T* score_factor, T* decay) {
  std::fill(decay + count, decay + kernel_chunk, T(0));
  std::fill(score_factor + count * kernel_chunk, score_factor + kernel_chunk * kernel_chunk, T(0));
  for (idx_t i = 0; i < count; ++i) {
    T* const row = score_factor + i * kernel_chunk;
    if (i == 0) std::fill_n(row, kernel_chunk, T(0));
    const packet<T> g = broadcast<T>(gates[i]);
    for (idx_t n = 0; i > 0 && n < kernel_chunk; n += width<T>)
      store<T>(row + n, mul(g, load<T>(row + n - kernel_chunk)));
    row[i] = complement ? T(1) - gates[i] : T(1);
    decay[i] = i > 0 ? decay[i - 1] * gates[i] : gates[i];
  }
}

/// What a tile of queries reads besides the scratch memory.
template <class T>
struct chunk_view {
  const kernel_sums<T>* sums;  // null: no key came before
  idx_t keys;                  // of the chunk itself; 0: no triangle
  bool weighed;                // whether the triangle has factors score_factor
  bool finite;                 // whether every value is finite
  bool normalise;
  idx_t features, dim_v;
};

/// den[i] = sum over r of features[r][i] z[r] for i < lanes.
template <class T>
void read_weights(const T* features, const T* z, idx_t count, idx_t lanes, T* den) {
  constexpr int packets = kernel_chunk / width<T>, some = packets < 4 ? packets : 4;
  for (idx_t t = 0; t < lanes; t += some * width<T>) {
    packet<T> sum[array_size<some>];
    for (int n = 0; n < some; ++n) sum[n] = zero<T>();
    for (idx_t r = 0; r < count; ++r)
      for (int n = 0; n < some; ++n)
        sum[n] = fma(load<T>(features + r * kernel_chunk + t + n * width<T>), broadcast<T>(z[r]), sum[n]);
    for (int n = 0; n < some; ++n) store<T>(den + t + n * width<T>, sum[n]);
  }
}

/// weights[m] = score_factor * (row r0 + m of q_own).(keys up to it), 0 beyond, and their sums.
template <class T, class P>
void own_weights(const chunk_view<T>& c, const kernel_scratch<T>& s, const chunk_operands<P>& x, idx_t r0, idx_t rows,
                 T* sums) {
  const idx_t limit = (std::min)(r0 + rows, c.keys);
  T *const weights = s.weights, *const score_factor = s.score_factor;
  products_of_rows<P, kernel_chunk, true>(
      rows, left_operand<P, 1, kernel_chunk>{x.q_own + r0}, x.k_own, panel_width<P>, 0,
      round_up(limit, panel_width<T>), operands<P>(c.features),
      [&](auto m, idx_t n, const auto& sum) { store<T>(weights + m * kernel_chunk + n, sum); });
  const idx_t padded = round_up(limit, width<T>);
  for (idx_t m = 0; m < rows; ++m) {
    T* const row = weights + m * kernel_chunk;
    const idx_t seen = (std::min)(r0 + m + 1, c.keys);
    if (c.weighed)
      for (idx_t n = 0; n < seen; n += width<T>)
        store<T>(row + n, mul(load<T>(row + n), load<T>(score_factor + (r0 + m) * kernel_chunk + n)));
    std::fill(row + seen, row + padded, T(0));
    packet<T> sum = zero<T>();
    for (idx_t n = 0; n < seen; n += width<T>) sum = add(sum, load<T>(row + n));
    sums[m] = sum_lanes(sum);
    if constexpr (numbers_of<P> > 1) lanes_to_pairs(row, padded, x.weights + m * kernel_chunk / 2);
  }
}

/// Rows [r0, r0 + rows) of the chunk, rows <= tile_rows, into out [tile_rows][stride], and their denominators den[m].
template <class T, class P>
void chunk_tile(const chunk_view<T>& c, const kernel_scratch<T>& s, const chunk_operands<P>& by, idx_t r0, idx_t rows,
                T* den, T* out, idx_t stride) {
  alignas(64) T own_sum[tile_rows] = {}, state_part[tile_rows] = {}, own_part[tile_rows] = {};
  const idx_t limit = (std::min)(r0 + rows, c.keys);
  if (c.keys > 0) own_weights(c, s, by, r0, rows, own_sum);
  for (idx_t m = 0; m < rows; ++m) {
    const T a = c.sums ? s.state_factor[r0 + m] : T(0), b = c.keys > 0 ? s.own_factor[r0 + m] : T(0);
    den[m] = (c.sums ? a * s.den[r0 + m] : T(0)) + (c.keys > 0 ? b * own_sum[m] : T(0));
    const T whole = den[m] + s.eps[r0 + m];
    const T normal = !c.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    state_part[m] = a * normal;
    own_part[m] = b * normal;
  }
  constexpr int depth = kernel_chunk / numbers_of<P>;
  const auto add_own = [&](idx_t col, idx_t m, idx_t half, const packet<T>& x) {
    T* const o = out + m * stride + col + half * width<T>;
    store<T>(o, fma(x, broadcast<T>(own_part[m]), load<T>(o)));
  };
  const left_operand<P, depth, 1> left{by.weights};
  const idx_t cols = round_up(c.dim_v, panel_width<T>);
  if (c.sums)
    products_of_rows<P, panel_width<P>, true>(
        rows, left_operand<P, 1, kernel_chunk>{by.q + r0}, by.sums, operands<P>(c.sums->rows()) * panel_width<P>, 0,
        cols, operands<P>(c.features), [&](auto m, idx_t col, const auto& x) {
          store<T>(out + m * stride + col, mul(x, broadcast<T>(state_part[m])));
        });
  else
    for (idx_t m = 0; m < rows; ++m) std::fill_n(out + m * stride, cols, T(0));
  if (limit > 0 && c.finite)
    products_of_rows<P, panel_width<P>, true>(
        rows, left, by.values, depth * panel_width<P>, 0, cols, operands<P>(limit),
        [&](auto m, idx_t col, const auto& x) { add_own(col, m, 0, x); });
  for (idx_t col = 0; col < c.dim_v && limit > 0 && !c.finite; col += panel_width<T>) {
    const P* const panel = by.values + col * depth;
    // key by key, without the masked ones: the same sums, to the last bit
    if constexpr (numbers_of<P> > 1) {
      const auto seen = [&](idx_t m, idx_t k) -> std::uint32_t {
        const idx_t keys = (std::min)(r0 + m + 1, c.keys) - 2 * k;
        return keys > 1 ? 0xffffffffu : keys > 0 ? 0xffffu : 0;
      };
      seen_product<kernel_chunk / 2>(left, rows, panel, 2, operands<P>(limit), seen,
                                     [&](idx_t m, idx_t half, const packet<T>& x) { add_own(col, m, half, x); });
    } else {
      for (idx_t m = 0; m < rows; ++m)
        unroll<2>([&](auto half) {
          packet<T> x = zero<T>();
          for (idx_t n = 0; n < (std::min)(r0 + m + 1, c.keys); ++n)
            x = fma(broadcast<T>(left.at(static_cast<int>(m), n)),
                    load<T>(panel + n * panel_width<T> + half * width<T>), x);
          add_own(col, m, half, x);
        });
    }
  }
}
template <class T>
void chunk_tile(const chunk_view<T>& c, const kernel_scratch<T>& s, idx_t r0, idx_t rows, T* den, T* out,
                idx_t stride) {
  if constexpr (has_pairs<T>)
    if (s.pairs.q) return chunk_tile(c, s, s.pairs, r0, rows, den, out, stride);
  const chunk_operands<T> numbers{s.q_phi, s.q_own, s.k_own, s.k_phi, s.weights, s.values,
                                  c.sums ? c.sums->values : nullptr};
  chunk_tile(c, s, numbers, r0, rows, den, out, stride);
}

}}}  // namespace attn::ATTN_ISA::detail
