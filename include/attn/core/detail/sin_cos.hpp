// attn: sine and cosine in registers, for any x. Up to |x| = 8192 within 1 ulp of 1, 1.1 without fused multiply-adds
// (absolute: near a zero other than x = 0 relative accuracy is limited by the rounding of x itself), beyond that by the
// standard library, lane by lane. Method: x = n pi + r with n the nearest whole number (for the cosine, x + pi / 2 = n
// pi + r). Pi is the sum of three terms, the first two of which have so few bits that n times them is exact. The sign
// is the parity of n; sin r on [-pi / 2, pi / 2] is a Taylor polynomial whose next term is below half an ulp.
#pragma once

#include <attn/core/detail/exp.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct sine_constants;

template <>
struct sine_constants<float> {
  static constexpr float pi[] = {3.140625f, 0x1.fb4p-11f, 0x1.4442d2p-23f};
  // (sin r - r) / r^3, in r^2
  static constexpr float series[] = {
      -1.0f / 6, 1.0f / 120, -1.0f / 5040, 1.0f / 362880, -1.0f / 39916800, 1.0f / 6227020800.0f};
};

template <>
struct sine_constants<double> {
  static constexpr double pi[] = {0x1.921fb5444p+1, 0x1.68c234c4cp-38, 0x1.98a2e03707345p-76};
  static constexpr double series[] = {
      -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368000.0,
      1.0 / 355687428096000.0, -1.0 / 121645100408832000.0, 1.0 / 51090942171709440000.0};
};

/// The nearest whole number, for |x| < 2^(mantissa - 1).
template <class T>
ATTN_INLINE packet<T> nearest(const packet<T>& x) {
  constexpr T large = T(3) * T(std::uint64_t(1) << (float_bits<T>::mantissa - 1));
  return sub(add(x, broadcast<T>(large)), broadcast<T>(large));
}

/// (-1)^n sin(x - whole pi), whole = n - shift.
template <class T>
ATTN_INLINE packet<T> sine_near(const packet<T>& x, const packet<T>& n, const packet<T>& whole) {
  using constants = sine_constants<T>;
  packet<T> r = fma(whole, broadcast<T>(-constants::pi[0]), x);
  r = fma(whole, broadcast<T>(-constants::pi[1]), r);
  r = fma(whole, broadcast<T>(-constants::pi[2]), r);
  const packet<T> half = mul(n, broadcast<T>(T(0.5))), odd = abs(sub(half, nearest<T>(half)));  // 0 or 1/2
  const packet<T> square = mul(r, r);
  const packet<T> sine = fma(mul(r, square), polynomial<T>(square, constants::series), r);
  return mul(sine, fma(odd, broadcast<T>(T(-4)), broadcast<T>(T(1))));
}

/// Beyond this size, n times the first terms of pi is rounded.
inline constexpr int sine_near_limit = 8192;

/// Corrects the lanes whose x is beyond that size and leaves the others: no lane affects another.
template <class T>
[[gnu::noinline]] void sin_cos_far(const packet<T>& x, packet<T>& sine, packet<T>& cosine) {
  alignas(64) T lanes[width<T>], s[width<T>], c[width<T>];
  store<T>(lanes, x), store<T>(s, sine), store<T>(c, cosine);
  for (int i = 0; i < width<T>; ++i)
    if (std::abs(lanes[i]) > T(sine_near_limit)) s[i] = std::sin(lanes[i]), c[i] = std::cos(lanes[i]);
  sine = load<T>(s), cosine = load<T>(c);
}

template <class T>
ATTN_INLINE void sin_cos(const packet<T>& x, packet<T>& sine, packet<T>& cosine) {
  const packet<T> turns = mul(x, broadcast<T>(T(0.318309886183790671537767526745)));
  const packet<T> n = nearest<T>(turns), m = nearest<T>(add(turns, broadcast<T>(T(0.5))));
  sine = sine_near<T>(x, n, n);
  cosine = sine_near<T>(x, m, sub(m, broadcast<T>(T(0.5))));
  // A NaN counts as not beyond it: a maximum may return it and so hide the other lanes.
  const packet<T> size = abs(x);
  if (max_lanes(if_less(broadcast<T>(T(sine_near_limit)), size, size, zero<T>())) > T(0)) [[unlikely]]
    sin_cos_far<T>(x, sine, cosine);
}

}}}  // namespace attn::ATTN_ISA::detail
