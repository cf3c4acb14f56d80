// attn: a call of a norm (layer_norm, rms_norm, group_norm), its checks and its run.
#pragma once

#include <attn/layers/detail/sequence.hpp>

#include <bit>
#include <cmath>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct layer_norm_weights;

namespace detail {

/// Whether a variance overflowed, or is so small that its squares lost digits by underflow.
template <class T>
bool variance_lost(T variance) {
  constexpr T least = T(std::same_as<T, double> ? 0x1p-900 : 0x1p-90);
  return !(variance < std::numeric_limits<T>::infinity() && variance >= least);
}

/// Scales a row to numbers up to 1 by a power of two, which it returns; rows of zeros, or with an infinity, stay.
template <class T>
[[gnu::noinline]] T scale_row(T* row, idx_t dim) {
  T size = 0;
  for (idx_t d = 0; d < dim; ++d) size = (std::max)(size, std::abs(row[d]));  // NaN is no maximum
  int exponent = 0;
  if (!(size > 0 && size < std::numeric_limits<T>::infinity())) return T(1);
  std::frexp(size, &exponent);
  constexpr int most = std::numeric_limits<T>::max_exponent - 2;
  const T power = std::ldexp(T(1), std::clamp(-exponent, -most, most));
  for (idx_t d = 0; d < dim; ++d) row[d] *= power;
  return power;
}

/// take(d, sum) for every packet from d = 0 on, d < end: to two sums by turns, so that few wait for the one before.
template <class T, class Take>
ATTN_INLINE T sum_packets(idx_t end, Take&& take) {
  packet<T> even = zero<T>(), odd = zero<T>();
  idx_t d = 0;
  for (; d + 2 * width<T> <= end; d += 2 * width<T>) take(d, even), take(d + width<T>, odd);
  if (d < end) take(d, even);
  return sum_lanes(add(even, odd));
}

/// Gamma and beta as plain numbers.
template <class T>
struct row_norm {
  T *gamma, *beta;                      // a row for each head, padded with zeros to whole packets, or a packet for all
  idx_t gamma_step = 1, beta_step = 1;  // 0 for a packet
  idx_t dim, heads;                     // of a row; rows of a token that are normalised each by itself
  T eps = 0;
  T share, terms;       // a power of two below 1 / dim, with which sums do not overflow; 2 dim times that
  T inverse;            // 1 / dim
  bool centred = true;  // whether the mean is subtracted; not by rms_norm

  [[gnu::noinline]] row_norm(arena& memory, idx_t features, idx_t of_heads = 1)
      : gamma(memory.allocate<T>(of_heads * round_up(features, width<T>))),
        beta(memory.allocate<T>(of_heads * round_up(features, width<T>))),
        dim(features),
        heads(of_heads),
        share(T(0.5) / static_cast<T>(std::bit_ceil(static_cast<std::uint64_t>(features) + 1))),
        terms(static_cast<T>(2 * features) * share),
        inverse(T(1) / static_cast<T>(features)) {}

  template <class S>
  [[gnu::noinline]] void set(const layer_norm_weights<S>& weights, T epsilon) {
    eps = epsilon;
    gamma_step = set_list<S>(weights.gamma, T(1), gamma), beta_step = set_list<S>(weights.beta, T(0), beta);
  }
  /// Fills gamma or beta; returns its step.
  template <class S>
  [[gnu::noinline]] idx_t set_list(const tensor_view<const S, 1>& list, T otherwise, T* to) const {
    if (dim > 0 && !list.data()) return store<T>(to, broadcast<T>(otherwise)), 0;
    const any_rows<T> numbers(list);
    for (idx_t h = 0; h < heads; ++h, to += padded()) {
      numbers.load(0, h * dim, dim, to);
      std::fill(to + dim, to + padded(), T(0));
    }
    return 1;
  }
  idx_t padded() const { return round_up(dim, width<T>); }

  /// What normalises a row, as centre() leaves it: the row times `factor`. `slope` is 1 / sqrt(variance + eps).
  struct row_scale {
    T factor, slope;
  };

  /// Subtracts the mean from a row that is not empty, without means nothing, and scales it by a power of two for which
  /// sums and squares stay in the range of T.
  row_scale centre(T* row) const { return centre(row, row); }
  /// The same of a row `from`, into `row`.
  ATTN_INLINE row_scale centre(const T* from, T* row) const {
    const T mean = centred ? half_mean(from) : T(0);  // halves of numbers do not overflow where a mean is subtracted
    T square = subtract(from, row, T(0.5), mean);
    // Of a row whose numbers are nearly equal the rounding of the mean is a part that counts.
    if (square * inverse < mean * mean * T(0.0625)) [[unlikely]] square = correct_mean(row);
    const T variance = square * inverse + eps * T(0.25);
    if (variance_lost(variance)) [[unlikely]] return scaled(row, T(0.5));
    const T factor = T(1) / std::sqrt(variance);
    return {factor, factor * T(0.5)};
  }
  /// The same for a row from which the mean was subtracted and which was multiplied by `power`.
  [[gnu::noinline]] row_scale scaled(T* row, T power) const {
    power *= scale_row(row, dim);
    if (centred) correct_mean(row);
    T square = 0;
    for (idx_t d = 0; d < dim; ++d) square += row[d] * row[d];
    const T factor = T(1) / std::hypot(std::sqrt(square / static_cast<T>(dim)), std::sqrt(eps) * power);
    return {factor, factor * power};
  }
  ATTN_INLINE T half_mean(const T* row) const {
    const idx_t whole = dim / width<T> * width<T>;
    T sum = sum_packets<T>(whole, [&](idx_t d, packet<T>& some) {
      some = fma(load<T>(row + d), broadcast<T>(share), some);
    });
    for (idx_t d = whole; d < dim; ++d) sum += row[d] * share;
    return sum / terms;
  }
  /// Subtracts from a row what the rounding of a mean left of it; returns the sum of its squares.
  [[gnu::noinline]] T correct_mean(T* row) const { return subtract(row, T(1), T(2) * half_mean(row)); }
  ATTN_INLINE T subtract(T* row, T factor, T mean) const { return subtract(row, row, factor, mean); }
  /// row = from * factor - mean; returns the sum of its squares.
  ATTN_INLINE T subtract(const T* from, T* row, T factor, T mean) const {
    const idx_t whole = dim / width<T> * width<T>;
    T square = sum_packets<T>(whole, [&](idx_t d, packet<T>& some) {
      const packet<T> away = fma(load<T>(from + d), broadcast<T>(factor), broadcast<T>(-mean));
      store<T>(row + d, away);
      some = fma(away, away, some);
    });
    for (idx_t d = whole; d < dim; ++d) {
      row[d] = from[d] * factor - mean;
      square += row[d] * row[d];
    }
    return square;
  }

  /// Normalises the rows of one token in place.
  void apply(T* row) const { apply(row, row); }
  /// The same of rows `from`.
  [[gnu::noinline]] void apply(const T* from, T* row) const {
    if (dim == 0) return;
    const idx_t whole = dim / width<T> * width<T>, of_gamma = gamma_step, of_beta = beta_step;
    const T *gammas = gamma, *betas = beta;
    for (idx_t left = heads;; from += dim, row += dim, gammas += padded() * of_gamma, betas += padded() * of_beta) {
      const T factor = centre(from, row).factor;
      for (idx_t d = 0; d < whole; d += width<T>)
        store<T>(row + d, fma(mul(load<T>(row + d), broadcast<T>(factor)), load<T>(gammas + d * of_gamma),
                              load<T>(betas + d * of_beta)));
      for (idx_t d = whole; d < dim; ++d) row[d] = row[d] * factor * gammas[d * of_gamma] + betas[d * of_beta];
      if (--left == 0) return;
    }
  }
};

/// Rows of x into rows of out, which may be the same. Numbers of T are read and written where they lie.
template <class T>
void run_layer_norm(const input_tokens<T>& x, const output_tokens<T>& out, const row_norm<T>& norm, execution& exec) {
  const double numbers = static_cast<double>(x.count) * static_cast<double>(x.dim);
  const auto limit = exec.limit_threads({.operations = 8 * numbers, .bytes = 2 * sizeof(T) * numbers});
  exec.for_each(ceil_div(x.count, tokens_per_task), [&](idx_t task, int worker) {
    T* const row = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(x.dim); });
    for (idx_t n = task * tokens_per_task; n < (std::min)((task + 1) * tokens_per_task, x.count); ++n) {
      const T* from = x.numbers(n);
      T *const there = out.numbers(n), *const to = there ? there : row;
      if (!from) x.load(n, row), from = row;
      norm.apply(from, to);
      if (!there) out.store(n, row);
    }
  });
}

/// What the norms and their backward passes have in common.
template <class S>
void check_norm(layer_views& check, idx_t heads, const layer_norm_weights<S>& w, compute_type<S> eps) {
  const idx_t dim = check.x.extents[2];
  check.out_dim(dim);
  check.at_least("heads", 1, heads);
  if (dim % heads != 0) check.fail({"x dim divisible by heads ", heads}, dim);
  if (!(eps >= 0)) check.fail("eps >= 0", static_cast<double>(eps));
  check.list("gamma", w.gamma, "feature", dim);
  check.list("beta", w.beta, "feature", dim);
}

/// group_norm, of one head layer_norm and, without means, rms_norm.
template <class S>
[[gnu::noinline]] void call_norm(const char* name, bool centred, idx_t heads, const tensor_view<const S, 3>& x,
                                 const tensor_view<S, 3>& out, const layer_norm_weights<S>& w, compute_type<S> eps,
                                 execution& exec) {
  using T = compute_type<S>;
  const idx_t dim = x.extent(2);
  layer_views check{name, x, out};
  check_norm<S>(check, heads, w, eps);

  auto norm = exec.shared_scratch(
      [=](arena& memory) { return row_norm<T>(memory, dim / heads, dim > 0 ? heads : 1); });
  norm.set(w, eps);
  norm.centred = centred;
  run_layer_norm<T>(x, out, norm, exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
