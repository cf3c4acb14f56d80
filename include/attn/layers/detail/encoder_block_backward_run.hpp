// attn: a call of the gradients of encoder_block, its checks and its driver.
#pragma once

#include <attn/layers/encoder_block.hpp>
#include <attn/layers/feed_forward_backward.hpp>
#include <attn/layers/layer_norm_backward.hpp>
#include <attn/layers/project_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_gradients;

namespace detail {

/// Rows of the sum of two sequences, normed.
template <class T>
void norm_sum(const token_sum<T>& x, const tensor_view<T, 3>& out, const row_norm<T>& norm, execution& exec) {
  const output_tokens<T> to(out);
  const work_estimate work{.operations = 8, .bytes = 3 * sizeof(T)};
  for_each_token<T>(to.count, to.dim, 2, work, exec, [&](idx_t n, idx_t stride, T* rows) {
    x.load(n, rows, rows + stride);
    norm.apply(rows);
    to.store(n, rows);
  });
}

/// A call that has passed its checks.
template <class S>
struct encoder_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;
  using sequence = tensor_view<T, 3>;  // gradients and activations are kept in the compute type
  static constexpr bool converts = !std::same_as<S, T>;

  const tensor_view<const S, 3>& x;
  const encoder_block_weights<S>& weights;
  const tensor_view<const S, 3>& d_out;
  const encoder_block_gradients<S>& gradients;
  const encoder_block_options<S>& options;

  struct buffers {
    row_norm<T> norm_1, norm_2;
    // d_mixed: the gradient given to the mixer; d_mixer: the one it returns
    tensor_view<S, 3> mixed{}, normed{}, d_mixed{}, d_mixer{};
    sequence h{}, d_fed{}, d_h{};
    tensor_view<S, 3> projected{};  // x R^T + b, and what its gradient leads to
    sequence d_residual{};
  };
  buffers layout(arena& memory) const {
    const idx_t inputs = x.extent(2), dim = d_out.extent(2);
    const auto stored = [&](idx_t n) { return allocate_sequence<S>(memory, x.extent(0), x.extent(1), n); };
    const auto computed = [&](idx_t n) { return allocate_sequence<T>(memory, x.extent(0), x.extent(1), n); };
    const row_norm<T> norm_1(memory, options.norm_first ? inputs : dim), norm_2(memory, dim);
    buffers p{.norm_1 = norm_1, .norm_2 = norm_2};
    p.mixed = options.mixed ? tensor_view<S, 3>(options.mixed) : stored(dim);
    if (options.norm_first) p.normed = stored(inputs);
    if (converts) p.d_mixed = stored(dim);
    p.d_mixer = stored(inputs);
    p.h = computed(dim);
    p.d_fed = computed(dim);
    p.d_h = options.norm_first ? p.d_fed : computed(dim);
    if (weights.residual.weight) p.projected = stored(dim), p.d_residual = computed(inputs);
    return p;
  }

  static gradient_memory<T> nothing() { return {tensor_view<T, 3>(), false}; }
  gradient_memory<T> list(const tensor_view<S, 1>& x_list) const { return {x_list, gradients.accumulate}; }

  /// The gradient of the feed-forward layer's input from that of its output.
  void feed_backward(const sequence& input, const input_tokens<T>& d, const sequence& to, execution& exec) const {
    const feed_forward_backward_memory<P> memory(weights.feed_forward, gradients.feed_forward, gradients.accumulate);
    run_feed_forward_backward<P>({input, d, {to, false}, memory, options.activation}, exec);
  }

  /// d_h, in the compute type and as the mixer takes it.
  void norm_backward(const row_norm<T>& norm, const layer_norm_weight_gradients<S>& of, const token_sum<T>& input,
                     const token_sum<T>& d, const input_tokens<T>& residual, const gradient_memory<T>& to,
                     const gradient_memory<T>& copy, execution& exec) const {
    norm_backward_driver<T>{.norm = norm, .x = input, .d = d, .residual = residual, .dx = to, .copy = copy,
                          .gamma = list(of.gamma), .beta = list(of.beta)}
        .run(exec);
  }

  /// The gradient that reaches x beside the mixer: that of h, or what a residual weight takes it to.
  sequence residual_backward(const buffers& p, execution& exec) const {
    const auto& [weight, bias] = gradients.residual;
    if (!weights.residual.weight) return p.d_h;
    const projection_gradient<P> one(weights.residual.weight, token_sum<T>(p.d_h), weight, bias, gradients.accumulate);
    run_projections_backward<P>(x, {gradients.x ? p.d_residual : sequence(), false}, {&one, 1}, exec);
    return p.d_residual;
  }

  void mix_backward(const buffers& p, const tensor_view<const S, 3>& input, const mixer_backward_ref<S>& mixer,
                    execution& exec) const {
    tensor_view<const S, 3> d;
    if constexpr (converts)
      d = p.d_mixed;
    else
      d = p.d_h;
    mixer(input, tensor_view<const S, 3>(p.mixed), d, p.d_mixer, exec);
  }

  /// h = x + mix(norm_1(x)), out = h + feed_forward(norm_2(h))
  void run_norm_first(const buffers& p, const mixer_ref<S>& mix, const mixer_backward_ref<S>& mixer,
                      execution& exec) const {
    const token_sum<T> sum(project_residual(x, weights.residual, p.projected, exec), p.mixed);
    run_layer_norm<T>(x, p.normed, p.norm_1, exec);
    if (!options.mixed) mix(tensor_view<const S, 3>(p.normed), p.mixed, exec);
    norm_sum<T>(sum, p.h, p.norm_2, exec);
    feed_backward(p.h, d_out, p.d_fed, exec);
    norm_backward(p.norm_2, gradients.norm_2, sum, token_sum<T>(p.d_fed), d_out, {p.d_h, false}, {p.d_mixed, false},
                  exec);
    mix_backward(p, p.normed, mixer, exec);
    norm_backward(p.norm_1, gradients.norm_1, token_sum<T>(x), token_sum<T>(p.d_mixer), residual_backward(p, exec),
                  {gradients.x, gradients.accumulate}, nothing(), exec);
  }

  /// h = norm_1(x + mix(x)), out = norm_2(h + feed_forward(h))
  void run_norm_after(const buffers& p, const mixer_ref<S>& mix, const mixer_backward_ref<S>& mixer,
                      execution& exec) const {
    const tensor_view<const T, 3> none;
    const token_sum<T> sum(project_residual(x, weights.residual, p.projected, exec), p.mixed);
    if (!options.mixed) mix(x, p.mixed, exec);
    norm_sum<T>(sum, p.h, p.norm_1, exec);
    const input_tokens<T> h(p.h);
    const output_tokens<T> fed(p.d_fed);
    const feed_forward_memory<product_type<S>> memory(weights.feed_forward);
    feed_tokens<product_type<S>>(
        h, memory, options.activation,
        {[&](idx_t n, T* row, T* residual) {
           h.load(n, row);
           h.load(n, residual);
         },
         [&](idx_t n, const T* sums, T* residual) {
           add_row(residual, sums, h.dim);
           fed.store(n, residual);
         }},
        exec);
    norm_backward(p.norm_2, gradients.norm_2, token_sum<T>(p.d_fed), token_sum<T>(d_out), none, {p.d_fed, false},
                  nothing(), exec);
    feed_backward(p.h, p.d_fed, p.d_h, exec);
    norm_backward(p.norm_1, gradients.norm_1, sum, {p.d_fed, p.d_h}, none, {p.d_h, false}, {p.d_mixed, false}, exec);
    mix_backward(p, x, mixer, exec);
    add_sequences<T>(token_sum<T>(residual_backward(p, exec), p.d_mixer), {gradients.x, gradients.accumulate}, exec);
  }

  void run(const mixer_ref<S>& mix, const mixer_backward_ref<S>& mixer, execution& exec) const {
    auto workspace = exec.workspace([&](arena& memory) { return layout(memory); });
    workspace->norm_1.set(weights.norm_1, options.eps);
    workspace->norm_2.set(weights.norm_2, options.eps);
    workspace->norm_1.centred = workspace->norm_2.centred = !options.rms;
    if (options.norm_first)
      run_norm_first(*workspace, mix, mixer, exec);
    else
      run_norm_after(*workspace, mix, mixer, exec);
  }
};

/// All checks of encoder_block_backward.
template <class S>
void check_encoder_backward(const tensor_view<const S, 3>& x, const encoder_block_weights<S>& w,
                            const tensor_view<const S, 3>& d_out, const encoder_block_gradients<S>& g,
                            const encoder_block_options<S>& options) {
  layer_views check{"encoder_block_backward", x, d_out,
                    layer_views::backward_pass{.in_place = !g.accumulate && same_memory(g.x, d_out)}};
  check.gradient("x", g.x, x);
  check.gradient("gamma of norm_1", g.norm_1.gamma, w.norm_1.gamma);
  check.gradient("beta of norm_1", g.norm_1.beta, w.norm_1.beta);
  check.gradient("gamma of norm_2", g.norm_2.gamma, w.norm_2.gamma);
  check.gradient("beta of norm_2", g.norm_2.beta, w.norm_2.beta);
  check.gradient("up", g.feed_forward.up, w.feed_forward.up, "up weight");
  check.gradient("down", g.feed_forward.down, w.feed_forward.down, "down weight");
  check.gradient("up_bias", g.feed_forward.up_bias, w.feed_forward.up_bias, "up bias");
  check.gradient("down_bias", g.feed_forward.down_bias, w.feed_forward.down_bias, "down bias");
  check.gradient("gate", g.feed_forward.gate, w.feed_forward.gate, "gate weight");
  check.gradient("gate_bias", g.feed_forward.gate_bias, w.feed_forward.gate_bias, "gate bias");
  check.gradient("weight of residual", g.residual.weight, w.residual.weight, "residual weight");
  check.gradient("bias of residual", g.residual.bias, w.residual.bias, "residual bias");
  check_encoder_block(check, w, options);
}

template <class S>
[[gnu::noinline]] void call_encoder_block_backward(const tensor_view<const S, 3>& x, const encoder_block_weights<S>& w,
                                                   const mixer_ref<S>& mix, const mixer_backward_ref<S>& mix_backward,
                                                   const tensor_view<const S, 3>& d_out,
                                                   const encoder_block_gradients<S>& g,
                                                   const encoder_block_options<S>& options, execution& exec) {
  check_encoder_backward<S>(x, w, d_out, g, options);
  encoder_backward_driver<S>{x, w, d_out, g, options}.run(mix, mix_backward, exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
