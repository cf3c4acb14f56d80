// attn: multi_head_latent token by token, with a cache of latents.
//
//   attn::kv_cache<float> cache({.batch = batch, .dim = 512 + 64, .value_dim = 512}, {.values_in_keys = true});
//   attn::multi_head_latent_step(cache, x_t, out_t, weights, {.heads = 128, .rotary = {{.interleaved = true}}});
//
// Appends the latents of the n new tokens x [B, n, ...] to the cache, normed, and their rotated keys, r + R numbers a
// token, and attends their queries to all tokens up to their own: out is the last n rows of one causal
// multi_head_latent over the whole sequence. Tokens are rotated to the positions that follow those of their item.
//
// Shapes   x, weights and out as multi_head_latent has them. The cache is a kv_cache or a paged_cache with
//          values_in_keys, of 1 head, dim r + R and value_dim r, of every element type it may have: latents in eight or
//          four bits too.
// Cost     the projections of n tokens without latent_up, and latent_attention_step, which reads latent_up and the
//          cache once for all heads. A prompt, more than 64 tokens for a cache without tokens, is attended as
//          multi_head_latent does, in a third of the operations with DeepSeek's dims; where the elements of the
//          cache have fewer bits, before they are rounded.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes;
//          those of .attention and of the cache by the name of latent_attention_step.
#pragma once

#include <attn/core/detail/rotary_step.hpp>
#include <attn/layers/detail/multi_head_latent_run.hpp>
#include <attn/layers/latent_attention_step.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_latent_step_options {
  idx_t heads = 1;
  latent_attention_step_options<S> attention{};  // scale, lengths and all other options of latent_attention_step
  /// Of both norms.
  compute_type<S> norm_eps = compute_type<S>(1e-6);
  /// Rotates the R shared dims of queries and keys to the positions of the new tokens.
  std::optional<rotary_options<S>> rotary{};
};

namespace detail {

template <class S>
[[gnu::noinline]] void call_multi_head_latent_step(layer_views& check, const tensor_view<const S, 3>& x,
                                                   const tensor_view<S, 3>& out, const multi_head_latent_weights<S>& w,
                                                   const multi_head_latent_step_options<S>& options,
                                                   std::span<const idx_t> before, const attend_latents_ref<S>& attend,
                                                   execution& exec) {
  const char* const name = "multi_head_latent_step";
  const idx_t batch = static_cast<idx_t>(before.size()), count = x.extent(1);
  if (options.attention.lse) check.update("lse", options.attention.lse);
  check.equal("x batch = cache batch", batch, x.extent(0));
  check_length_list(check, "lengths", options.attention.lengths, batch, count);
  auto rotary = options.rotary;
  const auto positions =
      exec.workspace([&](arena& memory) { return memory.allocate<idx_t>(rotary ? batch * count : 0); });
  if (rotary && place_new_tokens(check, *rotary, before, options.attention.lengths, count, *positions)) rotary.reset();
  check_multi_head_latent<S>(check, w, options.heads, options.norm_eps, rotary, {});
  run_multi_head_latent<S>({name, x, out, w, options.heads, options.norm_eps, rotary, {}}, attend, exec);
}

/// Attends the tokens of a prompt, which are all that there are.
template <class S>
[[gnu::noinline]] void attend_prompt(const latent_heads<S>& h, const tensor_view<S>& out,
                                     const latent_attention_step_options<S>& o, execution& exec) {
  latent_attention(h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, out,
                   latent_attention_options<S>{.scale = o.scale, .causal = true, .lengths = o.lengths, .bias = o.bias,
                                               .mask = o.mask, .key_mask = o.key_mask, .softcap = o.softcap,
                                               .alibi_slopes = o.alibi_slopes, .sinks = o.sinks, .lse = o.lse},
                   exec);
}

/// latent_attention_step of one call of the layer.
template <class S, class Cache>
void attend_latents(Cache& cache, const latent_heads<S>& h, const tensor_view<S>& out,
                    const latent_attention_step_options<S>& o, execution& exec) {
  auto& tokens = step_access::of(cache);
  const idx_t count = h.q.extent(2);
  // Options for every token of the cache are for as many as the longest item has.
  const bool options_fit = o.lengths.empty() || !(o.bias || o.mask || o.key_mask);
  if (tokens.tokens() > 0 || count <= 64 || !options_fit)
    return latent_attention_step(cache, h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, out, o, exec);
  check_stores<typename Cache::value_type, S>();
  const validator check{"latent_attention_step"};
  check_latent_cache(check, latent_views<S>{h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value}, tokens);
  const tensor_view<const S> rows(h.latent.data(), {h.latent.extent(0), 1, count, tokens.dim()}, h.latent.strides());
  tokens.check_tokens(check, rows, h.latent, o.lengths);
  append_and(tokens, rows, h.latent, o.lengths, [&] { attend_prompt<S>(h, out, o, exec); });
}

}  // namespace detail

/// Feeds n tokens. See the top of the file.
template <detail::key_value_cache Cache, viewable X, viewable O,
          class Weights = multi_head_latent_weights<element_of<const X&>>,
          class Options = multi_head_latent_step_options<element_of<const X&>>>
void multi_head_latent_step(Cache& cache, const X& x, O&& out, const Weights& weights, Options&& options = {},
                            execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& given = detail::options_or_default<multi_head_latent_step_options<S>>(options);
  const auto attend = [&](const detail::latent_heads<S>& h, const tensor_view<S>& attended, execution& e) {
    detail::attend_latents<S>(cache, h, attended, given.attention, e);
  };
  const auto& tokens = detail::step_access::of(cache);
  detail::layer_views check{"multi_head_latent_step", from, to, false};
  tokens.list_memory(check);
  detail::call_multi_head_latent_step<S>(check, from, to, detail::weights_of<multi_head_latent_weights<S>>(weights),
                                         given, tokens.lengths(), attend,
                                         detail::plain_execution_of("multi_head_latent_step", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void attend_prompt<S>(const latent_heads<S>&, const tensor_view<S>&,                               \
  const latent_attention_step_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void call_multi_head_latent_step<S>(layer_views&, const tensor_view<const S, 3>&,                  \
  const tensor_view<S, 3>&, const multi_head_latent_weights<S>&, const multi_head_latent_step_options<S>&,             \
  std::span<const idx_t>, const attend_latents_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
