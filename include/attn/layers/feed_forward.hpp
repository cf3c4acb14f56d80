// attn: the feed-forward layer of a Transformer.
//
//   out = f(x U^T + a) V^T + b          Vaswani et al. 2017, with f = GELU, its tanh form, or ReLU
//
//   attn::feed_forward(x, out, {.up = u, .down = v, .up_bias = a, .down_bias = b});
//   attn::feed_forward(x, out, weights, {.f = attn::activation::relu}, threads);
//
// Shapes   x [B, L, n], up [hidden, n], up_bias [hidden], down [m, hidden], down_bias [m], out [B, L, m]; the biases
// may
//          be left out. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     2 B L hidden (n + m) operations. Scratch: the packed weights, about hidden (n + m) numbers, and 48 tokens a
//          thread, with 512 hidden numbers each: never the hidden layer of the whole sequence.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/activation.hpp>
#include <attn/layers/projection.hpp>

namespace attn {

/// Weights of feed_forward.
template <class S>
struct feed_forward_weights {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  tensor_view<const S, 2> up{}, down{};
  tensor_view<const S, 1> up_bias{}, down_bias{};
};

/// Options of feed_forward.
struct feed_forward_options {
  activation f = activation::gelu;
};

namespace detail {

/// Both weights of a feed-forward layer, packed.
template <class T>
struct packed_feed_forward {
  packed_weight<T> up, down;

  static packed_feed_forward layout(carver& memory, index inputs, index hidden, index outputs) {
    packed_feed_forward w;
    w.up = packed_weight<T>::layout(memory, hidden, inputs);
    w.down = packed_weight<T>::layout(memory, outputs, hidden);
    return w;
  }

  template <class S>
  void pack(const feed_forward_weights<S>& from, execution& where) const {
    where.for_each(up.pieces() + down.pieces(), [&](index task, int) {
      if (task < up.pieces())
        up.pack(matrix_of(from.up), from.up_bias, task);
      else
        down.pack(matrix_of(from.down), from.down_bias, task - up.pieces());
    });
  }
};

/// Up to project_rows tokens on their way through the layer. The hidden numbers come and go by stretches of
/// project_depth, which is how the second product takes them anyway.
template <class T>
struct feed_forward_block {
  packed_tokens<T> x, hidden_tiles;
  token_sums<T> hidden, out;

  static feed_forward_block layout(carver& memory, const packed_feed_forward<T>& w) {
    const index stretch = std::min(project_depth, w.up.outputs);
    feed_forward_block block;
    block.x = packed_tokens<T>::layout(memory, w.up.inputs);
    block.hidden_tiles = packed_tokens<T>::layout(memory, stretch);
    block.hidden = token_sums<T>::layout(memory, stretch);
    block.out = token_sums<T>::layout(memory, w.down.outputs);
    return block;
  }

  /// out from the packed x.
  void run(const packed_feed_forward<T>& w, activation f) {
    out.begin(w.down.bias, x.rows);
    for (index j0 = 0; j0 < w.up.outputs; j0 += project_depth) {
      const index count = std::min(project_depth, w.up.outputs - j0);
      hidden.stride = round_up(count, panel_width<T>);
      hidden.begin(w.up.bias + j0, x.rows);
      for (index k0 = 0; k0 < x.inputs; k0 += project_depth) {
        const index depth = std::min(project_depth, x.inputs - k0);
        add_products(x.tile(k0, 0), x.rows, w.up.stretch(k0) + j0 * depth, depth, hidden);
      }
      for (index r = 0; r < x.rows; ++r) activate(f, hidden.row(r), count);
      hidden_tiles.inputs = count;
      hidden_tiles.pack([&](index r) { return hidden.row(r); }, x.rows, 1);
      add_products(hidden_tiles.tile(0, 0), x.rows, w.down.stretch(j0), count, out);
    }
  }
};

template <class S>
void run_feed_forward(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                      const feed_forward_weights<S>& weights, activation f, execution& where) {
  using T = compute_type<S>;
  const index rows = tokens(x);
  if (rows == 0) return;
  const auto packed = where.shared_scratch([&](carver& memory) {
    return packed_feed_forward<T>::layout(memory, x.extent(2), weights.up.extent(0), out.extent(2));
  });
  packed.pack(weights, where);
  where.for_each((rows + project_rows - 1) / project_rows, [&](index task, int worker) {
    const index begin = task * project_rows, count = std::min(project_rows, rows - begin);
    auto block = where.scratch(worker, [&](carver& memory) { return feed_forward_block<T>::layout(memory, packed); });
    block.x.pack([&](index r) { return token(x, begin + r); }, count, x.stride(2));
    block.run(packed, f);
    for (index r = 0; r < count; ++r) store_row(block.out.row(r), out.extent(2), token(out, begin + r), out.stride(2));
  });
}

template <class S>
void check_feed_forward(const door& at, const feed_forward_weights<S>& weights, index inputs,
                        const tensor_view<S, 3>& out) {
  check_weight(at, "up weight", weights.up, "up bias", weights.up_bias, inputs, out);
  check_weight(at, "down weight", weights.down, "down bias", weights.down_bias, weights.up.extent(0), out);
  at.equal("down weight rows = out dim", out.extent(2), weights.down.extent(0));
}

}  // namespace detail

/// The feed-forward layer, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O>
void feed_forward(const X& x, O&& out, const feed_forward_weights<element_of<const X&>>& weights,
                  const feed_forward_options& options, execution& where) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  const detail::door at("feed_forward");
  detail::check_sequences<S>(at, from, to, to.extent(2));
  detail::check_feed_forward<S>(at, weights, from.extent(2), to);
  detail::check_in_place<S>(at, from, to);
  detail::run_feed_forward<S>(from, to, weights, options.f, where);
}

template <viewable X, viewable O>
void feed_forward(const X& x, O&& out, const feed_forward_weights<element_of<const X&>>& weights,
                  const feed_forward_options& options = {}) {
  execution serial;
  feed_forward(x, out, weights, options, serial);
}

}  // namespace attn
