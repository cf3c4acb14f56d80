// attn: the backward pass of one chunk of tokens of kernel attention: the products that take most of the time.
//
// As in chunk.hpp a token is a lane: [feature][chunk]. S, z are the sums of the keys before the chunk; R, y those of
// the queries after it: R = sum_i phi(q_i) n_i d_out_i^T, y = -sum_i phi(q_i) n_i D_i, n_i = 1 / (phi(q_i)^T z + eps)
// and D_i = d_out_i . out_i. Within the chunk, a key j and a query i >= j have A_ji = phi(k_j).phi(q_i) and G_ji =
// v_j.d_out_i:
//
//   1. d phi(q_i) = n_i (S d_out_i - D_i z) + sum_j phi(k_j) n_i (G_ji - D_i)       of_sums, weighted_features
//   2. d phi(k_j) = R v_j + y               + sum_i phi(q_i) n_i (G_ji - D_i)
//   3. d v_j      = phi(k_j)^T R            + sum_i n_i A_ji d_out_i                rows_of_sums, add_score_rows
//
// n_i includes all factors of key and query: gates and, where features are exponentials, their scales.
//
// For bf16 elements the operands of these products are converted to pairs of bf16 numbers just before (bf16_pair.hpp),
// which takes little time compared with a product over 64 tokens, features or dims. Sums, n_i and D_i stay in T.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/kernel/detail/chunk.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows prefetched while one tile of a product with sums is computed: there are two such products per chunk.
inline constexpr idx_t rows_per_sums_tile = rows_per_tile / 2;

/// body(r, t, r * kernel_chunk + t) for every packet of `rows` rows.
template <class T, class Body>
ATTN_INLINE void each_packet(idx_t rows, idx_t lanes, Body&& body) {
  for (idx_t r = 0; r < rows; ++r)
    for (idx_t t = 0; t < lanes; t += width<T>) body(r, t, r * kernel_chunk + t);
}

/// Memory for both operands of a product as pairs; null where operands are the numbers themselves.
struct operand_pairs {
  bf16_pair *left = nullptr, *right = nullptr;
  explicit operator bool() const { return left != nullptr; }
};

/// Calls multiply(left, right); where operands are pairs, first convert(pairs of left, pairs of right), then multiply
/// with those.
template <class T, class Convert, class Multiply>
ATTN_INLINE void multiply_as(const operand_pairs& pairs, const T* left, const T* right, Convert&& convert,
                             Multiply&& multiply) {
  if constexpr (has_pairs<T>)
    if (pairs) {
      convert(pairs.left, pairs.right);
      return multiply(pairs.left, pairs.right);
    }
  multiply(left, right);
}

/// S [feature][value] as left operand, in place, in panels.
template <class P>
struct sums_operand {
  const P* data;
  idx_t panel;
  ATTN_INLINE P at(int m, idx_t k) const {
    constexpr idx_t wide = operands<P>(panel_width<P>);
    return data[k / wide * panel + k % wide + m * wide];
  }
};

/// to[r][t] = sum over d of S[r][d] columns[d][t].
template <class T>
void of_sums(const kernel_sums<T>& sums, const T* columns, idx_t lanes, T* to, row_prefetcher<>& prefetch,
             const operand_pairs& pairs) {
  const auto convert = [&](auto* left, auto* right) {
    lanes_to_pairs(sums.values, kernel_sums<T>::value_count(sums.features, sums.dim_v), left);
    rows_to_pairs(columns, sums.dim_v, round_up(lanes, panel_width<T>), kernel_chunk, right);
  };
  const auto multiply = [&]<class P>(const P* values, const P* right) {
    for (idx_t r = 0; r < sums.features; r += tile_rows) {
      prefetch.next(rows_per_sums_tile * ceil_div(lanes, panel_width<T>));
      const sums_operand<P> left{values + operands<P>(r * panel_width<T>), operands<P>(sums.rows() * panel_width<T>)};
      products_of_rows<P, kernel_chunk, true>(
          sums.features - r, left, right, panel_width<P>, 0, round_up(lanes, panel_width<P>), operands<P>(sums.dim_v),
          [&](auto m, idx_t t, const auto& x) { store<T>(to + (r + m) * kernel_chunk + t, x); });
    }
  };
  multiply_as(pairs, static_cast<const T*>(sums.values), columns, convert, multiply);
}

/// to[t][d] = sum over r of features[r][t] R[r][d], rows `stride` apart; or += that.
template <class T>
void rows_of_sums(const kernel_sums<T>& sums, const T* features, idx_t count, bool added, T* to, idx_t stride,
                  row_prefetcher<>& prefetch, const operand_pairs& pairs) {
  const auto convert = [&](auto* left, auto* right) {
    rows_to_pairs(features, sums.features, round_up(count, width<T>), kernel_chunk, left);
    panels_to_pairs(sums.values, sums.features, sums.rows(), sums.dim_v, right);
  };
  const auto multiply = [&]<class P>(const P* left, const P* values) {
    for (idx_t t = 0; t < count; t += tile_rows) {
      prefetch.next(rows_per_sums_tile * ceil_div(sums.dim_v, panel_width<T>));
      products_of_rows<P, panel_width<P>, true>(
          count - t, left_operand<P, 1, kernel_chunk>{left + t}, values, operands<P>(sums.rows()) * panel_width<P>, 0,
          round_up(sums.dim_v, panel_width<P>), operands<P>(sums.features), [&](auto m, idx_t col, const auto& x) {
            T* const at = to + (t + m) * stride + col;
            store<T>(at, added ? add(load<T>(at), x) : x);
          });
    }
  };
  multiply_as(pairs, features, static_cast<const T*>(sums.values), convert, multiply);
}

/// S = decay S + features^T values of `count` tokens, features [feature][chunk], values in panels.
template <class T>
void add_to_sums(kernel_sums<T>& sums, const T* features, const T* panels, idx_t count, const T* decay,
                 row_prefetcher<>& prefetch, const operand_pairs& pairs) {
  const auto convert = [&](auto* left, auto* right) {
    tokens_to_pairs(features, sums.features, count, left);
    panels_to_pairs(panels, count, kernel_chunk, sums.dim_v, right);
  };
  const auto multiply = [&](const auto* left, const auto* right) {
    add_values(sums, left, right, count, decay, prefetch);
  };
  multiply_as(pairs, features, panels, convert, multiply);
}

/// to[j][i] = sum over k < depth of of_keys[k][j] of_queries[k][i] for j < count and the lanes from j on: the
/// products of each key and the queries that see it.
template <class T>
void key_scores(const T* of_keys, const T* of_queries, idx_t depth, idx_t count, T* to, const operand_pairs& pairs) {
  const auto convert = [&](auto* left, auto* right) {
    rows_to_pairs(of_keys, depth, round_up(count, width<T>), kernel_chunk, left);
    rows_to_pairs(of_queries, depth, round_up(count, panel_width<T>), kernel_chunk, right);
  };
  const auto multiply = [&]<class P>(const P* left, const P* right) {
    for (idx_t j = 0; j < count; j += tile_rows)
      for (idx_t i = j / panel_width<T> * panel_width<T>; i < count; i += panel_width<T>)
        with_tile_height(std::min<idx_t>(tile_rows, count - j), [&](auto M) {
          tile_product<P, M.value, 2, kernel_chunk>(left_operand<P, 1, kernel_chunk>{left + j}, right + i,
                                                    operands<P>(depth), [&](auto m, auto half, const auto& x) {
                                                      store<T>(to + (j + m) * kernel_chunk + i + half * width<T>, x);
                                                    });
        });
  };
  multiply_as(pairs, of_keys, of_queries, convert, multiply);
}

/// Over which tokens a product within a chunk sums, for each lane.
enum class triangle_side {
  keys_before,    // lanes are queries: keys up to the lane
  queries_after,  // lanes are keys: queries from the lane on
};

/// to[r][t] = factor[r][t] sum over u of features[r][u] weights[u][t], u up to t or from t on; or += that. Weights on
/// the other side are 0, and with `finite` features their products are 0. Without `factor` it is 1.
template <triangle_side Side, class T>
void weighted_features(const T* features, idx_t rows, const T* weights, idx_t count, bool finite, const T* factor,
                       bool added, T* to, const operand_pairs& pairs) {
  constexpr idx_t wide = panel_width<T>;
  constexpr bool before = Side == triangle_side::keys_before;
  const auto sum_of = [&](idx_t at, const packet<T>& x) {
    const packet<T> old = added || !finite ? load<T>(to + at) : zero<T>();
    return factor ? fma(load<T>(factor + at), x, old) : add(old, x);
  };
  if (!added && !finite) std::fill_n(to, rows * kernel_chunk, T(0));
  /// take(at, packet) takes the sums of the panel of lanes from t on.
  const auto multiply_panel = [&]<class P>(const P* left, const P* right, idx_t t, const auto& take) {
    const idx_t begin = before ? 0 : t, end = before ? (std::min)(t + wide, count) : count;
    constexpr int stride = kernel_chunk / numbers_of<P>;
    for (idx_t r = 0; r < rows; r += tile_rows)
      with_tile_height(std::min<idx_t>(tile_rows, rows - r), [&](auto M) {
        tile_product<P, M.value, 2, kernel_chunk>(
            left_operand<P, stride, 1>{left + r * stride + operands<P>(begin)},
            right + operands<P>(begin) * kernel_chunk + t, operands<P>(end - begin),
            [&](auto m, auto half, const auto& x) { take((r + m) * kernel_chunk + t + half * width<T>, x); });
      });
  };
  const auto convert = [&](auto* left, auto* right) {
    tokens_to_pairs(features, rows, count, left);
    rows_to_pairs(weights, count, kernel_chunk, kernel_chunk, right);
  };
  const auto multiply = [&](auto* left, auto* right) {
    using P = std::remove_const_t<std::remove_pointer_t<decltype(left)>>;
    if (finite) {
      for (idx_t t = 0; t < count; t += wide)
        multiply_panel(left, right, t, [&](idx_t at, const packet<T>& x) { store<T>(to + at, sum_of(at, x)); });
    } else if constexpr (numbers_of<P> > 1) {
      // Lane by lane, skipping the other tokens: the same sums, to the last bit.
      for (idx_t t = 0; t < count; ++t) {
        convert(left, right);
        for (idx_t r = 0; r < rows; ++r)
          for (idx_t k = 0; k < operands<P>(count); ++k) {
            const auto seen = [&](idx_t u) { return before ? u <= t : u >= t; };
            left[r * kernel_chunk / 2 + k].bits &= (seen(2 * k) ? 0xffffu : 0) | (seen(2 * k + 1) ? 0xffff0000u : 0);
          }
        multiply_panel(left, right, t / wide * wide, [&](idx_t at, const packet<T>& x) {
          const idx_t lane = t - at % kernel_chunk;
          if (lane < 0 || lane >= width<T>) return;
          alignas(64) T lanes[width<T>];
          store<T>(lanes, sum_of(at, x));
          to[at + lane] = lanes[lane];
        });
      }
    } else {
      alignas(64) T position[kernel_chunk];
      for (int t = 0; t < kernel_chunk; ++t) position[t] = static_cast<T>(t);
      for (idx_t t = 0; t < count; t += width<T>) {
        const idx_t begin = before ? 0 : t, end = before ? std::min<idx_t>(t + width<T>, count) : count;
        for (idx_t r = 0; r < rows; ++r) {
          packet<T> sum = zero<T>();
          for (idx_t u = begin; u < end; ++u) {
            const packet<T> lane = load<T>(position + t), other = broadcast<T>(position[u]);
            const packet<T> next =
                fma(broadcast<T>(left[r * kernel_chunk + u]), load<T>(right + u * kernel_chunk + t), sum);
            sum = before ? if_less(lane, other, sum, next) : if_less(other, lane, sum, next);
          }
          store<T>(to + r * kernel_chunk + t, sum_of(r * kernel_chunk + t, sum));
        }
      }
    }
  };
  multiply_as(pairs, features, weights, convert, multiply);
}

/// to[j][d] = sum over i >= j of weights[j][i] values[i][d], values in panels; or += that.
template <class T>
void add_score_rows(const T* weights, const T* values, idx_t dim_v, idx_t count, bool finite, bool added, T* to,
                    idx_t stride, const operand_pairs& pairs) {
  constexpr idx_t wide = panel_width<T>;
  const auto convert = [&](auto* left, auto* right) {
    tokens_to_pairs(weights, count, count, left);
    panels_to_pairs(values, count, kernel_chunk, dim_v, right);
  };
  const auto multiply = [&]<class P>(const P* left, const P* right) {
    constexpr int row = kernel_chunk / numbers_of<P>;
    for (idx_t col = 0; col < dim_v; col += wide) {
      const P* const panel = right + operands<P>(col * kernel_chunk);
      for (idx_t j = 0; j < count; j += tile_rows) {
        const idx_t rows = std::min<idx_t>(tile_rows, count - j);
        const left_operand<P, row, 1> from{left + j * row + operands<P>(j)};
        const P* const below = panel + operands<P>(j) * wide;
        const auto take = [&](idx_t m, idx_t half, const packet<T>& x) {
          T* const at = to + (j + m) * stride + col + half * width<T>;
          store<T>(at, add(added ? load<T>(at) : zero<T>(), x));
        };
        if (finite) {
          with_tile_height(rows, [&](auto M) {
            tile_product<P, M.value, 2>(from, below, operands<P>(count - j),
                                        [&](auto m, auto half, const auto& x) { take(m, half, x); });
          });
        } else if constexpr (numbers_of<P> > 1) {
          const auto seen = [](idx_t m, idx_t k) {
            return (2 * k >= m ? 0xffffu : 0) | (2 * k + 1 >= m ? 0xffff0000u : 0);
          };
          seen_product<kernel_chunk / 2>(from, rows, below, 2, operands<P>(count - j), seen, take);
        } else {
          for (idx_t m = 0; m < rows; ++m)
            unroll<2>([&](auto half) {
              packet<T> x = zero<T>();
              for (idx_t i = m; i < count - j; ++i)
                x = fma(broadcast<T>(from.at(static_cast<int>(m), i)), load<T>(below + i * wide + half * width<T>), x);
              take(m, half, x);
            });
        }
      }
    }
  };
  multiply_as(pairs, weights, values, convert, multiply);
}

/// to[i + n][j + m] = from[j + m][i + n] for one packet of rows and columns.
template <class T>
ATTN_INLINE void transpose_tile(const T* from, idx_t j, idx_t i, T* to) {
  packet<T> square[array_size<width<T>>];
  for (idx_t n = 0; n < width<T>; ++n) square[n] = load<T>(from + (j + n) * kernel_chunk + i);
  transpose<T>(square);
  for (idx_t n = 0; n < width<T>; ++n) store<T>(to + (i + n) * kernel_chunk + j, square[n]);
}
/// to[i][j] = scores[j][i] for i >= j and the lanes of its panel, which are 0.
template <class T>
void transpose_scores(const T* scores, idx_t count, T* to) {
  for (idx_t j = 0; j < count; j += width<T>)
    for (idx_t i = j / panel_width<T> * panel_width<T>; i < count; i += width<T>) transpose_tile(scores, j, i, to);
}
/// to[j][i] = factors[i][j] for j <= i and the lanes before it in its vector.
template <class T>
void transpose_factors(const T* factors, idx_t count, T* to) {
  for (idx_t i = 0; i < count; i += width<T>)
    for (idx_t j = 0; j <= i; j += width<T>) transpose_tile(factors, i, j, to);
}

/// dot[t] = sum over r < rows of x[r][t] y[r][t].
template <class T>
void dot_features(const T* x, const T* y, idx_t rows, idx_t lanes, T* dot) {
  for (idx_t t = 0; t < lanes; t += width<T>) {
    packet<T> even = zero<T>(), odd = zero<T>();
    const auto term = [&](idx_t r, const packet<T>& sum) {
      return fma(load<T>(x + r * kernel_chunk + t), load<T>(y + r * kernel_chunk + t), sum);
    };
    for (idx_t r = 0; r + 1 < rows; r += 2) even = term(r, even), odd = term(r + 1, odd);
    if (rows % 2) even = term(rows - 1, even);
    store<T>(dot + t, add(even, odd));
  }
}

/// size[t] = sum over r < rows of |x[r][t]|.
template <class T>
void row_sizes(const T* x, idx_t rows, T* size) {
  std::fill_n(size, kernel_chunk, T(0));
  for (idx_t r = 0; r < rows; ++r)
    for (idx_t t = 0; t < kernel_chunk; t += width<T>)
      store<T>(size + t, add(load<T>(size + t), abs(load<T>(x + r * kernel_chunk + t))));
}

/// Is every number of the first `lanes` of each row finite?
template <class T>
bool all_finite(const T* rows, idx_t count, idx_t lanes) {
  packet<T> trace = zero<T>();  // 0 * x is NaN for an x that is not finite, and stays
  for (idx_t r = 0; r < count; ++r)
    for (idx_t t = 0; t < lanes; t += width<T>) trace = fma(load<T>(rows + r * kernel_chunk + t), zero<T>(), trace);
  return sum_lanes(trace) == T(0);
}

/// Scratch memory of one worker beside the forward pass's; one number per token of a chunk unless noted.
template <class T>
struct kernel_backward_scratch {
  kernel_scratch<T> forward;
  T *q_d, *k_d;              // gradients of features
  T *q_later, *k_later;      // features of queries for R, n_i included; those of keys for R
  T *v_columns, *d_columns;  // values and d_out [value dim][chunk]
  T* d_panels;               // d_out as panels
  T *scores, *products, *products_t, *factors;  // [key][query], [key][query], [query][key], [key][query]
  T *dv, *dx;                // rows [chunk][stride], columns [dim][chunk]
  T *dot, *normal, *sums_normal, *own_normal, *delta, *minus_delta, *log_scale, *row_normal, *key_factor, *d_sizes;
  T *gate_scores, *gate_queries, *gate_keys;  // for the gradient of gates: see gate_gradients.hpp
  operand_pairs operands{};                  // of one product at a time, where elements are multiplied as bf16 pairs

  static kernel_backward_scratch layout(arena& memory, const kernel_scratch<T>& forward, const attention_shape& shape,
                                        idx_t features, bool log_scaled, bool gated, bool paired) {
    kernel_backward_scratch x;
    x.forward = forward;
    const idx_t phi = (features + tile_rows) * kernel_chunk, square = kernel_chunk * kernel_chunk;
    const auto allocate = [&](idx_t count, std::initializer_list<T**> arrays) {
      for (T** each : arrays) *each = memory.allocate<T>(count);
    };
    allocate(phi, {&x.q_d, &x.k_d});
    x.q_later = forward.q_phi, x.k_later = forward.k_phi;  // no longer needed when these are computed
    if (!log_scaled) allocate(phi, {&x.q_later});
    if (gated) allocate(phi, {&x.k_later});
    allocate((shape.dim_v + tile_rows) * kernel_chunk, {&x.v_columns, &x.d_columns});
    allocate(kernel_chunk * forward.stride, {&x.d_panels, &x.dv});
    allocate(square, {&x.scores, &x.products, &x.products_t, &x.factors});
    allocate((shape.dim + tile_rows) * kernel_chunk, {&x.dx});
    allocate(kernel_chunk, {&x.dot, &x.normal, &x.sums_normal, &x.own_normal, &x.delta, &x.minus_delta, &x.log_scale,
                            &x.row_normal, &x.key_factor, &x.d_sizes, &x.gate_queries, &x.gate_keys});
    allocate(gated ? square : 0, {&x.gate_scores});
    if (has_pairs<T> && paired) {
      constexpr idx_t wide = panel_width<T>;
      const idx_t most =
          (std::max)({phi, (shape.dim_v + tile_rows) * kernel_chunk, square + tile_rows * kernel_chunk,
                    round_up(features, wide) * std::max<idx_t>(kernel_chunk, round_up(shape.dim_v, wide)),
                    kernel_chunk * round_up(shape.dim_v, wide)});
      for (bf16_pair** each : {&x.operands.left, &x.operands.right}) *each = memory.allocate<bf16_pair>(most / 2);
    }
    return x;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
