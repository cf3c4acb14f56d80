// attn: the gradients of feed_forward.
//
//   with p = x U^T + a, h = f(p), g = (d_out V) f'(p)                                     (out = h V^T + b)
//   dx = g U,   dU = sum over tokens of g^T x,   da = sum of g,   dV = sum of d_out^T h,   db = sum of d_out
//   gated, with q = x G^T + c, h = f(q) * p: g = (d_out V) * f(q), s = (d_out V) * p * f'(q),
//   dx = g U + s G,   dG = sum over tokens of s^T x,   dc = sum of s
//
//   attn::feed_forward(x, out, weights, {.activation = f}, threads);
//   attn::feed_forward_backward(x, weights, d_out, {.x = dx, .up = du, .down = dv}, {.activation = f}, threads);
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Cost     B L hidden (6 n + 4 m) operations, with a gate B L hidden (12 n + 4 m), 2.5 times those of
//          the forward pass: the hidden layer is computed again, 480 tokens at a time, never that of the whole
//          sequence. Scratch: packed, the weights and the transpose of up; the sums of dU and dV; n + m + 2 hidden
//          numbers for each of 480 tokens, with more than four threads as many again for every four.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// A token whose d_out is 0 has gradient 0 and adds nothing, whatever its x is: so has padding, NaN or not. relu' is 0
// at 0.
#pragma once

#include <attn/layers/detail/weight_gradients.hpp>
#include <attn/layers/feed_forward.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of feed_forward_weights.
template <class S>
struct feed_forward_weight_gradients {
  view_field<S, 2> up{}, down{}, gate{};
  view_field<S, 1> up_bias{}, down_bias{}, gate_bias{};
};

template <class S>
struct feed_forward_gradients {
  view_field<S, 3> x{};
  view_field<S, 2> up{}, down{}, gate{};
  view_field<S, 1> up_bias{}, down_bias{}, gate_bias{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

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

template <viewable X, viewable D, class Weights = feed_forward_weights<element_of<const X&>>,
          class Options = feed_forward_options>
void feed_forward_backward(const X& x, const Weights& weights, const D& d_out,
                           const feed_forward_gradients<element_of<const X&>>& gradients, Options&& options = {},
                           execution_ref exec = {}) {
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<feed_forward_weights<S>>(weights);
  const auto& given = detail::options_or_default<feed_forward_options>(options);
  detail::layer_views check{"feed_forward_backward", from, d, detail::layer_views::backward_pass{}};
  check.gradient("x", gradients.x, from);
  check.gradient("up", gradients.up, w.up, "up weight");
  check.gradient("down", gradients.down, w.down, "down weight");
  check.gradient("up_bias", gradients.up_bias, w.up_bias, "up bias");
  check.gradient("down_bias", gradients.down_bias, w.down_bias, "down bias");
  check.gradient("gate", gradients.gate, w.gate, "gate weight");
  check.gradient("gate_bias", gradients.gate_bias, w.gate_bias, "gate bias");
  check.out_dim(d.extent(2));
  detail::check_feed_forward(check, w, from.extent(2));

  const feed_forward_weight_gradients<S> of_weights{gradients.up,      gradients.down,      gradients.gate,
                                                    gradients.up_bias, gradients.down_bias, gradients.gate_bias};
  using P = detail::product_type<S>;
  const detail::feed_forward_backward_memory<P> memory(w, of_weights, gradients.accumulate);
  detail::run_feed_forward_backward<P>({detail::input_tokens<T>(from),
                                        detail::input_tokens<T>(d),
                                        {gradients.x, gradients.accumulate},
                                        memory,
                                        given.activation},
                                       detail::plain_execution_of("feed_forward_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_feed_forward_backward(const feed_forward_backward_driver<product_type<S>>&, execution&)
#include <attn/core/detail/compiled.hpp>
