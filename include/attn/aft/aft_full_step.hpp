// attn: aft_full token by token, over a cache that grows.
//
//   attn::kv_cache<float> cache({.batch = 1, .heads = 8, .dim = 64});
//   attn::aft_full_step(cache, q_t, k_t, v_t, out_t, w);      // a token or a chunk: what causal aft_full gives
#pragma once

#include <attn/aft/aft_full.hpp>
#include <attn/aft/detail/aft_step.hpp>
#include <attn/core/kv_cache.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// The rows of a chunk; k and v of x are those of the cache, which has tokens[b] of item b, the chunk included.
template <class T>
void full_step_rows(const aft_tensors<T>& x, std::span<const idx_t> tokens, execution& exec) {
  const auto limit = exec.limit_threads(x.work(16 * static_cast<double>(x.length * x.k.extents[2])));
  exec.for_each(x.batch * x.heads * x.length, [&](idx_t task, int worker) {
    const aft_head head = x.head(task / x.length);
    const idx_t t = task % x.length, b = task / (x.length * x.heads);
    const idx_t row = tokens[static_cast<std::size_t>(b)] - head.length + t;
    if (t >= head.length) return x.clear_padding(head, t, t + 1);
    constexpr idx_t keys_together = 64 * key_chunk;
    key_sums<T>*sums = nullptr, *keys = nullptr;
    const auto biases = exec.scratch(worker, [&](arena& memory) {
      sums = memory.allocate<key_sums<T>>(2 * x.parts());
      keys = memory.allocate<key_sums<T>>(key_chunk);
      return split_biases<T>::layout(memory, 1);
    });
    std::fill_n(sums, 2 * x.parts(), key_sums<T>{});
    key_sums<T>* const all = sums + x.parts();  // of keys before the last keys_together
    for (idx_t j = 0, count; j <= row; j += count) {
      count = (std::min)(key_chunk, row + 1 - j);
      if (j % keys_together == 0)
        for (idx_t p = 0; p < x.parts(); ++p) all[p].merge(std::exchange(sums[p], {}));
      add_to_row(x, x.elements->at(head.w, row, j), head.w.col_stride, count, biases, sums, [&](idx_t p) {
        x.elements->split(head, p * width<T>, j, count, keys);
        return keys;
      });
    }
    for (idx_t p = 0; p < x.parts(); ++p) all[p].merge(sums[p]);
    write_row(x, head, t, all);
  });
}

}  // namespace detail

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
  detail::append_and(inside, keys, values, x.lengths, [&] {
    x.k = cache.keys(), x.v = cache.values();
    detail::full_step_rows(x, cache.lengths(), call.exec);
  });
}

}}  // namespace attn::ATTN_ISA
