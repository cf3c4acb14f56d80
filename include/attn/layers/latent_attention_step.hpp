// attn: latent_attention token by token, with a cache of latents.
//
//   attn::kv_cache<float> cache({.dim = 512 + 64, .value_dim = 512}, {.values_in_keys = true});
//   attn::latent_attention_step(cache, q_t, q_rotary_t, latent_t, k_rotary_t, w_key, w_value, out_t);
//   attn::paged_cache<float> cache(pool, batch);               // or pages of a pool with values_in_keys
//
// Appends [c; k_rotary] of n new tokens to the cache, one key head of r + Dr numbers a token, then attends the n
// queries, which are at the last n positions, to all tokens up to their own. The result is the last n rows of one
// causal latent_attention over the whole sequence. The form is the absorbed one: the cache is read once for all heads,
// and no key or value of a head is ever made. A long prompt is faster by latent_attention and cache.append().
//
// Shapes   q [B, H, n, Dn], q_rotary [B, H, n, Dr], latent [B, 1, n, r], k_rotary [B, 1, n, Dr], weights and out as
//          latent_attention has them. The cache is a kv_cache or paged_cache with values_in_keys, of 1 head, dim r + Dr
//          and value_dim r, of every element type it may have (kv_cache.hpp): rounding is as full_softmax_step says.
// Cost     2 B H n (r (Dn + Dv) + tokens (2 r + Dr)) operations; one reading of the weights, and of the cache for every
//          64 queries and all heads of up to 256 rows. Scratch: B H n (2 r + Dr) numbers, and what
//          full_softmax_step takes.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/layers/detail/latent_attention_step_run.hpp>
#include <attn/layers/latent_attention.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct latent_attention_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::bias | detail::fields::masks |
                                     detail::fields::of_softmax;

  /// As in latent_attention_options.
  std::optional<real> scale{};
  /// Item b has the first lengths[b] tokens of the chunk, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  /// As in latent_attention_options, for all tokens of the cache, the new ones included; lse [B, H, n].
  view_field<const real> bias{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
};

/// Feeds n tokens and attends their queries; options and execution may each be left out. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable QR, viewable L, viewable KR, viewable W, viewable U,
          viewable O, class Options = latent_attention_step_options<element_of<const Q&>>>
void latent_attention_step(Cache& cache, const Q& q, const QR& q_rotary, const L& latent, const KR& k_rotary,
                           const W& w_key, const U& w_value, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::require_one_element_type<const Q&, const L&, const L&, O&>();
  const auto& given = detail::options_or_default<latent_attention_step_options<S>>(options);
  auto views = detail::latent_views<S>::of(q, q_rotary, latent, k_rotary, w_key, w_value);
  detail::checked_softmax<S, detail::no_score, latent_attention_step_options<S>> step(
      "latent_attention_step", nullptr, detail::plain_execution_of("latent_attention_step", exec, options), given);
  auto call = detail::checked_latent_call(step.views, views, tensor_view<S>(as_view(out)), given,
                                          latent_form::absorbed, step.exec);
  detail::check_latent_cache(step.views, call.views, detail::step_access::of(cache));
  detail::run_latent_attention_step(call, step, cache);
}

}}  // namespace attn::ATTN_ISA
