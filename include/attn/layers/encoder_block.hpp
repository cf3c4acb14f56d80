// attn: the block of a Transformer encoder, around anything that mixes tokens.
//
//   norm_place::before   h = x + mix(norm_1(x)),   out = h + feed(norm_2(h))          as in GPT-2 and ViT
//   norm_place::after    h = norm_1(x + mix(x)),   out = norm_2(h + feed(h))          Vaswani et al. 2017, BERT
//
//   const auto mix = [&](auto x, auto out, attn::execution& where) {
//     attn::multi_head(x, out, attention, attend, {.heads = 8}, where);
//   };
//   attn::encoder_block(x, out, mix, {.feed = {.up = u, .down = v}}, {.norm = attn::norm_place::before}, threads);
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

enum class norm_place { before, after };

/// Gamma and beta of a layer norm.
template <class S>
struct layer_norm_weights {
  tensor_view<const S, 1> gamma{}, beta{};
};

/// Weights of encoder_block.
template <class S>
struct encoder_block_weights {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  layer_norm_weights<S> norm_1{}, norm_2{};
  feed_forward_weights<S> feed{};
};

/// Options of encoder_block for elements of type S.
template <class S>
struct encoder_block_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  norm_place norm = norm_place::before;
  activation f = activation::gelu;
  /// Added to the variances of the norms.
  compute_type<S> eps = compute_type<S>(1e-5);
};

namespace detail {

/// One block, after its checks.
template <class S>
struct encoder_call {
  using T = compute_type<S>;

  const tensor_view<const S, 3>& x;
  const tensor_view<S, 3>& out;
  const encoder_block_weights<S>& weights;
  layer_norm_options<S> norm_1, norm_2;
  bool before;
  activation f;

  struct kept {
    tensor_view<S, 3> mixed, normed;
    row_norm<T> norm_1, norm_2;
  };

  template <class Mixer>
  void run(Mixer& mix, execution& exec) const {
    const index dim = x.extent(2);
    auto held = exec.workspace([&](arena& memory) {
      const auto take = [&] { return tensor_view<S, 3>(memory.allocate<S>(x.size()), x.extents()); };
      kept k;
      k.mixed = take();
      if (before) k.normed = take();
      k.norm_1 = row_norm<T>::layout(memory, dim);
      k.norm_2 = row_norm<T>::layout(memory, dim);
      return k;
    });
    if (before) run_layer_norm<S>(x, held->normed, norm_1, exec);
    mix(before ? tensor_view<const S, 3>(held->normed) : x, held->mixed, exec);
    if (x.empty()) return;
    held->norm_1.begin(norm_1);
    held->norm_2.begin(norm_2);

    // Everything after the mixing goes token by token, so in one pass.
    const auto begin = [&](index n, T* normed, T* h) {
      load_row(token(x, n), x.stride(2), dim, h);
      load_row(token(held->mixed, n), 1, dim, normed);
      for (index d = 0; d < dim; ++d) h[d] += normed[d];
      if (!before) held->norm_1.apply(h);
      std::copy(h, h + dim, normed);
      if (before) held->norm_2.apply(normed);
    };
    const auto end = [&](index n, const T* fed, T* h) {
      for (index d = 0; d < dim; ++d) h[d] += fed[d];
      if (!before) held->norm_2.apply(h);
      store_row(h, dim, token(out, n), out.stride(2));
    };
    feed_tokens<S>(tokens(x), x.extent(1), weights.feed, f, begin, end, exec);
  }
};

}  // namespace detail

/// A block of an encoder, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O, class Mixer>
void encoder_block(const X& x, O&& out, Mixer&& mix, const encoder_block_weights<element_of<const X&>>& weights,
                   const encoder_block_options<element_of<const X&>>& options, execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  static_assert(sequence_function<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  const layer_norm_options<S> norm_1{weights.norm_1.gamma, weights.norm_1.beta, options.eps};
  const layer_norm_options<S> norm_2{weights.norm_2.gamma, weights.norm_2.beta, options.eps};

  const detail::validator check("encoder_block");
  detail::check_sequences<S>(check, from, to, from.extent(2));
  detail::check_layer_norm<S>(check, "gamma of norm_1", "beta of norm_1", norm_1, to);
  detail::check_layer_norm<S>(check, "gamma of norm_2", "beta of norm_2", norm_2, to);
  detail::check_feed_forward<S>(check, weights.feed, from.extent(2), to);
  detail::check_in_place<S>(check, from, to);
  check.fits("x", {from.extent(0), from.extent(1), from.extent(2)});
  detail::encoder_call<S>{from, to, weights, norm_1, norm_2, options.norm == norm_place::before, options.f}.run(mix,
                                                                                                                exec);
}

template <viewable X, viewable O, class Mixer>
void encoder_block(const X& x, O&& out, Mixer&& mix, const encoder_block_weights<element_of<const X&>>& weights,
                   const encoder_block_options<element_of<const X&>>& options = {}) {
  execution serial;
  encoder_block(x, out, mix, weights, options, serial);
}

}  // namespace attn
