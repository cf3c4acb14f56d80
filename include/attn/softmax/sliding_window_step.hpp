// attn: sliding-window attention over an endless stream, in memory that does not grow with it.
//
//   attn::sliding_window_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64}, {.left = 512});
//   attn::sliding_window_step(cache, q_t, k_t, v_t, out_t);    // a token or a chunk, as causal sliding_window
//
// The step feeds n tokens, k [B, Hkv, n, D] and v [B, Hkv, n, Dv], and attends their queries q [B, H, n, D] causally: the
// next n rows of one causal sliding_window over the whole stream. Batch items are streams of their own: with `lengths`
// item b takes the first lengths[b] tokens, and the rest is padding. In `score` i and j are positions since the start.
//
// Memory   batch * heads * (capacity + global positions) * (dim + value_dim) elements. The ring holds the window,
//          left * dilation + 1 tokens; since a global query sees every token before it, up to the last global position
//          if that is further.
// Cost     2 H (D + Dv) operations for every key seen; scratch independent of everything but H, D and Dv. Tokens are
//          taken one by one; feed a long prompt to sliding_window, then append() it.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          Should `score` throw, or memory be lacking, the cache is reset.
#pragma once

#include <attn/core/detail/kv_memory.hpp>
#include <attn/core/detail/rotary_step.hpp>
#include <attn/softmax/detail/streaming.hpp>
#include <attn/softmax/sliding_window.hpp>


namespace attn::inline ATTN_ISA {

/// Options of a step; the window, its dilation and the global positions are the cache's.
template <class S>
struct sliding_window_step_options {
  using real = compute_type<S>;

  /// As in full_softmax_options; lse is [B, H, n].
  std::optional<real> scale{};
  /// Of the chunk item b has its first lengths[b] tokens, the rest is padding; all of them unless given.
  list_view<index> lengths{};
  /// Rotates the new queries and keys to their positions, which follow the item's tokens so far, before anything else.
  std::optional<rotary_options<S>> rotary{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  tensor_view<real, 3> lse{};
};

/// What a stream sees. It is causal, so there is nothing to the right.
struct sliding_window_cache_options {
  /// Keys seen before the query's own, >= 0.
  index left = 128;
  /// Every how manyth key the window takes, >= 1: none given (1), one for all heads, or one per query head.
  list_view<index> dilation{};
  /// Positions seen by every later query, and whose queries see every earlier key.
  list_view<index> global_positions{};
};

/// The last tokens of a stream, and those at its global positions. One that was moved from may only be assigned to or
/// destroyed.
template <element S>
class sliding_window_cache : public detail::token_state {
 public:
  /// An empty stream; heads are key heads, and the lists of the options are copied. Throws std::invalid_argument for
  /// options that do not fit or sizes no memory can hold.
  explicit sliding_window_cache(const state_extents& extents, const sliding_window_cache_options& options = {})
      : sliding_window_cache({detail::validator("sliding_window_cache"), extents, false}, options) {
    const detail::validator check(name_);
    memory_.grow(check, check.fits("ring", {rows()}), {});
  }
  /// The same in the caller's memory, [B, Hkv, rows, D] and [B, Hkv, rows, Dv], with any strides, of at least rows()
  /// rows: the ring and the global positions. A copy of the cache is in the same memory.
  sliding_window_cache(const tensor_view<S>& keys, const tensor_view<S>& values,
                       const sliding_window_cache_options& options = {})
      : sliding_window_cache({detail::validator("sliding_window_cache"), keys, values}, options) {
    detail::validator(name_).at_least("rows of the caller's memory", rows(), keys.extent(2));
  }

  /// Tokens the ring holds, and rows of memory, which are those and the global positions.
  index capacity() const { return capacity_; }
  index rows() const { return capacity_ + static_cast<index>(globals_.size()); }
  std::size_t bytes() const { return memory_.bytes(); }

  /// Back to the start of a stream: all of them, or one.
  void reset() { std::fill(lengths_.begin(), lengths_.end(), 0); }
  void reset(index item) { length(check_item(item)) = 0; }
  /// Item `to` becomes a copy of item `from`: a branch.
  void copy_item(index from, index to) {
    if (check_item(from) != check_item(to)) memory_.copy(from, to, rows());
    length(to) = length(from);
  }
  /// Item n becomes what item order[n] was, for all n. Throws std::invalid_argument for a list of another size, or items
  /// there are not.
  void reorder(list_view<index> order) {
    const auto exchange = [&](index a, index b) {
      memory_.exchange(a, b, rows());
      std::swap(length(a), length(b));
    };
    detail::reorder_items(
        detail::validator(name_), order, batch(), [&](index from, index to) { copy_item(from, to); }, exchange);
  }

  /// Feeds tokens without attending: k [B, Hkv, n, D], v [B, Hkv, n, Dv]. Throws std::invalid_argument for shapes that
  /// do not fit, before anything changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v, const append_options& options = {}) {
    const tensor_view<const S> keys = as_view(k), values = as_view(v);
    check_tokens(detail::validator(name_), keys, values, options.lengths);
    const index count = keys.extent(2);
    for (index b = 0; b < batch(); ++b)
      for (index h = 0; h < heads(); ++h)
        for (index t = 0; t < taken_of(b, count, options.lengths); ++t) put(keys, values, b, h, t);
    advance(count, options.lengths);
  }

  // For the step ------------------------------------------------------------------------------------------------------

  const std::vector<index>& globals() const { return globals_; }
  void check_heads(const detail::validator& check, index query_heads) const {
    if (!one_dilation()) check.equal("query heads = dilations of the cache", std::ssize(dilation_), query_heads);
  }
  bool one_dilation() const { return dilation_.size() <= 1; }
  index dilation(index query_head) const {
    return dilation_.empty() ? 1 : dilation_[one_dilation() ? 0 : static_cast<std::size_t>(query_head)];
  }
  index left() const { return left_; }

  /// Keys and values of one head: `capacity` rows of the ring, where position p is in row p % capacity, then the
  /// global ones in order.
  detail::matrix_view<const S> keys(index b, index h) const {
    return detail::head_of(tensor_view<const S>(memory_.keys()), b, h);
  }
  detail::matrix_view<const S> values(index b, index h) const {
    return detail::head_of(tensor_view<const S>(memory_.values()), b, h);
  }

  /// Token t of a chunk goes to its place in the ring and, if global, among the global ones.
  void put(const tensor_view<const S>& k, const tensor_view<const S>& v, index b, index h, index t) {
    const index position = length(b) + t;
    const auto found = std::lower_bound(globals_.begin(), globals_.end(), position);
    memory_.put(k, v, b, h, t, b, position % capacity_);
    if (found != globals_.end() && *found == position)
      memory_.put(k, v, b, h, t, b, capacity_ + (found - globals_.begin()));
  }
  void advance(index count, std::span<const index> given) {
    for (index b = 0; b < batch(); ++b) length(b) += taken_of(b, count, given);
  }
  /// Checks what append() would, and nothing else.
  void check_tokens(const detail::validator& check, const tensor_view<const S>& k, const tensor_view<const S>& v,
                    std::span<const index> given) const {
    token_state::check_tokens(check, k, v, given);
    memory_.check_tokens(check, k, v);
  }
  void no_alias(const detail::validator& check, const char* what, const detail::memory_layout& x) const {
    memory_.no_alias(check, what, x);
  }

 private:
  sliding_window_cache(detail::kv_memory<S> memory, const sliding_window_cache_options& options)
      : token_state("sliding_window_cache", memory.extents()), left_(options.left), memory_(std::move(memory)) {
    const detail::validator check(name_);
    check.at_least("left", 0, left_);
    index widest = 1, furthest = 0;
    for (index d : options.dilation) check.at_least("dilation", 1, d), widest = std::max(widest, d);
    for (index p : options.global_positions) check.at_least("global positions", 0, p), furthest = std::max(furthest, p);
    dilation_.assign(options.dilation.begin(), options.dilation.end());
    globals_.assign(options.global_positions.begin(), options.global_positions.end());
    std::sort(globals_.begin(), globals_.end());
    globals_.erase(std::unique(globals_.begin(), globals_.end()), globals_.end());
    capacity_ =
        std::max(check.fits("left * dilation", {left_, widest}), check.fits("global positions", {furthest})) + 1;
  }

  index left_, capacity_ = 0;
  std::vector<index> dilation_, globals_;
  detail::kv_memory<S> memory_;
};

namespace detail {

template <class S, class Score>
struct window_step {
  using T = compute_type<S>;

  const softmax_call<S, Score>& in;
  sliding_window_cache<S>& cache;
  const attention_shape& shape = in.shape;

  struct scratch {
    stream_queries<T> rows;
    online_softmax<T> state;
  };
  scratch layout(arena& memory) const {
    return {stream_queries<T>::layout(memory, shape.group(), shape.dim, shape.dim_v),
            online_softmax<T>::layout(memory, shape.group(), shape.dim_v)};
  }

  /// Attends token t of the chunk, of the `count` query heads from `head` on, which share a dilation.
  void attend_token(index b, index kv, index t, index head, index count, scratch& s) const {
    const index p = cache.tokens(b) + t, d = cache.dilation(head), ring = cache.capacity();
    const auto& globals = cache.globals();
    const index known = std::upper_bound(globals.begin(), globals.end(), p) - globals.begin();
    const bool global_query = known > 0 && globals[static_cast<std::size_t>(known - 1)] == p;
    const index step = global_query ? 1 : d, first = global_query ? 0 : p - std::min(cache.left(), p / d) * d;
    s.rows.begin(in.q.slice(2, t, 1), b, head, count, 1, in.terms.query_factor());
    s.state.rows = count;
    s.state.clear();
    const auto keys = cache.keys(b, kv), values = cache.values(b, kv);
    const auto token_terms = in.terms.for_head(b, head, p);
    const auto take = [&](index row, index stride, index rows, const index_map& positions) {
      const matrix_view<const S> some_keys{keys.row(row), rows, keys.cols, keys.row_stride * stride,
                                            keys.col_stride};
      const matrix_view<const S> some_values{values.row(row), rows, values.cols, values.row_stride * stride,
                                              values.col_stride};
      attend_stream(s.rows, some_keys, some_values, positions, 0, rows, token_terms, stream_limit{rows}, s.state);
    };
    // The window lies in the ring in one run, or in two.
    for (index from = first; from <= p;) {
      const index rows = std::min((p - from) / step, (ring - 1 - from % ring) / step) + 1;
      take(from % ring, step, rows, {from, step, nullptr});
      from += rows * step;
    }
    // Global keys before the window, or beside its steps, run by run.
    const auto outside = [&](index position) { return position < first || (p - position) % d != 0; };
    for (index g = 0; g < known && !global_query; ++g) {
      index end = g;
      while (end < known && outside(globals[static_cast<std::size_t>(end)])) ++end;
      if (end > g) take(ring + g, 1, end - g, {0, 1, globals.data() + g});
      g = end;
    }
    for (index r = 0; r < count; ++r) in.finish_row(s.state, r, b, head + r, t);
  }

  void run() const {
    const index tokens = shape.queries, group = shape.group();
    const index seen = std::min(cache.left() + 1, cache.tokens() + tokens);
    const auto limit = in.limit_threads(seen, static_cast<double>(tokens) * static_cast<double>(seen));
    try {
      in.exec.for_each(shape.batch * shape.kv_heads, [&](index task, int worker) {
        const index b = task / shape.kv_heads, kv = task % shape.kv_heads, heads = cache.one_dilation() ? group : 1;
        scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        for (index t = 0; t < in.lengths.queries(b); ++t) {
          cache.put(in.k, in.v, b, kv, t);
          for (index h = kv * group; h < (kv + 1) * group; h += heads) attend_token(b, kv, t, h, heads, s);
        }
        for (index h = kv * group; h < (kv + 1) * group; ++h) in.clear_padding(b, h);
      });
    } catch (...) {  // of the score function, or no memory: the ring has already lost what the chunk pushed out
      cache.reset();
      throw;
    }
    cache.advance(tokens, in.lengths.given_queries);
  }
};
template <class S, class Score>
window_step(const softmax_call<S, Score>&, sliding_window_cache<S>&) -> window_step<S, Score>;

}  // namespace detail

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the file.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = sliding_window_step_options<S>,
          class Score = detail::no_score>
void sliding_window_step(sliding_window_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                         Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  detail::call_softmax<sliding_window_step_options>(
      "sliding_window_step", q, k, v, out, options, score, exec, [&](auto& call, const auto& given) {
        cache.check_tokens(call.check, call.k, call.v, given.lengths);
        for (const auto& [name, view] : std::initializer_list<detail::validator::named_view>{
                 {"q", call.q}, {"out", call.out}, {"lse", given.lse}})
          cache.no_alias(call.check, name, view);
        call.lengths.given_queries = given.lengths;
        cache.check_heads(call.check, call.shape.heads);
        call.check.equal("query length = key length", call.shape.keys, call.shape.queries);
        const auto rotation = call.exec.workspace([&](detail::arena& memory) {
          return detail::rotary_step<S>::layout(memory, given.rotary.has_value(), call.q, call.k);
        });
        rotation->rotate(call.check, given.rotary, cache.lengths(), call.q, call.k, call.exec);
        detail::window_step{call, cache}.run();
      });
}

}  // namespace attn::inline ATTN_ISA
