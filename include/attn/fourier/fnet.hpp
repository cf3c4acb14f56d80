// attn: Fourier mixing of tokens.
//
//   out = Re(F_L(F_D(x)))                          Lee-Thorp et al. 2021, "FNet: Mixing Tokens with Fourier Transforms"
//   out_lc = sum over t, d of x_td cos(2 pi (l t / L + c d / D))
//
//   attn::fnet(x, out);                            // Eigen matrices [length, dim]
//   attn::fnet(x, out, {.lengths = lengths}, threads);
//
// F_L is the discrete Fourier transform over tokens, F_D that over the hidden dim; nothing is normalised.
//
// Shapes   x and out [B, H, L, D]; every [b, h] is transformed on its own, so give the whole dim of a model as D. Any L
//          and D, primes too. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     5/4 B H L D log2(L D) operations, a quarter of two complex transforms. A direction whose length has a prime
//          factor above 41 takes five times its share: the whole then takes two to three times as long. Scratch, in
//          rows of two vectors (32 floats with AVX-512): L for every row's width of the channels 0 to D / 2, for one
//          [b, h] or for as many as fill the threads; a thread D, and for such a prime factor 2 L or 2 D more. Tables:
//          about 8 L + 5 D numbers, twice that for such a prime factor.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/execution.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/fourier/detail/sequence_plan.hpp>

namespace attn::inline ATTN_ISA {

/// Options of fnet for elements of type S.
template <class S>
struct fnet_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// True lengths, one per batch item: the transform runs over these, and rows of padding are 0 in out.
  list_view<index> lengths{};
  /// Refused: every result of a Fourier transform depends on every token.
  bool causal = false;
};

namespace detail {

// Nothing changes if x gives way to its even part e_td = (x_td + x_-t,-d) / 2, indices modulo L and D; and for an even
// e the result is, mirrored, what two real transforms make of it. With cas = cos + sin,
//
//   u_ld = sum over t of e_td cas(2 pi l t / L)    u_l,-d = u_-l,d    so only d <= D / 2 is needed: half of the columns
//   h_lc = sum over d of u_ld cas(2 pi c d / D)    h_-l,-c = h_lc     so only l <= L / 2 is needed: half of the rows
//   out_-l,c = out_l,-c = h_lc
//
// Both steps run the same transform on packets: of channels over the tokens, as they lie in memory; of tokens over the
// channels, where squares of numbers are transposed in registers on the way in and out. (In place of the second step a
// product with the D x D matrix of cas, halved by symmetry, takes D^2 / 2 multiply-adds a row: at D = 64 35 ns at the
// peak of a Zen 4 core, where the transform takes 10. They meet at D = 16.)

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
  /// Channel blocks that are taken in together: so many fit into the second cache.
  static constexpr index blocks_together = 8;

  const tensor_view<const S>& x;
  const tensor_view<S>& out;
  list_view<index> lengths;

  index slices() const { return x.extent(0) * x.extent(1); }
  index dim() const { return x.extent(3); }
  index length(index slice) const {
    return lengths.empty() ? x.extent(2) : lengths[static_cast<std::size_t>(slice / x.extent(1))];
  }
  /// Blocks of the channels d <= D / 2.
  index channel_blocks() const { return (dim() / 2 + wide) / wide; }
  matrix_view<const S> input(index slice, index n) const {
    auto head = head_of(x, slice / x.extent(1), slice % x.extent(1));
    head.rows = n;
    return head;
  }
  matrix_view<S> output(index slice) const { return head_of(out, slice / x.extent(1), slice % x.extent(1)); }

  /// The transform over channels, of one block of tokens: the packet of real parts is one half of them, that of
  /// imaginary parts the other. `rows` has room for the channels and what the plan wants to spare.
  void transform_channels(const fourier_plan<T>& plan, const sequence_plan<T>& sequence, index block, const T* blocks,
                          const matrix_view<S>& to, T* rows) const {
    constexpr int w = width<T>;
    const index n = sequence.length(), first = block * wide, count = std::min<index>(wide, n / 2 + 1 - first);
    index token[wide];
    const T *plus[wide], *minus[wide];  // their rows, and those of -l
    for (index i = 0; i < wide; ++i) {
      token[i] = sequence.token(first + std::min(i, count - 1));
      plus[i] = blocks + sequence.place(token[i]) * wide;
      minus[i] = blocks + sequence.place(mirror(token[i], n)) * wide;
    }
    for (index b = 0; b < channel_blocks(); ++b)
      unroll<8>([&](auto choice) {
        constexpr int part = choice / 4, half = choice / 2 % 2;
        constexpr bool mirrored = choice % 2;
        const index offset = b * sequence.rows() * wide;
        packet<T> square[w];
        unroll<w>([&](auto i) {
          const auto z = load_row(plus[part * w + i] + offset), y = load_row(minus[part * w + i] + offset);
          const auto u = mirrored ? hartley_twice<T>(y, z) : hartley_twice<T>(z, y);
          square[i] = half == 0 ? u.re : u.im;
        });
        transpose<T>(square);
        for (int j = 0; j < w; ++j) {
          const index d = b * wide + half * w + j;
          if (mirrored ? d > 0 && 2 * d < dim() : 2 * d <= dim())
            store<T>(rows + (mirrored ? dim() - d : d) * wide + part * w, square[j]);
        }
      });
    hartley_twice(plan, rows, rows + dim() * wide);
    for (index part = 0; part < count; part += w)
      for (const bool mirrored : {false, true})
        for (index c0 = 0; c0 < dim(); c0 += w) {
          packet<T> square[w];
          for (int j = 0; j < w; ++j) {
            const index c = std::min(c0 + j, dim() - 1);
            square[j] = load<T>(rows + plan.order(mirrored ? c : mirror(c, dim())) * wide + part);
          }
          transpose<T>(square);
          for (index i = part; i < std::min<index>(part + w, count); ++i) {
            const index l = mirrored ? mirror(token[i], n) : token[i];
            store_part<T>(to.row(l) + c0 * to.col_stride, to.col_stride, dim() - c0, square[i - part]);
          }
        }
  }

  /// Slices [first, first + count), all of the plan's length.
  void transform(const fourier_plan<T>& over_channels, const sequence_plan<T>& over_tokens, index first, index count,
                 T* memory, index spare_rows, execution& exec) const {
    const index n = over_tokens.length(), blocks = channel_blocks(), parts = over_tokens.parts();
    const index block_size = over_tokens.rows() * wide, token_blocks = (n / 2 + wide) / wide;
    const index pieces = over_tokens.input_pieces(), groups = (blocks + blocks_together - 1) / blocks_together;
    const auto spare = [&](int worker) { return rows_of(exec, worker, spare_rows); };
    const auto blocks_of = [&](index place) { return memory + place * blocks * block_size; };

    exec.for_each(count * pieces * groups, [&](index task, int worker) {
      const index place = task / groups / pieces, piece = task / groups % pieces, group = task % groups;
      const even_part<T, S> even{input(first + place, n)};
      over_tokens.take_in(
          piece, group * blocks / groups, (group + 1) * blocks / groups, blocks_of(place), spare(worker),
          [&](index block, index t, T* row, T* mirrored) { even.fold(t, block * wide, row, mirrored); });
    });
    exec.for_each(count * blocks * parts, [&](index task, int worker) {
      over_tokens.transform_part(task % parts, memory + task / parts * block_size, spare(worker));
    });
    exec.for_each(count * token_blocks, [&](index task, int worker) {
      const index place = task / token_blocks;
      transform_channels(over_channels, over_tokens, task % token_blocks, blocks_of(place), output(first + place),
                         spare(worker));
    });
  }

  static T* rows_of(execution& exec, int worker, index count) {
    return exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(count * wide); });
  }

  void run(execution& exec) const {
    if (x.empty()) return;
    // What the greediest of the plans for tokens takes.
    const index blocks = channel_blocks();
    index plan_bytes = 0, slice_rows = 0, spare_rows = 0;
    for (index slice = 0; slice < slices(); slice += x.extent(1)) {
      if (length(slice) == 0) continue;
      arena count;
      const auto plan = sequence_plan<T>::layout(count, length(slice));
      plan_bytes = std::max(plan_bytes, static_cast<index>(count.used()));
      slice_rows = std::max(slice_rows, blocks * plan.rows());
      spare_rows = std::max(spare_rows, plan.spare_rows(std::min(blocks, blocks_together)));
    }
    // A wave of slices keeps the threads busy; serial, it is one slice.
    const index slice_bytes = std::max<index>(1, slice_rows * wide * static_cast<index>(sizeof(T)));
    const index wave = exec.threads() == 1 ? 1 : std::clamp<index>((index(4) << 20) / slice_bytes, 1, slices());

    fourier_plan<T> over_channels;
    sequence_plan<T> over_tokens;
    std::byte* plan_memory = nullptr;
    T* const rows = exec.shared_scratch([&](arena& memory) {
      over_channels = fourier_plan<T>::layout(memory, dim());
      plan_memory = memory.allocate<std::byte>(plan_bytes);
      return memory.allocate<T>(wave * slice_rows * wide);
    });
    spare_rows = std::max(spare_rows, dim() + over_channels.spare_rows());
    over_channels.fill(rows_of(exec, 0, spare_rows));

    index planned = 0;
    for (index first = 0, count; first < slices(); first += count) {
      const index n = length(first);
      for (count = 1; count < wave && first + count < slices() && length(first + count) == n;) ++count;
      if (n != planned && n > 0) {
        arena memory(plan_memory);
        over_tokens = sequence_plan<T>::layout(memory, n);
        over_tokens.fill(rows_of(exec, 0, spare_rows));
        planned = n;
      }
      if (n > 0) transform(over_channels, over_tokens, first, count, rows, spare_rows, exec);
      for (index slice = first; slice < first + count; ++slice) clear_rows(output(slice), n, x.extent(2));
    }
  }
};

template <class S>
void check_fnet(const validator& check, const tensor_view<const S>& x, const tensor_view<S>& out,
                const fnet_options<S>& options) {
  check.readable("x", x);
  check.writable("out", out);
  check.equal("out batch = x batch", x.extent(0), out.extent(0));
  check.equal("out heads = x heads", x.extent(1), out.extent(1));
  check.equal("out length = x length", x.extent(2), out.extent(2));
  check.equal("out dim = x dim", x.extent(3), out.extent(3));
  check.no_alias("out", out, "x", x);
  check_length_list(check, "lengths", options.lengths, x.extent(0), x.extent(2));
  if (options.causal) check.fail("causal = false, since a Fourier transform needs every token", "causal = true");
}

}  // namespace detail

/// Fourier mixing by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O>
void fnet(const X& x, O&& out, const fnet_options<element_of<const X&>>& options, execution& exec) {
  detail::require_one_element_type<const X&, const X&, const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S> from = as_view(x);
  const tensor_view<S> to = as_view(out);
  detail::check_fnet(detail::validator("fnet"), from, to, options);
  detail::fnet_call<S>{from, to, options.lengths}.run(exec);
}

template <viewable X, viewable O>
void fnet(const X& x, O&& out, const fnet_options<element_of<const X&>>& options = {}) {
  execution serial;
  fnet(x, out, options, serial);
}

}  // namespace attn
