// attn: exponentials in registers.
//   exp2_weight  2^x for softmax weights: x <= 0 or small, <= 2 ulp (2.2 without fused multiply-adds), exact 0 for
//                -infinity, NaN stays NaN
//   exp          e^x for any x, <= 2 ulp, exact 0 for -infinity and 1 for 0, infinity above the range
//   split_exp    e^x for any x as factor and power of two, neither of which overflows or underflows
// Method: x = n + f with n the nearest integer (added to and taken from a number so large that its last bit is 1),
// 2^f by a minimax polynomial (own Remez fits), times 2^n, whose bits are n + bias shifted up. At n = -bias the factor
// is exactly 0, and so is the result: from about 0.7 times the smallest normal number down.
#pragma once

#include <attn/core/detail/simd.hpp>

#include <limits>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class T>
struct exp_constants;

template <>
struct exp_constants<float> {
  // 2^f - 1 on [-1/2, 1/2], in all within 1.8 ulp of 2^f. The constant term of 2^f lies between two floats: 1 is added
  // separately.
  static constexpr float weight[] = {
      4.31663665e-08f, 0.693146825f, 0.240221471f, 0.0555088408f, 0.00967492163f, 0.00132298446f};
  // e^r on [-ln 2 / 2, ln 2 / 2] with e^0 = 1, relative error 2.6e-9
  static constexpr float natural[] = {
      1.0f, 1.000000049671635390262f, 0.5000000434650605635761f, 0.166663653148811866877f, 0.04166477649491015766143f,
      0.00837902073340588758204f, 0.001406127728061230066454f};
  // ln 2 as a sum of two numbers, the first with few bits, so that n times it is exact
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440054690583e-4f;
  // log2 e as a sum of two numbers, which has twice the digits
  static constexpr float log2_e_high = 1.4426950216293335f, log2_e_low = 1.92596299112661747e-8f;
};

template <>
struct exp_constants<double> {
  // error 3.1e-18 of 2^f
  static constexpr double weight[] = {
      0.0, 0.6931471805599453304866, 0.2402265069591015628897, 0.05550410866481991982762, 0.009618129107588303157383,
      0.001333355814679023906586, 0.000154035304625558875407, 0.00001525273348977261867845,
      0.000001321543306820398001249, 1.017819807807518266127e-7, 7.07410945229280121208e-9,
      4.435278896980214484557e-10};
  // relative error 1.8e-17
  static constexpr double natural[] = {
      1.0, 1.000000000000000559363, 0.5000000000000005578061, 0.16666666666657294875, 0.04166666666657356144399,
      0.00833333333771809595838, 0.001388888893236685984476, 0.0001984126148803925345197, 0.00002480150447792307105496,
      0.000002756425632434608000813, 2.762631035431588782864e-7, 2.298131500361142611535e-8};
  static constexpr double ln2_high = 0.693147180369123816490, ln2_low = 1.90821492927058770002e-10;
  static constexpr double log2_e_high = 1.4426950408889634, log2_e_low = 2.03552737409310320e-17;
};

/// 1.5 * 2^mantissa + bias: added to x it leaves round(x) + bias in the lowest bits.
template <class T>
inline constexpr T rounder = T(3) * T(std::uint64_t(1) << (float_bits<T>::mantissa - 1)) + T(float_bits<T>::bias);

template <class T, std::size_t N>
ATTN_INLINE packet<T> polynomial(const packet<T>& x, const T (&c)[N]) {
  packet<T> y = broadcast<T>(c[N - 1]);
  unroll<static_cast<int>(N) - 1>([&](int i) { y = fma(y, x, broadcast<T>(c[N - 2 - static_cast<std::size_t>(i)])); });
  return y;
}

/// 2^x for x <= about 100: no upper limit is guarded.
template <class T>
ATTN_INLINE packet<T> exp2_weight(const packet<T>& x) {
  const packet<T> clamped = (max)(x, broadcast<T>(T(-float_bits<T>::bias)));
  const packet<T> shifted = add(clamped, broadcast<T>(rounder<T>));
  const packet<T> fraction = sub(clamped, sub(shifted, broadcast<T>(rounder<T>)));
  const packet<T> power = add(polynomial<T>(fraction, exp_constants<T>::weight), broadcast<T>(T(1)));
  return mul(power, bits_to_exponent<T>(shifted));
}

/// 2^x for a weight that is rounded to bf16 next, which errs by 2^-9: relative error 1.02e-4, and 0 becomes 1.
ATTN_INLINE packet<float> exp2_rounded(const packet<float>& x) {
  constexpr float power[] = {1, 0.693282927f, 0.242210959f, 0.0550089311f};  // own Remez fit on [-1/2, 1/2]
  const packet<float> clamped = (max)(x, broadcast<float>(-float_bits<float>::bias));
  const packet<float> shifted = add(clamped, broadcast<float>(rounder<float>));
  const packet<float> fraction = sub(clamped, sub(shifted, broadcast<float>(rounder<float>)));
  return mul(polynomial<float>(fraction, power), bits_to_exponent<float>(shifted));
}

/// e^x.
template <class T>
ATTN_INLINE packet<T> exp(const packet<T>& x) {
  using constants = exp_constants<T>;
  // 2^bias is the largest power with a normal factor; one step up goes in two factors.
  constexpr T highest = T(float_bits<T>::bias + 1), lowest = T(-float_bits<T>::bias);
  const packet<T> scaled =
      (max)((min)(mul(x, broadcast<T>(constants::log2_e_high)), broadcast<T>(highest)), broadcast<T>(lowest));
  const packet<T> n = sub(add(scaled, broadcast<T>(rounder<T>)), broadcast<T>(rounder<T>));
  packet<T> r = fma(n, broadcast<T>(-constants::ln2_high), x);
  r = fma(n, broadcast<T>(-constants::ln2_low), r);
  // Outside the range r has no meaning: it is clamped, so that 0 and infinity result from the factors alone. Within it
  // |r| <= ln 2 / 2, but up to ln 2 where the processor does not round to nearest.
  r = (max)((min)(r, broadcast<T>(T(0.75))), broadcast<T>(T(-0.75)));
  const packet<T> up = if_less(broadcast<T>(T(0)), n, broadcast<T>(T(1)), broadcast<T>(T(0)));
  const packet<T> factor = bits_to_exponent<T>(add(sub(n, up), broadcast<T>(rounder<T>)));
  return mul(mul(polynomial<T>(r, constants::natural), factor), add(up, broadcast<T>(T(1))));
}

/// 2^n for integers n <= bias in lanes: exact, and exactly 0 from n = -bias down.
template <class T>
ATTN_INLINE packet<T> power_of_two(const packet<T>& n) {
  return bits_to_exponent<T>(add((max)(n, broadcast<T>(T(-float_bits<T>::bias))), broadcast<T>(rounder<T>)));
}

/// factor * 2^exponent, a number beyond the range of T.
template <class T>
struct split_number {
  packet<T> factor, exponent;
};

/// The whole number nearest to x log2 e, for x up to max / 6 in size; all beyond share one, so that sums of a few stay
/// finite.
template <class T>
ATTN_INLINE packet<T> nearest_power(const packet<T>& x) {
  constexpr T limit = (std::numeric_limits<T>::max)() / 4;
  const packet<T> scaled = mul(x, broadcast<T>(exp_constants<T>::log2_e_high));
  return round((max)((min)(scaled, broadcast<T>(limit)), broadcast<T>(-limit)));
}

/// e^x with 0.7 < factor < 1.42 and a whole exponent, <= 2 ulp for |x| < 2^11, beyond that less than rounding x costs
/// (twice that without fused multiply-adds) and 0.47 < factor < 2.12. Numbers beyond max / 6 in size are not told
/// apart. Where x is not finite the exponent is -infinity, so that maxima ignore it: for x = -infinity the factor is 0,
/// for NaN and +infinity it is NaN.
template <class T>
ATTN_INLINE split_number<T> split_exp(const packet<T>& x) {
  using constants = exp_constants<T>;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const packet<T> n = nearest_power<T>(x);
  packet<T> r = fma(n, broadcast<T>(-constants::ln2_high), x);
  r = fma(n, broadcast<T>(-constants::ln2_low), r);
  r = (max)((min)(r, broadcast<T>(T(0.75))), broadcast<T>(T(-0.75)));
  const packet<T> factor = fma(x, zero<T>(), polynomial<T>(r, constants::natural));
  return {if_less(x, broadcast<T>(std::numeric_limits<T>::lowest()), zero<T>(), factor),
          if_less(abs(x), broadcast<T>(infinity), n, broadcast<T>(-infinity))};
}

/// e^x for x <= 0, <= 2 ulp; 0 from about 0.7 times the smallest normal number down.
template <class T>
ATTN_INLINE packet<T> exp_weight(const packet<T>& x) {
  using constants = exp_constants<T>;
  if constexpr (!fuses_products) return exp<T>(x);  // x log2 e would be off by its own rounding
  constexpr T lowest = T(-float_bits<T>::bias * 0.693147180559945309417);
  const packet<T> clamped = (max)(x, broadcast<T>(lowest));
  const packet<T> shifted = add(mul(clamped, broadcast<T>(constants::log2_e_high)), broadcast<T>(rounder<T>));
  const packet<T> n = sub(shifted, broadcast<T>(rounder<T>));
  packet<T> fraction = fma(clamped, broadcast<T>(constants::log2_e_high), sub(zero<T>(), n));
  fraction = fma(clamped, broadcast<T>(constants::log2_e_low), fraction);
  const packet<T> power = add(polynomial<T>(fraction, constants::weight), broadcast<T>(T(1)));
  return mul(power, bits_to_exponent<T>(shifted));
}

/// 1 / (1 + e^-x) = over / under, neither of which overflows: relative error a few ulp on both sides.
template <class T>
struct sigmoid_fraction {
  packet<T> over, under;

  explicit ATTN_INLINE sigmoid_fraction(const packet<T>& x) {
    const packet<T> one = broadcast<T>(T(1)), e = exp_weight<T>(sub(zero<T>(), abs(x)));
    over = if_less(x, zero<T>(), e, one), under = add(one, e);
  }
};

/// tanh x, relative error a few ulp: odd in x, (1 - e) / (1 + e) with e = exp(-2|x|) away from 0, where it would lose
/// digits a polynomial in x^2.
template <class T>
ATTN_INLINE packet<T> tanh(const packet<T>& x) {
  // Taylor coefficients of tanh(x) / x in x^2, enough for |x| < 0.35 in double; seven are in float
  constexpr T all[] = {
      T(1), T(-1.0 / 3), T(2.0 / 15), T(-17.0 / 315), T(62.0 / 2835), T(-1382.0 / 155925), T(21844.0 / 6081075),
      T(-929569.0 / 638512875), T(6404582.0 / 10854718875.0), T(-443861162.0 / 1856156927625.0),
      T(18888466084.0 / 194896477400625.0), T(-113927491862.0 / 2900518163668125.0),
      T(58870668456604.0 / 3698160658676859375.0)};
  const packet<T> one = broadcast<T>(T(1)), size = abs(x);
  const packet<T> e = exp_weight<T>(mul(broadcast<T>(T(-2)), size));
  const packet<T> big = div(sub(one, e), add(one, e));
  const packet<T> signed_big = with_sign<T>(big, x);
  packet<T> near_zero;
  if constexpr (std::same_as<T, float>) {
    constexpr T series[] = {all[0], all[1], all[2], all[3], all[4], all[5], all[6]};
    near_zero = mul(x, polynomial<T>(mul(x, x), series));
  } else {
    near_zero = mul(x, polynomial<T>(mul(x, x), all));
  }
  return if_less(size, broadcast<T>(T(0.35)), near_zero, signed_big);
}

/// y[i] = f(x[i]) by whole packets; the last one through a buffer. x and y may be the same.
template <class T, class F>
void map_packets(const T* x, T* y, idx_t n, F&& f) {
  idx_t i = 0;
  for (; i + width<T> <= n; i += width<T>) store<T>(y + i, f(load<T>(x + i)));
  if (i == n) return;
  alignas(64) T rest[width<T>] = {};
  std::copy(x + i, x + n, rest);
  store<T>(rest, f(load<T>(rest)));
  std::copy(rest, rest + (n - i), y + i);
}

}  // namespace detail

/// y[i] = e^x[i] for n numbers, <= 2 ulp, no allocation; x and y may be the same array. Results below
/// about 0.7 times the smallest normal number are 0; e^-infinity = 0, e^0 = 1, NaN stays NaN.
template <class T>
  requires(std::same_as<T, float> || std::same_as<T, double>)
void exp(const T* x, T* y, idx_t n) {
  detail::map_packets(x, y, n, [](const auto& p) { return detail::exp<T>(p); });
}

}}  // namespace attn::ATTN_ISA
