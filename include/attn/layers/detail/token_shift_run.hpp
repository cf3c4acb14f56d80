// attn: a call of token_shift, its checks and its driver.
//
// Rows are those of a convolution of two taps (convolution_tiles.hpp): row 0 is the state, row t + 1 is token t.
#pragma once

#include <attn/layers/detail/short_convolution_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks what the forward call, the step and the backward pass have in common.
[[gnu::noinline]] inline void check_token_shift(layer_views& check, const memory_layout& mix,
                                                std::span<const idx_t> lengths) {
  const idx_t* const x = check.x.extents;
  check.out_dim(x[2]);
  check.list("mix", mix, "channel", x[2]);
  check_length_list(check, "lengths", lengths, x[0], x[1]);
}
[[gnu::noinline]] inline void check_shift_state(const layer_views& check, const char* name,
                                                const memory_layout& state) {
  const tensor_view<const float, 2> like(nullptr, {check.x.extents[0], check.x.extents[2]});
  if (state.given()) check_same_shape(check, name, state, "one token of each batch item", like);
}

/// A state [B, C] as the last token [B, 1, C] of each item.
template <class S>
tensor_view<S, 3> as_last_tokens(const tensor_view<S, 2>& x) {
  return {x.data(), {x.extent(0), 1, x.extent(1)}, {x.stride(0), 0, x.stride(1)}};
}

/// Two successive rows of an item, going along it. `copies` is memory of two rows.
template <class T>
struct successive_rows {
  const convolution_rows<T>& rows;
  idx_t b, length, padded;
  const T* zeros;
  T* copies;
  const T *before = nullptr, *here = nullptr;

  void begin(idx_t e) { here = rows.row(b, e, length, zeros, slot(e)); }
  /// Rows e and e + 1; begin(e) or advance(e - 1) came before.
  void advance(idx_t e) {
    before = here;
    here = rows.row(b, e + 1, length, zeros, slot(e + 1));
  }
  T* slot(idx_t e) const { return copies + e % 2 * padded; }
};

/// Rows of one number a channel.
template <class T>
struct shift_rows {
  idx_t dim, padded;
  T *mix, *zeros;

  shift_rows(arena& memory, idx_t channels)
      : dim(channels),
        padded(round_up(channels, width<T>)),
        mix(memory.allocate<T>(padded)),
        zeros(memory.allocate<T>(padded)) {}

  void set(const any_rows<T>& given) const {
    std::fill_n(mix, padded, T(0));
    std::fill_n(zeros, padded, T(0));
    given.load_or(T(1), 0, dim, mix);
  }
  /// out = (1 - mix) x + mix y: what is finite does not overflow, and mix 1 gives y itself.
  [[gnu::noinline]] void blend(const T* x, const T* y, T* out) const {
    for (idx_t c = 0; c < padded; c += width<T>) {
      const packet<T> here = load<T>(x + c), share = load<T>(mix + c);
      store<T>(out + c, fma(share, load<T>(y + c), sub(here, mul(share, here))));
    }
  }
};

/// Of a checked call. Tasks are segments of items.
template <class T>
struct token_shift_driver {
  convolution_rows<T> rows;
  any_rows<T> mix;  // may be missing: 1
  std::span<const idx_t> lengths;

  idx_t batch() const { return rows.x.extents[0]; }
  idx_t length(idx_t b) const { return lengths.empty() ? rows.x.length : lengths[static_cast<std::size_t>(b)]; }
  idx_t token(idx_t b, idx_t t) const { return b * rows.x.length + t; }
  double numbers() const { return static_cast<double>(rows.x.count) * static_cast<double>(rows.x.dim); }

  void run(const output_tokens<T>& out, execution& exec) const {
    if (rows.x.count == 0 || rows.x.dim == 0) return;
    const auto limit = exec.limit_threads({.operations = 4 * numbers(), .bytes = 2 * sizeof(T) * numbers()});
    auto w = exec.shared_scratch([&](arena& memory) { return shift_rows<T>(memory, rows.x.dim); });
    w.set(mix);
    const idx_t segments = ceil_div(rows.x.length, tokens_per_task);
    exec.for_each(batch() * segments, [&](idx_t task, int worker) {
      T* const memory = exec.scratch(worker, [&](arena& a) { return a.allocate<T>(3 * w.padded); });
      const idx_t begin = task % segments * tokens_per_task;
      run_segment(w, task / segments, begin, (std::min)(begin + tokens_per_task, rows.x.length), memory, out);
    });
  }

 private:
  /// Tokens [begin, end) of item b.
  void run_segment(const shift_rows<T>& w, idx_t b, idx_t begin, idx_t end, T* memory,
                   const output_tokens<T>& out) const {
    const idx_t real = length(b), stop = (std::min)(end, real);
    const bool in_place = rows_in_place<T>(out);
    successive_rows<T> x{rows, b, real, w.padded, w.zeros, memory};
    if (begin < stop) x.begin(begin);
    for (idx_t t = begin; t < stop; ++t) {
      x.advance(t);
      if (!mix.data) {
        out.store(token(b, t), x.before);
        continue;
      }
      T* const to = in_place ? reinterpret_cast<T*>(out.at(token(b, t))) : memory + 2 * w.padded;
      w.blend(x.here, x.before, to);
      if (!in_place) out.store(token(b, t), to);
    }
    for (idx_t t = (std::max)(begin, stop); t < end; ++t) out.store(token(b, t), w.zeros);
  }
};

template <class T>
void run_token_shift(const token_shift_driver<T>& call, const output_tokens<T>& out, execution& exec) {
  call.run(out, exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_token_shift(const token_shift_driver<T>&, const output_tokens<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
