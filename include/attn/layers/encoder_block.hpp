// attn: the block of a Transformer encoder, around anything that mixes tokens.
//
//   .norm_first = true    h = x + mix(norm_1(x)),   out = h + feed_forward(norm_2(h))    pre-norm: GPT-2, ViT
//   .norm_first = false   h = norm_1(x + mix(x)),   out = norm_2(h + feed_forward(h))    post-norm: Vaswani et al. 2017
//
//   const auto mix = [&](auto x, auto out, attn::execution& exec) {
//     attn::multi_head(x, out, attention, attend, {.heads = 8}, exec);
//   };
//   attn::encoder_block(x, out, {.feed_forward = {.up = u, .down = d}}, mix);
//   attn::encoder_block(x, out, weights, mix, {.norm_first = false}, threads);
//
// With .residual = {.weight = r, .bias = b} the first sum has x r^T + b in the place of x, and the width may change.
//
// Shapes   x and out [B, L, D], up [hidden, D], up_bias [hidden], down [D, hidden], down_bias [D], and gamma and beta
//          of each norm [D]; biases, gammas and betas may be left out. Out may be x: a stack of blocks then needs the
//          memory of one sequence. With a residual weight [D, n], x is [B, L, n], and so are what the mixer takes and,
//          before it, norm_1. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Mixer    mix(x, out, execution) is called once, with views [B, L, D]; multi_head as above, or fnet. It fills out.
// Cost     that of the mixer, and 4 B L D hidden operations. Scratch, beside the mixer's: two sequences like x, a third
//          with a residual weight, and the packed weights of the feed-forward layer.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; exceptions of the mixer are
//          passed on and leave out unchanged.
#pragma once

#include <attn/layers/feed_forward.hpp>
#include <attn/layers/layer_norm.hpp>
#include <attn/layers/project.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_weights {
  layer_norm_weights<S> norm_1{}, norm_2{};
  feed_forward_weights<S> feed_forward{};
  project_weights<S> residual{};
};

template <class S>
struct encoder_block_options {
  bool norm_first = true;
  bool rms = false;  // whether the norms are rms_norm, without means, instead of layer_norm
  attn::activation activation = attn::activation::gelu;
  /// Added to the variances of the norms.
  compute_type<S> eps = compute_type<S>(1e-5);
  /// Written if given: the result of the mixer, [B, L, D]. encoder_block_backward reads it; without it, it calls the
  /// mixer once more.
  view_field<S, 3> mixed{};
};

namespace detail {

/// x R^T + b in `memory`, or x where there is no such weight.
template <class S>
tensor_view<const S, 3> project_residual(const tensor_view<const S, 3>& x, const project_weights<S>& w,
                                         const tensor_view<S, 3>& memory, execution& exec) {
  if (!w.weight) return x;
  run_project<S>(x, memory, w, exec);
  return memory;
}

/// Everything after the mixer is computed token by token, in one pass.
template <class T, class P>
void run_encoder_tail(const input_tokens<T>& x, const input_tokens<T>& mixed, const output_tokens<T>& out,
                      const row_norm<T>& norm_1, const row_norm<T>& norm_2, bool norm_first,
                      const feed_forward_memory<P>& weights, activation f, execution& exec) {
  const auto begin = [&](idx_t n, T* normed, T* h) {
    x.load(n, h);
    mixed.load(n, normed);
    for (idx_t d = 0; d < x.dim; ++d) h[d] += normed[d];
    if (!norm_first) norm_1.apply(h);
    std::copy(h, h + x.dim, normed);
    if (norm_first) norm_2.apply(normed);
  };
  const auto end = [&](idx_t n, const T* fed, T* h) {
    for (idx_t d = 0; d < x.dim; ++d) h[d] += fed[d];
    if (!norm_first) norm_2.apply(h);
    out.store(n, h);
  };
  feed_tokens<P>(x, weights, f, {begin, end}, exec);
}

template <class S>
void run_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                       const encoder_block_weights<S>& weights, const encoder_block_options<S>& options,
                       const mixer_ref<S>& mix, execution& exec) {
  using T = compute_type<S>;
  struct buffers {
    tensor_view<S, 3> mixed, normed, residual;
    row_norm<T> norm_1, norm_2;
  };
  const idx_t dim = out.extent(2);
  auto workspace = exec.workspace([&](arena& memory) {
    const auto allocated = [&](idx_t n) { return allocate_sequence<S>(memory, x.extent(0), x.extent(1), n); };
    return buffers{options.mixed ? tensor_view<S, 3>(options.mixed) : allocated(dim),
                   options.norm_first ? allocated(x.extent(2)) : tensor_view<S, 3>(),
                   weights.residual.weight ? allocated(dim) : tensor_view<S, 3>(),
                   row_norm<T>(memory, options.norm_first ? x.extent(2) : dim), row_norm<T>(memory, dim)};
  });
  auto& [mixed, normed, projected, norm_1, norm_2] = *workspace;
  norm_1.set(weights.norm_1, options.eps);
  norm_2.set(weights.norm_2, options.eps);
  norm_1.centred = norm_2.centred = !options.rms;
  if (options.norm_first) run_layer_norm<T>(x, normed, norm_1, exec);
  mix(options.norm_first ? tensor_view<const S, 3>(normed) : x, mixed, exec);
  if (out.empty()) return;
  const auto residual = project_residual(x, weights.residual, projected, exec);
  with_products<S>(exec, [&, &first = mixed, &before = norm_1, &after = norm_2]<class P>(std::type_identity<P>) {
    const feed_forward_memory<P> feed(weights.feed_forward);
    run_encoder_tail<T>(residual, first, out, before, after, options.norm_first, feed, options.activation, exec);
  });
}

template <class S>
void check_encoder_block(layer_views& check, const encoder_block_weights<S>& w,
                         const encoder_block_options<S>& options) {
  const idx_t inputs = check.x.extents[2], dim = w.residual.weight ? w.residual.weight.extent(0) : inputs;
  const idx_t dim_1 = options.norm_first ? inputs : dim;
  const tensor_view<S, 3>& mixed = options.mixed;
  check.out_dim(dim);
  if (w.residual.weight.per_head()) check.fail("residual weight as one matrix", "one for each head");
  if (!(options.eps >= 0)) check.fail("eps >= 0", static_cast<double>(options.eps));
  check.list("gamma of norm_1", w.norm_1.gamma, "feature", dim_1);
  check.list("beta of norm_1", w.norm_1.beta, "feature", dim_1);
  check.list("gamma of norm_2", w.norm_2.gamma, "feature", dim);
  check.list("beta of norm_2", w.norm_2.beta, "feature", dim);
  if (w.residual.weight)
    check.linear("residual weight", w.residual.weight, "residual bias", w.residual.bias, inputs);
  else if (w.residual.bias)
    check.fail("residual bias with a residual weight", "no residual weight");
  check_feed_forward(check, w.feed_forward, dim);
  check.fits("x", {check.x.extents[0], check.x.extents[1], inputs});
  check.fits("out", {check.x.extents[0], check.x.extents[1], dim});
  if (!mixed) return;
  check.extents({{"mixed batch = x batch", check.x.extents[0], mixed.extent(0)},
                 {"mixed length = x length", check.x.extents[1], mixed.extent(1)},
                 {w.residual.weight ? "mixed dim = out dim" : "mixed dim = x dim", dim, mixed.extent(2)}});
  if (check.backward) return check.read("mixed", mixed);
  check.write("mixed", mixed);
}

template <class S>
[[gnu::noinline]] void call_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                          const encoder_block_weights<S>& weights,
                                          const encoder_block_options<S>& options, const mixer_ref<S>& mix,
                                          execution& exec) {
  layer_views check{"encoder_block", x, out};
  check_encoder_block(check, weights, options);
  run_encoder_block<S>(x, out, weights, options, mix, exec);
}

}  // namespace detail

template <viewable X, viewable O, class Mixer, class Weights = encoder_block_weights<element_of<const X&>>,
          class Options = encoder_block_options<element_of<const X&>>>
void encoder_block(const X& x, O&& out, const Weights& weights, Mixer&& mix, Options&& options = {},
                   execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(detail::token_mixer<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_encoder_block<S>(from, to, detail::weights_of<encoder_block_weights<S>>(weights),
                                detail::options_or_default<encoder_block_options<S>>(options),
                                [&mix](const auto& in, const auto& mixed, execution& e) { mix(in, mixed, e); },
                                detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_encoder_block<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,               \
  const encoder_block_weights<S>&, const encoder_block_options<S>&, const mixer_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
