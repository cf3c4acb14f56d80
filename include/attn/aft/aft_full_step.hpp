// attn: aft_full token by token, over a cache that grows.
//
//   attn::kv_cache<float> cache({.batch = 1, .heads = 8, .dim = 64});
//   attn::aft_full_step(cache, q_t, k_t, v_t, out_t, w);      // a token or a chunk: what causal aft_full gives
#pragma once

#include <attn/aft/aft_full.hpp>
#include <attn/aft/detail/aft_step_run.hpp>
#include <attn/core/kv_cache.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Appends n tokens k, v [B, H, n, D] to the cache, or of item b the first lengths[b], and writes the rows of their
/// queries q [B, H, n, D]: the next n rows of one causal aft_full over the whole sequence. w is that of the longest
/// sequence, [L, L] or [H, L, L] with L >= tokens of the cache + n; row t belongs to the t-th token since the start.
/// Cost: one reading of the cache per token; for a long prompt use aft_full, then append() it. Scratch does not depend
/// on the size of the cache. Throws std::invalid_argument before anything, the cache included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W, class Options = aft_step_options>
void aft_full_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, const W& w, Options&& options = {},
                   execution_ref exec = {}) {
  auto call = detail::checked_aft_step<aft_step_options, S>(
      "aft_full_step", {.batch = cache.batch(), .heads = cache.heads(), .dim = cache.dim()}, false, q, k, v, out, w,
      options, exec);
  auto& x = call.x;
  const detail::validator& check = call.views;
  auto& inside = detail::step_access::of(cache);
  const idx_t tokens = inside.tokens_after(x.length, x.lengths);
  check.equal("value dim = cache value dim", cache.value_dim(), x.dim);
  detail::check_biases(check, x);
  check.at_least("w rows", tokens, x.w.extents[2]);
  check.at_least("w columns", tokens, x.w.extents[3]);
  x.key_mask.validate(call.views, x.batch, tokens);
  const tensor_view<const S> keys = as_view(k), values = as_view(v);
  inside.check_tokens(check, keys, values, x.lengths);
  inside.list_memory(call.views);
  detail::run_aft_full_step<S>(x, cache, keys, values, call.exec);
}

}}  // namespace attn::ATTN_ISA
