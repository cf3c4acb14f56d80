// attn: aft_full token by token, over a cache that grows.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = heads, .dim = dim});
//   attn::aft_full_step(cache, q_t, k_t, v_t, out_t, w);      // a token or a chunk: what causal aft_full gives
#pragma once

#include <attn/aft/aft_full.hpp>
#include <attn/aft/detail/aft_step.hpp>
#include <attn/core/kv_cache.hpp>

namespace attn::inline ATTN_ISA {

/// Appends n tokens k, v [B, H, n, D] to the cache and writes the rows of their queries q [B, H, n, D]: the next n rows
/// of one causal aft_full over the whole sequence. w is that of the longest sequence, [L, L] or [H, L, L] with L >=
/// cache size + n; row t belongs to the t-th token since the start. Cost: one reading of the cache a token; for a long
/// prompt use aft_full, then append() it. Scratch does not depend on the size of the cache. Throws
/// std::invalid_argument before anything, the cache included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_full_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, const W& w,
                   const aft_step_options& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  using T = compute_type<S>;
  const detail::validator check("aft_full_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<const S> biases = detail::parameter_view(w);
  const tensor_view<S> to = as_view(out);
  const auto call = detail::check_aft_step<S>(check, cache.batch(), cache.heads(), cache.dim(), queries, keys, values,
                                              to, options.gate);
  check.equal("value dim = cache value dim", cache.value_dim(), call.dim);
  detail::check_parameter(check, biases, to);
  check.broadcasts("w heads", call.heads, biases.extent(1));
  const index before = cache.tokens(), tokens = call.length, parts = call.parts();
  check.at_least("w rows", before + tokens, biases.extent(2));
  check.at_least("w columns", before + tokens, biases.extent(3));
  cache.check_tokens(check, keys, values);
  cache.no_alias(check, "q", queries);
  cache.no_alias(check, "w", biases);
  cache.no_alias(check, "out", to);
  cache.append(keys, values);
  try {
    exec.for_each(call.batch * call.heads * tokens, [&](index task, int worker) {
      const index b = task / tokens / call.heads, h = task / tokens % call.heads, t = task % tokens;
      T* sums = nullptr;
      const auto scratch = exec.scratch(worker, [&](detail::arena& memory) {
        sums = memory.allocate<T>(parts * detail::key_sums<T>::size);
        return detail::row_scratch<T>::layout(memory);
      });
      for (index p = 0; p < parts; ++p) detail::key_sums<T>{}.write(sums + p * detail::key_sums<T>::size);
      const auto bias = detail::head_of(biases, 0, biases.extent(1) == 1 ? 0 : h);
      scratch.add(detail::head_of(cache.keys(), b, h), detail::head_of(cache.values(), b, h), 0, before + t + 1, parts,
                  sums, [&](index j, index count, T* row) {
                    detail::copy_biases(bias.row(before + t) + j * bias.col_stride, bias.col_stride, count, row);
                  });
      detail::write_row(sums, parts, options.gate, call.head(b, h), t);
    });
  } catch (...) {  // no memory
    cache.truncate(before);
    throw;
  }
}

template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_full_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, const W& w,
                   const aft_step_options& options = {}) {
  execution serial;
  aft_full_step(cache, q, k, v, out, w, options, serial);
}

}  // namespace attn
