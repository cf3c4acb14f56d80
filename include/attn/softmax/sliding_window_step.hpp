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
// Values   `out` is finite where |v| times the number of keys that a row sees is below the largest number of the
//          compute type (float: 3.4e38), for sums precede the division.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          If `score` throws, or memory runs out, the ring is reset; a cache that keeps all tokens drops the chunk.
#pragma once

#include <attn/softmax/detail/softmax_step.hpp>
#include <attn/softmax/detail/window_step.hpp>
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
};

namespace detail {

/// The inside of sliding_window_cache: a ring, and the global positions.
template <class S>
class window_tokens : public cached_tokens {
  static_assert(row_format<S>::tail == 0,
                "attn: a sliding_window_cache has no elements of attn::int4 or attn::int8_channels; give the window of "
                "a step over a kv_cache or paged_cache");

 public:
  using value_type = S;

  /// In memory without rows, which becomes the cache's own, or in the caller's.
  window_tokens(kv_memory<S> memory, const sliding_window_cache_options& options)
      : cached_tokens("sliding_window_cache", memory.extents()), left_(options.left), memory_(std::move(memory)) {
    const validator check{name_};
    check_window(check, options, batch());
    idx_t widest = 1, furthest = 0;
    for (idx_t d : options.dilation) widest = (std::max)(widest, d);
    for (idx_t p : options.global_positions) furthest = (std::max)(furthest, p);
    dilation_.assign(options.dilation.begin(), options.dilation.end());
    const global_lists sizes = global_lists::sizes(options);
    globals_.resize(static_cast<std::size_t>(sizes.lists * sizes.most));
    counts_.resize(static_cast<std::size_t>(sizes.lists));
    (void)globals().set(options);
    capacity_ =
        (std::max)(check.fits("left * dilation", {left_, widest}), check.fits("global positions", {furthest})) + 1;
    capacity_ = row_format<S>::ring(capacity_);
    if (memory_.given())
      check.at_least("rows of the caller's memory", rows(), memory_.rows());
    else
      memory_.grow(check, check.fits("ring", {rows()}), {});
  }

  window_tokens(const window_tokens& other)
      : cached_tokens(other), left_(other.left_), capacity_(other.capacity_), dilation_(other.dilation_),
        globals_(other.globals_), counts_(other.counts_), memory_(other.memory_) {
    if (memory_.given()) return;
    memory_.grow(validator(name_), rows(), {}, 2 * tokens() >= capacity_);
    for (idx_t b = 0; b < batch(); ++b)
      each_range(b, [&](auto... range) { memory_.copy_from(other.memory_, b, b, range...); });
  }
  window_tokens(window_tokens&&) noexcept = default;
  window_tokens& operator=(const window_tokens& other) { return this == &other ? *this : *this = window_tokens(other); }
  window_tokens& operator=(window_tokens&&) noexcept = default;

  idx_t capacity() const { return capacity_; }
  idx_t rows() const { return capacity_ + globals().most; }
  std::size_t bytes() const { return memory_.bytes(); }
  stream_window window() const { return {left_, dilation_, globals()}; }
  bool values_in_keys() const { return memory_.values_in_keys(); }
  /// [B, Hkv, rows, D]: for each head first the `capacity` rows of the ring, with position p in row p % capacity, then
  /// those of the item's global positions in order.
  tensor_view<const S> keys() const { return memory_.keys(); }
  tensor_view<const S> values() const { return memory_.values(); }

  template <class E>
  void check_tokens(const validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> given) const {
    check_shapes(check, k, v, given);
    memory_.check_tokens(check, k, v, given);
  }
  void list_memory(call_views& views) const { memory_.list_memory(views); }
  /// Token t of a chunk goes to its place in the ring and, if global, among the global ones.
  template <class E>
  void put(const tensor_view<const E>& k, const tensor_view<const E>& v, idx_t b, idx_t h, idx_t t) {
    const idx_t position = length(b) + t;
    const global_list global = globals()(b);
    memory_.put(k, v, b, h, t, b, position % capacity_);
    if (global.contains(position)) memory_.put(k, v, b, h, t, b, capacity_ + global.before(position));
  }
  template <class E>
  void append(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> given) {
    put_all(k.extent(2), given, [&](idx_t b, idx_t h, idx_t t) { put(k, v, b, h, t); });
  }
  void reset(idx_t b) { length(b) = 0; }
  /// Global positions go with their item.
  void copy(idx_t from, idx_t to) {
    each_range(from, [&](auto... range) { memory_.copy(from, to, range...); });
    if (counts_.size() < 2) return;
    std::copy_n(list_of(from), globals().most, list_of(to));
    counts_[static_cast<std::size_t>(to)] = counts_[static_cast<std::size_t>(from)];
  }
  void exchange(idx_t a, idx_t b) {
    memory_.exchange(a, b, (std::min)(capacity_, (std::max)(length(a), length(b))));
    memory_.exchange(a, b, (std::max)(known_globals(a), known_globals(b)), capacity_);
    if (counts_.size() < 2) return;
    std::swap_ranges(list_of(a), list_of(a) + globals().most, list_of(b));
    std::swap(counts_[static_cast<std::size_t>(a)], counts_[static_cast<std::size_t>(b)]);
  }

 private:
  global_lists globals() const {
    const idx_t lists = std::ssize(counts_), most = lists == 0 ? 0 : std::ssize(globals_) / lists;
    return {lists, most, const_cast<idx_t*>(globals_.data()), const_cast<idx_t*>(counts_.data())};
  }
  /// Global positions among the tokens of an item.
  idx_t known_globals(idx_t b) const { return globals()(b).before(length(b)); }
  /// visit(count, first) for the rows that an item has written: in the ring, and of global positions.
  template <class Visit>
  void each_range(idx_t b, const Visit& visit) const {
    visit((std::min)(length(b), capacity_), idx_t(0)), visit(known_globals(b), capacity_);
  }
  idx_t* list_of(idx_t b) { return globals_.data() + b * globals().most; }

  idx_t left_, capacity_ = 0;
  std::vector<idx_t> dilation_, globals_, counts_;  // the latter two those of global_lists
  kv_memory<S> memory_;
};

}  // namespace detail

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
      : base(memory(detail::validator("sliding_window_cache"), extents, false), options) {}
  /// The same in the caller's memory, [B, Hkv, rows, D] and [B, Hkv, rows, Dv], with any strides, of at least rows()
  /// rows: the ring and the global positions. With std::int8_t it consists of blocks of 16 rows, as in a kv_cache. A
  /// copy of the cache is in the same memory.
  sliding_window_cache(const tensor_view<S>& keys, const tensor_view<S>& values,
                       const sliding_window_cache_options& options = {})
      : base(memory(detail::validator("sliding_window_cache"), keys, values), options) {}

  /// Number of tokens in the ring, and of rows of memory: those and the global positions.
  using base::capacity, base::rows, base::bytes;
};

namespace detail {

/// Checks the window of a call over a cache of all tokens.
inline void check_window_of_call(const validator& check, const sliding_window_cache_options& window,
                                 const attention_shape& shape) {
  check_window(check, window, shape.batch);
  stream_window{window.left, window.dilation}.check_heads(check, shape.heads);
}
/// Attends it: the cache has the tokens of the queries. Many of them share the keys that sliding_window packs.
template <class Call, class Inside>
void attend_cache_window(Call& call, const Inside& cache, const sliding_window_cache_options& window) {
  const auto cached = call.over(cache.keys(), cache.values(), cache.pages());
  const auto lists = call.exec.workspace([&](arena& memory) { return global_lists::layout(memory, window); });
  const stream_window seen{(std::min)(window.left, furthest_position), window.dilation, lists->set(window)};
  all_tokens tokens{seen, call.lengths};
  if constexpr (requires { cached.key_rows(0, 0).row(0); }) {
    tokens.in_place = false;
    idx_t taken = 0;
    const attention_shape& s = call.shape;
    for (idx_t n = 0; n < s.batch * s.heads; ++n) taken += tokens.takes(n / s.heads, n % s.heads);
    if (taken < s.batch * s.heads) {
      sliding_window_options<typename decltype(call.q)::value_type> options;
      options.causal = true, options.left = window.left, options.dilation = window.dilation;
      options.global_positions = window.global_positions, options.global_counts = window.global_counts;
      run_sliding_window(cached, options, window_in_place);
    }
    if (taken == 0 && s.batch * s.heads > 0) return;
  }
  attend_stream_window(cached, tokens);
}

/// Tokens of a ring, which takes those of the chunk one by one.
template <class S, class C>
struct ring_tokens {
  static constexpr bool adjacent_globals = true;

  window_tokens<C>& cache;
  const tensor_view<const S>&k_new, v_new;
  stream_window window = cache.window();

  idx_t before(idx_t b) const { return cache.length(b); }
  idx_t ring() const { return cache.capacity(); }
  idx_t global_row(idx_t g, idx_t) const { return ring() + g; }
  void put(idx_t b, idx_t kv, idx_t t) const { cache.put(k_new, v_new, b, kv, t); }
  bool takes(idx_t, idx_t) const { return true; }
};
template <class Call, class C>
void attend_ring(Call& call, window_tokens<C>& cache) {
  using S = typename decltype(call.q)::value_type;
  attend_stream_window(call.over(cache.keys(), cache.values(), {}), ring_tokens<S, C>{cache, call.k, call.v});
}

}  // namespace detail

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the
/// file.
template <detail::cache_element C, viewable Q, viewable K, viewable V, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_step(sliding_window_cache<C>& cache, const Q& q, const K& k, const V& v, O&& out,
                         Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call =
      detail::checked_call<sliding_window_step_options>("sliding_window_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  tokens.window().check_heads(call.check, call.shape.heads);
  call.lengths.given_queries = call.options.lengths;
  detail::with_rotated_tokens(call, tokens, [&] {
    // By an exception of score, or for want of memory, the ring has lost the tokens that the chunk replaced.
    detail::do_or_undo([&] { detail::attend_ring(call, tokens); }, [&] { cache.reset(); });
  });
  tokens.advance(call.shape.queries, call.options.lengths);
}

/// The same over a kv_cache or paged_cache, which keeps all tokens and reads those of the window: for models that mix
/// windows with full attention in one pool, and for sequences that are truncated.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_step(Cache& cache, const sliding_window_cache_options& window, const Q& q, const K& k, const V& v,
                         O&& out, Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call =
      detail::checked_call<sliding_window_step_options>("sliding_window_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  detail::check_window_of_call(call.check, window, call.shape);
  detail::cache_step(call, tokens, [&] { detail::attend_cache_window(call, tokens, window); });
}

/// The same for tokens that the cache has already: nothing is appended, and the queries q [B, H, n, D] are at the last
/// n positions of their item (full_softmax_cached). `rotary` is refused: q is used as it is.
template <detail::key_value_cache Cache, viewable Q, viewable O,
          class Options = sliding_window_step_options<element_of<const Q&>>, class Score = detail::no_score>
void sliding_window_cached(const Cache& cache, const sliding_window_cache_options& window, const Q& q, O&& out,
                           Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  const auto& tokens = detail::step_access::of(cache);
  auto call = detail::checked_cached_call<sliding_window_step_options>("sliding_window_cached", tokens, q, out, options,
                                                                       score, exec);
  detail::check_window_of_call(call.check, window, call.shape);
  detail::attend_cache_window(call, tokens, window);
}

}}  // namespace attn::ATTN_ISA
