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
#include <attn/fourier/sequence_plan.hpp>

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
    const index other = detail::mirror(t, x.rows);
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

  /// Channel blocks that are taken in together: their columns fit into the second cache.
  static constexpr index blocks_together = 8;

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

  /// Tokens t and -t into `blocks`: one piece of the plan, channel blocks [begin, end).
  void take_in(const sequence_plan<T>& plan, index slice, index piece, index begin, index end, T* blocks,
               T* spare) const {
    matrix_view<const S> from = head_of(x, slice / x.extent(1), slice % x.extent(1));
    from.rows = plan.length();
    const even_part<T, S> even{from};
    plan.take_in(piece, begin, end, blocks, spare,
                 [&](index block, index t, T* row, T* mirrored) { even.fold(t, block * wide, row, mirrored); });
  }

  /// Over channels: one block of tokens, the packet of real parts and that of imaginary ones half of it each.
  void transform_channels(const fourier_plan<T>& plan, const sequence_plan<T>& sequence, index slice, index block,
                          const T* blocks, T* rows) const {
    constexpr int w = width<T>;
    const index d_end = dim(), n = sequence.length(), first = block * wide;
    T* const spare = rows + d_end * wide;
    index token[wide];
    const T *plus[wide], *minus[wide];
    for (index i = 0; i < wide; ++i) {
      token[i] = sequence.token(std::min(first + i, n / 2));
      plus[i] = blocks + sequence.place(token[i]) * wide;
      minus[i] = blocks + sequence.place(mirror(token[i], n)) * wide;
    }
    for (index b = 0; b < channel_blocks(); ++b) {
      const index offset = b * sequence.rows() * wide;
      unroll<8>([&](auto choice) {
        constexpr int part = choice / 4, half = choice / 2 % 2, sign = choice % 2;
        packet<T> square[w];
        unroll<w>([&](auto i) {
          const auto z = load_row(plus[part * w + i] + offset), y = load_row(minus[part * w + i] + offset);
          const auto h = sign == 0 ? hartley_twice<T>(z, y) : hartley_twice<T>(y, z);
          square[i] = half == 0 ? h.re : h.im;
        });
        transpose<T>(square);
        for (int j = 0; j < w; ++j) {
          const index d = b * wide + half * w + j;
          if (sign == 0 ? 2 * d <= d_end : d > 0 && 2 * d < d_end)
            store<T>(rows + (sign == 0 ? d : d_end - d) * wide + part * w, square[j]);
        }
      });
    }
    hartley_twice(plan, rows, spare);
    const matrix_view<S> to = head_of(out, slice / x.extent(1), slice % x.extent(1));
    for (int part = 0; part < 2; ++part) {
      const index tokens = std::min<index>(w, n / 2 + 1 - first - part * w);
      for (index c0 = 0; c0 < d_end && tokens > 0; c0 += w)
        for (int sign = 0; sign < 2; ++sign) {
          packet<T> square[w];
          for (int j = 0; j < w; ++j) {
            const index c = std::min(c0 + j, d_end - 1);
            square[j] = load<T>(rows + plan.order(sign == 0 ? c : mirror(c, d_end)) * wide + part * w);
          }
          transpose<T>(square);
          for (int i = 0; i < tokens; ++i) {
            const index l = token[part * w + i];
            store_part<T>(to.row(sign == 0 ? mirror(l, n) : l) + c0 * to.col_stride, to.col_stride, d_end - c0,
                          square[i]);
          }
        }
    }
  }

  void run(execution& where) const {
    if (x.empty()) return;
    // What the greediest of the plans for tokens takes.
    const index blocks = channel_blocks();
    index plan_bytes = 0, block_rows = 0, spare_rows = 0;
    for (index slice = 0; slice < slices(); slice += x.extent(1)) {
      if (length(slice) == 0) continue;
      carver count;
      const auto plan = sequence_plan<T>::layout(count, length(slice));
      plan_bytes = std::max(plan_bytes, static_cast<index>(count.used()));
      block_rows = std::max(block_rows, plan.rows());
      spare_rows = std::max(spare_rows, plan.spare_rows(std::min(blocks, blocks_together)));
    }
    const index threads = where.threads();
    const index wave = threads == 1 ? 1 : std::clamp((8 * threads + blocks - 1) / blocks, index(1), slices());

    fourier_plan<T> over_channels;
    sequence_plan<T> over_tokens;
    std::byte* plan_memory = nullptr;
    T* const all = where.shared_scratch([&](carver& memory) {
      over_channels = fourier_plan<T>::layout(memory, dim());
      plan_memory = memory.take<std::byte>(plan_bytes);
      return memory.take<T>(wave * blocks * block_rows * wide);
    });
    spare_rows = std::max(spare_rows, dim() + over_channels.spare_rows());
    const auto spare = [&](int worker) {
      return where.scratch(worker, [&](carver& memory) { return memory.take<T>(spare_rows * wide); });
    };
    over_channels.fill(spare(0));

    for (index first = 0, planned = 0, count; first < slices(); first += count) {
      const index n = length(first);
      for (count = 1; count < wave && first + count < slices() && length(first + count) == n;) ++count;
      if (n != planned && n > 0) {
        carver memory(plan_memory);
        over_tokens = sequence_plan<T>::layout(memory, n);
        over_tokens.fill(spare(0));
        planned = n;
      }
      if (n > 0) {
        const index block_size = over_tokens.rows() * wide, parts = over_tokens.parts(),
                    pieces = over_tokens.input_pieces();
        const index groups = (blocks + blocks_together - 1) / blocks_together;
        where.for_each(count * pieces * groups, [&](index task, int worker) {
          const index group = task % groups, piece = task / groups % pieces, place = task / groups / pieces;
          take_in(over_tokens, first + place, piece, group * blocks / groups, (group + 1) * blocks / groups,
                  all + place * blocks * block_size, spare(worker));
        });
        where.for_each(count * blocks * parts, [&](index task, int worker) {
          over_tokens.transform_part(task % parts, all + task / parts * block_size, spare(worker));
        });
        where.for_each(count * token_blocks(n), [&](index task, int worker) {
          const index place = task / token_blocks(n);
          transform_channels(over_channels, over_tokens, first + place, task % token_blocks(n),
                             all + place * blocks * block_size, spare(worker));
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
