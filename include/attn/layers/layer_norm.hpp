// attn: layer normalisation.
//
//   out = gamma (x - mean) / sqrt(variance + eps) + beta          Ba, Kiros & Hinton 2016, per token, over its features
//
//   attn::layer_norm(x, out);                       // Eigen matrices [length, dim]; out may be x
//   attn::layer_norm(x, out, {.gamma = g, .beta = b, .eps = 1e-6f}, threads);
//
// Shapes   x and out [B, L, D], gamma and beta [D]. float, double, or Eigen::half / Eigen::bfloat16 in memory with
//          float arithmetic.
// Cost     a few operations a number; scratch: a row a thread.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/layers/detail/sequence.hpp>

namespace attn::inline ATTN_ISA {

/// Options of layer_norm for elements of type S.
template <class S>
struct layer_norm_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Factor of every feature, [D]; 1 unless given.
  tensor_view<const S, 1> gamma{};
  /// Added to every feature, [D]; 0 unless given.
  tensor_view<const S, 1> beta{};
  /// Added to the variance.
  real eps = real(1e-5);
};

namespace detail {

/// Gamma and beta as plain numbers.
template <class T>
struct row_norm {
  T *gamma = nullptr, *beta = nullptr;
  index dim = 0;
  T eps = 0;

  static row_norm layout(arena& memory, index dim) {
    row_norm norm;
    norm.dim = dim;
    norm.gamma = memory.allocate<T>(dim);
    norm.beta = memory.allocate<T>(dim);
    return norm;
  }

  template <class S>
  void begin(const layer_norm_options<S>& options) {
    eps = options.eps;
    for (index d = 0; d < dim; ++d) {
      gamma[d] = options.gamma ? static_cast<T>(options.gamma(d)) : T(1);
      beta[d] = options.beta ? static_cast<T>(options.beta(d)) : T(0);
    }
  }

  /// Normalises one row in place.
  void apply(T* row) const {
    if (dim == 0) return;
    packet<T> sums = zero<T>();
    const index whole = dim / width<T> * width<T>;
    for (index d = 0; d < whole; d += width<T>) sums = add(sums, load<T>(row + d));
    T sum = sum_lanes(sums);
    for (index d = whole; d < dim; ++d) sum += row[d];
    const T mean = sum / static_cast<T>(dim);

    packet<T> squares = zero<T>();
    for (index d = 0; d < whole; d += width<T>) {
      const packet<T> away = sub(load<T>(row + d), broadcast<T>(mean));
      store<T>(row + d, away);
      squares = fma(away, away, squares);
    }
    T square = sum_lanes(squares);
    for (index d = whole; d < dim; ++d) {
      row[d] -= mean;
      square += row[d] * row[d];
    }
    const T factor = T(1) / std::sqrt(square / static_cast<T>(dim) + eps);
    for (index d = 0; d < dim; ++d) row[d] = row[d] * factor * gamma[d] + beta[d];
  }
};

template <class S>
void check_layer_norm(const validator& check, const char* gamma, const char* beta, const layer_norm_options<S>& options,
                      const tensor_view<S, 3>& out) {
  if (!(options.eps >= 0)) check.fail("eps >= 0", static_cast<double>(options.eps));
  if (options.gamma) {
    check_parameter(check, gamma, options.gamma, "out", out);
    check.one_per(gamma, "feature", out.extent(2), options.gamma.extent(0));
  }
  if (options.beta) {
    check_parameter(check, beta, options.beta, "out", out);
    check.one_per(beta, "feature", out.extent(2), options.beta.extent(0));
  }
}

/// Tokens a task takes where every token stands for itself.
inline constexpr index row_step = 64;

/// Rows of x into rows of out, which may be the same.
template <class S>
void run_layer_norm(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                    const layer_norm_options<S>& options, execution& exec) {
  using T = compute_type<S>;
  const index rows = tokens(x), dim = x.extent(2);
  auto norm = exec.shared_scratch([&](arena& memory) { return row_norm<T>::layout(memory, dim); });
  norm.begin(options);
  exec.for_each((rows + row_step - 1) / row_step, [&](index task, int worker) {
    T* const row = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(dim); });
    for (index n = task * row_step; n < std::min((task + 1) * row_step, rows); ++n) {
      load_row(token(x, n), x.stride(2), dim, row);
      norm.apply(row);
      store_row(row, dim, token(out, n), out.stride(2));
    }
  });
}

}  // namespace detail

/// Normalises every token, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O>
void layer_norm(const X& x, O&& out, const layer_norm_options<element_of<const X&>>& options, execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  const detail::validator check("layer_norm");
  detail::check_sequences<S>(check, from, to, from.extent(2));
  detail::check_layer_norm<S>(check, "gamma", "beta", options, to);
  detail::check_in_place<S>(check, from, to);
  detail::run_layer_norm<S>(from, to, options, exec);
}

template <viewable X, viewable O>
void layer_norm(const X& x, O&& out, const layer_norm_options<element_of<const X&>>& options = {}) {
  execution serial;
  layer_norm(x, out, options, serial);
}

}  // namespace attn
