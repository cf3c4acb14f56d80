// attn: feature maps of linear attention, as values.
//
//   attn::linear(q, k, v, out, {}, attn::relu{});
//   attn::linear(q, k, v, out, {}, [](float x) { return x * x; });      // your
//   own, number by number
//
// A map may also make other features than one of each number: a type with
//   attn::index features(attn::index dim) const;                        // how
//   many void operator()(std::span<const T> token, std::span<T> phi) const;  //
//   all of them, of one token
// Maps are called in no particular order and from all threads of the execution
// at once; T is float or double.
#pragma once

#include <attn/core/exp.hpp>
#include <attn/kernel/features.hpp>

#include <cmath>
#include <span>

namespace attn {

/// elu(x) + 1: x + 1 for x > 0, e^x below (Katharopoulos 2020).
struct elu_plus_one {
  template <std::floating_point T>
  T operator()(T x) const {
    return x > T(0) ? x + T(1) : std::exp(x);
  }
};

/// max(x, 0).
struct relu {
  template <std::floating_point T>
  T operator()(T x) const {
    return x < T(0) ? T(0) : x;
  }
};

/// x: features computed elsewhere.
struct identity {
  template <std::floating_point T>
  T operator()(T x) const {
    return x;
  }
};

namespace detail {

template <class F, class T>
concept number_map = requires(const F& f, T x) {
  { f(x) } -> std::convertible_to<T>;
};

template <class F, class T>
concept token_map = requires(const F& f, std::span<const T> token, std::span<T> phi, index dim) {
  { f.features(dim) } -> std::convertible_to<index>;
  f(token, phi);
};

/// e^x for x <= 0, exact 0 for -infinity; NaN stays NaN, and positive x give
/// rubbish. x log2 e is taken apart into n + f by multiply-adds, which lose
/// nothing but the digits log2 e itself lacks: relative error 1.3e-7 + 1.4e-8
/// |x| in float.
template <class T>
ATTN_INLINE packet<T> exp_below_zero(const packet<T>& x) {
  constexpr T log2_e = T(1.442695040888963407359924681);
  constexpr T lowest = T(-float_bits<T>::bias * 0.69314718055994530942);  // there the power of two is 0
  const packet<T> held = max(x, broadcast<T>(lowest));
  const packet<T> shifted = fma(held, broadcast<T>(log2_e), broadcast<T>(rounder<T>));
  const packet<T> f = fma(held, broadcast<T>(log2_e), sub(broadcast<T>(rounder<T>), shifted));
  return mul(add(polynomial<T>(f, exp_constants<T>::weight), broadcast<T>(T(1))), bits_to_exponent<T>(shifted));
}

/// The caller's map, or one of ours, as the engine asks for it.
template <class S, class F>
struct mapped_features final : kernel_features<S> {
  using T = compute_type<S>;

  const F& map;
  index dim;

  mapped_features(const F& f, index d) : map(f), dim(d) {}

  index features() const override {
    if constexpr (token_map<F, T>)
      return map.features(dim);
    else
      return dim;
  }
  index work() const override { return token_map<F, T> ? dim * kernel_chunk + dim + features() : 0; }

  void keys(const token_rows<S>& x, index, T* phi, T*, [[maybe_unused]] T* work) const override {
    if constexpr (token_map<F, T>) {
      T *const columns = work, *const token = work + dim * kernel_chunk, *const made = token + dim;
      pack_columns(x, x.count, dim, x.col_stride, columns);
      for (index t = 0; t < kernel_chunk; ++t) {
        for (index d = 0; d < dim; ++d) token[d] = columns[d * kernel_chunk + std::min(t, x.count - 1)];
        if (t < x.count)
          map(std::span<const T>(token, static_cast<std::size_t>(dim)),
              std::span<T>(made, static_cast<std::size_t>(features())));
        for (index r = 0; r < features(); ++r) phi[r * kernel_chunk + t] = made[r];
      }
    } else {
      if constexpr (std::same_as<F, elu_plus_one>) {
        const packet<T> one = broadcast<T>(T(1));
        pack_columns<T>(x, x.count, dim, x.col_stride, phi,
                        [&](const packet<T>& p) { return if_less(zero<T>(), p, add(p, one), exp_below_zero<T>(p)); });
      } else if constexpr (std::same_as<F, relu>) {
        pack_columns<T>(x, x.count, dim, x.col_stride, phi,
                        [](const packet<T>& p) { return if_less(p, zero<T>(), zero<T>(), p); });
      } else {
        pack_columns<T>(x, x.count, dim, x.col_stride, phi);
        if constexpr (!std::same_as<F, identity>)
          for (index i = 0; i < dim * kernel_chunk; ++i) phi[i] = static_cast<T>(map(phi[i]));
      }
    }
  }
};

}  // namespace detail
}  // namespace attn
