// attn: the sums over keys of kernel attention, and how two of them are merged.
//
//   values     S = sum_j phi(k_j) v_j^T     [features, value dim]
//   weights    z = sum_j phi(k_j)           [features]; not by the rules that read the state
//   log_scale  where features are exponentials: row r of S and z is 2^log_scale[r] times what is stored
//
// Log scales are integers, so raising one rescales exactly. There is one per feature, because the features of long keys
// differ by hundreds of powers of two, and the query decides which of them matter.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The log scale of a feature that no key has contributed to. Features with a smaller logarithm count as 0: those of
/// keys whose squares nearly overflow.
template <class T>
inline constexpr T no_log_scale = std::numeric_limits<T>::lowest() / 2;

/// What is there of the sums.
enum class sum_parts { values, weights, log_scales };

template <class T>
struct kernel_sums {
  static constexpr idx_t wide = panel_width<T>;

  T *values = nullptr, *weights = nullptr;  // panels [dim_v / wide][rows][wide]; [round_up(features, width)]
  T* log_scale = nullptr;                   // as weights; null where features are plain numbers
  idx_t features = 0, dim_v = 0;
  bool empty = true;

  static idx_t rows(idx_t features) { return round_up(features, tile_step); }
  static idx_t lanes(idx_t features) { return round_up(rows(features), width<T>); }
  static idx_t value_count(idx_t features, idx_t dim_v) { return rows(features) * round_up(dim_v, wide); }
  /// Size of the memory of the sums, in numbers.
  static idx_t count(idx_t features, idx_t dim_v, sum_parts parts) {
    return round_up(value_count(features, dim_v), 16) + round_up(lanes(features), 16) * static_cast<idx_t>(parts);
  }

  static kernel_sums over(T* memory, idx_t features, idx_t dim_v, sum_parts parts) {
    kernel_sums sums;
    sums.features = features;
    sums.dim_v = dim_v;
    if (!memory) return sums;
    sums.values = memory;
    if (parts != sum_parts::values) sums.weights = memory + round_up(value_count(features, dim_v), 16);
    if (parts == sum_parts::log_scales) sums.log_scale = sums.weights + round_up(lanes(features), 16);
    return sums;
  }
  [[gnu::noinline]] static kernel_sums layout(arena& memory, idx_t features, idx_t dim_v, sum_parts parts) {
    return over(memory.allocate<T>(count(features, dim_v, parts)), features, dim_v, parts);
  }

  idx_t rows() const { return rows(features); }
  T* panel(idx_t col) const { return values + col * rows(); }
  T& value(idx_t r, idx_t d) const { return panel(d / wide * wide)[r * wide + d % wide]; }

  void clear() {
    std::fill_n(values, value_count(features, dim_v), T(0));
    if (weights) std::fill_n(weights, lanes(features), T(0));
    if (log_scale) std::fill_n(log_scale, lanes(features), no_log_scale<T>);
    empty = true;
  }
};

template <class T>
void copy_sums(const kernel_sums<T>& from, kernel_sums<T>& to) {
  to.empty = from.empty;
  const sum_parts parts = from.log_scale ? sum_parts::log_scales : sum_parts::weights;
  if (!from.empty) std::copy_n(from.values, kernel_sums<T>::count(from.features, from.dim_v, parts), to.values);
}

/// sum over r < n of a[r] b[r].
template <class T>
T dot_rows(const T* a, const T* b, idx_t n) {
  packet<T> sum = zero<T>();
  idx_t i = 0;
  for (; i + width<T> <= n; i += width<T>) sum = fma(load<T>(a + i), load<T>(b + i), sum);
  T rest = sum_lanes(sum);
  for (; i < n; ++i) rest = std::fma(a[i], b[i], rest);
  return rest;
}

/// into = factor * a + b, over common log scales. `into` may be a or b. `scratch`: 2 * lanes numbers.
template <class T>
void combine(const kernel_sums<T>& a, T factor, const kernel_sums<T>& b, kernel_sums<T>& into, T* scratch) {
  const idx_t lanes = kernel_sums<T>::lanes(a.features), rows = a.rows();
  T *const of_a = scratch, *const of_b = scratch + lanes;
  for (idx_t r = 0; r < lanes; r += width<T>) {
    packet<T> fa = broadcast<T>(factor), fb = broadcast<T>(T(1));
    if (a.log_scale) {
      const packet<T> la = load<T>(a.log_scale + r), lb = load<T>(b.log_scale + r), larger = (max)(la, lb);
      fa = mul(fa, exp2_weight<T>(sub(la, larger)));
      fb = exp2_weight<T>(sub(lb, larger));
      store<T>(into.log_scale + r, larger);
    }
    store<T>(of_a + r, fa);
    store<T>(of_b + r, fb);
    store<T>(into.weights + r, fma(load<T>(a.weights + r), fa, mul(load<T>(b.weights + r), fb)));
  }
  for (idx_t col = 0; col < a.dim_v; col += panel_width<T>) {
    const T *x = a.panel(col), *y = b.panel(col);
    T* to = into.panel(col);
    for (idx_t r = 0; r < rows; ++r, x += panel_width<T>, y += panel_width<T>, to += panel_width<T>)
      unroll<2>([&](auto half) {
        const idx_t at = half * width<T>;
        store<T>(to + at, fma(load<T>(x + at), broadcast<T>(of_a[r]), mul(load<T>(y + at), broadcast<T>(of_b[r]))));
      });
  }
  into.empty = a.empty && b.empty;
}

/// sums = factor sums, without log scales.
template <class T>
void scale(kernel_sums<T>& sums, T factor) {
  if (factor == T(1) || sums.empty) return;
  for (idx_t n = 0; n < kernel_sums<T>::value_count(sums.features, sums.dim_v); ++n) sums.values[n] *= factor;
  for (idx_t r = 0; r < sums.features; ++r) sums.weights[r] *= factor;
}

}}}  // namespace attn::ATTN_ISA::detail
