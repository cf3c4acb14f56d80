// attn: the driver of the gradients of feed_forward.
#pragma once

#include <attn/layers/detail/feed_forward_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct feed_forward_weight_gradients;

namespace detail {

/// The gradients of a feed-forward layer in memory.
template <class P>
struct feed_forward_backward_memory {
  using T = sum_type<P>;

  feed_forward_memory<P> weights;
  linear_weight<P> up_transposed, down_transposed, gate_transposed;
  gradient_memory<T> up, down, gate, up_bias, down_bias, gate_bias;

  template <class S>
  feed_forward_backward_memory(const feed_forward_weights<S>& w, const feed_forward_weight_gradients<S>& g,
                               bool accumulate)
      : weights(w),
        up_transposed(transposed(w.up), {}),
        down_transposed(transposed(w.down), {}),
        gate_transposed(transposed(w.gate), {}),
        up(g.up, accumulate),
        down(g.down, accumulate),
        gate(g.gate, accumulate),
        up_bias(g.up_bias, accumulate),
        down_bias(g.down_bias, accumulate),
        gate_bias(g.gate_bias, accumulate) {}
};

template <class P>
struct feed_forward_backward_driver {
  using T = sum_type<P>;

  input_tokens<T> x, d;
  gradient_memory<T> dx;
  const feed_forward_backward_memory<P>& memory;
  activation f;

  idx_t inputs() const { return memory.weights.up.inputs; }
  idx_t hidden() const { return memory.weights.up.outputs; }
  idx_t outputs() const { return memory.weights.down.outputs; }
  bool gated() const { return memory.weights.gated; }
  bool any_up() const { return memory.up.given() || memory.up_bias.given(); }
  bool any_gate() const { return memory.gate.given() || memory.gate_bias.given(); }
  /// What is needed: the gradient of the hidden numbers, and the hidden numbers at all.
  bool needs_slopes() const { return dx.given() || any_up() || any_gate(); }
  bool needs_hidden() const { return needs_slopes() || memory.down.given(); }
  double products() const {
    const double up = static_cast<double>(inputs()), down = static_cast<double>(outputs());
    return static_cast<double>(hidden()) *
           (up * ((1 + gated()) * (needs_hidden() + dx.given()) + memory.up.given() + memory.gate.given()) +
            down * (needs_slopes() + memory.down.given()));
  }

  /// What the threads share.
  struct shared_buffers {
    weight_panels<P> weights[5];  // up, and the transposes of down and up; gate and its transpose
    weight_sums<P> sums[3];       // of up, down and gate

    const weight_panels<P>& up() const { return weights[0]; }
    const weight_panels<P>& back_to_hidden() const { return weights[1]; }
    const weight_panels<P>& back_to_x() const { return weights[2]; }
    const weight_panels<P>& gate() const { return weights[3]; }
    const weight_panels<P>& gate_back_to_x() const { return weights[4]; }
  };
  shared_buffers layout(arena& m, idx_t chunks) const {
    const weight_panels<P> up(m, memory.weights.up), to_hidden(m, memory.down_transposed),
        to_x(m, memory.up_transposed), gate(m, memory.weights.gate), gate_to_x(m, memory.gate_transposed);
    const input_panels<P> x_panels(m, inputs(), memory.up.given() || memory.gate.given() ? chunks : 0),
        hidden_panels(m, hidden(), memory.down.given() ? chunks : 0);
    const weight_sums<P> up_sums(m, memory.up, memory.up_bias, hidden(), x_panels, chunks),
        down_sums(m, memory.down, memory.down_bias, outputs(), hidden_panels, chunks),
        gate_sums(m, memory.gate, memory.gate_bias, hidden(), x_panels, chunks);
    return {{up, to_hidden, to_x, gate, gate_to_x}, {up_sums, down_sums, gate_sums}};
  }

  /// A worker's block of tokens. Hidden numbers are computed input_block at a time.
  struct block_buffers {
    packed_tokens<P> x_tiles, d_tiles, slope_tiles;
    row_buffer<T> x, d, hidden, slopes, gates, gate_slopes, dx;
  };
  block_buffers layout_block(arena& m) const {
    const idx_t at_once = (std::min)(input_block, hidden());
    const packed_tokens<P> x_tiles(m, inputs()), d_tiles(m, outputs()), slope_tiles(m, at_once);
    const row_buffer<T> x_rows(m, token_block, inputs()), d_rows(m, token_block, outputs()),
        hidden_rows(m, token_block, at_once, panel_width<T>), slope_rows(m, token_block, at_once, panel_width<T>),
        gate_rows(m, token_block, gated() ? at_once : 0, panel_width<T>),
        gate_slope_rows(m, token_block, gated() ? at_once : 0, panel_width<T>),
        dx_rows(m, token_block, inputs(), panel_width<T>);
    return {x_tiles,    d_tiles,   slope_tiles,     x_rows, d_rows, hidden_rows,
            slope_rows, gate_rows, gate_slope_rows, dx_rows};
  }

  void run_block(idx_t first, idx_t rows, const chunk_place& place, const shared_buffers& shared,
                 block_buffers block) const {
    const auto& [up_sums, down_sums, gate_sums] = shared.sums;
    for (idx_t r = 0; r < rows; ++r) {
      d.load(first + r, block.d.row(r));
      if (is_zero(block.d.row(r), outputs()))
        std::fill_n(block.x.row(r), inputs(), T(0));
      else
        x.load(first + r, block.x.row(r));
    }
    if (down_sums.wanted()) down_sums.d.put(place, block.d, rows, 0, outputs());
    if (!needs_hidden()) return;
    if (memory.up.given() || memory.gate.given()) up_sums.x.put(place, block.x, rows, 0, inputs());
    block.x_tiles.pack([&](idx_t r) { return block.x.row(r); }, rows);
    block.d_tiles.pack([&](idx_t r) { return block.d.row(r); }, rows);
    if (dx.given()) clear_buffer(block.dx, rows);
    for (idx_t j0 = 0; j0 < hidden(); j0 += input_block) {
      const idx_t count = (std::min)(input_block, hidden() - j0);
      multiply_tokens(block.x_tiles, shared.up(), j0, count, block.hidden);
      if (needs_slopes()) multiply_tokens(block.d_tiles, shared.back_to_hidden(), j0, count, block.slopes);
      if (gated()) multiply_tokens(block.x_tiles, shared.gate(), j0, count, block.gates);
      for (idx_t r = 0; r < rows; ++r)
        if (gated())
          gate_row(block, r, count);
        else if (needs_slopes())
          activate_backward(f, block.hidden.row(r), block.slopes.row(r), count);
        else
          activate(f, block.hidden.row(r), count);
      if (memory.down.given()) down_sums.x.put(place, block.hidden, rows, j0, count);
      if (any_up()) up_sums.d.put(place, block.slopes, rows, j0, count);
      if (any_gate()) gate_sums.d.put(place, block.gate_slopes, rows, j0, count);
      if (!dx.given()) continue;
      block.slope_tiles.inputs = count;
      const auto add_back = [&](const row_buffer<T>& slopes, const weight_panels<P>& back) {
        block.slope_tiles.pack([&](idx_t r) { return slopes.row(r); }, rows);
        add_products(block.slope_tiles.from(0), rows, back.block(j0), operands<P>(count), block.dx);
      };
      add_back(block.slopes, shared.back_to_x());
      if (gated()) add_back(block.gate_slopes, shared.gate_back_to_x());
    }
    for (idx_t r = 0; dx.given() && r < rows; ++r) dx.put(first + r, 0, inputs(), block.dx.row(r));
  }

  /// Of a row: hidden p becomes h = f(q) p, slopes d V become g, and gates q and their slopes f(q) and s.
  void gate_row(const block_buffers& block, idx_t r, idx_t count) const {
    T *const hidden_row = block.hidden.row(r), *const gate = block.gates.row(r), *const slopes = block.slopes.row(r),
      *const gate_slopes = block.gate_slopes.row(r);
    if (needs_slopes()) {
      for (idx_t n = 0; n < count; ++n) gate_slopes[n] = slopes[n] * hidden_row[n];
      activate_backward(f, gate, gate_slopes, count);
      multiply_rows(slopes, gate, count);
    } else {
      activate(f, gate, count);
    }
    multiply_rows(hidden_row, gate, count);
  }

  void run(execution& exec) const {
    if (!needs_hidden() && !memory.down_bias.given()) return;
    const auto limit = exec.limit_threads(
        {.operations = 2 * static_cast<double>(x.count) * products(), .bytes = sizeof(T) * products()});
    const idx_t together = chunks_together(exec, x.count);
    const shared_buffers shared = exec.shared_scratch([&](arena& m) { return layout(m, together); });
    if (needs_hidden()) pack_weights<P>(shared.weights, exec);
    sum_over_tokens<P>(x.count, together, shared.sums, exec,
                       [&](idx_t first, idx_t rows, const chunk_place& place, int worker) {
                         const auto block = exec.scratch(worker, [&](arena& m) { return layout_block(m); });
                         run_block(first, rows, place, shared, block);
                       });
  }
};

template <class P>
void run_feed_forward_backward(const feed_forward_backward_driver<P>& call, execution& exec) {
  call.run(exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
