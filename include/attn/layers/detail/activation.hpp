// attn: the activation functions of layers/activation.hpp, on vectors, and their derivatives.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/layers/activation.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Phi(-a) = e^(-a^2 / 2) g(a) / (a + shift) for a >= 0, where g is smooth: a polynomial in u = base - factor / (a +
/// shift), which takes a in [0, farthest] to [-1, 1] (own Chebyshev fits). Beyond `farthest` the tail is below every
/// number.
template <class T>
struct normal_tail_constants;

template <>
struct normal_tail_constants<float> {
  static constexpr float farthest = 16, shift = 4, base = 1.5f, factor = 10;
  static constexpr float series[] = {0.8939409337f,   -0.6296958611f,   0.3289950788f,    -0.1214521862f,
                                     0.02679433437f,  -6.864201383e-4f, -1.431346673e-3f, 2.277417755e-4f,
                                     8.232412068e-5f, -1.713372472e-5f, -5.182693956e-6f};  // error 3.1e-9
};

template <>
struct normal_tail_constants<double> {
  static constexpr double farthest = 40, shift = 5, base = 1.25, factor = 11.25;
  static constexpr double series[] = {
      0.84969577171772043018,     -0.70046492716831294111,   0.48437498414282825383,    -0.27811948195866812083,
      0.12948165075059688115,     -0.046439848471161472927,  0.011238259242227438109,   -0.00089223599837507491439,
      -0.00053135214124391333224, 0.00019836149567616763411, 4.0269205122117498757e-6,  -1.8309491606217897489e-5,
      1.9814522256241948612e-6,   1.6315882654898510907e-6,  -3.142335792520198814e-7,  -1.6561373958573774091e-7,
      3.7418484840097832443e-8,   1.9461312165756110165e-8,  -3.8250673215623652775e-9, -2.2864323817158118618e-9,
      3.0587084313947988631e-10,  1.7982145219164412172e-10, -1.3796560806489797202e-11};  // error 1.3e-17
};

/// e^(-a^2 / 2) and Phi(x), a being |x| up to where Phi ends.
template <class T>
struct normal_values {
  packet<T> bell, distribution;

  ATTN_INLINE normal_values(const packet<T>& x, const packet<T>& a) {
    using constants = normal_tail_constants<T>;
    const packet<T> one = broadcast<T>(T(1)), half = broadcast<T>(T(-0.5));
    // The square as a sum of two numbers: its rounding error would grow with the exponent.
    const packet<T> square = mul(a, a), rest = fma(a, a, sub(zero<T>(), square));
    bell = mul(exp<T>(mul(square, half)), fma(rest, half, one));
    const packet<T> r = div(one, add(a, broadcast<T>(constants::shift)));
    const packet<T> u = fma(r, broadcast<T>(-constants::factor), broadcast<T>(constants::base));
    const packet<T> tail = mul(mul(bell, polynomial<T>(u, constants::series)), r);
    distribution = if_less(zero<T>(), x, sub(one, tail), tail);
  }
};

template <class T>
ATTN_INLINE packet<T> gelu(const packet<T>& x) {
  constexpr T farthest = normal_tail_constants<T>::farthest;
  const packet<T> above = (max)(x, broadcast<T>(-farthest));  // -infinity times 0 would be NaN
  return mul(above, normal_values<T>(x, (min)(abs(above), broadcast<T>(farthest))).distribution);
}

/// x (1 + tanh u) / 2 = x / (1 + e^(-2u))
template <class T>
ATTN_INLINE packet<T> gelu_tanh(const packet<T>& x) {
  constexpr T minus_two_root = T(-1.595769121605730711759785);  // -2 sqrt(2 / pi)
  const packet<T> above = (max)(x, broadcast<T>(T(-64)));         // where e^(-2u) is infinite
  const packet<T> cubic = fma(mul(above, above), broadcast<T>(T(0.044715)), broadcast<T>(T(1)));
  const packet<T> minus_2u = mul(mul(above, broadcast<T>(minus_two_root)), cubic);
  return div(above, add(exp<T>(minus_2u), broadcast<T>(T(1))));
}

/// Phi(x) + x phi(x), the derivative of gelu.
template <class T>
ATTN_INLINE packet<T> gelu_slope(const packet<T>& x) {
  constexpr T phi_at_0 = T(0.3989422804014326779399461);  // 1 / sqrt(2 pi)
  const packet<T> farthest = broadcast<T>(normal_tail_constants<T>::farthest);
  const packet<T> above = (max)(x, broadcast<T>(-normal_tail_constants<T>::farthest));
  const packet<T> within = if_less(farthest, above, farthest, above);  // NaN stays
  const normal_values<T> normal(x, (min)(abs(within), farthest));
  return fma(within, mul(normal.bell, broadcast<T>(phi_at_0)), normal.distribution);
}

/// With s = 1 / (1 + e^(-2u)) the derivative of gelu_tanh, s + x s (1 - s) 2u'; both s and 1 - s keep their digits.
template <class T>
ATTN_INLINE packet<T> gelu_tanh_slope(const packet<T>& x) {
  constexpr T two_root = T(1.595769121605730711759785);  // 2 sqrt(2 / pi)
  const packet<T> one = broadcast<T>(T(1)), farthest = broadcast<T>(T(64));
  const packet<T> above = (max)(x, broadcast<T>(T(-64)));
  const packet<T> within = if_less(farthest, above, farthest, above);  // NaN stays
  const packet<T> square = mul(within, within), scaled = mul(within, broadcast<T>(two_root));
  const packet<T> two_u = mul(scaled, fma(square, broadcast<T>(T(0.044715)), one));
  const packet<T> e = exp<T>(sub(zero<T>(), abs(two_u))), large = div(one, add(one, e)), other = mul(e, large);
  const packet<T> x_2u_slope = mul(scaled, fma(square, broadcast<T>(T(3 * 0.044715)), one));
  return fma(x_2u_slope, mul(large, other), if_less(zero<T>(), x, large, other));
}

/// s = 1 / (1 + e^-x) as unit / (unit + e), e = unit e^-x, unit a small power of two: nothing overflows before x s is
/// 0, and without the precautions of exp() silu takes two thirds of the time.
template <class T>
struct sigmoid_terms {
  static constexpr int scale = std::same_as<T, float> ? 32 : 64;
  static constexpr T unit = T(0.5) / static_cast<T>(std::uint64_t(1) << (scale - 1));
  static constexpr T lowest = T(-(float_bits<T>::bias + scale) * 0.693147180559945309417), highest = T(60);

  packet<T> power, factor;  // e is their product

  /// lowest <= x <= highest, where s is 0 times anything and 1.
  explicit ATTN_INLINE sigmoid_terms(const packet<T>& x) {
    using constants = exp_constants<T>;
    const packet<T> base = broadcast<T>(rounder<T> - T(scale)), minus_log2_e = broadcast<T>(-constants::log2_e_high);
    const packet<T> shifted = fma(x, minus_log2_e, base);
    packet<T> fraction;
    if constexpr (fuses_products) {
      fraction = fma(x, broadcast<T>(-constants::log2_e_low), fma(x, minus_log2_e, sub(base, shifted)));
    } else {  // x log2 e would be off by its own rounding
      const packet<T> n = sub(shifted, base), r = add(x, mul(n, broadcast<T>(constants::ln2_high)));
      fraction = mul(add(r, mul(n, broadcast<T>(constants::ln2_low))), minus_log2_e);
    }
    set(shifted, fraction);
  }

  /// Of y = x log2 e, in [lowest, highest] times log2 e.
  static ATTN_INLINE sigmoid_terms of_log2(const packet<T>& y) {
    const packet<T> base = broadcast<T>(rounder<T> - T(scale)), shifted = sub(base, y);
    sigmoid_terms terms;
    terms.set(shifted, sub(sub(base, shifted), y));
    return terms;
  }

 private:
  sigmoid_terms() = default;
  ATTN_INLINE void set(const packet<T>& shifted, const packet<T>& fraction) {
    power = add(polynomial<T>(fraction, exp_constants<T>::weight), broadcast<T>(T(1)));
    factor = bits_to_exponent<T>(shifted);
  }
};

/// x s, s = 1 / (1 + e^-x).
template <class T>
ATTN_INLINE packet<T> silu(const packet<T>& x) {
  using terms = sigmoid_terms<T>;
  const packet<T> above = (max)(x, broadcast<T>(terms::lowest)), unit = broadcast<T>(terms::unit);
  const terms t((min)(above, broadcast<T>(terms::highest)));
  return mul(above, div(unit, fma(t.power, t.factor, unit)));
}

/// The same of x = y ln 2, as the sum of products with a factor that was multiplied by log2 e beforehand.
template <class T>
ATTN_INLINE packet<T> silu_of_log2(const packet<T>& y) {
  using terms = sigmoid_terms<T>;
  constexpr T log2_e = exp_constants<T>::log2_e_high, ln2 = T(0.693147180559945309417);
  const packet<T> above = (max)(y, broadcast<T>(terms::lowest * log2_e));
  const terms t = terms::of_log2((min)(above, broadcast<T>(terms::highest * log2_e)));
  return mul(above, div(broadcast<T>(terms::unit * ln2), fma(t.power, t.factor, broadcast<T>(terms::unit))));
}

/// s + x s (1 - s), the derivative of silu; both s and 1 - s keep their digits.
template <class T>
ATTN_INLINE packet<T> silu_slope(const packet<T>& x) {
  using terms = sigmoid_terms<T>;
  const packet<T> one = broadcast<T>(T(1)), highest = broadcast<T>(terms::highest), unit = broadcast<T>(terms::unit);
  const packet<T> above = (max)(x, broadcast<T>(terms::lowest));
  const packet<T> within = if_less(highest, above, highest, above);  // NaN stays
  const terms t(within);
  const packet<T> e = mul(t.power, t.factor), inverse = div(one, add(unit, e));
  return mul(mul(inverse, unit), fma(within, mul(e, inverse), one));
}

template <class T>
ATTN_INLINE packet<T> sigmoid(const packet<T>& x) {
  const sigmoid_fraction<T> s(x);
  return div(s.over, s.under);
}

/// With e = e^-|x| the derivative of sigmoid, e / (1 + e)^2; that of tanh is four times this, of 2 x.
template <class T>
ATTN_INLINE packet<T> sigmoid_slope(const packet<T>& x) {
  const packet<T> one = broadcast<T>(T(1)), e = exp_weight<T>(sub(zero<T>(), abs(x))), inverse = div(one, add(one, e));
  return mul(mul(e, inverse), inverse);
}

/// 0 for what is smaller than a normal number: products with such numbers take many times as long.
template <class T>
ATTN_INLINE packet<T> flush_tiny(const packet<T>& x) {
  return if_less(abs(x), broadcast<T>((std::numeric_limits<T>::min)()), zero<T>(), x);
}

/// x[n] = f(x[n]) and d[n] = d[n] f'(x[n]) for `count` numbers; relu' is 0 at 0.
template <class T>
[[gnu::noinline]] void activate_backward(activation f, T* x, T* d, idx_t count) {
  const auto each = [&](auto&& step) {
    idx_t n = 0;
    for (; n + width<T> <= count; n += width<T>) step(x + n, d + n);
    if (n == count) return;
    alignas(64) T rest[2][width<T>] = {};
    std::copy(x + n, x + count, rest[0]);
    std::copy(d + n, d + count, rest[1]);
    step(rest[0], rest[1]);
    std::copy_n(rest[0], count - n, x + n);
    std::copy_n(rest[1], count - n, d + n);
  };
  const auto chain = [&](auto&& value, auto&& slope) {
    each([&](T* x_at, T* d_at) {
      const packet<T> p = load<T>(x_at);
      store<T>(d_at, flush_tiny<T>(mul(load<T>(d_at), slope(p))));
      store<T>(x_at, flush_tiny<T>(value(p)));
    });
  };
  switch (f) {
    case activation::relu:
      return each([](T* x_at, T* d_at) {
        const packet<T> p = load<T>(x_at);
        store<T>(d_at, if_less(zero<T>(), p, load<T>(d_at), zero<T>()));
        store<T>(x_at, (max)(p, zero<T>()));
      });
    case activation::gelu:
      return chain([](const auto& p) { return gelu<T>(p); }, [](const auto& p) { return gelu_slope<T>(p); });
    case activation::gelu_tanh:
      return chain([](const auto& p) { return gelu_tanh<T>(p); }, [](const auto& p) { return gelu_tanh_slope<T>(p); });
    case activation::silu:
      return chain([](const auto& p) { return silu<T>(p); }, [](const auto& p) { return silu_slope<T>(p); });
    case activation::tanh:
      return chain([](const auto& p) { return tanh<T>(p); },
                   [](const auto& p) { return mul(broadcast<T>(T(4)), sigmoid_slope<T>(add(p, p))); });
    case activation::sigmoid:
      return chain([](const auto& p) { return sigmoid<T>(p); }, [](const auto& p) { return sigmoid_slope<T>(p); });
    case activation::identity:
      return;
  }
}

/// x[n] = f(x[n]) for `count` numbers.
template <class T>
[[gnu::noinline]] void activate(activation f, T* x, idx_t count) {
  switch (f) {
    case activation::relu:
      return map_packets(x, x, count, [](const auto& p) { return (max)(p, zero<T>()); });
    case activation::gelu:
      return map_packets(x, x, count, [](const auto& p) { return gelu<T>(p); });
    case activation::gelu_tanh:
      return map_packets(x, x, count, [](const auto& p) { return gelu_tanh<T>(p); });
    case activation::silu:
      return map_packets(x, x, count, [](const auto& p) { return silu<T>(p); });
    case activation::tanh:
      return map_packets(x, x, count, [](const auto& p) { return tanh<T>(p); });
    case activation::sigmoid:
      return map_packets(x, x, count, [](const auto& p) { return sigmoid<T>(p); });
    case activation::identity:
      return;
  }
}

}}}  // namespace attn::ATTN_ISA::detail
