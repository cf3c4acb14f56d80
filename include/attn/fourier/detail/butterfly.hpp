// attn: the small transforms that a long one consists of, over packets of independent channels.
//
// A row is one complex number per lane: a packet of real parts, then one of imaginary parts. One pass takes blocks of
// `size` rows and transforms the `radix` rows that are size / radix apart (decimation in frequency), in place.
#pragma once

#include <attn/core/detail/simd.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Numbers of a row.
template <class T>
inline constexpr int row_width = 2 * width<T>;

template <class T>
struct complex_packet {
  packet<T> re, im;

  friend ATTN_INLINE complex_packet add(const complex_packet& a, const complex_packet& b) {
    return {add(a.re, b.re), add(a.im, b.im)};
  }
  friend ATTN_INLINE complex_packet sub(const complex_packet& a, const complex_packet& b) {
    return {sub(a.re, b.re), sub(a.im, b.im)};
  }
  /// a - i b and a + i b
  friend ATTN_INLINE complex_packet sub_i(const complex_packet& a, const complex_packet& b) {
    return {add(a.re, b.im), sub(a.im, b.re)};
  }
  friend ATTN_INLINE complex_packet add_i(const complex_packet& a, const complex_packet& b) {
    return {sub(a.re, b.im), add(a.im, b.re)};
  }
};
template <class T>
ATTN_INLINE complex_packet<T> load_row(const T* p) {
  return {load<T>(p), load<T>(p + width<T>)};
}
template <class T>
ATTN_INLINE void store_row(T* p, const complex_packet<T>& x) {
  store<T>(p, x.re), store<T>(p + width<T>, x.im);
}
/// x times the complex number at `factor`, the same for all lanes.
template <class T>
ATTN_INLINE complex_packet<T> times(const complex_packet<T>& x, const T* factor) {
  const packet<T> re = broadcast<T>(factor[0]), im = broadcast<T>(factor[1]);
  return {sub(mul(x.re, re), mul(x.im, im)), fma(x.re, im, mul(x.im, re))};
}

// Butterflies: y_k = sum over q of x_q e^(-2 pi i q k / R), in place and in order ------------------------------------

template <class T>
ATTN_INLINE void butterfly(complex_packet<T> (&x)[2]) {
  const auto a = x[0], b = x[1];
  x[0] = add(a, b), x[1] = sub(a, b);
}

template <class T>
ATTN_INLINE void butterfly_4(complex_packet<T>& x0, complex_packet<T>& x1, complex_packet<T>& x2,
                             complex_packet<T>& x3) {
  const auto a = add(x0, x2), b = sub(x0, x2), c = add(x1, x3), d = sub(x1, x3);
  x0 = add(a, c), x1 = sub_i(b, d), x2 = sub(a, c), x3 = add_i(b, d);
}
template <class T>
ATTN_INLINE void butterfly(complex_packet<T> (&x)[4]) {
  butterfly_4(x[0], x[1], x[2], x[3]);
}

template <class T>
ATTN_INLINE void butterfly(complex_packet<T> (&x)[8]) {
  butterfly_4(x[0], x[2], x[4], x[6]);
  butterfly_4(x[1], x[3], x[5], x[7]);
  // The odd half times powers of e^(-pi i / 4): sums and differences of parts, times the root of 1/2.
  const packet<T> plus = broadcast<T>(T(0.70710678118654752440)), minus = broadcast<T>(T(-0.70710678118654752440));
  const auto e0 = x[0], e1 = x[2], e2 = x[4], e3 = x[6], o0 = x[1], o1 = x[3], o2 = x[5], o3 = x[7];
  x[0] = add(e0, o0), x[4] = sub(e0, o0);
  x[2] = sub_i(e2, o2), x[6] = add_i(e2, o2);
  const packet<T> sum1 = add(o1.re, o1.im), difference1 = sub(o1.im, o1.re);
  x[1] = {fma(sum1, plus, e1.re), fma(difference1, plus, e1.im)};
  x[5] = {fma(sum1, minus, e1.re), fma(difference1, minus, e1.im)};
  const packet<T> sum3 = add(o3.re, o3.im), difference3 = sub(o3.im, o3.re);
  x[3] = {fma(difference3, plus, e3.re), fma(sum3, minus, e3.im)};
  x[7] = {fma(difference3, minus, e3.re), fma(sum3, plus, e3.im)};
}

/// cos and sin of 2 pi q / R, q = 1 ... (R - 1) / 2
template <int R>
struct odd_roots;
template <>
struct odd_roots<3> {
  static constexpr double cosine[] = {-0.5}, sine[] = {0.86602540378443864676};
};
template <>
struct odd_roots<5> {
  static constexpr double cosine[] = {0.30901699437494742410, -0.80901699437494742410};
  static constexpr double sine[] = {0.95105651629515357212, 0.58778525229247312917};
};

/// Sums a_q and differences b_q of the rows q and R - q make y_k and y_(R - k) at once:
/// x_0 + sum of a_q cos(2 pi q k / R) -+ i sum of b_q sin(2 pi q k / R).
template <class T, std::size_t Rows>
  requires(Rows == 3 || Rows == 5)
ATTN_INLINE void butterfly(complex_packet<T> (&x)[Rows]) {
  constexpr int R = static_cast<int>(Rows), half = R / 2;
  complex_packet<T> a[array_size<half>], b[array_size<half>];
  const auto first = x[0];
  unroll<half>([&](auto q) {
    a[q] = add(x[q + 1], x[R - 1 - q]), b[q] = sub(x[q + 1], x[R - 1 - q]);
    x[0] = add(x[0], a[q]);
  });
  unroll_constants<half>([&](auto k) {
    complex_packet<T> even = first, odd;
    unroll_constants<half>([&](auto q) {
      constexpr int turn = (k + 1) * (q + 1) % R, place = (turn > half ? R - turn : turn) - 1;
      const packet<T> c = broadcast<T>(T(odd_roots<R>::cosine[place]));
      const packet<T> s = broadcast<T>(T(turn > half ? -odd_roots<R>::sine[place] : odd_roots<R>::sine[place]));
      even = {fma(a[q].re, c, even.re), fma(a[q].im, c, even.im)};
      if constexpr (q == 0)
        odd = {mul(b[q].re, s), mul(b[q].im, s)};
      else
        odd = {fma(b[q].re, s, odd.re), fma(b[q].im, s, odd.im)};
    });
    x[k + 1] = sub_i(even, odd), x[R - 1 - k] = add_i(even, odd);
  });
}

// Passes --------------------------------------------------------------------------------------------------------------

/// One pass over `blocks` blocks of `size` rows. The twiddles e^(-2 pi i j k / size), k = 1 ... R - 1, are in the
/// order of j, of which [begin, end) are computed; the last pass, of size R, needs none. Transposed, they come before
/// the butterfly: as its matrix is symmetric, a transform is also its passes transposed and in reverse, from the order
/// it leaves into the natural one. Not inlined: compiled twice, it may contract other products and sums.
template <int R, bool Transposed, class T>
[[gnu::noinline]] void pass(T* rows, idx_t blocks, idx_t size, idx_t begin, idx_t end, const T* twiddles) {
  const idx_t step = size / R * row_width<T>;
  for (idx_t block = 0; block < blocks; ++block, rows += size * row_width<T>) {
    const T* factor = twiddles + 2 * (R - 1) * begin;
    for (T* at = rows + begin * row_width<T>; at < rows + end * row_width<T>; at += row_width<T>) {
      complex_packet<T> x[array_size<R>];
      unroll<R>([&](auto q) { x[q] = load_row(at + q * step); });
      const auto turn = [&] { unroll<R - 1>([&](auto k) { x[k + 1] = times(x[k + 1], factor + 2 * k); }); };
      if (Transposed && size != R) turn();
      butterfly(x);
      if (!Transposed && size != R) turn();
      unroll<R>([&](auto q) { store_row(at + q * step, x[q]); });
      if (size != R) factor += 2 * (R - 1);
    }
  }
}

/// The largest prime that is a radix of its own. A convolution takes 1.4 ns a number on a Zen 4, a pass of radix p
/// about p / 60.
inline constexpr int largest_odd_radix = 41;

/// The same for any odd radix: `roots` are its cosines and sines, a pair for every q < radix.
template <class T>
[[gnu::noinline]] void odd_pass(int radix, T* rows, idx_t blocks, idx_t size, idx_t begin, idx_t end, const T* roots,
                                const T* twiddles) {
  constexpr int most = largest_odd_radix / 2;
  const int half = radix / 2;
  const idx_t step = size / radix * row_width<T>;
  for (idx_t block = 0; block < blocks; ++block, rows += size * row_width<T>) {
    const T* factor = twiddles + 2 * (radix - 1) * begin;
    T* const stop = rows + end * row_width<T>;
    for (T* at = rows + begin * row_width<T>; at < stop; at += row_width<T>, factor += 2 * (radix - 1)) {
      complex_packet<T> a[most], b[most];
      const auto first = load_row(at);
      auto whole = first;
      for (int q = 0; q < half; ++q) {
        const auto one = load_row(at + (q + 1) * step), other = load_row(at + (radix - 1 - q) * step);
        a[q] = add(one, other), b[q] = sub(one, other), whole = add(whole, a[q]);
      }
      store_row(at, whole);
      for (int k = 1; k <= half; ++k) {
        complex_packet<T> even = first, odd = {zero<T>(), zero<T>()};
        for (int q = 0, turn = k; q < half; ++q, turn = (turn + k) % radix) {
          const packet<T> c = broadcast<T>(roots[2 * turn]), s = broadcast<T>(roots[2 * turn + 1]);
          even = {fma(a[q].re, c, even.re), fma(a[q].im, c, even.im)};
          odd = {fma(b[q].re, s, odd.re), fma(b[q].im, s, odd.im)};
        }
        store_row(at + k * step, times(sub_i(even, odd), factor + 2 * (k - 1)));
        store_row(at + (radix - k) * step, times(add_i(even, odd), factor + 2 * (radix - k - 1)));
      }
    }
  }
}

}}}  // namespace attn::ATTN_ISA::detail
