// attn: multi_head_latent token by token, with a cache of latents.
//
//   attn::kv_cache<float> cache({.batch = batch, .dim = 512 + 64, .value_dim = 512}, {.values_in_keys = true});
//   attn::multi_head_latent_step(cache, x_t, out_t, weights, {.heads = 128, .rotary = {{.interleaved = true}}}, threads);
//
// Appends the latents of the n new tokens x [B, n, ...] to the cache, normed, and their rotated keys, r + R numbers a
// token, and attends their queries to all tokens up to their own: out is the last n rows of one causal
// multi_head_latent over the whole sequence. Tokens are rotated to the positions that follow those of their item.
//
// Shapes   x, weights and out as multi_head_latent has them. The cache is a kv_cache or a paged_cache with
//          values_in_keys, of 1 head, dim r + R and value_dim r, of every element type it may have: latents in eight or
//          four bits too.
// Cost     the projections of n tokens without latent_up, and latent_attention_step, which reads latent_up and the cache
//          once for all heads.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes;
//          those of .attention and of the cache by the name of latent_attention_step.
#pragma once

#include <attn/core/detail/rotary_step.hpp>
#include <attn/layers/detail/multi_head_latent_run.hpp>
#include <attn/layers/latent_attention_step.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of multi_head_latent_step for elements of type S.
template <class S>
struct multi_head_latent_step_options {
  idx_t heads = 1;
  /// scale, lengths and all other options of latent_attention_step.
  latent_attention_step_options<S> attention{};
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
  check.equal("x batch = cache batch", batch, x.extent(0));
  check_length_list(check, "lengths", options.attention.lengths, batch, count);
  auto rotary = options.rotary;
  const auto positions =
      exec.workspace([&](arena& memory) { return memory.allocate<idx_t>(rotary ? batch * count : 0); });
  if (rotary && place_new_tokens(check, *rotary, before, options.attention.lengths, count, *positions)) rotary.reset();
  check_multi_head_latent<S>(check, w, options.heads, options.norm_eps, rotary, {});
  run_multi_head_latent<S>({name, x, out, w, options.heads, options.norm_eps, rotary, {}}, attend, exec);
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
    latent_attention_step(cache, h.q, h.q_rotary, h.latent, h.k_rotary, h.w_key, h.w_value, attended, given.attention,
                          e);
  };
  const auto& tokens = detail::step_access::of(cache);
  detail::layer_views check{"multi_head_latent_step", from, to, false};
  tokens.list_memory(check);
  detail::call_multi_head_latent_step<S>(check, from, to, detail::weights_of<multi_head_latent_weights<S>>(weights),
                                         given, tokens.lengths(), attend, detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head_latent_step<S>(layer_views&, const tensor_view<const S, 3>&,                  \
  const tensor_view<S, 3>&, const multi_head_latent_weights<S>&, const multi_head_latent_step_options<S>&,             \
  std::span<const idx_t>, const attend_latents_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
