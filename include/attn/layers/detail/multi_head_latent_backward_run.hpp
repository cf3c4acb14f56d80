// attn: the gradients of multi_head_latent: through the output, latent_attention, rotations, norms and projections.
#pragma once

#include <attn/layers/detail/head_norms_backward.hpp>
#include <attn/layers/detail/multi_head_latent_run.hpp>
#include <attn/layers/latent_attention_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks the options of attention, which has no other checks before gradients are written. Returns its lengths.
template <class S>
sequence_lengths check_attention_options(const latent_dims& d, idx_t batch, idx_t length,
                                         const latent_attention_options<S>& given, execution& exec) {
  call_views check{"latent_attention"};
  const attention_shape shape{.batch = batch, .heads = d.heads, .kv_heads = d.heads, .queries = length, .keys = length,
                              .dim = d.key + d.rotary, .dim_v = d.value};
  const tensor_view<const compute_type<S>, 3> rows(nullptr, {batch, d.heads, length});
  if (given.lse) check.read_like("lse", given.lse, "the rows of out", rows);
  return latent_call_of<S>(check, {}, shape, given, given.form, exec).attend.lengths;
}

/// Copies d_out, but for the rows of padding, which become 0.
template <class S>
void copy_real_rows(const tensor_view<const S, 3>& d_out, const sequence_lengths& lengths,
                    const tensor_view<S, 3>& to, execution& exec) {
  exec.for_each(to.extent(0), [&](idx_t b, int) {
    for (idx_t i = 0; i < to.extent(1); ++i)
      for (idx_t d = 0; d < to.extent(2); ++d) to(b, i, d) = i < lengths.queries(b) ? d_out(b, i, d) : S(0);
  });
}

/// The gradients wanted, those of multi_head_latent_gradients.
template <class S, class Gradients>
void run_multi_head_latent_backward(const multi_head_latent_call<S>& call, const tensor_view<const S, 3>& d_out,
                                    const Gradients& g, const latent_attention_options<S>& given,
                                    execution& exec) {
  using T = compute_type<S>;
  using P = product_type<S>;
  const auto& w = call.w;
  const latent_dims d = call.dims();
  const idx_t batch = call.x.extent(0), length = call.x.extent(1);
  const bool adds = g.accumulate;
  const bool of_queries = g.x || g.query || g.query_down || g.q_norm || g.query_up,
             of_latents = g.x || g.latent || g.latent_norm, below = of_queries || of_latents || g.latent_up;
  const sequence_lengths lengths = check_attention_options<S>(d, batch, length, given, exec);
  const bool padded = !given.lengths.empty() || !given.query_lengths.empty();
  if (!below && !g.output) return;

  struct buffers {
    projected_latents<S> forward, gradients;
    tensor_view<S, 3> attended, d_attended, d_real;
    tensor_view<T, 3> lse;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto allocate = [&](idx_t dim) { return allocate_sequence<S>(memory, batch, length, dim); };
    buffers all;
    all.forward = projected_latents<S>::layout(memory, w, batch, length, true);
    all.gradients = projected_latents<S>::layout(memory, w, batch, length, false);
    all.attended = call.attended ? call.attended : allocate(d.heads * d.value);
    if (w.output) all.d_attended = allocate(d.heads * d.value);
    if (g.output && padded) all.d_real = allocate(d_out.extent(2));
    all.lse = given.lse;
    if (!call.attended && !given.lse)
      all.lse = {memory.allocate<T>(batch * d.heads * length), {batch, d.heads, length}};
    return all;
  });
  const auto& [forward, gradients, attended, d_attended, d_real, lse] = *workspace;
  latent_attention_options<S> options = given;
  options.lse = lse;

  latent_heads<S> h;
  if (below || !call.attended) h = project_latents<S>(call, forward, exec);
  const tensor_view<S> heads_out = split_heads(attended, d.heads);
  if (!call.attended)
    latent_attention(h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, heads_out, options, exec);
  if (w.output) {
    if (d_real) copy_real_rows<S>(d_out, lengths, d_real, exec);
    const tensor_view<const S, 3> d_rows = d_real ? tensor_view<const S, 3>(d_real) : d_out;
    const projection_gradient<P> last(w.output, input_tokens<T>(d_rows), g.output, tensor_view<S, 1>(), adds);
    const tensor_view<S, 3> to = below ? d_attended : tensor_view<S, 3>();
    run_projections_backward<P>(attended, {to, false}, {&last, 1}, exec);
  }
  if (!below) return;

  latent_attention_gradients<S> of_core;
  of_core.accumulate = adds && g.latent_up;  // to the weights; the others are added to zeros
  if (of_queries) of_core.q = gradients.q_own(d), of_core.q_rotary = gradients.q_rotary(d);
  if (of_latents) of_core.latent = split_heads(gradients.latent, 1), of_core.k_rotary = gradients.k_rotary(d);
  if (g.latent_up) {
    of_core.w_key = head_rows_of<S>(g.latent_up, d.heads, 0, d.key);
    of_core.w_value = head_rows_of<S>(g.latent_up, d.heads, d.key, d.value);
  }
  if (of_core.accumulate)
    for (const auto& x : {gradients.q, gradients.rows}) std::fill_n(x.data(), x.size(), S(0));
  latent_attention_backward(
      h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, tensor_view<const S>(heads_out),
      split_heads(w.output ? tensor_view<const S, 3>(d_attended) : d_out, d.heads), of_core, options, exec);
  if (!of_queries && !of_latents) return;

  if (of_queries) call.rotate(gradients.q_rotary(d), true, exec);
  if (of_latents) call.rotate(gradients.k_rotary(d), true, exec);
  const tensor_view<S, 3>& of_down = gradients.down;
  if (!w.query && of_queries) {
    const projection_gradient<P> up(w.query_up, input_tokens<T>(gradients.q), g.query_up, tensor_view<S, 1>(), adds);
    run_projections_backward<P>(forward.normed_down, {of_down, false}, {&up, 1}, exec);
    if (w.q_norm) normalise_heads_backward<S>(forward.down, w.q_norm, call.norm_eps, of_down, {}, g.q_norm, adds, exec);
  }
  if (w.latent_norm && of_latents)
    normalise_heads_backward<S>(forward.raw_latent(), w.latent_norm, call.norm_eps, gradients.latent, {},
                                g.latent_norm, adds, exec);
  const tensor_view<S, 1> no_bias;
  const projection_gradient<P> list[] = {
      {w.query ? w.query : w.query_down, token_sum<T>(w.query ? gradients.q : of_down),
       w.query ? g.query : g.query_down, no_bias, adds},
      {w.latent, token_sum<T>(gradients.rows), g.latent, no_bias, adds}};
  run_projections_backward<P>(call.x, {g.x, adds}, std::span(list).subspan(of_queries ? 0 : 1, of_queries + of_latents),
                              exec);
}

}}}  // namespace attn::ATTN_ISA::detail
