// attn: the driver of fnet, and the transform over channels.
//
// Nothing changes if x is replaced by its even part e_td = (x_td + x_-t,-d) / 2, indices modulo L and D; and for an
// even e the result is, mirrored, what two real transforms make of it. With cas = cos + sin,
//
//   u_ld = sum over t of e_td cas(2 pi l t / L)    u_l,-d = u_-l,d    so only d <= D / 2 is needed: half of the columns
//   h_lc = sum over d of u_ld cas(2 pi c d / D)    h_-l,-c = h_lc     so only l <= L / 2 is needed: half of the rows
//   out_-l,c = out_l,-c = h_lc
//
// Both steps run the same transform on packets: of channels over the tokens, as they lie in memory; of tokens over the
// channels, where squares of numbers are transposed in registers on the way in and out. (A product with the D x D
// matrix of cas takes D^2 / 2 multiply-adds a row: at D = 64 3.5 times as long on a Zen 4. They meet at D = 16.)
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/fourier/detail/sequence_plan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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
  ATTN_INLINE void fold(idx_t t, idx_t first, T* row, T* mirrored_row) const {
    const idx_t other = detail::mirror(t, x.rows);
    if (x.col_stride != 1 || first + row_width<T> > x.cols) {
      fold_slowly(t, other, first, row);
      return fold_slowly(other, t, first, mirrored_row);
    }
    const S *const a = x.row(t), *const b = x.row(other);
    const packet<T> eighth = broadcast<T>(T(0.125));
    unroll<2>([&](auto part) {
      const idx_t d = first + part * width<T>;
      store<T>(row + part * width<T>, mul(add(load_as<T>(a + d), mirror(b, d)), eighth));
      store<T>(mirrored_row + part * width<T>, mul(add(load_as<T>(b + d), mirror(a, d)), eighth));
    });
  }

 private:
  /// Channels -d, -d - 1, ...
  ATTN_INLINE packet<T> mirror(const S* p, idx_t d) const {
    if (d > 0) return reverse<T>(load_as<T>(p + x.cols - d - width<T> + 1));
    return shuffle<T>(load_as<T>(p + x.cols - width<T>), load_as<T>(p),
                      [](int i) { return i == 0 ? width<T> : width<T> - i; });
  }

  [[gnu::noinline]] void fold_slowly(idx_t t, idx_t other, idx_t first, T* row) const {
    const S *const a = x.row(t), *const b = x.row(other);
    std::fill_n(row, row_width<T>, T(0));
    for (idx_t d = first; d < std::min<idx_t>(first + row_width<T>, x.cols); ++d)
      row[d - first] =
          (static_cast<T>(a[d * x.col_stride]) + static_cast<T>(b[(x.cols - d) % x.cols * x.col_stride])) * T(0.125);
  }
};

/// Writes the first `count` lanes to p, `stride` apart, or adds them to what is there.
template <class T, bool adds, class S>
ATTN_INLINE void store_part(S* p, idx_t stride, idx_t count, packet<T> x) {
  if constexpr (adds) x = add(load_part<T>(p, stride, count), x);
  if constexpr (std::same_as<S, T>)
    if (stride == 1 && count >= width<T>) return store<T>(p, x);
  alignas(64) T lanes[width<T>];
  store<T>(lanes, x);
  for (idx_t i = 0; i < std::min<idx_t>(count, width<T>); ++i) p[i * stride] = static_cast<S>(lanes[i]);
}

/// The transform over channels, of one block of row_width tokens.
template <class T>
struct channel_transform {
  static constexpr idx_t wide = row_width<T>;

  const fourier_plan<T>& plan;
  const sequence_plan<T>& sequence;
  idx_t first;  // token of the block, in the order of their places
  idx_t count = std::min<idx_t>(wide, sequence.length() / 2 + 1 - first);

  idx_t token(idx_t i) const { return sequence.token(first + (std::min)(i, count - 1)); }
  idx_t mirrored_token(idx_t i) const { return mirror(token(i), sequence.length()); }
  idx_t dim() const { return plan.length(); }

  /// Real parts are one half of the tokens, imaginary parts the other. `rows` has room for channels and plan.
  [[gnu::noinline]] void transform(const T* blocks, T* rows) const {
    constexpr int w = width<T>;
    const T *plus[array_size<wide>], *minus[array_size<wide>];  // the rows of the tokens l, and those of -l
    for (idx_t i = 0; i < wide; ++i) {
      plus[i] = blocks + sequence.place(token(i)) * wide;
      minus[i] = blocks + sequence.place(mirrored_token(i)) * wide;
    }
    for (idx_t b = 0; b * wide <= dim() / 2; ++b)
      unroll_constants<8>([&](auto choice) {
        constexpr int part = choice / 4, half = choice / 2 % 2;
        constexpr bool mirrored = choice % 2;
        const idx_t offset = b * sequence.rows() * wide;
        packet<T> square[array_size<w>];
        unroll<w>([&](auto i) {
          const auto z = load_row(plus[part * w + i] + offset), y = load_row(minus[part * w + i] + offset);
          const auto u = mirrored ? hartley_twice<T>(y, z) : hartley_twice<T>(z, y);
          square[i] = half == 0 ? u.re : u.im;
        });
        transpose<T>(square);
        for (int j = 0; j < w; ++j) {
          const idx_t d = b * wide + half * w + j;
          if (mirrored ? d > 0 && 2 * d < dim() : 2 * d <= dim())
            store<T>(rows + (mirrored ? dim() - d : d) * wide + part * w, square[j]);
        }
      });
    hartley_twice(plan, rows, rows + dim() * wide);
  }

  /// Rows of the result, and their mirror images.
  template <bool adds, class S>
  void write(const T* rows, const matrix_view<S>& to) const {
    constexpr int w = width<T>;
    idx_t tokens[2][array_size<wide>];
    for (idx_t i = 0; i < count; ++i) tokens[0][i] = token(i), tokens[1][i] = mirrored_token(i);
    for (idx_t part = 0; part < count; part += w)
      for (const bool mirrored : {false, true})
        for (idx_t c0 = 0; c0 < dim(); c0 += w) {
          packet<T> square[array_size<w>];
          for (int j = 0; j < w; ++j) {
            const idx_t c = (std::min)(c0 + j, dim() - 1);
            square[j] = load<T>(rows + plan.order(mirrored ? c : mirror(c, dim())) * wide + part);
          }
          transpose<T>(square);
          for (idx_t i = part; i < std::min<idx_t>(part + w, count); ++i) {
            S* const at = to.row(tokens[mirrored][i]) + c0 * to.col_stride;
            if constexpr (adds) {
              if (!mirrored && tokens[0][i] == tokens[1][i]) continue;  // its own image: written twice, but added once
              __builtin_prefetch(at + 4 * w * to.col_stride);  // the processor does not prefetch so many rows at once
            }
            store_part<T, adds>(at, to.col_stride, dim() - c0, square[i - part]);
          }
        }
  }
};

/// A checked call, whose result is written to out or, in the backward pass, added to it.
template <class S>
struct fnet_call {
  const tensor_view<const S>& x;
  const tensor_view<S>& out;
  std::span<const idx_t> lengths;
  bool accumulate = false;
};

/// Every slice [b, h] is transformed separately.
template <class S, bool adds = false>
struct fnet_driver : fnet_call<S> {
  using fnet_call<S>::x, fnet_call<S>::out, fnet_call<S>::lengths;
  using T = compute_type<S>;
  using slices = wave<T*>;  // a slice's scratch: its channel blocks [block][row][row_width]
  static constexpr idx_t wide = row_width<T>;
  /// Channel blocks that are taken in together: so many fit into the second cache.
  static constexpr idx_t blocks_together = 8;

  idx_t length(idx_t slice) const {
    return lengths.empty() ? x.extent(2) : lengths[static_cast<std::size_t>(slice / x.extent(1))];
  }
  template <class X>
  static auto slice_of(const tensor_view<X>& y, idx_t slice) {
    return head_of(y, slice / y.extent(1), slice % y.extent(1));
  }
  /// Blocks of the channels d <= D / 2.
  idx_t channel_blocks() const { return (x.extent(3) / 2 + wide) / wide; }
  static T* rows_of(execution& exec, int worker, idx_t count) {
    return exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(count * wide); });
  }

  /// Slices that all have the plan's length. Not inlined: compiled twice, it may contract other products and sums.
  [[gnu::noinline]] void transform(const fourier_plan<T>& over_channels, const sequence_plan<T>& over_tokens,
                                   const slices& w, idx_t spare_rows) const {
    const idx_t n = over_tokens.length(), blocks = channel_blocks(), parts = over_tokens.parts();
    const idx_t block_size = over_tokens.rows() * wide, groups = ceil_div(blocks, blocks_together);
    const auto spare = [&](int worker) { return rows_of(w.exec, worker, spare_rows); };

    w.for_each(over_tokens.input_slices() * groups, [&](idx_t slice, T* rows, idx_t step, int worker) {
      even_part<T, S> even{slice_of(x, slice)};
      even.x.rows = n;
      const idx_t group = step % groups;
      over_tokens.read_input(
          step / groups, group * blocks / groups, (group + 1) * blocks / groups, rows, spare(worker),
          [&](idx_t block, idx_t t, T* row, T* mirrored) { even.fold(t, block * wide, row, mirrored); });
    });
    const idx_t pieces = over_tokens.pieces_of_part(), all = blocks * parts, threads = w.exec.active_threads();
    if (threads == 1 || pieces == 1 || w.count * all >= threads) {
      w.for_each(all, [&](idx_t, T* rows, idx_t step, int worker) {
        over_tokens.transform_part(step % parts, rows + step / parts * block_size, spare(worker));
      });
    } else {
      w.for_each(all * pieces, [&](idx_t, T* rows, idx_t step, int) {
        over_tokens.start_part(step / pieces % parts, step % pieces, rows + step / pieces / parts * block_size);
      });
      w.for_each(all * pieces, [&](idx_t, T* rows, idx_t step, int) {
        over_tokens.finish_part(step / pieces % parts, step % pieces, rows + step / pieces / parts * block_size);
      });
    }
    w.for_each((n / 2 + wide) / wide, [&](idx_t slice, T* rows, idx_t block, int worker) {
      const channel_transform<T> over{over_channels, over_tokens, block * wide};
      T* const channels = spare(worker);
      over.transform(rows, channels);
      over.template write<adds>(channels, slice_of(out, slice));
    });
  }

  void run(execution& exec) const {
    const double numbers = static_cast<double>(x.size());
    const auto limit = exec.limit_threads({.operations = 10 * numbers, .bytes = 16 * numbers});
    // What the largest of the plans for tokens takes.
    const idx_t blocks = channel_blocks(), all = x.extent(0) * x.extent(1);
    idx_t plan_bytes = 0, slice_rows = 0, spare_rows = 0;
    for (idx_t slice = 0; slice < all; slice += x.extent(1)) {
      if (length(slice) == 0) continue;
      arena count;
      const auto plan = sequence_plan<T>::layout(count, length(slice));
      plan_bytes = (std::max)(plan_bytes, static_cast<idx_t>(count.used()));
      slice_rows = (std::max)(slice_rows, blocks * plan.rows());
      spare_rows = (std::max)(spare_rows, plan.spare_rows((std::min)(blocks, blocks_together)));
    }
    fourier_plan<T> over_channels;
    sequence_plan<T> over_tokens;
    const auto plan_memory = exec.workspace([&](arena& memory) {
      over_channels = fourier_plan<T>::layout(memory, x.extent(3));
      return memory.allocate<std::byte>(plan_bytes);
    });
    spare_rows = (std::max)(spare_rows, x.extent(3) + over_channels.spare_rows());
    over_channels.fill(rows_of(exec, 0, spare_rows));

    // Of slices of one length, as many as are a multiple of the threads are a task each. Threads share the passes of
    // the others, which takes 1.4 times as long in all, and of as many at a time as fit in half of the second caches.
    const idx_t threads = exec.active_threads();
    const idx_t slice_bytes = std::max<idx_t>(1, slice_rows * wide * static_cast<idx_t>(sizeof(T)));
    const idx_t waves = threads == 1 ? all : ceil_div(all, std::max<idx_t>(1, (threads << 19) / slice_bytes));
    const idx_t together = ceil_div(all, std::max<idx_t>(1, waves));
    const std::span<execution> serial = threads == 1 ? std::span(&exec, 1) : exec.serial_executions();
    const auto memory_of_slice = [&](arena& memory) { return memory.allocate<T>(slice_rows * wide); };
    for (idx_t first = 0, end, planned = 0; first < all; first = end) {
      const idx_t n = length(first);
      for (end = first + 1; end < all && length(end) == n;) ++end;
      for (idx_t slice = first; slice < end && !adds; ++slice) clear_rows(slice_of(out, slice), n, x.extent(2));
      if (n == 0) continue;
      if (n != planned) {
        arena memory(*plan_memory);
        over_tokens = sequence_plan<T>::layout(memory, n);
        over_tokens.fill(rows_of(exec, 0, spare_rows));
        planned = n;
      }
      const idx_t rest = (end - first) % threads;
      const idx_t shared = threads == 1 ? end - first : 7 * rest < 5 * threads ? rest : 0, whole = end - first - shared;
      exec.for_each(whole, [&](idx_t slice, int worker) {
        T* rows = exec.scratch(worker, memory_of_slice);
        transform(over_channels, over_tokens, {serial[static_cast<std::size_t>(worker)], first + slice, 1, &rows},
                  spare_rows);
      });
      for (slices w : waves_of(exec, shared, together, memory_of_slice)) {
        w.first += first + whole;
        transform(over_channels, over_tokens, w, spare_rows);
      }
    }
  }
};

template <class S>
void run_fnet(const fnet_call<S>& call, execution& exec) {
  if (!call.x.empty()) fnet_driver<S>{call}.run(exec);
}
template <class S>
void run_fnet_backward(const fnet_call<S>& call, execution& exec) {
  if (!call.accumulate) return run_fnet(call, exec);
  if (!call.x.empty()) fnet_driver<S, true>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_fnet(const fnet_call<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void run_fnet_backward(const fnet_call<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
