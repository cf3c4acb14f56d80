// attn: multi-head latent attention, the layer (MLA: DeepSeek V2, V3 and R1, Kimi K2; Kimi Linear without rotations).
//
//   [c; k_r] = x W_latent^T, c <- rms_norm(c),   [q; q_r] = x W_q^T, or rms_norm(x W_down^T) W_up^T, of every head
//   q_r and k_r are rotated to their positions;   [W; U] of a head are its rows of latent_up: keys, then values
//   out = concat over heads of latent_attention(q, q_r, c, k_r, W, U) W_o^T      DeepSeek-AI 2024, "DeepSeek-V2"
//
//   attn::multi_head_latent(x, out, {.query_down = wqa, .q_norm = gq, .query_up = wqb, .latent = wkva,
//                                    .latent_norm = gc, .latent_up = wkvb, .output = wo},
//                           {.heads = 128, .attention = {.causal = true}, .rotary = {{.interleaved = true}}}, threads);
//
// Shapes   x [B, L, n]; query [heads (D + R), n], or query_down [m, n], q_norm [m] and query_up [heads (D + R), m];
//          latent [r + R, n], latent_norm [r], latent_up [heads (D + Dv), r], output [p, heads Dv], out [B, L, p]. R,
//          the dims that all heads share and that are rotated, are the rows of latent beyond r; D and Dv follow. Norms
//          may be left out; without an output weight out is the concatenation of the heads. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float sums.
// Cost     2 operations per token and number of a weight, latent_up only where latent_attention makes keys and values,
//          and that. Scratch, beside that of latent_attention: queries, latents and the heads' output; nothing is
//          copied between them.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written; those of
//          .attention by the name of latent_attention.
//
// Lengths, masks, scale and all else of attention are given in .attention. DeepSeek's pairs of dims are interleaved.
// For longer contexts its .rotary has .frequencies of rotary_yarn(), and .attention.scale, otherwise 1 / sqrt(D + R),
// is multiplied by the square of rotary_magnitude(). Decoding: multi_head_latent_step.hpp.
#pragma once

#include <attn/layers/detail/multi_head_latent_run.hpp>
#include <attn/layers/latent_attention.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_latent_options {
  idx_t heads = 1;
  latent_attention_options<S> attention{};  // scale, causal, lengths and all other options of latent_attention
  /// Of both norms.
  compute_type<S> norm_eps = compute_type<S>(1e-6);
  std::optional<rotary_options<S>> rotary{};  // rotates the R shared dims of queries and keys
  /// Written if given, where there is an output weight: the heads' output, [B, L, heads Dv]. multi_head_latent_backward
  /// reads it; without it, it attends once more.
  view_field<S, 3> attended{};
};

namespace detail {

template <class S>
[[gnu::noinline]] void call_multi_head_latent(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                              const multi_head_latent_weights<S>& w,
                                              const multi_head_latent_options<S>& options, execution& exec) {
  layer_views check{"multi_head_latent", x, out, false};
  if (options.attention.lse) check.update("lse", options.attention.lse);
  check_multi_head_latent<S>(check, w, options.heads, options.norm_eps, options.rotary, options.attended);
  run_multi_head_latent<S>(
      {"multi_head_latent", x, out, w, options.heads, options.norm_eps, options.rotary, options.attended},
      [&](const latent_heads<S>& h, const tensor_view<S>& attended, execution& e) {
        latent_attention(h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, attended, options.attention, e);
      },
      exec);
}

}  // namespace detail

template <viewable X, viewable O, class Weights = multi_head_latent_weights<element_of<const X&>>,
          class Options = multi_head_latent_options<element_of<const X&>>>
void multi_head_latent(const X& x, O&& out, const Weights& weights, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_multi_head_latent<S>(from, to, detail::weights_of<multi_head_latent_weights<S>>(weights),
                                    detail::options_or_default<multi_head_latent_options<S>>(options),
                                    detail::plain_execution_of("multi_head_latent", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head_latent<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,           \
  const multi_head_latent_weights<S>&, const multi_head_latent_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
