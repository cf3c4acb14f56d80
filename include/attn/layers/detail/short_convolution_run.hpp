// attn: a call of short_convolution, its driver, and the state after it.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/layers/detail/convolution_tiles.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks what the forward call, the step and the backward pass have in common. Returns the width of the weight.
[[gnu::noinline]] inline idx_t check_convolution(layer_views& check, const memory_layout& weight,
                                                 const memory_layout& bias, std::span<const idx_t> lengths) {
  const idx_t dim = check.x.extents[2], taps = weight.extents[1];
  check.out_dim(dim);
  check.read("weight", weight, {{"weight rows = x dim", dim}});
  check.at_least("weight columns", 1, taps);
  check.fits("a packed weight", {round_up(dim, 16), taps, 8});
  check.list("bias", bias, "channel", dim);
  check_length_list(check, "lengths", lengths, check.x.extents[0], check.x.extents[1]);
  return taps;
}

/// A state has the shape of the tokens that the first one sees.
[[gnu::noinline]] inline void check_convolution_state(const layer_views& check, const char* name,
                                                      const memory_layout& state, idx_t taps) {
  const tensor_view<const float, 3> like(nullptr, {check.x.extents[0], taps - 1, check.x.extents[2]});
  if (state.given()) check_same_shape(check, name, state, "the last weight columns - 1 tokens", like);
}

/// Of a checked call. Tasks are segments of items.
template <class T>
struct convolution_driver {
  convolution_rows<T> rows;
  any_rows<T> weight, bias;  // the weight by tap
  std::optional<activation> f;
  std::span<const idx_t> lengths;

  idx_t batch() const { return rows.x.extents[0]; }
  idx_t length(idx_t b) const { return lengths.empty() ? rows.x.length : lengths[static_cast<std::size_t>(b)]; }
  idx_t token(idx_t b, idx_t t) const { return b * rows.x.length + t; }
  /// The convolution of x, results to come.
  convolution_tile_call<T> tile_of(const convolution_weights<T>& w, const row_window<T>& window) const {
    return {w.rows, w.bias, w.stride, w.taps, w.padded, window.rows, nullptr};
  }
  double numbers() const { return static_cast<double>(rows.x.count) * static_cast<double>(rows.x.dim); }

  void run(const output_tokens<T>& out, execution& exec) const {
    const idx_t dim = rows.x.dim, taps = rows.taps;
    if (rows.x.count == 0 || dim == 0) return;
    const auto limit = exec.limit_threads(
        {.operations = (2 * static_cast<double>(taps) + 8) * numbers(), .bytes = 2 * sizeof(T) * numbers()});
    auto w = exec.shared_scratch([&](arena& memory) { return convolution_weights<T>(memory, taps, dim); });
    // With silu times log2 e, which the exponential would multiply every sum by: .89 of the time.
    bool fused_silu = f == activation::silu;
    w.set(weight, bias, fused_silu ? exp_constants<T>::log2_e_high : T(1));
    if (fused_silu && !w.finite()) fused_silu = false, w.set(weight, bias);
    const idx_t segment = convolution_segment(taps), segments = ceil_div(rows.x.length, segment);
    exec.for_each(batch() * segments, [&](idx_t task, int worker) {
      const auto [window, results] = exec.scratch(worker, [&](arena& memory) {
        return std::pair{row_window<T>(memory, taps, w.padded), memory.allocate<T>(convolution_tile * w.padded)};
      });
      const idx_t begin = task % segments * segment;
      run_segment(w, fused_silu, task / segments, begin, (std::min)(begin + segment, rows.x.length), window, results,
                  out);
    });
  }

 private:
  /// Tokens [begin, end) of item b.
  void run_segment(const convolution_weights<T>& w, bool with_silu, idx_t b, idx_t begin, idx_t end,
                   const row_window<T>& window, T* results, const output_tokens<T>& out) const {
    const idx_t real = length(b), stop = (std::min)(end, real);
    const bool in_place = rows_in_place<T>(out);
    convolution_tile_call<T> tile = tile_of(w, window);
    const auto row = [&](idx_t e, T* slot) { return rows.row(b, e, real, w.zeros, slot); };
    window.begin(begin, row);
    for (idx_t t = begin; t < stop; t += convolution_tile) {
      window.advance(t, row);
      T* to[convolution_tile];
      for (int r = 0; r < convolution_tile; ++r)
        to[r] = in_place && t + r < stop ? reinterpret_cast<T*>(out.at(token(b, t + r))) : results + r * w.padded;
      tile.out = to;
      with_silu ? convolve_silu(tile, stop - t) : convolve_tile(tile, stop - t);
      for (int r = 0; r < convolution_tile && t + r < stop; ++r) {
        if (f && !with_silu) activate(*f, to[r], w.padded);
        if (!in_place) out.store(token(b, t + r), to[r]);
      }
    }
    for (idx_t t = (std::max)(begin, stop); t < end; ++t) out.store(token(b, t), w.zeros);
  }
};

template <class S, class Weights>
convolution_driver<compute_type<S>> make_convolution(const tensor_view<const S, 3>& x, const Weights& weights,
                                                   const std::optional<activation>& f, std::span<const idx_t> lengths,
                                                   const tensor_view<const S, 3>& state) {
  const tensor_view<const S, 2> weight = weights.weight;
  const tensor_view<const S, 1> bias = weights.bias;
  return {{x, state, weight.extent(1)}, transposed(weight), bias, f, lengths};
}

template <class T>
void run_short_convolution(const convolution_driver<T>& call, const output_tokens<T>& out, execution& exec) {
  call.run(out, exec);
}

/// The states `to` [B, w - 1, C] after the tokens of x. `to` may be `from`, the states before them, which may be null.
template <class S>
void store_last_tokens(const tensor_view<const S, 3>& x, std::span<const idx_t> lengths,
                       const tensor_view<const S, 3>& from, const tensor_view<S, 3>& to) {
  const idx_t entries = to.extent(1);
  for (idx_t b = 0; b < to.extent(0); ++b) {
    const idx_t length = lengths.empty() ? x.extent(1) : lengths[static_cast<std::size_t>(b)];
    for (idx_t e = 0; e < entries; ++e) {  // ascending: an entry has moved before it is written over
      const idx_t t = e + length - entries;
      for (idx_t c = 0; c < to.extent(2); ++c)
        to(b, e, c) = t >= 0 ? x(b, t, c) : from ? from(b, e + length, c) : static_cast<S>(0.0f);
    }
  }
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_short_convolution(const convolution_driver<T>&, const output_tokens<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
