// attn: the block of a Transformer encoder, around anything that mixes tokens.
//
//   .norm_first = true    h = x + mix(norm_1(x)),   out = h + feed_forward(norm_2(h))      pre-norm: GPT-2, ViT
//   .norm_first = false   h = norm_1(x + mix(x)),   out = norm_2(h + feed_forward(h))      post-norm: Vaswani et al. 2017
//
//   const auto mix = [&](auto x, auto out, attn::execution& exec) {
//     attn::multi_head(x, out, attention, attend, {.heads = 8}, exec);
//   };
//   attn::encoder_block(x, out, {.feed_forward = {.up = u, .down = d}}, mix);
//   attn::encoder_block(x, out, weights, mix, {.norm_first = false}, threads);
//
// Shapes   x and out [B, L, D], up [hidden, D], up_bias [hidden], down [D, hidden], down_bias [D], and gamma and beta
//          of each norm [D]; biases, gammas and betas may be left out. Out may be x: a stack of blocks needs one
//          sequence. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Mixer    mix(x, out, execution) is called once, with views [B, L, D]; multi_head as above, or fnet. It fills out.
// Cost     that of the mixer, and 4 B L D hidden operations. Scratch, beside the mixer's: two sequences like x, and the
//          packed weights of the feed-forward layer.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; what the mixer throws passes
//          through, leaving out as it was.
#pragma once

#include <attn/layers/feed_forward.hpp>
#include <attn/layers/layer_norm.hpp>

namespace attn::inline ATTN_ISA {

/// Weights of encoder_block.
template <class S>
struct encoder_block_weights {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  layer_norm_weights<S> norm_1{}, norm_2{};
  feed_forward_weights<S> feed_forward{};
};

/// Options of encoder_block for elements of type S.
template <class S>
struct encoder_block_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  bool norm_first = true;
  attn::activation activation = attn::activation::gelu;
  /// Added to the variances of the norms.
  compute_type<S> eps = compute_type<S>(1e-5);
};

namespace detail {

/// Everything after the mixing goes token by token, so in one pass.
template <class T>
struct encoder_tail {
  input_tokens<T> x, mixed;
  output_tokens<T> out;
  row_norm<T> norm_1, norm_2;
  bool norm_first;

  void run(const feed_forward_memory<T>& weights, activation f, execution& exec) const {
    const index dim = x.dim;
    const auto begin = [&](index n, T* normed, T* h) {
      x.load(n, h);
      mixed.load(n, normed);
      for (index d = 0; d < dim; ++d) h[d] += normed[d];
      if (!norm_first) norm_1.apply(h);
      std::copy(h, h + dim, normed);
      if (norm_first) norm_2.apply(normed);
    };
    const auto end = [&](index n, const T* fed, T* h) {
      for (index d = 0; d < dim; ++d) h[d] += fed[d];
      if (!norm_first) norm_2.apply(h);
      out.store(n, h);
    };
    feed_tokens<T>(x.count, x.length, weights, f, begin, end, exec);
  }
};

template <class S, class Mixer>
void run_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                       const encoder_block_weights<S>& weights, const encoder_block_options<S>& options, Mixer& mix,
                       execution& exec) {
  using T = compute_type<S>;
  struct pieces {
    tensor_view<S, 3> mixed, normed;
    row_norm<T> norm_1, norm_2;
  };
  auto workspace = exec.workspace([&](arena& memory) {
    const auto sequence = [&] { return tensor_view<S, 3>(memory.allocate<S>(x.size()), x.extents()); };
    pieces p;
    p.mixed = sequence();
    if (options.norm_first) p.normed = sequence();
    p.norm_1 = row_norm<T>::layout(memory, x.extent(2));
    p.norm_2 = row_norm<T>::layout(memory, x.extent(2));
    return p;
  });
  auto& [mixed, normed, norm_1, norm_2] = *workspace;
  norm_1.set(weights.norm_1, options.eps);
  norm_2.set(weights.norm_2, options.eps);
  const input_tokens<T> tokens(x);
  if (options.norm_first) run_layer_norm<T>(tokens, output_tokens<T>(normed), norm_1, exec);
  mix(options.norm_first ? tensor_view<const S, 3>(normed) : x, mixed, exec);
  if (x.empty()) return;
  const encoder_tail<T> tail{.x = tokens,
                             .mixed = input_tokens<T>(mixed),
                             .out = output_tokens<T>(out),
                             .norm_1 = norm_1,
                             .norm_2 = norm_2,
                             .norm_first = options.norm_first};
  tail.run(feed_forward_memory<T>(weights.feed_forward), options.activation, exec);
}

template <class S>
void check_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                         const encoder_block_weights<S>& w, const encoder_block_options<S>& options) {
  const validator check("encoder_block");
  check_sequences(check, x, out);
  check.memory({{"out", out}}, {{"gamma of norm_1", w.norm_1.gamma},
                                {"beta of norm_1", w.norm_1.beta},
                                {"gamma of norm_2", w.norm_2.gamma},
                                {"beta of norm_2", w.norm_2.beta},
                                {"up weight", w.feed_forward.up},
                                {"up bias", w.feed_forward.up_bias},
                                {"down weight", w.feed_forward.down},
                                {"down bias", w.feed_forward.down_bias}});
  const index dim = x.extent(2);
  check_extents(check, x, out, dim);
  check_layer_norm<S>(check, "gamma of norm_1, one per feature:", "beta of norm_1, one per feature:", w.norm_1,
                      options.eps, dim);
  check_layer_norm<S>(check, "gamma of norm_2, one per feature:", "beta of norm_2, one per feature:", w.norm_2,
                      options.eps, dim);
  check_feed_forward(check, w.feed_forward, dim, dim);
  check.fits("x", {x.extent(0), x.extent(1), dim});
}

}  // namespace detail

/// A block of an encoder. See the top of the file.
template <viewable X, viewable O, class Mixer, class Weights = encoder_block_weights<element_of<const X&>>,
          class Options = encoder_block_options<element_of<const X&>>>
void encoder_block(const X& x, O&& out, const Weights& weights, Mixer&& mix, Options&& options = {},
                   execution_ref exec = {}) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  static_assert(detail::token_mixer<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  const tensor_view<const S, 3> from = detail::as_sequence(x);
  const tensor_view<S, 3> to = detail::as_sequence(out);
  const auto& w = detail::weights_of<encoder_block_weights<S>>(weights);
  const auto& given = detail::options_or_default<encoder_block_options<S>>(options);
  detail::check_encoder_block<S>(from, to, w, given);
  detail::run_encoder_block<S>(from, to, w, given, mix, detail::execution_of(exec, options));
}

}  // namespace attn::inline ATTN_ISA
