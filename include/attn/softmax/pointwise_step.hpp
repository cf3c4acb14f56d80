// attn: decoding without a softmax, with a cache of keys and values.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::pointwise_step(cache, q_t, k_t, v_t, out_t, {.shift = -8});    // one token, or a chunk: as causal pointwise
//   attn::pointwise_cached(cache, q, out, {.causal = false});             // attends what is cached, and appends nothing
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, a kv_cache or paged_cache of any elements, then attends
// the n queries q [B, H, n, D], which are at the last n positions: the last n rows of one causal pointwise over the
// whole sequence. With `lengths`, item b has only the first lengths[b] tokens of the chunk.
//
// Cost     as full_softmax_step, and with `left` as sliding_window_step over a cache of all tokens. Over a cache of
//          fewer bits than the tokens', queries and weights are rounded likewise.
// Values   `out` is finite where that of pointwise is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          Exceptions of `f` leave the tokens of the cache as they were (full_softmax_step.hpp).
#pragma once

#include <attn/softmax/detail/pointwise_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>
#include <attn/softmax/pointwise.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step for elements of type S.
template <class S>
struct pointwise_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::rotary | detail::fields::of_pointwise;

  /// As in pointwise_options; lengths and rotary as in softmax_step_options.
  pointwise_activation activation = pointwise_activation::sigmoid;
  std::optional<real> scale{};
  list_view<idx_t> lengths{};
  /// Number of keys seen before the query's own, >= 0; unlimited unless given.
  idx_t left = unlimited;
  /// As in pointwise_options; row_weights [B or 1, n].
  real weight = 1;
  view_field<const real, 2> row_weights{};
  real shift = 0;
  std::optional<rotary_options<S>> rotary{};
  /// As in pointwise_options: bias and mask [B or 1, H or 1, n or 1, cache.tokens() with the new ones], key_mask
  /// likewise for all those tokens.
  view_field<const real> bias{};
  view_field<const real, 2> relative_bias{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{};
};

/// Options of a call over what is cached, for elements of type S.
template <class S>
struct pointwise_cached_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::causal | detail::fields::of_pointwise;

  /// As in pointwise_options; a query sees the tokens up to its own position, or all of its item.
  pointwise_activation activation = pointwise_activation::sigmoid;
  std::optional<real> scale{};
  bool causal = true;
  /// Item b has the first lengths[b] queries, the rest is padding; all of them unless given.
  list_view<idx_t> lengths{};
  /// As in pointwise_step_options, for the tokens of the cache; `left` only where causal.
  idx_t left = unlimited;
  real weight = 1;
  view_field<const real, 2> row_weights{};
  real shift = 0;
  view_field<const real> bias{};
  view_field<const real, 2> relative_bias{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{};
};

/// Feeds n tokens and attends their queries; options, f and execution may each be left out. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = pointwise_step_options<element_of<const Q&>>, class F = detail::no_function>
void pointwise_step(Cache& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, F&& f = {},
                    execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<pointwise_step_options<S>>(options);
  auto weights = detail::pointwise_function_of<S>(given, f);
  execution_ref threads(detail::execution_of(exec, options, f));
  auto call = detail::checked_call<pointwise_step_options>("pointwise_step", q, k, v, out, given, weights, threads);
  detail::check_pointwise(call);
  auto& tokens = detail::check_step(call, cache);
  detail::cache_step(call, tokens, [&] { detail::run_pointwise_step(call.over(tokens), call.options.left); });
}

/// Attends q [B, H, n, D] to the tokens of a kv_cache or paged_cache; options, f and execution may each be left out.
/// Several threads may attend one cache at the same time. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable O,
          class Options = pointwise_cached_options<element_of<const Q&>>, class F = detail::no_function>
void pointwise_cached(const Cache& cache, const Q& q, O&& out, Options&& options = {}, F&& f = {},
                      execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& tokens = detail::step_access::of(cache);
  const auto& given = detail::options_or_default<pointwise_cached_options<S>>(options);
  auto weights = detail::pointwise_function_of<S>(given, f);
  execution_ref threads(detail::execution_of(exec, options, f));
  auto call = detail::checked_cached_call<pointwise_cached_options>("pointwise_cached", tokens, q, out, given, weights,
                                                                    threads);
  detail::check_pointwise(call);
  if (!given.causal && given.left != unlimited) call.check.fail("a causal call, since left is given", "causal = false");
  detail::run_pointwise_step(call.over(tokens), given.left);
}

}}  // namespace attn::ATTN_ISA
