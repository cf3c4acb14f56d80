// attn: the gradients of encoder_block.
//
//   const auto mix_backward = [&](auto x, auto out, auto d_out, auto dx, attn::execution& exec) {
//     attn::multi_head_backward(x, heads, attend, attend_backward, d_out, {.x = dx, .query = dwq}, {.heads = 8}, exec);
//   };
//   attn::encoder_block(x, out, weights, mix, {}, threads);
//   attn::encoder_block_backward(x, weights, mix, mix_backward, d_out,
//                                {.x = dx, .norm_1 = {.gamma = dg}, .feed_forward = {.up = du}}, {}, threads);
//   const auto fourier_backward = [](auto, auto, auto d_out, auto dx, attn::execution& exec) {
//     attn::fnet_backward(attn::split_heads(d_out, 1), {.x = attn::split_heads(dx, 1)}, exec);
//   };
//
// Shapes   x, weights and options as the forward call's, d_out as its out, which is not needed; gradients have the
//          shapes of what they are of. dx may be d_out unless it is added to: a stack needs one sequence of gradients.
// Mixer    mix(x, out, execution) is called once more, unless options.mixed is given, which the forward call wrote.
//          Then mix_backward(x, out, d_out, dx, execution), with views [B, L, D], out being the mixer's result for x,
//          must overwrite dx. It also computes the gradients of the mixer's own weights, which encoder_block_backward
//          does not know.
// Cost     that of the mixer (without options.mixed) and of its backward pass, and 10 B L D hidden operations, 2.5
//          times those of the forward pass, or 14 where the norms come after: the feed-forward layer is computed again.
//          Scratch, beside theirs: five sequences like x, one less with options.mixed, two more with a residual weight,
//          and what feed_forward_backward needs; for 16-bit elements two to four of the sequences are of floats.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients of what was not given or that share
//          memory with an input or one another, before anything is written; exceptions of the mixers are passed on and
//          leave dx unchanged.
#pragma once

#include <attn/layers/encoder_block.hpp>
#include <attn/layers/feed_forward_backward.hpp>
#include <attn/layers/layer_norm_backward.hpp>
#include <attn/layers/project_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_gradients {
  view_field<S, 3> x{};
  layer_norm_weight_gradients<S> norm_1{}, norm_2{};
  feed_forward_weight_gradients<S> feed_forward{};
  project_weight_gradients<S> residual{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

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

template <viewable X, class Mixer, class MixerBackward, viewable D,
          class Weights = encoder_block_weights<element_of<const X&>>,
          class Options = encoder_block_options<element_of<const X&>>>
void encoder_block_backward(const X& x, const Weights& weights, Mixer&& mix, MixerBackward&& mix_backward,
                            const D& d_out, const encoder_block_gradients<element_of<const X&>>& gradients,
                            Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(detail::token_mixer<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  static_assert(detail::token_mixer_backward<std::remove_reference_t<MixerBackward>, S>,
                "attn: the mixer's gradient must be callable as mix_backward(x, out, d_out, dx, execution)");
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<encoder_block_weights<S>>(weights);
  const auto& given = detail::options_or_default<encoder_block_options<S>>(options);
  detail::call_encoder_block_backward<S>(
      from, w, [&mix](const auto& in, const auto& mixed, execution& e) { mix(in, mixed, e); },
      [&mix_backward](const auto& in, const auto& mixed, const auto& d_mixed, const auto& dx, execution& e) {
        mix_backward(in, mixed, d_mixed, dx, e);
      },
      d, gradients, given, detail::plain_execution_of("encoder_block_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_encoder_block_backward<S>(const tensor_view<const S, 3>&,                                \
  const encoder_block_weights<S>&, const mixer_ref<S>&, const mixer_backward_ref<S>&, const tensor_view<const S, 3>&,  \
  const encoder_block_gradients<S>&, const encoder_block_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
