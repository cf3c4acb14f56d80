// attn: the work of rotary.hpp. A task takes some tokens: their cosines and sines are computed once, in double, then
// the rows of all heads are rotated. The angle of a position is the sum of that of the last multiple of 16 and that of
// the remainder; its cosine and sine follow from theirs, of which there are few.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/sin_cos.hpp>
#include <attn/core/detail/tile_product.hpp>

#include <cmath>
#include <optional>
#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr double two_pi = 6.283185307179586476925286766559;

inline double frequency_of(idx_t n, idx_t dims, double base) {
  return std::pow(base, -2 * static_cast<double>(n) / static_cast<double>(dims));
}

/// f(n, frequency_of(n)) for every two dims that are rotated together; the base is the first of the numbers that must
/// be positive.
template <class F>
std::vector<double> frequencies_of(const char* name, idx_t dims, std::initializer_list<double> positive, const F& f) {
  const validator check{name};
  if (dims < 0 || dims % 2 != 0) check.fail("an even number of dims", dims);
  for (double x : positive)
    if (!(x > 0 && std::isfinite(x))) check.fail("a base and a factor > 0", x);
  std::vector<double> all(static_cast<std::size_t>(dims / 2));
  for (idx_t n = 0; n < dims / 2; ++n)
    all[static_cast<std::size_t>(n)] = f(n, frequency_of(n, dims, *positive.begin()));
  return all;
}

/// The fast turns, checked.
inline double checked_turns(const char* name, idx_t original_length, double fast, double slow) {
  const validator check{name};
  check.at_least("original length", 1, original_length);
  if (!(slow > 0)) check.fail("slow turns > 0", slow);
  if (!(fast > slow && std::isfinite(fast))) check.fail({"fast turns > slow turns ", slow}, fast);
  return fast;
}

/// Cosines and sines of count angles position * frequency[n], in whole packets. Full turns are subtracted by 2 pi in
/// three terms, the first two of 32 bits, so that multiples of up to 2^21 turns are exact.
inline void rotation_angles(double position, const double* frequency, idx_t count, double* cosine, double* sine) {
  using packet_type = packet<double>;
  constexpr double turn[] = {0x1.921fb544p+2, 0x1.0b4611a6p-32, 0x1.3198a2e037073p-67};
  for (idx_t n = 0; n < count; n += width<double>) {
    const packet_type angle = mul(broadcast<double>(position), load<double>(frequency + n));
    const packet_type turns = nearest<double>(mul(angle, broadcast<double>(1 / two_pi)));
    packet_type rest = angle;
    for (double part : turn) rest = fma(turns, broadcast<double>(-part), rest);
    packet_type s, c;
    sin_cos<double>(rest, s, c);
    store<double>(cosine + n, c), store<double>(sine + n, s);
  }
}

/// One rotation of x into to.
template <class S, class Options>
struct rotary_call {
  using T = compute_type<S>;
  static constexpr idx_t tokens = 256;     // of a task
  static constexpr idx_t remainders = 16;  // a position is a multiple of it plus a remainder

  tensor_view<const S> x;
  tensor_view<S> to;
  const Options& o;
  idx_t dims;
  const double* frequency;  // [whole packets]
  bool back, accumulate;
  double* remainder_angles = nullptr;  // [remainders][2][angles()]: cosines and sines, where there are tokens enough

  idx_t frequencies() const { return dims / 2; }
  /// A row is rotated as a whole (adjacent dims), or as two halves.
  idx_t columns() const { return o.interleaved ? dims : frequencies(); }
  idx_t padded() const { return round_up(columns(), width<T>); }

  idx_t angles() const { return round_up(frequencies(), width<double>); }

  struct scratch {
    T *cosine, *sine;  // [tokens][padded]; adjacent dims: each twice, the first sine negated
    T* row;            // [2 padded]
    double *multiple, *rest, *sum;  // [2][angles()]: cosines and sines
    idx_t known = (std::numeric_limits<idx_t>::min)();  // the multiple for which they hold
  };
  scratch layout(arena& memory) const {
    return {memory.allocate<T>(tokens * padded()),       memory.allocate<T>(tokens * padded()),
            memory.allocate<T>(2 * padded()),            memory.allocate<double>(2 * angles()),
            memory.allocate<double>(2 * angles()),       memory.allocate<double>(2 * angles())};
  }
  void angles_of(idx_t position, double* into) const {
    rotation_angles(static_cast<double>(position), frequency, frequencies(), into, into + angles());
  }
  void prepare_remainders() const {
    for (idx_t n = 0; n < remainders; ++n) angles_of(n, remainder_angles + n * 2 * angles());
  }

  /// The cosines and sines of a token at a position.
  void prepare(idx_t at, T* c, T* s, scratch& own) const {
    const double sign = back ? -1 : 1;
    if (o.cos) {
      for (idx_t n = 0; n < frequencies(); ++n) set(n, o.cos(at, n), static_cast<T>(sign) * o.sin(at, n), c, s);
    } else {
      const idx_t left = (at % remainders + remainders) % remainders;
      if (own.known != at - left) angles_of(own.known = at - left, own.multiple);
      const double* rest = remainder_angles ? remainder_angles + left * 2 * angles() : own.rest;
      if (!remainder_angles) angles_of(left, own.rest);
      const packet<double> factor = broadcast<double>(o.magnitude), sine_factor = broadcast<double>(sign * o.magnitude);
      for (idx_t n = 0; n < angles(); n += width<double>) {
        const packet<double> c_1 = load<double>(own.multiple + n), s_1 = load<double>(own.multiple + angles() + n),
                             c_2 = load<double>(rest + n), s_2 = load<double>(rest + angles() + n);
        store<double>(own.sum + n, mul(factor, sub(mul(c_1, c_2), mul(s_1, s_2))));
        store<double>(own.sum + angles() + n, mul(sine_factor, fma(s_1, c_2, mul(c_1, s_2))));
      }
      if (o.interleaved) {
        for (idx_t n = 0; n < frequencies(); ++n)
          set(n, static_cast<T>(own.sum[n]), static_cast<T>(own.sum[angles() + n]), c, s);
      } else {
        narrow(own.sum, c), narrow(own.sum + angles(), s);
      }
    }
    std::fill(c + columns(), c + padded(), T(0)), std::fill(s + columns(), s + padded(), T(0));
  }
  /// Loops whose counts are known are vectorized at -O2 too.
  void narrow(const double* from, T* into) const {
    for (const double* const end = from + angles(); from < end; from += width<double>, into += width<double>)
      for (idx_t lane = 0; lane < width<double>; ++lane) into[lane] = static_cast<T>(from[lane]);
  }
  void set(idx_t n, T cosine, T sine, T* c, T* s) const {
    if (!o.interleaved) {
      c[n] = cosine, s[n] = sine;
    } else {
      c[2 * n] = c[2 * n + 1] = cosine;
      s[2 * n] = -sine, s[2 * n + 1] = sine;
    }
  }

  /// Rotates a row of `padded` numbers, or two halves of it, in whole packets.
  void rotate(const T* a, const T* b, const T* c, const T* s, T* to_a, T* to_b) const {
    if (o.interleaved) return rotate_neighbours(a, c, s, to_a);
    const idx_t count = padded();  // not looked up again after every store
    for (idx_t n = 0; n < count; n += width<T>) {
      const packet<T> first = load<T>(a + n), second = load<T>(b + n), cosine = load<T>(c + n), sine = load<T>(s + n);
      store<T>(to_a + n, sub(mul(first, cosine), mul(second, sine)));
      store<T>(to_b + n, fma(second, cosine, mul(first, sine)));
    }
  }
  void rotate_neighbours(const T* row, const T* c, const T* s, T* result) const {
    if constexpr (width<T> == 1) {
      for (idx_t n = 0; n < dims; n += 2) {
        const T first = row[n], second = row[n + 1];
        result[n] = first * c[n] + second * s[n];
        result[n + 1] = second * c[n + 1] + first * s[n + 1];
      }
    } else {
      const idx_t count = padded();
      for (idx_t n = 0; n < count; n += width<T>) {
        const packet<T> x_n = load<T>(row + n), other = shuffle<T>(x_n, x_n, [](int lane) { return lane ^ 1; });
        store<T>(result + n, fma(x_n, load<T>(c + n), mul(other, load<T>(s + n))));
      }
    }
  }

  /// Tokens [begin, end) of heads [first, last), token by token: a few heads at a time are memory streams that the
  /// processor prefetches, and cosines and sines stay in the cache; head by head takes twice as long.
  void rotate_rows(idx_t b, idx_t first, idx_t last, idx_t begin, idx_t end, const scratch& s) const {
    const idx_t half = frequencies(), step = padded(), rest = x.data() == to.data() ? 0 : x.extent(3) - dims;
    if constexpr (std::same_as<S, T>)
      if (x.stride(3) == 1 && to.stride(3) == 1 && columns() == padded() && !accumulate) {
        const T *cosine = s.cosine, *sine = s.sine;
        for (idx_t i = begin; i < end; ++i, cosine += step, sine += step)
          for (idx_t h = first; h < last; ++h) {
            const S* const row = &x(b, h, i, 0);
            S* const result = &to(b, h, i, 0);
            rotate(row, row + half, cosine, sine, result, result + half);
            if (rest > 0) std::copy_n(row + dims, rest, result + dims);
          }
        return;
      }
    for (idx_t i = begin; i < end; ++i)
      for (idx_t h = first; h < last; ++h)
        rotate_any(&x(b, h, i, 0), x.stride(3), &to(b, h, i, 0), to.stride(3), (i - begin) * step, s);
  }
  /// A row in any layout, through s.row.
  void rotate_any(const S* row, idx_t row_stride, S* result, idx_t result_stride, idx_t n, const scratch& s) const {
    const idx_t half = frequencies(), halves = o.interleaved ? 1 : 2;
    for (idx_t part = 0; part < halves; ++part)
      for (idx_t d = 0; d < padded(); d += width<T>)
        store<T>(s.row + part * padded() + d,
                 load_part<T>(row + (part * half + d) * row_stride, row_stride, columns() - d));
    rotate(s.row, s.row + padded(), s.cosine + n, s.sine + n, s.row, s.row + padded());
    for (idx_t part = 0; part < halves; ++part)
      for (idx_t d = 0; d < columns(); ++d)
        store_gradient(result[(part * half + d) * result_stride], s.row[part * padded() + d], accumulate);
    for (idx_t d = dims; d < x.extent(3) && (accumulate || row != result); ++d)
      store_gradient(result[d * result_stride], static_cast<T>(row[d * row_stride]), accumulate);
  }

  void run(execution& exec) const {
    const idx_t batch = x.extent(0), length = x.extent(2), blocks = ceil_div(length, tokens);
    const bool given = bool(o.positions), shared = !given || o.positions.extent(0) == 1;  // by the batch
    const idx_t heads = x.extent(1), group = x.stride(1) < x.stride(2) ? std::max<idx_t>(1, heads) : 4;
    const double numbers = static_cast<double>(x.size());
    const auto limit = exec.limit_threads({.operations = 3 * numbers, .bytes = 2 * sizeof(S) * numbers});
    exec.for_each(blocks * (shared ? 1 : batch), [&](idx_t task, int worker) {
      scratch s = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      const idx_t item = task / blocks, begin = task % blocks * tokens, end = (std::min)(begin + tokens, length);
      for (idx_t i = begin; i < end; ++i) {
        const idx_t n = (i - begin) * padded();
        prepare(given ? o.positions(item, i) : o.first_position + i, s.cosine + n, s.sine + n, s);
      }
      for (idx_t b = item; b < (shared ? batch : item + 1); ++b)
        for (idx_t h = 0; h < heads; h += group) rotate_rows(b, h, (std::min)(h + group, heads), begin, end, s);
    });
  }
};

/// The checks of positions: they are rows of a table, or small enough for sums of them.
inline void check_positions(const validator& check, const tensor_view<const idx_t, 2>& positions, idx_t first,
                            const memory_layout& x, std::optional<idx_t> rows) {
  const idx_t least = rows ? 0 : -furthest_position, most = rows ? *rows - 1 : furthest_position;
  const auto check_one = [&](idx_t p) {
    if (p < least || p > most) check.fail({"positions from ", least, " to ", most}, p);
  };
  if (!positions) {
    if (x.empty()) return;
    check_one(first);
    return check_one(first + (std::min)(x.extents[2] - 1, idx_t(1) << 41));
  }
  check.broadcasts("positions batch", x.extents[0], positions.extent(0));
  check.equal("positions length = x length", x.extents[2], positions.extent(1));
  for (idx_t b = 0; b < positions.extent(0); ++b)
    for (idx_t i = 0; i < positions.extent(1); ++i) check_one(positions(b, i));
}

/// The checks of options of a rotation of x [B, H, L, D], which `views` list. Returns the number of rotated dims.
template <class Options>
idx_t check_rotary(call_views& views, const memory_layout& x, const Options& o) {
  const validator& check = views;
  const idx_t dims = o.dims.value_or(x.extents[3]);
  if (dims < 0 || dims % 2 != 0 || dims > x.extents[3])
    check.fail({"an even number of dims up to ", x.extents[3]}, dims);
  views.read("positions", o.positions), views.read("cos", o.cos), views.read("sin", o.sin);
  std::optional<idx_t> rows;
  if (o.cos || o.sin) {
    rows = o.cos.extent(0);
    check.extents({{"sin positions = cos positions", *rows, o.sin.extent(0)},
                   {"cos columns = dims / 2 =", dims / 2, o.cos.extent(1)},
                   {"sin columns = dims / 2 =", dims / 2, o.sin.extent(1)}});
    if (!o.frequencies.empty()) check.fail("either frequencies or a table of cos and sin", "both");
    if (o.magnitude != 1) check.fail("a magnitude of 1 beside a table of cos and sin", o.magnitude);
  }
  check_positions(check, o.positions, o.first_position, x, rows);
  if (!o.frequencies.empty())
    check.equal("frequencies = dims / 2 =", dims / 2, static_cast<idx_t>(o.frequencies.size()));
  for (double f : o.frequencies)
    if (!(std::abs(f) <= 1e100)) check.fail("finite frequencies, up to 1e100", f);
  if (!(o.base > 0 && std::isfinite(o.base))) check.fail("a finite base > 0", o.base);
  if (!std::isfinite(o.magnitude)) check.fail("a finite magnitude", o.magnitude);
  return dims;
}

/// Rotates x into `to`; `names` are those of both in messages.
template <class S, class Options>
void run_rotary(const validator& check, const tensor_view<const S>& x, const tensor_view<S>& to,
                std::array<const char*, 2> names, const Options& o, bool back, bool accumulate, execution& exec) {
  const memory_layout from = x, out = to;
  call_views views(check);
  check.readable(names[0], from);
  if (accumulate || !same_memory(out, from)) views.read(names[0], from);
  views.write(names[1], out);
  for (int n = 0; n < 4; ++n) {
    constexpr const char* axes[] = {" batch = ", " heads = ", " length = ", " dim = "};
    if (out.extents[n] != from.extents[n])
      check.fail({names[1], axes[n], names[0], axes[n], from.extents[n]}, out.extents[n]);
  }
  const idx_t dims = check_rotary(views, from, o);
  if (x.empty()) return;

  using call_type = rotary_call<S, Options>;
  const idx_t angles = round_up(dims / 2, width<double>);
  const bool many = !o.cos && x.extent(2) >= call_type::remainders;
  const auto [frequency, remainder_angles] = exec.shared_scratch([&](arena& memory) {
    return std::array{memory.allocate<double>(angles),
                      memory.allocate<double>(many ? 2 * angles * call_type::remainders : 0)};
  });
  std::fill_n(frequency, angles, 0.0);
  for (idx_t n = 0; n < dims / 2; ++n)
    frequency[n] = o.frequencies.empty() ? frequency_of(n, dims, o.base) : o.frequencies[static_cast<std::size_t>(n)];
  const call_type call{.x = x, .to = to, .o = o, .dims = dims, .frequency = frequency, .back = back,
                       .accumulate = accumulate, .remainder_angles = many ? remainder_angles : nullptr};
  if (many) call.prepare_remainders();
  call.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail
