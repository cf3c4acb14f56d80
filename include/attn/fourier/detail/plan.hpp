// attn: a Fourier transform of any length, planned once and run on packets of channels.
//
//   X_k = sum over t of x_t e^(-2 pi i t k / n)
//
// A length whose primes are at most largest_odd_radix is transformed factor by factor (mixed radix, in place, depth
// first: a part that fits into the first cache is finished before the next one is begun). Any other length n becomes a
// circular convolution of a length of factors 2, 3 and 5 that is at least 2 n - 1 (Bluestein 1970): with
// 2 t k = t^2 + k^2 - (k - t)^2 the transform is a product with the chirp c_t = e^(-pi i t^2 / n), a convolution with
// its conjugate, and a product with the chirp again. The inverse transform runs the passes transposed and in reverse,
// so that results never need to be reordered.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/fourier/detail/butterfly.hpp>

#include <cmath>
#include <complex>
#include <numbers>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// e^(-2 pi i k / n) for k >= 0. The angle is brought into the first octant as a fraction, so that cos and sin never
/// see a rounded multiple of pi.
inline std::complex<double> root_of_unity(idx_t k, idx_t n) {
  idx_t a = 8 * (k % n);  // the circle is 8 n, an octant n
  const auto fold = [&a](idx_t half) {
    const bool beyond = a > half;
    if (beyond) a = 2 * half - a;
    return beyond;
  };
  const bool below = fold(4 * n), left = fold(2 * n), steep = fold(n);
  const double angle = std::numbers::pi / 4 * (static_cast<double>(a) / static_cast<double>(n));
  double c = std::cos(angle), s = std::sin(angle);
  if (steep) std::swap(c, s);
  return {left ? -c : c, below ? s : -s};
}

/// All powers of one root of unity, each the product of two from tables of about sqrt(n): n sines and cosines would
/// take as long as a transform.
class root_table {
 public:
  static root_table layout(arena& memory, idx_t n) {
    root_table table;
    table.n_ = n;
    while (table.step_ * table.step_ < n) table.step_ *= 2;
    table.fine_ = memory.allocate<std::complex<double>>(table.step_);
    table.coarse_ = memory.allocate<std::complex<double>>((n + table.step_ - 1) / table.step_);
    return table;
  }
  void fill() const {
    for (idx_t k = 0; k < step_; ++k) fine_[k] = root_of_unity(k, n_);
    for (idx_t k = 0; k * step_ < n_; ++k) coarse_[k] = root_of_unity(k * step_, n_);
  }

  /// e^(-2 pi i k / n), 0 <= k < n
  std::complex<double> operator()(idx_t k) const {
    const std::complex<double> a = coarse_[k / step_], b = fine_[k % step_];
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  }

 private:
  idx_t n_ = 1, step_ = 1;
  std::complex<double>*fine_ = nullptr, *coarse_ = nullptr;
};

/// The least number of factors 2, 3 and 5 that is not below n.
inline idx_t smooth_size(idx_t n) {
  idx_t best = (std::numeric_limits<idx_t>::max)();
  for (idx_t fives = 1; fives < best; fives *= 5)
    for (idx_t odd = fives; odd < best; odd *= 3) {
      idx_t all = odd;
      while (all < n) all *= 2;
      best = (std::min)(best, all);
    }
  return best;
}

/// A root of unity as two numbers of type T.
template <class T>
void put_root(T* to, std::complex<double> root) {
  to[0] = static_cast<T>(root.real()), to[1] = static_cast<T>(root.imag());
}

template <class T>
class fourier_plan {
 public:
  fourier_plan() = default;

  /// Whether a transform of this length is nothing but passes.
  static bool is_smooth(idx_t n) { return fourier_plan().factor(n); }

  /// The plan of length n >= 1 and its memory; to be filled once.
  static fourier_plan layout(arena& memory, idx_t n) {
    fourier_plan plan;
    plan.length_ = plan.size_ = n;
    if (!plan.factor(n)) {
      plan.size_ = smooth_size(2 * n - 1);
      plan.factor(plan.size_);
      plan.chirp_ = memory.allocate<T>(2 * n);
      plan.spectrum_ = memory.allocate<T>(2 * plan.size_);
      plan.chirp_roots_ = root_table::layout(memory, 2 * n);
    }
    if (!plan.convolves()) plan.place_ = memory.allocate<idx_t>(n);
    plan.roots_ = root_table::layout(memory, plan.size_);
    idx_t size = plan.size_;
    for (stage* s = plan.stages_; s < plan.stages_ + plan.passes_; ++s) {
      s->size = size, size /= s->radix;
      s->roots = memory.allocate<T>(2 * s->radix);
      s->twiddles = memory.allocate<T>(2 * (s->radix - 1) * size);
    }
    return plan;
  }

  idx_t length() const { return length_; }
  /// Rows of memory a transform needs beside its own.
  idx_t spare_rows() const { return convolves() ? size_ : 0; }
  /// The row of result k after a transform.
  idx_t order(idx_t k) const { return convolves() ? k : place_[k]; }

  /// Computes the tables; `spare` is memory of spare_rows() rows.
  void fill(T* spare) const {
    roots_.fill();
    for (int n = 0; n < passes_; ++n) stages_[n].fill(roots_, size_);
    convolves() ? fill_chirp(spare) : fill_places();
  }

  /// Transforms length() rows in place; `spare` is memory of spare_rows() rows.
  void transform(T* rows, T* spare) const {
    convolves() ? convolve(rows, spare) : run<false>(0, rows);
  }

  /// The same in two steps that threads share: start(p, rows) for every p < pieces(), then finish(p, rows) for every p.
  /// One piece: a transform is too small, or cannot be split.
  idx_t pieces() const { return convolves() || size_ <= in_cache ? 1 : stages_[0].radix; }
  void start(idx_t piece, T* rows) const {
    const idx_t columns = size_ / pieces();
    stages_[0].template run<false>(rows, 1, piece * columns / pieces(), (piece + 1) * columns / pieces());
  }
  void finish(idx_t piece, T* rows) const { run<false>(1, rows + piece * (size_ / pieces()) * row_width<T>); }

 private:
  /// One pass over blocks of `size` rows.
  struct stage {
    int radix = 1;
    idx_t size = 1;
    T *roots = nullptr, *twiddles = nullptr;

    void fill(const root_table& table, idx_t whole) const {
      for (idx_t q = 0; q < radix; ++q) put_root(roots + 2 * q, std::conj(table(whole / radix * q)));
      T* to = twiddles;
      for (idx_t j = 0; j < size / radix; ++j)
        for (idx_t k = 1; k < radix; ++k, to += 2) put_root(to, table(whole / size * j * k));
    }
    template <bool Transposed>
    void run(T* rows, idx_t blocks) const {
      run<Transposed>(rows, blocks, 0, size / radix);
    }
    template <bool Transposed>
    void run(T* rows, idx_t blocks, idx_t begin, idx_t end) const {
      if (radix == 2) return pass<2, Transposed>(rows, blocks, size, begin, end, twiddles);
      if (radix == 3) return pass<3, Transposed>(rows, blocks, size, begin, end, twiddles);
      if (radix == 4) return pass<4, Transposed>(rows, blocks, size, begin, end, twiddles);
      if (radix == 5) return pass<5, Transposed>(rows, blocks, size, begin, end, twiddles);
      if (radix == 8) return pass<8, Transposed>(rows, blocks, size, begin, end, twiddles);
      odd_pass(radix, rows, blocks, size, begin, end, roots, twiddles);  // never in a convolution
    }
  };

  /// So many rows fit into the first cache.
  static constexpr idx_t in_cache = 24 * 1024 / (row_width<T> * static_cast<idx_t>(sizeof(T)));

  bool convolves() const { return size_ != length_; }

  void convolve(T* rows, T* spare) const {
    constexpr idx_t wide = row_width<T>;
    for (idx_t t = 0; t < length_; ++t) store_row(spare + t * wide, times(load_row(rows + t * wide), chirp_ + 2 * t));
    std::fill(spare + length_ * wide, spare + size_ * wide, T(0));
    run<false>(0, spare);
    // Real and imaginary parts change places before and after: that makes a transform its inverse.
    for (idx_t p = 0; p < size_; ++p) {
      const auto x = times(load_row(spare + p * wide), spectrum_ + 2 * p);
      store_row<T>(spare + p * wide, {x.im, x.re});
    }
    run<true>(0, spare);
    for (idx_t k = 0; k < length_; ++k) {
      const auto x = load_row(spare + k * wide);
      store_row(rows + k * wide, times<T>({x.im, x.re}, chirp_ + 2 * k));
    }
  }

  /// Plans the passes of length n; false if a prime of it is too large. Powers of two go by eights where the registers
  /// hold them, else by fours; the widest come last, since the last pass needs no twiddles.
  bool factor(idx_t n) {
    passes_ = 0;
    const auto use = [this](int radix) { stages_[passes_++].radix = radix; };
    for (int p = 3; p <= largest_odd_radix; p += 2)
      for (; n % p == 0; n /= p) use(p);
    int twos = 0;
    for (; n % 2 == 0; n /= 2) ++twos;
    const bool eights = registers >= 32;
    if (twos == 1 || (!eights && twos % 2 == 1)) use(2), --twos;
    for (; twos > 0 && (!eights || twos % 3 != 0); twos -= 2) use(4);
    for (; twos > 0; twos -= 3) use(8);
    return n == 1;
  }

  /// Result k = k_0 + r_0 (k_1 + r_1 (k_2 + ...)) is where its digits count parts, the first one the largest.
  void fill_places() const {
    idx_t known = 1;  // results below `known` are placed
    place_[0] = 0;
    for (int n = 0; n < passes_; ++n) {
      const stage& s = stages_[n];
      for (idx_t digit = 1; digit < s.radix; ++digit)
        for (idx_t k = 0; k < known; ++k) place_[digit * known + k] = place_[k] + digit * (s.size / s.radix);
      known *= s.radix;
    }
  }

  void fill_chirp(T* rows) const {
    chirp_roots_.fill();
    std::fill(rows, rows + size_ * row_width<T>, T(0));
    for (idx_t t = 0; t < length_; ++t) {
      const std::complex<double> c = chirp_roots_(t * t % (2 * length_));
      put_root(chirp_ + 2 * t, c);
      for (idx_t at : {t, (size_ - t) % size_}) {
        rows[at * row_width<T>] = static_cast<T>(c.real() / static_cast<double>(size_));
        rows[at * row_width<T> + width<T>] = static_cast<T>(-c.imag() / static_cast<double>(size_));
      }
    }
    run<false>(0, rows);
    for (idx_t n = 0; n < 2 * size_; ++n) spectrum_[n] = rows[n / 2 * row_width<T> + n % 2 * width<T>];
  }

  /// Passes n, n + 1, ... on one block; transposed, they come in reverse.
  template <bool Transposed>
  void run(int n, T* rows) const {
    if (n == passes_) return;
    const stage& first = stages_[n];
    if (first.size <= in_cache) {
      for (int m = n; m < passes_; ++m) {
        const stage& s = stages_[Transposed ? passes_ - 1 - (m - n) : m];
        s.template run<Transposed>(rows, first.size / s.size);
      }
      return;
    }
    if (!Transposed) first.template run<false>(rows, 1);
    for (int part = 0; part < first.radix; ++part)
      run<Transposed>(n + 1, rows + part * (first.size / first.radix) * row_width<T>);
    if (Transposed) first.template run<true>(rows, 1);
  }

  idx_t length_ = 0, size_ = 0;  // of the transform, and of its passes
  int passes_ = 0;
  stage stages_[40];                          // 3^39 is beyond memory
  idx_t* place_ = nullptr;                    // where result k of the passes stands
  T *chirp_ = nullptr, *spectrum_ = nullptr;  // the spectrum as the passes leave it
  root_table roots_, chirp_roots_;
};

// The discrete Hartley transform of many real channels, H_k = sum over t of x_t (cos + sin)(2 pi t k / n). Two channels
// make one complex one: the packets of real and of imaginary parts of a row are channels of their own. With Z the
// Fourier transform of a + i b, sums and differences of Z_k and Z_-k are the transforms of a and b at k and -k: the
// rows of 2 H_k and 2 H_-k are (Z_k + Z_-k) +- i (Z_k - Z_-k).

/// -k modulo n
ATTN_INLINE idx_t mirror(idx_t k, idx_t n) { return k == 0 ? 0 : n - k; }

/// 2 H_k of Z_k and Z_-k; 2 H_-k if these change places.
template <class T>
ATTN_INLINE complex_packet<T> hartley_twice(const complex_packet<T>& z, const complex_packet<T>& z_mirrored) {
  return add_i(add(z, z_mirrored), sub(z, z_mirrored));
}

/// Twice the Hartley transform of plan.length() rows, in place; result k is row plan.order(k).
template <class T>
void hartley_twice(const fourier_plan<T>& plan, T* rows, T* spare) {
  plan.transform(rows, spare);
  const idx_t n = plan.length();
  for (idx_t k = 0; k <= n / 2; ++k) {
    T *const at = rows + plan.order(k) * row_width<T>, *const other = rows + plan.order(mirror(k, n)) * row_width<T>;
    const auto z = load_row(at), y = load_row(other);
    store_row(at, hartley_twice<T>(z, y));
    store_row(other, hartley_twice<T>(y, z));
  }
}

}}}  // namespace attn::ATTN_ISA::detail
