// attn: sliding-window attention over an endless stream, in memory that does not grow with it.
//
//   attn::sliding_window_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64}, {.left = 512});
//   attn::sliding_window_step(cache, q_t, k_t, v_t, out_t);    // a token or a chunk, as causal sliding_window
//   attn::sliding_window_step(paged, {.left = 512}, q_t, k_t, v_t, out_t);     // over a kv_cache or paged_cache
//   attn::sliding_window_cached(paged, {.left = 512}, q, out);                 // the same, where tokens are there already
//
// The step feeds n tokens, k [B, Hkv, n, D] and v [B, Hkv, n, Dv], and attends their queries q [B, H, n, D] causally:
// the next n rows of one causal sliding_window over the whole stream. Batch items are independent streams: with
// `lengths` item b takes the first lengths[b] tokens, and the rest is padding. In `score` i and j are positions since
// the start.
//
// Memory   batch * heads * (capacity + global positions) * (dim + value_dim) elements, of the types a kv_cache may
//          have. The ring has room for the window, left * dilation + 1 tokens (with std::int8_t up to 30 more). Since a
//          global query sees every token before it, the ring has room for all tokens up to the last global position, if
//          those are more.
// Cost     2 H (D + Dv) operations for every key seen; scratch independent of everything but H, D and Dv. log_decay,
//          mask, bias and key_mask are of all tokens since the start; log decays are added up anew in every step, in 16
//          bytes for each. A ring takes tokens one by one; feed a long prompt to sliding_window, then append() it.
//          Where an item has more than 16 tokens times the dilation, a kv_cache or paged_cache of floating-point
//          numbers is attended as by sliding_window, with its scratch.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          If `score` throws, or memory runs out, the ring is reset; a cache that keeps all tokens drops the chunk.
#pragma once

#include <attn/softmax/detail/sliding_window_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step, as of full_softmax_step; the window, its dilation and the global positions are the cache's. bias,
/// mask, log_decay and key_mask have an entry for every token of the stream.
template <class S>
using sliding_window_step_options = softmax_step_options<S>;

/// The window of a stream. Steps are causal, so there is nothing to the right.
struct sliding_window_cache_options {
  /// Number of keys seen before the query's own, >= 0.
  idx_t left = 128;
  /// Stride between the keys of the window, >= 1: a list of one for all heads, or of one per query head; 1 unless
  /// given.
  list_view<idx_t> dilation{};
  /// Positions whose keys are seen by every later query, and whose queries see every earlier key; global_counts: how
  /// many of them each batch item has, whose positions follow those of the item before; unless given, every item has
  /// all.
  list_view<idx_t> global_positions{}, global_counts{};
  /// Of a sliding_window_cache: whether keys are stored rotated, as in kv_cache_options.
  bool rotate = false;
};

/// The last tokens of a stream, and those at its global positions, which copy_item and reorder take along, and reset
/// leaves. A moved-from cache may only be assigned to or destroyed.
template <class S>
class sliding_window_cache : public detail::cached_sequences<detail::window_tokens<S>> {
  using base = detail::cached_sequences<detail::window_tokens<S>>;
  using memory = detail::kv_memory<S>;

 public:
  /// An empty stream; heads are key heads, and the lists of the options are copied. Throws std::invalid_argument for
  /// options that do not fit or sizes no memory can hold.
  explicit sliding_window_cache(const state_extents& extents, const sliding_window_cache_options& options = {})
      : base(memory(detail::validator("sliding_window_cache"), extents, {.rotated = options.rotate}), options) {}
  /// The same in the caller's memory, [B, Hkv, rows, D] and [B, Hkv, rows, Dv], with any strides, of at least rows()
  /// rows: the ring and the global positions. With std::int8_t it consists of blocks of 16 rows, as in a kv_cache. A
  /// copy of the cache is in the same memory.
  sliding_window_cache(const tensor_view<S>& keys, const tensor_view<S>& values,
                       const sliding_window_cache_options& options = {})
      : base(memory(detail::validator("sliding_window_cache"), keys, values, {.rotated = options.rotate}), options) {}

  /// Number of tokens in the ring, and of rows of memory: those and the global positions.
  using base::capacity, base::rows, base::bytes;
};

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the
/// file.
template <detail::cache_element C, viewable Q, viewable K, viewable V, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_step(sliding_window_cache<C>& cache, const Q& q, const K& k, const V& v, O&& out,
                         Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_call<sliding_window_step_options, detail::invariant_form::rows>(
      "sliding_window_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  tokens.window().check_heads(call.check, call.shape.heads);
  call.lengths.given_queries = call.options.lengths;
  const detail::rotated_tokens rotated(call, tokens);
  // By an exception of score, or for want of memory, the ring has lost the tokens that the chunk replaced.
  detail::do_or_undo([&] { detail::run_sliding_window_step(call.over(tokens), tokens, call.k, call.v); },
                     [&] { cache.reset(); });
  tokens.advance(call.shape.queries, call.options.lengths);
}

/// The same over a kv_cache or paged_cache, which keeps all tokens and reads those of the window: for models that mix
/// windows with full attention in one pool, and for sequences that are truncated.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_step(Cache& cache, const sliding_window_cache_options& window, const Q& q, const K& k, const V& v,
                         O&& out, Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_call<sliding_window_step_options, detail::invariant_form::rows>(
      "sliding_window_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  const auto given = detail::window_of_call<element_of<const Q&>>(call.check, window, call.shape);
  detail::cache_step(call, tokens, [&] { detail::run_sliding_window_step(call.over(tokens), given); });
}

/// The same for tokens that the cache has already: nothing is appended, and the queries q [B, H, n, D] are at the last
/// n positions of their item (full_softmax_cached). `rotary` is refused: q is used as it is.
template <detail::key_value_cache Cache, viewable Q, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_cached(const Cache& cache, const sliding_window_cache_options& window, const Q& q, O&& out,
                           Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  const auto& tokens = detail::step_access::of(cache);
  auto call = detail::checked_cached_call<sliding_window_step_options, detail::invariant_form::rows>(
      "sliding_window_cached", tokens, q, out, options, score, exec);
  detail::run_sliding_window_step(call.over(tokens),
                                  detail::window_of_call<element_of<const Q&>>(call.check, window, call.shape));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_sliding_window_step(const softmax_call<S, no_score>&, const sliding_window_options<S>&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_OVER(S, C) void run_sliding_window_step(const softmax_call<S, no_score, C>&,                          \
  const sliding_window_options<S>&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void run_sliding_window_step(const softmax_call<S, no_score>&, window_tokens<S>&,                  \
  const tensor_view<const S>&, const tensor_view<const S>&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_OVER_ROWS(S, C) void run_sliding_window_step(const softmax_call<S, no_score, C>&, window_tokens<C>&,  \
  const tensor_view<const S>&, const tensor_view<const S>&)
#include <attn/core/detail/compiled.hpp>
