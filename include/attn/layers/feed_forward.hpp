// attn: the feed-forward layer of a Transformer.
//
//   out = f(x U^T + a) V^T + b          Vaswani et al. 2017, with f = GELU, its tanh form, or ReLU
//
//   attn::feed_forward(x, out, {.up = u, .down = v, .up_bias = a, .down_bias = b});
//   attn::feed_forward(x, out, weights, {.activation = attn::activation::relu}, threads);
//
// Shapes   x [B, L, n], up [hidden, n], up_bias [hidden], down [m, hidden], down_bias [m], out [B, L, m]; the biases
//          may be left out, and out may be x. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic.
// Cost     2 B L hidden (n + m) operations. Scratch: the packed weights, about hidden (n + m) numbers, and 48 tokens per
//          thread, with 512 hidden numbers each: never the hidden layer of the whole sequence. With L up to four, as in
//          decoding, the weights are read in place, if their columns have stride 1; scratch is then 48 tokens at most,
//          with all their hidden numbers, and threads share the hidden numbers and the outputs, 64 per task.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/detail/activation.hpp>
#include <attn/layers/detail/token_products.hpp>

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
  attn::activation activation = attn::activation::gelu;
};

namespace detail {

/// The weights of a feed-forward layer in memory.
template <class T>
struct feed_forward_memory {
  linear_weight<T> up, down;

  template <class S>
  explicit feed_forward_memory(const feed_forward_weights<S>& w) : up(w.up, w.up_bias), down(w.down, w.down_bias) {}
};

/// Both weights of a feed-forward layer, packed.
template <class T>
struct packed_feed_forward {
  packed_weight<T> up, down;

  static packed_feed_forward layout(arena& memory, const feed_forward_memory<T>& from) {
    packed_feed_forward w;
    w.up = packed_weight<T>::layout(memory, from.up.outputs, from.up.inputs);
    w.down = packed_weight<T>::layout(memory, from.down.outputs, from.down.inputs);
    return w;
  }

  void pack(const feed_forward_memory<T>& from, execution& exec) const {
    exec.for_each(up.pieces() + down.pieces(), [&](index task, int) {
      if (task < up.pieces())
        up.pack(from.up, task);
      else
        down.pack(from.down, task - up.pieces());
    });
  }
};

/// Up to token_block tokens on their way through the layer. Hidden numbers are computed in blocks of input_block, which
/// is how the second product takes them anyway.
template <class T>
struct feed_forward_block {
  packed_tokens<T> x, hidden_tiles;
  output_sums<T> hidden, out;

  static feed_forward_block layout(arena& memory, const packed_feed_forward<T>& w) {
    const index block_size = std::min(input_block, w.up.outputs);
    feed_forward_block block;
    block.x = packed_tokens<T>::layout(memory, w.up.inputs);
    block.hidden_tiles = packed_tokens<T>::layout(memory, block_size);
    block.hidden = output_sums<T>::layout(memory, block_size);
    block.out = output_sums<T>::layout(memory, w.down.outputs);
    return block;
  }

  /// out from the packed x.
  void run(const packed_feed_forward<T>& w, activation f) {
    out.begin(w.down.bias, x.rows);
    for (index j0 = 0; j0 < w.up.outputs; j0 += input_block) {
      const index count = std::min(input_block, w.up.outputs - j0);
      hidden.stride = round_up(count, panel_width<T>);
      hidden.begin(w.up.bias + j0, x.rows);
      for (index k0 = 0; k0 < x.inputs; k0 += input_block) {
        const index depth = std::min(input_block, x.inputs - k0);
        add_products(x.tile(k0, 0), x.rows, w.up.block(k0) + j0 * depth, depth, hidden);
      }
      for (index r = 0; r < x.rows; ++r) activate(f, hidden.row(r), count);
      hidden_tiles.inputs = count;
      hidden_tiles.pack([&](index r) { return hidden.row(r); }, x.rows, 1);
      add_products(hidden_tiles.tile(0, 0), x.rows, w.down.block(j0), count, out);
    }
  }
};

template <class T, class Begin, class End>
void feed_many_tokens(index rows, const feed_forward_memory<T>& weights, activation f, Begin&& begin, End&& end,
                      execution& exec) {
  const index inputs = weights.up.inputs, outputs = weights.down.outputs;
  const auto packed =
      exec.shared_scratch([&](arena& memory) { return packed_feed_forward<T>::layout(memory, weights); });
  packed.pack(weights, exec);
  exec.for_each(ceil_div(rows, token_block), [&](index task, int worker) {
    const index first = task * token_block, count = std::min(token_block, rows - first);
    auto [block, x, residual] = exec.scratch(worker, [&](arena& memory) {
      auto all = feed_forward_block<T>::layout(memory, packed);
      T* const from = memory.allocate<T>(token_block * inputs);
      return std::tuple{all, from, memory.allocate<T>(token_block * outputs)};
    });
    for (index r = 0; r < count; ++r) begin(first + r, x + r * inputs, residual + r * outputs);
    block.x.pack([from = x, inputs](index r) { return from + r * inputs; }, count, 1);
    block.run(packed, f);
    for (index r = 0; r < count; ++r) end(first + r, block.out.row(r), residual + r * outputs);
  });
}

/// The same for sequences of few tokens, with the weights in place, token_block rows at a time.
template <class T, class Begin, class End>
void feed_few_tokens(index rows, const feed_forward_memory<T>& weights, activation f, Begin&& begin, End&& end,
                     execution& exec) {
  const index inputs = weights.up.inputs, hidden = weights.up.outputs, outputs = weights.down.outputs;
  struct pieces {
    padded_rows<T> x, hidden, out, residual;
  };
  const auto all = exec.shared_scratch([&](arena& memory) {
    const auto layout = [&](index count) { return padded_rows<T>::layout(memory, std::min(token_block, rows), count); };
    pieces p;
    p.x = layout(inputs);
    p.hidden = layout(hidden);
    p.out = layout(outputs);
    p.residual = layout(outputs);
    return p;
  });
  for (index first = 0; first < rows; first += token_block) {
    const index count = std::min(token_block, rows - first);
    for (index r = 0; r < count; ++r) begin(first + r, all.x.row(r), all.residual.row(r));
    all.x.clear_padding(count, inputs);
    all.hidden.clear_padding(count, hidden);
    few_token_products(all.x, count, weights.up, exec, [&](index r, index o, index n, T* values) {
      activate(f, values, n);
      std::copy(values, values + n, all.hidden.row(r) + o);
    });
    few_token_products(all.hidden, count, weights.down, exec, [&](index r, index o, index n, const T* values) {
      std::copy(values, values + n, all.out.row(r) + o);
    });
    for (index r = 0; r < count; ++r) end(first + r, all.out.row(r), all.residual.row(r));
  }
}

/// The layer over `rows` tokens of sequences of `length`. begin(n, x, residual) writes the inputs of token n and may keep
/// as many numbers as there are outputs for end(n, sums, residual), which takes the token's outputs and may change them.
/// The length of a sequence, not the number of all tokens, decides how products are computed, so that a batch gives what
/// its items alone give.
template <class T, class Begin, class End>
void feed_tokens(index rows, index length, const feed_forward_memory<T>& weights, activation f, Begin&& begin,
                 End&& end, execution& exec) {
  if (rows == 0) return;
  const double numbers =
      static_cast<double>(weights.up.outputs) * static_cast<double>(weights.up.inputs + weights.down.outputs);
  const auto limit = exec.limit_threads(
      {.operations = 2 * static_cast<double>(rows) * numbers, .bytes = static_cast<double>(sizeof(T)) * numbers});
  if (length <= tokens_in_place && weights.up.readable_in_place() && weights.down.readable_in_place())
    feed_few_tokens(rows, weights, f, begin, end, exec);
  else
    feed_many_tokens(rows, weights, f, begin, end, exec);
}

/// Checks the extents of the weights for inputs and outputs of these sizes.
template <class S>
void check_feed_forward(const validator& check, const feed_forward_weights<S>& w, index inputs, index outputs) {
  check_weight(check, "up weight columns = dim of its input", w.up, "up bias, one per row of its weight:", w.up_bias,
               inputs);
  check_weight(check, "down weight columns = dim of its input", w.down,
               "down bias, one per row of its weight:", w.down_bias, w.up.extent(0));
  check.equal("down weight rows = out dim", outputs, w.down.extent(0));
}

}  // namespace detail

/// The feed-forward layer. See the top of the file.
template <viewable X, viewable O, class Weights = feed_forward_weights<element_of<const X&>>,
          class Options = feed_forward_options>
void feed_forward(const X& x, O&& out, const Weights& weights, Options&& options = {}, execution_ref exec = {}) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const tensor_view<const S, 3> from = detail::as_sequence(x);
  const tensor_view<S, 3> to = detail::as_sequence(out);
  const auto& w = detail::weights_of<feed_forward_weights<S>>(weights);
  const auto& given = detail::options_or_default<feed_forward_options>(options);

  const detail::validator check("feed_forward");
  detail::check_sequences(check, from, to);
  check.memory({{"out", to}},
               {{"up weight", w.up}, {"up bias", w.up_bias}, {"down weight", w.down}, {"down bias", w.down_bias}});
  detail::check_extents(check, from, to, to.extent(2));
  detail::check_feed_forward(check, w, from.extent(2), to.extent(2));

  const detail::input_tokens<T> tokens(from);
  const detail::output_tokens<T> results(to);
  detail::feed_tokens<T>(
      tokens.count, tokens.length, detail::feed_forward_memory<T>(w), given.activation,
      [&](index n, T* row, T*) { tokens.load(n, row); }, [&](index n, T* sums, T*) { results.store(n, sums); },
      detail::execution_of(exec, options));
}

}  // namespace attn::inline ATTN_ISA
