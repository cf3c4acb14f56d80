// attn: a call of feed_forward, its checks and its driver.
#pragma once

#include <attn/layers/detail/activation.hpp>
#include <attn/layers/detail/token_products.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct feed_forward_weights;

namespace detail {

/// The weights of a feed-forward layer in memory.
template <class P>
struct feed_forward_memory {
  linear_weight<P> up, down, gate;
  bool gated;

  template <class S>
  feed_forward_memory(const feed_forward_weights<S>& w)
      : up(w.up, w.up_bias), down(w.down, w.down_bias), gate(w.gate, w.gate_bias), gated(w.gate) {}
};

template <class T>
void multiply_rows(T* x, const T* y, idx_t count) {
  for (idx_t n = 0; n < count; ++n) x[n] *= y[n];
}

/// Up to token_block tokens on their way through the layer. Hidden numbers are computed in blocks of input_block, which
/// is how the second product takes them anyway.
template <class P>
struct feed_forward_block {
  using T = sum_type<P>;

  packed_tokens<P> x, hidden_tiles;
  row_buffer<T> hidden, gates, out, inputs, residual;

  feed_forward_block(arena& memory, const feed_forward_memory<P>& w)
      : x(memory, w.up.inputs),
        hidden_tiles(memory, (std::min)(input_block, w.up.outputs)),
        hidden(memory, token_block, hidden_tiles.inputs, panel_width<T>),
        gates(memory, token_block, w.gated ? hidden_tiles.inputs : 0, panel_width<T>),
        out(memory, token_block, w.down.outputs, panel_width<T>),
        inputs(memory, token_block, w.up.inputs),
        residual(memory, token_block, w.down.outputs) {}

  /// out from the first `rows` inputs.
  void run(idx_t rows, const weight_panels<P>& up, const weight_panels<P>& down, const weight_panels<P>* gate,
           activation f) {
    x.pack([&](idx_t r) { return inputs.row(r); }, rows);
    out.begin(down.bias, rows);
    for (idx_t j0 = 0; j0 < down.from->inputs; j0 += input_block) {
      const idx_t count = (std::min)(input_block, down.from->inputs - j0);
      multiply_tokens(x, up, j0, count, hidden);
      if (gate) multiply_tokens(x, *gate, j0, count, gates);
      for (idx_t r = 0; r < rows; ++r)
        if (gate)
          activate(f, gates.row(r), count), multiply_rows(hidden.row(r), gates.row(r), count);
        else
          activate(f, hidden.row(r), count);
      hidden_tiles.inputs = count;
      hidden_tiles.pack([&](idx_t r) { return hidden.row(r); }, rows);
      add_products(hidden_tiles.from(0), rows, down.block(j0), operands<P>(count), out);
    }
  }
};

/// What surrounds the layer: begin(n, x, residual) writes the inputs of token n and may keep as many numbers as there
/// are outputs for end(n, sums, residual), which takes the token's outputs.
template <class T>
struct around_feed_forward {
  function_ref<void(idx_t n, T* x, T* residual)> begin;
  function_ref<void(idx_t n, const T* sums, T* residual)> end;
};

template <class P>
void feed_many_tokens(idx_t rows, const feed_forward_memory<P>& w, activation f,
                      const around_feed_forward<sum_type<P>>& around, execution& exec) {
  const auto packed = exec.shared_scratch([&](arena& memory) {
    return std::array{weight_panels<P>(memory, w.up), weight_panels<P>(memory, w.down),
                      weight_panels<P>(memory, w.gate)};
  });
  pack_weights<P>(packed, exec);
  exec.for_each(ceil_div(rows, token_block), [&](idx_t task, int worker) {
    const idx_t first = task * token_block, count = (std::min)(token_block, rows - first);
    auto block = exec.scratch(worker, [&](arena& memory) { return feed_forward_block<P>(memory, w); });
    for (idx_t r = 0; r < count; ++r) around.begin(first + r, block.inputs.row(r), block.residual.row(r));
    block.run(count, packed[0], packed[1], w.gated ? &packed[2] : nullptr, f);
    for (idx_t r = 0; r < count; ++r) around.end(first + r, block.out.row(r), block.residual.row(r));
  });
}

/// The same for few tokens, threads sharing the hidden numbers and the outputs, token_block rows at a time.
template <class P>
void feed_few_tokens(idx_t rows, idx_t length, const feed_forward_memory<P>& w, activation f,
                     const around_feed_forward<sum_type<P>>& around, execution& exec) {
  using T = sum_type<P>;
  struct buffers {
    row_buffer<T> x, hidden, out, residual;
    packed_tokens<P> packed;
  };
  auto all = exec.shared_scratch([&](arena& memory) {
    const auto make = [&](idx_t count) {
      return row_buffer<T>(memory, (std::min)(token_block, rows), count, width<T>);
    };
    return buffers{make(w.up.inputs), make(w.up.outputs), make(w.down.outputs), make(w.down.outputs),
                   packed_tokens<P>(memory, (std::max)(w.up.inputs, w.up.outputs))};
  });
  for (idx_t first = 0; first < rows; first += token_block) {
    const idx_t count = (std::min)(token_block, rows - first);
    for (idx_t r = 0; r < count; ++r) around.begin(first + r, all.x.row(r), all.residual.row(r));
    const auto multiply = [&](const row_buffer<T>& x, const linear_weight<P>& weight,
                              function_ref<void(idx_t row, idx_t output, idx_t count, T* values)> done) {
      few_token_products<T, P>(x, count, length, weight, all.packed, exec, done);
    };
    multiply(all.x, w.gated ? w.gate : w.up, [&](idx_t r, idx_t o, idx_t n, T* values) {
      activate(f, values, n);
      std::copy(values, values + n, all.hidden.row(r) + o);
    });
    if (w.gated)
      multiply(all.x, w.up, [&](idx_t r, idx_t o, idx_t n, const T* values) {
        multiply_rows(all.hidden.row(r) + o, values, n);
      });
    multiply(all.hidden, w.down, [&](idx_t r, idx_t o, idx_t n, const T* values) {
      std::copy(values, values + n, all.out.row(r) + o);
    });
    for (idx_t r = 0; r < count; ++r) around.end(first + r, all.out.row(r), all.residual.row(r));
  }
}

/// The layer over the tokens of x.
template <class P>
void feed_tokens(const input_tokens<sum_type<P>>& x, const feed_forward_memory<P>& w, activation f,
                 const around_feed_forward<sum_type<P>>& around, execution& exec) {
  if (x.count == 0) return;
  const double numbers =
      static_cast<double>(w.up.outputs) * static_cast<double>((w.gated ? 2 : 1) * w.up.inputs + w.down.outputs);
  const auto limit = exec.limit_threads(
      {.operations = 2 * static_cast<double>(x.count) * numbers, .bytes = double(sizeof(P)) / numbers_of<P> * numbers});
  if (has_few_tokens(x, w.up, exec) || has_few_tokens(x, w.down, exec) || (w.gated && has_few_tokens(x, w.gate, exec)))
    feed_few_tokens(x.count, x.length, w, f, around, exec);
  else
    feed_many_tokens(x.count, w, f, around, exec);
}

/// Checks the weights of a layer for `inputs` numbers of a token.
template <class S>
void check_feed_forward(layer_views& check, const feed_forward_weights<S>& w, idx_t inputs) {
  check.linear("up weight", w.up, "up bias", w.up_bias, inputs);
  check.linear("down weight", w.down, "down bias", w.down_bias, w.up.extent(0));
  if (!w.gate && w.gate_bias) check.fail("a gate weight, since there is a bias of it", "none");
  if (w.gate) {
    check.linear("gate weight", w.gate, "gate bias", w.gate_bias, inputs);
    check.equal("gate weight rows = up weight rows", w.up.extent(0), w.gate.extent(0));
  }
  check.equal("down weight rows = out dim", check.out.extents[2], w.down.extent(0));
}

template <class S>
[[gnu::noinline]] void call_feed_forward(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                         const feed_forward_weights<S>& w, activation f, execution& exec) {
  using T = compute_type<S>;
  layer_views check{"feed_forward", x, out};
  check.out_dim(out.extent(2));
  check_feed_forward(check, w, x.extent(2));
  const input_tokens<T> tokens(x);
  const output_tokens<T> results(out);
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    feed_tokens<P>(tokens, w, f,
                   {[&](idx_t n, T* row, T*) { tokens.load(n, row); },
                    [&](idx_t n, const T* sums, T*) { results.store(n, sums); }},
                   exec);
  });
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
