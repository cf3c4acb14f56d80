// attn: the backward pass of short_convolution.
//
// Tasks are segments of rows (convolution_tiles.hpp). Along the tokens of a segment, tile by tile, z is computed again,
// and g from it; then the gradients of the tile's rows, which are a convolution of g with the taps in reverse order,
// and the tile's share of the sums. A task computes g of the w - 1 tokens before its own once more.
#pragma once

#include <attn/layers/detail/short_convolution_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// sums[i] += sum over `Count` tokens r of d[r] rows[r + i], sums[taps] += those of d.
template <int Count, class T>
ATTN_INLINE void add_convolution_sums(const T* const* d, const T* const* rows, idx_t taps, idx_t padded, T* sums) {
  for (idx_t c = 0; c < padded; c += width<T>) {
    packet<T> g[array_size<Count>];
    unroll<Count>([&](auto r) { g[r] = load<T>(d[r] + c); });
    T* sum = sums + c;
    for (idx_t i = 0; i < taps; ++i, sum += padded) {
      packet<T> all = load<T>(sum);
      unroll<Count>([&](auto r) { all = fma(g[r], load<T>(rows[r + i] + c), all); });
      store<T>(sum, all);
    }
    packet<T> all = load<T>(sum);
    unroll<Count>([&](auto r) { all = add(all, g[r]); });
    store<T>(sum, all);
  }
}

template <class T>
struct convolution_backward_driver {
  convolution_driver<T> forward;
  input_tokens<T> d;
  any_rows<T> d_final;  // may be missing
  gradient_memory<T> dx, d_initial, d_weight, d_bias;

  void run(execution& exec) const {
    const idx_t dim = forward.rows.x.dim, taps = forward.rows.taps;
    if (dim == 0 || !(rows_wanted() || sums_wanted())) return;
    const auto limit = exec.limit_threads({.operations = (6 * static_cast<double>(taps) + 24) * forward.numbers(),
                                           .bytes = 3 * sizeof(T) * forward.numbers()});
    const idx_t segment = convolution_segment(taps), padded = round_up(dim, width<T>), one = (taps + 1) * padded;
    const idx_t segments = ceil_div(forward.rows.x.length + taps - 1, segment);
    auto shared = exec.shared_scratch([&](arena& memory) {
      return std::pair{convolution_weights<T>(memory, taps, dim), task_sums<T>(memory, sums_wanted() ? one : 0, exec)};
    });
    convolution_weights<T>& w = shared.first;
    w.set(forward.weight, forward.bias);
    const T* const total =
        shared.second.add_up(forward.batch() * segments, exec, [&](idx_t task, T* own, int worker) {
          const auto scratch = exec.scratch(worker, [&](arena& memory) { return task_memory(memory, taps, padded); });
          run_segment(w, task / segments, task % segments * segment, segment, scratch, own);
        });
    for (idx_t i = 0; i < taps && d_weight.given(); ++i) d_weight.put(i, 0, dim, total + i * padded);
    if (d_bias.given()) d_bias.put(0, 0, dim, total + taps * padded);
  }

 private:
  bool rows_wanted() const { return dx.given() || d_initial.given(); }
  bool sums_wanted() const { return d_weight.given() || d_bias.given(); }

  struct task_memory {
    row_window<T> seen, d;  // rows of x; g as the gradients of rows see it
    T *z, *spare;

    task_memory(arena& memory, idx_t taps, idx_t padded)
        : seen(memory, taps, padded),
          d(memory, taps, padded),
          z(memory.allocate<T>(convolution_tile * padded)),
          spare(memory.allocate<T>(padded)) {}
  };

  /// Rows [begin, begin + count) of item b, up to its last one, and the sums of the tokens of the same numbers.
  void run_segment(const convolution_weights<T>& w, idx_t b, idx_t begin, idx_t count, const task_memory& m,
                   T* sums) const {
    const auto& f = forward.f;
    const idx_t taps = w.taps, length = forward.length(b);
    const idx_t last = (std::min)(begin + count, forward.rows.x.length + taps - 1);
    const idx_t end = (std::min)(last, rows_wanted() ? length + taps - 1 : length);  // beyond it all is 0
    const idx_t start = begin - round_up(taps - 1, convolution_tile);
    const idx_t first_token = std::max<idx_t>(0, begin - taps + 1);
    const bool sees_rows = f || d_weight.given();
    const auto row = [&](idx_t e, T* slot) { return forward.rows.row(b, e, length, w.zeros, slot); };
    const auto d_row = [&](idx_t e, T* slot) -> const T* {  // of token e - (taps - 1); with f computed below
      const idx_t t = e - (taps - 1);
      if (t < first_token || t >= length) return w.zeros;
      return f ? slot : row_or_copy(d, forward.token(b, t), w.dim, slot);
    };
    if (sees_rows) m.seen.begin(start, row);
    m.d.begin(start, [&](idx_t, T*) -> const T* { return w.zeros; });
    for (idx_t s = start; s < end; s += convolution_tile) {  // tokens and rows s, s + 1, ...
      if (sees_rows) m.seen.advance(s, row);
      m.d.advance(s, d_row);
      if (f && s + convolution_tile > first_token && s < length) apply_slopes(w, b, s, m);
      if (s < begin) continue;
      if (sums) add_sums(m.d.rows + (taps - 1), std::min<idx_t>(convolution_tile, length - s), m, w, sums);
      if (rows_wanted()) put_rows(w, b, s, end, length, m);
    }
    for (idx_t e = (std::max)(begin, length + taps - 1); e < last; ++e)
      if (dx.given() && !dx.accumulate) dx.put(forward.token(b, e - (taps - 1)), 0, w.dim, w.zeros);
  }

  /// g of the tokens s, s + 1, ... of a tile, from d.
  void apply_slopes(const convolution_weights<T>& w, idx_t b, idx_t s, const task_memory& m) const {
    const T* from[convolution_tile];
    T *z[convolution_tile], *to[convolution_tile];
    for (int r = 0; r < convolution_tile; ++r) {
      const idx_t e = s + w.taps - 1 + r;
      const bool wanted = m.d.rows[w.taps - 1 + r] != w.zeros;
      z[r] = m.z + r * w.padded;
      to[r] = wanted ? m.d.slot(e) : z[r];
      from[r] = wanted ? row_or_copy(d, forward.token(b, s + r), w.dim, to[r]) : w.zeros;
    }
    convolution_tile_call<T> tile = forward.tile_of(w, m.seen);
    if (forward.f == activation::silu) {
      tile.out = to;
      return convolve_silu_backward(tile, from);
    }
    tile.out = z;
    convolve_tile(tile);
    for (int r = 0; r < convolution_tile; ++r) {
      if (from[r] == w.zeros) continue;
      if (from[r] != to[r]) std::copy_n(from[r], w.padded, to[r]);
      activate_backward(*forward.f, z[r], to[r], w.padded);
    }
  }

  void add_sums(const T* const* g, idx_t count, const task_memory& m, const convolution_weights<T>& w, T* sums) const {
    const idx_t taps = d_weight.given() ? w.taps : 0;  // rows are not seen for the bias alone
    T* const from = sums + (w.taps - taps) * w.padded;
    if (count == convolution_tile) return add_convolution_sums<convolution_tile>(g, m.seen.rows, taps, w.padded, from);
    for (idx_t r = 0; r < count; ++r) add_convolution_sums<1>(g + r, m.seen.rows + r, taps, w.padded, from);
  }

  /// The gradients of rows s, s + 1, ... of a tile, up to `end`.
  void put_rows(const convolution_weights<T>& w, idx_t b, idx_t s, idx_t end, idx_t length,
                const task_memory& m) const {
    const idx_t state = w.taps - 1;
    T* to[convolution_tile];
    const bool in_place = dx.given() && !dx.accumulate && rows_in_place<T>(dx);
    for (int r = 0; r < convolution_tile; ++r) {
      const idx_t e = s + r;
      const bool final = in_place && e >= state && e < (std::min)(end, d_final.given() ? length : end);
      to[r] = final ? reinterpret_cast<T*>(dx.at(forward.token(b, e - state))) : m.z + r * w.padded;
    }
    convolve_tile<T>({w.rows + state * w.stride, w.zeros, -w.stride, w.taps, w.padded, m.d.rows, to});
    for (idx_t e = s; e < (std::min)(s + convolution_tile, end); ++e) {
      T* const gradient = to[e - s];
      if (gradient != m.z + (e - s) * w.padded) continue;
      if (e >= length && d_final.given()) {
        d_final.load(b * state + e - length, 0, w.dim, m.spare);
        add_row(gradient, m.spare, w.dim);
      }
      if (e >= state && dx.given()) dx.put(forward.token(b, e - state), 0, w.dim, gradient);
      if (e < state && d_initial.given()) d_initial.put(b * state + e, 0, w.dim, gradient);
    }
  }
};

template <class T>
void run_short_convolution_backward(const convolution_backward_driver<T>& call, execution& exec) {
  call.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_short_convolution_backward(const convolution_backward_driver<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
