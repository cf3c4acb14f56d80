// attn: Fourier mixing of tokens.
//
//   out = Re(F_L(F_D(x)))     F_n the discrete Fourier transform of length n, over tokens (L) and over the hidden dim
//   (D) out_lc = sum over t, d of x_td cos(2 pi (l t / L + c d / D))        Lee-Thorp et al. 2021, "FNet: Mixing Tokens
//   with
//                                                                       Fourier Transforms"; nothing is normalised
//   attn::fnet(x, out);                                          // Eigen matrices [length, dim]
//   attn::fnet(x, out, {.lengths = lengths}, threads);
//
// Shapes   x and out [B, H, L, D]; every [b, h] is transformed on its own, so give a whole model dim as D, not heads.
//          Any L and D, primes too. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     5/4 B H L D log2(L D) operations if L and D are products of small factors, a quarter of two complex
//          transforms; about four times as much for lengths with a prime above 31. Scratch: L D / 2 numbers (of one
//          [b, h], or of as many as fill the threads), 2 L numbers for each lane of a vector and thread, and the roots
//          of unity, about 2 (L + D).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/attention_shape.hpp>
#include <attn/core/execution.hpp>
#include <attn/core/tile_product.hpp>
#include <attn/fourier/hartley.hpp>

namespace attn {

/// Options of fnet for elements of type S.
template <class S>
struct fnet_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// True lengths, one per batch item: the transform runs over these, and rows of padding are 0 in out.
  std::span<const index> lengths{};
  /// Refused: every result of a Fourier transform depends on every token.
  bool causal = false;
};

namespace detail {

// The result does not change if x gives way to its even part e_td = (x_td + x_-t,-d) / 2, indices modulo L and D, and
// of e it is, mirrored, the product of two real transforms: with cas = cos + sin,
//
//   u_ld = sum over t of e_td cas(2 pi l t / L)       u_l,-d = u_-l,d       so d <= D / 2 is enough: half of the
//   columns h_lc = sum over d of u_ld cas(2 pi c d / D)       h_-l,-c = h_lc        so l <= L / 2 is enough: half of
//   the rows out_-l,c = out_l,-c = h_lc
//
// Nothing complex is ever stored. Both steps run the same transform on packets: of channels over the tokens, where
// packets lie in memory; of tokens over the channels, where squares of them are transposed in registers on the way in
// and out. (A product with the D x D matrix of cas, in place of the second transform, takes D^2 / 2 multiply-adds a
// token; the transform is faster from D = 16 on.)

/// Lanes of a packet in reverse.
template <class T>
ATTN_INLINE packet<T> reverse(const packet<T>& x) {
  return shuffle<T>(x, x, [](int i) { return width<T> - 1 - i; });
}

/// One sequence [length, dim] as the transform over tokens takes it.
template <class T, class S>
struct even_part {
  matrix_view<const S> x;  // rows: the true length

  /// Channels first ... first + row_width - 1 of tokens t and -t, an eighth of each sum: the two Hartley transforms
  /// double what they are given.
  ATTN_INLINE void fold(index t, index first, T* row, T* mirrored_row) const {
    const index other = t == 0 ? 0 : x.rows - t;
    if (x.col_stride != 1 || first + row_width<T> > x.cols) {
      fold_slowly(t, other, first, row);
      return fold_slowly(other, t, first, mirrored_row);
    }
    const S *const a = x.row(t), *const b = x.row(other);
    const packet<T> eighth = broadcast<T>(T(0.125));
    unroll<2>([&](auto part) {
      const index d = first + part * width<T>;
      const packet<T> one = mul(add(load_as<T>(a + d), mirror(b, d)), eighth);
      const packet<T> two = mul(add(load_as<T>(b + d), mirror(a, d)), eighth);
      store<T>(row + part * width<T>, one);
      store<T>(mirrored_row + part * width<T>, two);
    });
  }

 private:
  /// Channels -d, -d - 1, ...
  ATTN_INLINE packet<T> mirror(const S* p, index d) const {
    if (d > 0) return reverse<T>(load_as<T>(p + x.cols - d - width<T> + 1));
    return shuffle<T>(load_as<T>(p + x.cols - width<T>), load_as<T>(p),
                      [](int i) { return i == 0 ? width<T> : width<T> - i; });
  }

  [[gnu::noinline]] void fold_slowly(index t, index other, index first, T* row) const {
    const S *const a = x.row(t), *const b = x.row(other);
    for (index i = 0; i < row_width<T>; ++i) {
      const index d = first + i;
      row[i] = T(0);
      if (d < x.cols)
        row[i] =
            (static_cast<T>(a[d * x.col_stride]) + static_cast<T>(b[(x.cols - d) % x.cols * x.col_stride])) * T(0.125);
    }
  }
};

/// Writes the first `count` lanes to p, `stride` apart.
template <class T, class S>
ATTN_INLINE void store_part(S* p, index stride, index count, const packet<T>& x) {
  if constexpr (std::same_as<S, T>)
    if (stride == 1 && count >= width<T>) return store<T>(p, x);
  alignas(64) T lanes[width<T>];
  store<T>(lanes, x);
  for (index i = 0; i < std::min<index>(count, width<T>); ++i) p[i * stride] = static_cast<S>(lanes[i]);
}

/// One call, after its checks.
template <class S>
struct fnet_call {
  using T = compute_type<S>;
  static constexpr index wide = row_width<T>;

  const tensor_view<const S>& x;
  const tensor_view<S>& out;
  std::span<const index> lengths;

  index slices() const { return x.extent(0) * x.extent(1); }
  index longest() const { return x.extent(2); }
  index dim() const { return x.extent(3); }
  index length(index slice) const {
    return lengths.empty() ? longest() : lengths[static_cast<std::size_t>(slice / x.extent(1))];
  }
  /// Blocks of the channels d <= D / 2.
  index channel_blocks() const { return (dim() / 2 + wide) / wide; }
  /// Blocks of the tokens l <= n / 2.
  static index token_blocks(index n) { return (n / 2 + wide) / wide; }

  /// Between the two transforms: u_l and u_-l for every l <= n / 2, by blocks of channels.
  T* between(T* all, index slice, index n, index block, index l) const {
    return all + ((slice * channel_blocks() + block) * (n / 2 + 1) + l) * 2 * wide;
  }
  index between_size(index n) const { return channel_blocks() * (n / 2 + 1) * 2 * wide; }

  /// Over tokens: one block of channels.
  void transform_tokens(const fourier_plan<T>& plan, index slice, index block, T* rows, T* all, index place) const {
    const index n = plan.length();
    matrix_view<const S> from = head_of(x, slice / x.extent(1), slice % x.extent(1));
    from.rows = n;
    const even_part<T, S> even{from};
    for (index t = 0; t <= n / 2; ++t) even.fold(t, block * wide, rows + t * wide, rows + (t == 0 ? 0 : n - t) * wide);
    T* const results = hartley_twice(plan, rows);
    for (index l = 0; l <= n / 2; ++l) {
      T* const to = between(all, place, n, block, l);
      store_row(to, load_row(plan.place(results, l)));
      store_row(to + wide, load_row(plan.place(results, l == 0 ? 0 : n - l)));
    }
  }

  /// Over channels: one block of tokens, the packet of real parts and that of imaginary ones half of it each.
  void transform_channels(const fourier_plan<T>& plan, index slice, index n, index block, T* rows, T* all,
                          index place) const {
    constexpr int w = width<T>;
    const index d_end = dim(), last = n / 2;
    for (index part = 0; part < wide; part += w) {
      const index l0 = block * wide + part;
      for (index d0 = 0; d0 <= d_end / 2; d0 += w)
        for (int sign = 0; sign < 2; ++sign) {
          packet<T> square[w];
          for (int i = 0; i < w; ++i)
            square[i] = load<T>(between(all, place, n, d0 / wide, std::min(l0 + i, last)) + sign * wide + d0 % wide);
          transpose<T>(square);
          for (int j = 0; j < w; ++j) {
            const index d = d0 + j;
            if (sign == 0 ? 2 * d <= d_end : d > 0 && 2 * d < d_end)
              store<T>(rows + (sign == 0 ? d : d_end - d) * wide + part, square[j]);
          }
        }
    }
    T* const results = hartley_twice(plan, rows);
    const matrix_view<S> to = head_of(out, slice / x.extent(1), slice % x.extent(1));
    for (index part = 0; part < wide; part += w) {
      const index l0 = block * wide + part, tokens = std::min<index>(w, last + 1 - l0);
      if (tokens <= 0) break;
      for (index c0 = 0; c0 < d_end; c0 += w)
        for (int sign = 0; sign < 2; ++sign) {
          packet<T> square[w];
          for (int j = 0; j < w; ++j) {
            const index c = std::min(c0 + j, d_end - 1);
            square[j] = load<T>(plan.place(results, sign == 0 || c == 0 ? c : d_end - c) + part);
          }
          transpose<T>(square);
          for (int i = 0; i < tokens; ++i) {
            const index l = sign == 0 && l0 + i > 0 ? n - l0 - i : l0 + i;
            store_part<T>(to.row(l) + c0 * to.col_stride, to.col_stride, d_end - c0, square[i]);
          }
        }
    }
  }

  void run(execution& where) const {
    if (x.empty()) return;
    // What the longest of the plans for tokens takes.
    index plan_bytes = 0, rows = 0, most_between = 0;
    for (index slice = 0; slice < slices(); slice += x.extent(1)) {
      const index n = length(slice);
      if (n == 0) continue;
      carver count;
      const auto plan = fourier_plan<T>::layout(count, n);
      plan_bytes = std::max(plan_bytes, static_cast<index>(count.used()));
      rows = std::max(rows, plan.rows());
      most_between = std::max(most_between, between_size(n));
    }
    const index threads = where.threads();
    const index wave =
        threads == 1 ? 1 : std::clamp((8 * threads + channel_blocks() - 1) / channel_blocks(), index(1), slices());

    fourier_plan<T> over_channels, over_tokens;
    std::byte* plan_memory = nullptr;
    T* const all = where.shared_scratch([&](carver& memory) {
      over_channels = fourier_plan<T>::layout(memory, dim());
      plan_memory = memory.take<std::byte>(plan_bytes);
      return memory.take<T>(wave * most_between);
    });
    rows = std::max(rows, over_channels.rows());
    const auto rows_of = [&](int worker) {
      return where.scratch(worker, [&](carver& memory) { return memory.take<T>(rows * wide); });
    };
    over_channels.fill(rows_of(0));

    for (index first = 0, planned = 0, count; first < slices(); first += count) {
      const index n = length(first);
      for (count = 1; count < wave && first + count < slices() && length(first + count) == n;) ++count;
      if (n != planned && n > 0) {
        carver memory(plan_memory);
        over_tokens = fourier_plan<T>::layout(memory, n);
        over_tokens.fill(rows_of(0));
        planned = n;
      }
      if (n > 0) {
        where.for_each(count * channel_blocks(), [&](index task, int worker) {
          const index place = task / channel_blocks();
          transform_tokens(over_tokens, first + place, task % channel_blocks(), rows_of(worker), all, place);
        });
        where.for_each(count * token_blocks(n), [&](index task, int worker) {
          const index place = task / token_blocks(n);
          transform_channels(over_channels, first + place, n, task % token_blocks(n), rows_of(worker), all, place);
        });
      }
      for (index slice = first; slice < first + count; ++slice) {
        const matrix_view<S> to = head_of(out, slice / x.extent(1), slice % x.extent(1));
        for (index l = n; l < longest(); ++l)
          for (index d = 0; d < dim(); ++d) to.row(l)[d * to.col_stride] = static_cast<S>(T(0));
      }
    }
  }
};

template <class S>
void check_fnet(const door& at, const tensor_view<const S>& x, const tensor_view<S>& out,
                const fnet_options<S>& options) {
  at.readable("x", x);
  at.writable("out", out);
  at.equal("out batch = x batch", x.extent(0), out.extent(0));
  at.equal("out heads = x heads", x.extent(1), out.extent(1));
  at.equal("out length = x length", x.extent(2), out.extent(2));
  at.equal("out dim = x dim", x.extent(3), out.extent(3));
  at.apart("out", out, "x", x);
  check_length_list(at, "lengths", options.lengths, x.extent(0), x.extent(2));
  if (options.causal) at.refuse("causal = false, since a Fourier transform needs every token", "causal = true");
}

}  // namespace detail

/// Fourier mixing by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O>
void fnet(const X& x, O&& out, const fnet_options<element_of<const X&>>& options, execution& where) {
  detail::require_one_element_type<const X&, const X&, const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S> from = as_view(x);
  const tensor_view<S> to = as_view(out);
  detail::check_fnet(detail::door("fnet"), from, to, options);
  detail::fnet_call<S>{from, to, options.lengths}.run(where);
}

template <viewable X, viewable O>
void fnet(const X& x, O&& out, const fnet_options<element_of<const X&>>& options = {}) {
  execution serial;
  fnet(x, out, options, serial);
}

}  // namespace attn
