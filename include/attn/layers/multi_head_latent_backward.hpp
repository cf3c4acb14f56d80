// attn: the gradients of multi_head_latent.
//
//   d_heads = d_out W_o,   (dq, dq_r, dc, dk_r, dW, dU) = latent_attention_backward(d_heads),   back through rotations
//   and norms (rotary_backward, rms_norm_backward),   dx = [dc; dk_r] W_latent + dq W_q, or through W_up, norm, W_down
//
//   attn::multi_head_latent(x, out, weights, {.heads = 16, .attention = {.causal = true, .lse = lse},
//                                             .attended = attended});
//   attn::multi_head_latent_backward(x, weights, d_out, {.x = dx, .latent = dwkva, .latent_up = dwkvb},
//                                    {.heads = 16, .attention = {.causal = true, .lse = lse}, .attended = attended});
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Saved    Queries and latents are made again. .attended and .attention.lse are what the forward call wrote; without
//          .attended latent_attention is called once more, which writes the lse. Without an output weight the forward
//          call's out serves as attended.
// Cost     three times that of the forward call for the projections of queries and latents, twice for that of the
//          output, and latent_attention (without .attended) and its backward pass. Scratch, beside theirs: queries,
//          latents and the heads' output, the gradients of these, with lengths a copy of d_out, and what
//          project_backward.hpp needs.
// Throws   std::invalid_argument for shapes or options that do not fit, and for gradients of what was not given or that
//          share memory with an input or one another, before anything is written; for those of .attention by the name
//          of latent_attention.
//
// What lies in padding (.attention.lengths) has gradient 0 and adds nothing, NaN or not.
#pragma once

#include <attn/layers/detail/multi_head_latent_backward_run.hpp>
#include <attn/layers/multi_head_latent.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_latent_gradients {
  view_field<S, 3> x{};
  view_field<S, 2> query{}, query_down{};
  view_field<S, 1> q_norm{};
  view_field<S, 2> query_up{}, latent{};
  view_field<S, 1> latent_norm{};
  view_field<S, 2> latent_up{}, output{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

namespace detail {

template <class S>
[[gnu::noinline]] void call_multi_head_latent_backward(const tensor_view<const S, 3>& x,
                                                       const multi_head_latent_weights<S>& w,
                                                       const tensor_view<const S, 3>& d_out,
                                                       const multi_head_latent_gradients<S>& g,
                                                       const multi_head_latent_options<S>& options, execution& exec) {
  const char* const name = "multi_head_latent_backward";
  layer_views check{name, x, d_out, layer_views::backward_pass{}};
  if (options.attention.lse) check.update("lse", options.attention.lse);
  check.gradient("x", g.x, x);
  check.gradient("query", g.query, w.query, "query weight");
  check.gradient("query_down", g.query_down, w.query_down, "query_down weight");
  check.gradient("q_norm", g.q_norm, w.q_norm);
  check.gradient("query_up", g.query_up, w.query_up, "query_up weight");
  check.gradient("latent", g.latent, w.latent, "latent weight");
  check.gradient("latent_norm", g.latent_norm, w.latent_norm);
  check.gradient("latent_up", g.latent_up, w.latent_up, "latent_up weight");
  check.gradient("output", g.output, w.output, "output weight");
  check_multi_head_latent<S>(check, w, options.heads, options.norm_eps, options.rotary, options.attended);
  run_multi_head_latent_backward<S>(
      {name, x, {}, w, options.heads, options.norm_eps, options.rotary, options.attended}, d_out, g,
      options.attention, exec);
}

}  // namespace detail

template <viewable X, viewable D, class Weights = multi_head_latent_weights<element_of<const X&>>,
          class Options = multi_head_latent_options<element_of<const X&>>>
void multi_head_latent_backward(const X& x, const Weights& weights, const D& d_out,
                                const multi_head_latent_gradients<element_of<const X&>>& gradients,
                                Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& given = detail::options_or_default<multi_head_latent_options<S>>(options);
  detail::call_multi_head_latent_backward<S>(from, detail::weights_of<multi_head_latent_weights<S>>(weights), d,
                                             gradients, given,
                                             detail::plain_execution_of("multi_head_latent_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head_latent_backward<S>(const tensor_view<const S, 3>&,                            \
  const multi_head_latent_weights<S>&, const tensor_view<const S, 3>&, const multi_head_latent_gradients<S>&,          \
  const multi_head_latent_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
