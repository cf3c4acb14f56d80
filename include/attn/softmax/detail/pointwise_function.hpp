// attn: weights without a softmax: pointwise_function stands in the place of a score function, and the kernels of
// softmax attention, where they find one, make weights f(s + shift) of scores s in base e, and add up weights times
// values. A row's online softmax then has no part but `out`: its maximum is 0 once it was attended, so that states are
// added where those of a softmax are merged, and its sum is not 0, which says that there is something to merge.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/softmax/detail/score_loops.hpp>
#include <attn/softmax/pointwise_activation.hpp>

#include <array>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Stands for the function, or its derivative, where there is none of the caller's.
struct no_function {};

// The functions: of x `scale` times too large. weight(x), and weight and derivative; both are exactly 0 for the score
// -infinity, and NaN for NaN.

/// e = e^-s for scores s = -z / log2 e, for z up to `most`, beyond which 1 / (1 + e) counts as 0, so that e is finite.
template <class T>
struct inverse_exponential {
  static constexpr T scale = -log2_e<T>, most = T(float_bits<T>::bias - 2);

  packet<T> e, under;  // under: 1 + e
  explicit ATTN_INLINE inverse_exponential(const packet<T>& z)
      : e(exp2_weight<T>((min)(z, broadcast<T>(most)))), under(add(e, broadcast<T>(T(1)))) {}
  /// x where z is not beyond.
  static ATTN_INLINE packet<T> seen(const packet<T>& z, const packet<T>& x) {
    return if_less(broadcast<T>(most), z, zero<T>(), x);
  }
};

/// 1 + 2^z for z up to bias + 1, where it is infinity; by two operations fewer than exp2_weight(), whose constant term
/// is two numbers (pointwise, sigmoid, Zen 1: 0.97 of the time).
template <class T>
ATTN_INLINE packet<T> one_plus_exp2(const packet<T>& z) {
  using constants = exp_constants<T>;
  static constexpr auto power = [] {
    std::array<T, std::size(constants::weight)> c{};
    std::copy(std::begin(constants::weight), std::end(constants::weight), c.begin());
    c[0] = T(1);
    return c;
  }();
  const packet<T> clamped = (max)(z, broadcast<T>(T(-float_bits<T>::bias)));
  const packet<T> shifted = add(clamped, broadcast<T>(rounder<T>));
  const packet<T> fraction = sub(clamped, sub(shifted, broadcast<T>(rounder<T>)));
  packet<T> y = broadcast<T>(power[power.size() - 1]);
  unroll_constants<static_cast<int>(power.size()) - 1>(
      [&](auto i) { y = fma(y, fraction, broadcast<T>(power[power.size() - 2 - i])); });
  return fma(y, bits_to_exponent<T>(shifted), broadcast<T>(T(1)));
}

template <class T>
struct sigmoid_weights {
  using exponential = inverse_exponential<T>;
  static constexpr T scale = exponential::scale;

  static ATTN_INLINE packet<T> weight(const packet<T>& z) {
    return div(broadcast<T>(T(1)), one_plus_exp2<T>((min)(z, broadcast<T>(T(float_bits<T>::bias + 1)))));
  }
  static ATTN_INLINE void both(const packet<T>& z, packet<T>& w, packet<T>& slope) {
    const exponential x(z);
    const packet<T> s = div(broadcast<T>(T(1)), x.under);
    w = exponential::seen(z, s), slope = mul(w, mul(x.e, s));
  }
};

template <class T>
struct silu_weights {
  using exponential = inverse_exponential<T>;
  static constexpr T scale = exponential::scale;

  static ATTN_INLINE packet<T> score(const packet<T>& z) {
    return mul(exponential::seen(z, z), broadcast<T>(T(1) / scale));
  }
  static ATTN_INLINE packet<T> weight(const packet<T>& z) {
    return div(score(z), one_plus_exp2<T>((min)(z, broadcast<T>(exponential::most))));
  }
  static ATTN_INLINE void both(const packet<T>& z, packet<T>& w, packet<T>& slope) {
    const exponential x(z);
    const packet<T> s = div(broadcast<T>(T(1)), x.under), y = score(z), rest = mul(x.e, s);
    w = mul(y, s), slope = exponential::seen(z, mul(s, fma(y, rest, broadcast<T>(T(1)))));
  }
};

template <class T>
struct relu_weights {
  static constexpr T scale = T(1);

  static ATTN_INLINE packet<T> weight(const packet<T>& x) { return (max)(x, zero<T>()); }
  static ATTN_INLINE void both(const packet<T>& x, packet<T>& w, packet<T>& slope) {
    w = weight(x);
    slope = if_less(zero<T>(), x, broadcast<T>(T(1)), mul(w, zero<T>()));  // NaN stays
  }
};

template <class T>
struct squared_relu_weights {
  static constexpr T scale = T(1);

  static ATTN_INLINE packet<T> weight(const packet<T>& x) {
    const packet<T> y = (max)(x, zero<T>());
    return mul(y, y);
  }
  static ATTN_INLINE void both(const packet<T>& x, packet<T>& w, packet<T>& slope) {
    const packet<T> y = (max)(x, zero<T>());
    w = mul(y, y), slope = add(y, y);
  }
};

/// The function of a call: one of these, or the caller's F with its derivative D; and the factors of its rows.
template <class T, class F = no_function, class D = no_function>
struct pointwise_function {
  using makes_weights_of = T;

  pointwise_activation activation{};
  T shift = 0, weight = 1;
  tensor_view<const T, 2> row_weights{};
  F* function = nullptr;
  D* derivative = nullptr;

  static constexpr bool own = !std::same_as<std::remove_const_t<F>, no_function>;

  /// The factor of the sum of row i of a batch item.
  T factor(idx_t b, idx_t i) const {
    return weight * (row_weights ? row_weights(row_weights.extent(0) == 1 ? 0 : b, i) : T(1));
  }

  /// Scores x, times `times`, become weights; count is a multiple of the vector width.
  [[gnu::noinline]] void weigh(T* x, idx_t count, T times) const {
    if constexpr (own)
      for (idx_t n = 0; n < count; ++n) x[n] = of_seen(*function, x[n], times);
    else
      with([&]<class Of>(Of) {
        const packet<T> by = broadcast<T>(times * Of::scale), more = broadcast<T>(shift * Of::scale);
        for (idx_t n = 0; n < count; n += width<T>) store<T>(x + n, Of::weight(fma(load<T>(x + n), by, more)));
      });
  }
  /// Scores become weights times `row`, and d, the gradients of the weights, those of the scores. Returns the sum of
  /// weights, without that factor, times d.
  [[gnu::noinline]] T differentiate(T* x, T* d, idx_t count, T row) const {
    packet<T> sum = zero<T>();
    const auto store_both = [&](idx_t n, const packet<T>& w, const packet<T>& slope) {
      const packet<T> before = load<T>(d + n), all = broadcast<T>(row);
      sum = add(sum, if_less(zero<T>(), abs(w), mul(w, before), w));
      store<T>(x + n, mul(w, all));  // 0 where the derivative is 0, whatever the value; NaN stays NaN
      store<T>(d + n, if_less(zero<T>(), abs(slope), mul(mul(slope, before), all), slope));
    };
    if constexpr (own) {
      for (idx_t n = 0; n < count; n += width<T>) {
        alignas(64) T w[width<T>], slope[width<T>];
        for (int lane = 0; lane < width<T>; ++lane) {
          w[lane] = of_seen(*function, x[n + lane], T(1)), slope[lane] = of_seen(*derivative, x[n + lane], T(1));
        }
        store_both(n, load<T>(w), load<T>(slope));
      }
    } else {
      with([&]<class Of>(Of) {
        const packet<T> by = broadcast<T>(Of::scale), more = broadcast<T>(shift * Of::scale);
        for (idx_t n = 0; n < count; n += width<T>) {
          packet<T> w, slope;
          Of::both(fma(load<T>(x + n), by, more), w, slope);
          store_both(n, w, slope);
        }
      });
    }
    return sum_lanes(sum);
  }

 private:
  /// f of a score, which is not called for -infinity.
  template <class Function>
  ATTN_INLINE T of_seen(Function& f, T x, T times) const {
    const bool seen = x != -std::numeric_limits<T>::infinity();
    const T y = static_cast<T>(f(seen ? x * times + shift : T(0)));
    return seen ? y : T(0);
  }

  template <class Use>
  void with(const Use& use) const {
    switch (activation) {
      case pointwise_activation::sigmoid: return use(sigmoid_weights<T>{});
      case pointwise_activation::silu: return use(silu_weights<T>{});
      case pointwise_activation::relu: return use(relu_weights<T>{});
      case pointwise_activation::squared_relu: return use(squared_relu_weights<T>{});
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
