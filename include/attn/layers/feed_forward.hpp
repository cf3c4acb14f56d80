// attn: the feed-forward layer of a Transformer.
//
//   out = f(x U^T + a) V^T + b          Vaswani et al. 2017, with f = GELU, its tanh form, or ReLU
//
//   attn::feed_forward(x, out, {.up = u, .down = v, .up_bias = a, .down_bias = b});
//   attn::feed_forward(x, out, weights, {.f = attn::activation::relu}, threads);
//
// Shapes   x [B, L, n], up [hidden, n], up_bias [hidden], down [m, hidden], down_bias [m], out [B, L, m]; the biases
//          may be left out, and out may be x. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic.
// Cost     2 B L hidden (n + m) operations. Scratch: the packed weights, about hidden (n + m) numbers, and 48 tokens a
//          thread, with 512 hidden numbers each: never the hidden layer of the whole sequence. With L up to four, as in
//          decoding, the weights are read in place, if their columns have stride 1; scratch is then 48 tokens at most,
//          with all their hidden numbers, and threads share the hidden numbers and the outputs, 64 a task.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/detail/activation.hpp>
#include <attn/layers/project.hpp>

#include <tuple>

namespace attn::inline ATTN_ISA {

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

  static packed_feed_forward layout(arena& memory, index inputs, index hidden, index outputs) {
    packed_feed_forward w;
    w.up = packed_weight<T>::layout(memory, hidden, inputs);
    w.down = packed_weight<T>::layout(memory, outputs, hidden);
    return w;
  }

  template <class S>
  void pack(const feed_forward_weights<S>& from, execution& exec) const {
    exec.for_each(up.pieces() + down.pieces(), [&](index task, int) {
      if (task < up.pieces())
        up.pack(matrix_of(from.up), from.up_bias, task);
      else
        down.pack(matrix_of(from.down), from.down_bias, task - up.pieces());
    });
  }
};

/// Up to token_block tokens on their way through the layer. The hidden numbers come and go by stretches of
/// input_stretch, which is how the second product takes them anyway.
template <class T>
struct feed_forward_block {
  packed_tokens<T> x, hidden_tiles;
  output_sums<T> hidden, out;

  static feed_forward_block layout(arena& memory, const packed_feed_forward<T>& w) {
    const index stretch = std::min(input_stretch, w.up.outputs);
    feed_forward_block block;
    block.x = packed_tokens<T>::layout(memory, w.up.inputs);
    block.hidden_tiles = packed_tokens<T>::layout(memory, stretch);
    block.hidden = output_sums<T>::layout(memory, stretch);
    block.out = output_sums<T>::layout(memory, w.down.outputs);
    return block;
  }

  /// out from the packed x.
  void run(const packed_feed_forward<T>& w, activation f) {
    out.begin(w.down.bias, x.rows);
    for (index j0 = 0; j0 < w.up.outputs; j0 += input_stretch) {
      const index count = std::min(input_stretch, w.up.outputs - j0);
      hidden.stride = round_up(count, panel_width<T>);
      hidden.begin(w.up.bias + j0, x.rows);
      for (index k0 = 0; k0 < x.inputs; k0 += input_stretch) {
        const index depth = std::min(input_stretch, x.inputs - k0);
        add_products(x.tile(k0, 0), x.rows, w.up.stretch(k0) + j0 * depth, depth, hidden);
      }
      for (index r = 0; r < x.rows; ++r) activate(f, hidden.row(r), count);
      hidden_tiles.inputs = count;
      hidden_tiles.pack([&](index r) { return hidden.row(r); }, x.rows, 1);
      add_products(hidden_tiles.tile(0, 0), x.rows, w.down.stretch(j0), count, out);
    }
  }
};

/// The layer over `rows` tokens. begin(n, x, kept) fills in the inputs of token n and may keep as many numbers as there
/// are outputs for end(n, sums, kept), which takes the token's outputs and may use them up.
template <class S, class Begin, class End>
void feed_many_tokens(index rows, const feed_forward_weights<S>& weights, activation f, Begin&& begin, End&& end,
                      execution& exec) {
  using T = compute_type<S>;
  const index inputs = weights.up.extent(1), hidden = weights.up.extent(0), outputs = weights.down.extent(0);
  const auto packed = exec.shared_scratch(
      [&](arena& memory) { return packed_feed_forward<T>::layout(memory, inputs, hidden, outputs); });
  packed.pack(weights, exec);
  exec.for_each((rows + token_block - 1) / token_block, [&](index task, int worker) {
    const index first = task * token_block, count = std::min(token_block, rows - first);
    auto [block, x, kept] = exec.scratch(worker, [&](arena& memory) {
      auto all = feed_forward_block<T>::layout(memory, packed);
      T* const from = memory.allocate<T>(token_block * inputs);
      return std::tuple{all, from, memory.allocate<T>(token_block * outputs)};
    });
    for (index r = 0; r < count; ++r) begin(first + r, x + r * inputs, kept + r * outputs);
    block.x.pack([from = x, inputs](index r) { return from + r * inputs; }, count, 1);
    block.run(packed, f);
    for (index r = 0; r < count; ++r) end(first + r, block.out.row(r), kept + r * outputs);
  });
}

/// The same for sequences of few tokens, with the weights where they lie, token_block rows at a time.
template <class S, class Begin, class End>
void feed_few_tokens(index rows, const feed_forward_weights<S>& weights, activation f, Begin&& begin, End&& end,
                     execution& exec) {
  using T = compute_type<S>;
  const index inputs = weights.up.extent(1), hidden = weights.up.extent(0), outputs = weights.down.extent(0);
  struct pieces {
    padded_rows<T> x, hidden, out, kept;
  };
  const auto all = exec.shared_scratch([&](arena& memory) {
    const auto take = [&](index count) { return padded_rows<T>::layout(memory, std::min(token_block, rows), count); };
    return pieces{take(inputs), take(hidden), take(outputs), take(outputs)};
  });
  for (index first = 0; first < rows; first += token_block) {
    const index count = std::min(token_block, rows - first);
    for (index r = 0; r < count; ++r) begin(first + r, all.x.row(r), all.kept.row(r));
    all.x.clear_padding(count, inputs);
    all.hidden.clear_padding(count, hidden);
    exec.for_each((hidden + dot_step - 1) / dot_step, [&](index task, int) {
      const index from = task * dot_step, to = std::min(from + dot_step, hidden);
      dot_products<T>(all.x, count, matrix_of(weights.up), from, to,
                      [&](index r, index o, T sum) { all.hidden.row(r)[o] = bias_of(weights.up_bias, o) + sum; });
      for (index r = 0; r < count; ++r) activate(f, all.hidden.row(r) + from, to - from);
    });
    exec.for_each((outputs + dot_step - 1) / dot_step, [&](index task, int) {
      const index from = task * dot_step, to = std::min(from + dot_step, outputs);
      dot_products<T>(all.hidden, count, matrix_of(weights.down), from, to,
                      [&](index r, index o, T sum) { all.out.row(r)[o] = bias_of(weights.down_bias, o) + sum; });
    });
    for (index r = 0; r < count; ++r) end(first + r, all.out.row(r), all.kept.row(r));
  }
}

/// Either, for sequences of `length` tokens: how many, not how many in all, decides, so that a batch gives what its
/// items alone give.
template <class S, class Begin, class End>
void feed_tokens(index rows, index length, const feed_forward_weights<S>& weights, activation f, Begin&& begin,
                 End&& end, execution& exec) {
  if (rows == 0) return;
  if (length <= tokens_in_place && weights.up.stride(1) == 1 && weights.down.stride(1) == 1)
    feed_few_tokens(rows, weights, f, begin, end, exec);
  else
    feed_many_tokens(rows, weights, f, begin, end, exec);
}

template <class S>
void check_feed_forward(const validator& check, const feed_forward_weights<S>& weights, index inputs,
                        const tensor_view<S, 3>& out) {
  check_weight(check, "up weight", weights.up, "up bias", weights.up_bias, inputs, out);
  check_weight(check, "down weight", weights.down, "down bias", weights.down_bias, weights.up.extent(0), out);
  check.equal("down weight rows = out dim", out.extent(2), weights.down.extent(0));
}

}  // namespace detail

/// The feed-forward layer, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O>
void feed_forward(const X& x, O&& out, const feed_forward_weights<element_of<const X&>>& weights,
                  const feed_forward_options& options, execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  const detail::validator check("feed_forward");
  detail::check_sequences<S>(check, from, to, to.extent(2));
  detail::check_feed_forward<S>(check, weights, from.extent(2), to);
  detail::check_in_place<S>(check, from, to);
  using T = compute_type<S>;
  detail::feed_tokens<S>(
      detail::tokens(from), from.extent(1), weights, options.f,
      [&](index n, T* row, T*) { detail::load_row(detail::token(from, n), from.stride(2), from.extent(2), row); },
      [&](index n, T* sums, T*) { detail::store_row(sums, to.extent(2), detail::token(to, n), to.stride(2)); }, exec);
}

template <viewable X, viewable O>
void feed_forward(const X& x, O&& out, const feed_forward_weights<element_of<const X&>>& weights,
                  const feed_forward_options& options = {}) {
  execution serial;
  feed_forward(x, out, weights, options, serial);
}

}  // namespace attn
