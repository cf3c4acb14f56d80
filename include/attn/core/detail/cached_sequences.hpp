// attn: sequences of cached keys and values: what all caches of tokens share.
#pragma once

#include <attn/core/detail/item_sequences.hpp>
#include <attn/core/detail/kv_memory.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The base of what caches have inside, by which a step feeds them:
///   using value_type = S;
///   void check_tokens(check, k, v, given) const;    checks the tokens of a step, all or of item b the first given[b]
///   void list_memory(call_views&) const;            which no view of a call may overlap
///   void append(k, v, given);                       checked tokens; an exception leaves all as it was
///   void cut(idx_t b, idx_t tokens);                keeps the first tokens of item b, where a cache can
///   void keep(idx_t b, positions, idx_t first);     keeps those at rising positions[n], which are n for n < first
class cached_tokens : public sequence_items {
 public:
  /// Key heads.
  idx_t heads() const { return extents_.heads; }
  idx_t dim() const { return extents_.dim; }
  idx_t value_dim() const { return extents_.value_dim; }

  void check_shapes(const validator& check, const memory_layout& k, const memory_layout& v,
                    std::span<const idx_t> given) const {
    detail::check_tokens(check, batch(), heads(), dim(), value_dim(), k, v);
    check_length_list(check, "lengths", given, batch(), k.extents[2]);
  }
  /// put(b, h, t) for every token of a chunk, which then are counted.
  template <class Put>
  void put_all(idx_t count, std::span<const idx_t> given, Put&& put) {
    for (idx_t b = 0; b < batch(); ++b)
      for (idx_t h = 0; h < heads(); ++h)
        for (idx_t t = 0; t < taken_of(b, count, given); ++t) put(b, h, t);
    advance(count, given);
  }

 protected:
  /// Throws std::invalid_argument for extents that are negative or beyond memory.
  cached_tokens(const char* name, const state_extents& extents)
      : sequence_items(name), extents_(check_state_extents(validator(name), extents)) {
    lengths_.resize(static_cast<std::size_t>(extents_.batch));
  }

  state_extents extents_;
};

/// Appends checked tokens, which are forgotten with this object unless keep() was called: an exception undoes a step.
template <class Inside>
class appended_tokens {
 public:
  template <class E>
  appended_tokens(Inside& cache, const tensor_view<const E>& k, const tensor_view<const E>& v,
                  std::span<const idx_t> given)
      : cache_(cache), count_(k.extent(2)), given_(given) {
    cache.append(k, v, given);
  }
  ~appended_tokens() {
    for (idx_t b = 0; b < cache_.batch() && !kept_; ++b)
      cache_.cut(b, cache_.length(b) - cache_.taken_of(b, count_, given_));
  }
  appended_tokens(const appended_tokens&) = delete;
  appended_tokens& operator=(const appended_tokens&) = delete;

  void keep() { kept_ = true; }

 private:
  Inside& cache_;
  idx_t count_;
  std::span<const idx_t> given_;
  bool kept_ = false;
};

/// Appends checked tokens and attends. If that throws, the tokens are forgotten.
template <class Inside, class E, class Attend>
void append_and(Inside& cache, const tensor_view<const E>& k, const tensor_view<const E>& v,
                std::span<const idx_t> given, Attend&& attend) {
  appended_tokens appended(cache, k, v, given);
  attend();
  appended.keep();
}

/// The public interface of caches: item_sequences, and what follows from append() and cut().
template <class Inside>
class cached_sequences : public item_sequences<Inside> {
 public:
  using Inside::heads, Inside::dim, Inside::value_dim, Inside::tokens, Inside::batch;

  /// Forgets all but the first `count` tokens of every item, or of one; the memory stays.
  void truncate(idx_t count)
    requires requires(Inside& x) { x.cut(count, count); }
  {
    check_kept(count, tokens());
    for (idx_t b = 0; b < batch(); ++b) Inside::cut(b, (std::min)(count, this->length(b)));
  }
  void truncate(idx_t item, idx_t count)
    requires requires(Inside& x) { x.cut(item, count); }
  {
    check_kept(count, tokens(item));
    Inside::cut(item, count);
  }

  /// Of the tokens of an item keeps those at `positions`, which rise; token n becomes what token positions[n] was. For
  /// the accepted branch of a tree of drafts, for eviction, and for a context shift. The memory stays; pages that no
  /// sequence uses any more become free.
  ///
  /// Keys stay as they were rotated: nothing is rotated again. A later step with `rotary` goes on at position
  /// tokens(item), which is right where tokens were rotated to the places they have now, as those of a branch of
  /// drafts; otherwise give it first_position or positions.
  ///
  /// With std::int8_t the keys of a block of 16 stay as they are, to the bit, where one block had them before. Of other
  /// blocks, those that come from another block than the first one are rounded once more, by at most 1/254 of their
  /// largest number, or of their largest difference from the block's reference, if that is smaller. With int4 and
  /// int8_channels moved tokens are bfloat16 until their block is full, then rounded once more with the block.
  ///
  /// Cost     the tokens after the first one that is left out are read and written once, as by append, in place; a
  ///          paged_cache moves pages whose tokens stay together, also shared ones, by their numbers alone.
  ///          multipole_cache clusters the segments of those tokens again in the next step or append.
  /// Throws   std::invalid_argument for positions that fall, repeat, or are not those of tokens, for items that do not
  ///          exist, and where a paged_cache, which does not write to shared pages, needs more new ones than are free;
  ///          what an allocator of pages throws is passed on. The cache is then as it was.
  void keep(idx_t item, list_view<idx_t> positions)
    requires requires(Inside& x) { x.keep(item, positions, item); }
  {
    const validator check{this->name_};
    const idx_t all = tokens(item), kept = std::ssize(positions);
    idx_t first = 0, least = 0;
    for (idx_t p : positions) {
      if (p < 0 || p >= all) check.fail({"positions to keep of the ", all, " tokens of item ", item}, p);
      if (p < least) check.fail({"positions to keep that rise, one from ", least, " on"}, p);
      if (p == first) ++first;
      least = p + 1;
    }
    if (first == kept) return Inside::cut(item, kept);
    Inside::keep(item, positions, first);
  }

  /// Appends copies of the tokens k [B, Hkv, n, D] and v [B, Hkv, n, Dv], of which item b takes the first lengths[b].
  /// Throws std::invalid_argument for shapes that do not fit, views of the cache itself, more tokens than there is room
  /// for in the caller's memory or in free pages, or numbers beyond those of the cache's elements, before anything
  /// changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v, const append_options& options = {}) {
    using E = element_of<const K&>;
    check_stores<typename Inside::value_type, E>();
    const tensor_view<const E> keys = as_view(k), values = as_view(v);
    check_append(keys, values, options.lengths);
    Inside::append(keys, values, options.lengths);
  }

 protected:
  using item_sequences<Inside>::item_sequences;

  void check_kept(idx_t kept, idx_t most) const {
    if (kept < 0 || kept > most) validator(this->name_).fail({"tokens to keep from 0 to ", most}, kept);
  }
  template <class E>
  void check_append(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> given) const {
    call_views views(this->name_);
    this->check_tokens(views, k, v, given);
    views.read("k", k), views.read("v", v);
    this->list_memory(views);
  }
};

/// All tokens so far, in memory that grows or is the caller's: the inside of kv_cache, and of caches that keep more.
template <class S>
class kv_tokens : public cached_tokens {
 public:
  using value_type = S;

  kv_tokens(const char* name, const state_extents& extents, const key_storage& storage = {})
      : cached_tokens(name, extents), memory_(validator(name), extents_, storage) {}
  kv_tokens(const char* name, kv_memory<S> given, std::span<const idx_t> lengths)
      : cached_tokens(name, given.extents()), memory_(std::move(given)) {
    check_length_list(validator(name), "lengths", lengths, batch(), capacity());
    std::copy(lengths.begin(), lengths.end(), lengths_.begin());
  }

  /// A copy costs the tokens: it has as much room as they would have that came one by one, at most that of the other.
  kv_tokens(const kv_tokens& other) : cached_tokens(other), memory_(other.memory_) {
    if (memory_.given()) return;
    memory_.grow(validator(name_), (std::min)(other.capacity(), std::max<idx_t>(16, 2 * tokens())), {});
    copy_items(other);
  }
  kv_tokens(kv_tokens&&) noexcept = default;
  kv_tokens& operator=(const kv_tokens& other) {
    if (!memory_.has_room_of(other.memory_, other.tokens())) return *this = kv_tokens(other);
    static_cast<cached_tokens&>(*this) = other;
    if (this != &other) copy_items(other);
    return *this;
  }
  kv_tokens& operator=(kv_tokens&&) noexcept = default;

  idx_t capacity() const { return memory_.rows(); }
  std::size_t bytes() const { return memory_.bytes(); }
  void reserve(idx_t tokens) {
    const validator check{name_};
    check.at_least("tokens to reserve", 0, tokens);
    check_room(check, tokens);
    if (tokens > capacity()) memory_.grow(check, tokens, lengths_);
  }
  tensor_view<const S> keys() const { return memory_.keys(tokens()); }
  tensor_view<const S> values() const { return memory_.values(tokens()); }
  bool values_in_keys() const { return memory_.values_in_keys(); }
  bool rotated() const { return memory_.rotated(); }
  page_tables pages() const { return {}; }

  template <class E>
  void check_tokens(const validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> given) const {
    check_shapes(check, k, v, given);
    check_room(check, tokens_after(k.extent(2), given));
    memory_.check_tokens(check, k, v, given);
  }
  void list_memory(call_views& views) const { memory_.list_memory(views); }
  template <class E>
  void append(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> given) {
    const idx_t most = tokens_after(k.extent(2), given);
    if (most > capacity()) reserve((std::max)({most, 2 * capacity(), idx_t(16)}));
    put_all(k.extent(2), given, [&](idx_t b, idx_t h, idx_t t) { memory_.put(k, v, b, h, t, b, length(b) + t); });
  }
  void cut(idx_t b, idx_t tokens) { length(b) = tokens; }
  void keep(idx_t b, std::span<const idx_t> positions, idx_t first) {
    memory_.begin_moves(b, length(b));
    for (idx_t n = first; n < std::ssize(positions); ++n) memory_.move(b, positions[static_cast<std::size_t>(n)], b, n);
    length(b) = std::ssize(positions);
  }
  void reset(idx_t b) { length(b) = 0; }
  void copy(idx_t from, idx_t to) { memory_.copy(from, to, length(from)); }
  void exchange(idx_t a, idx_t b) { memory_.exchange(a, b, (std::max)(length(a), length(b))); }

 private:
  void check_room(const validator& check, idx_t tokens) const {
    if (memory_.given() && tokens > capacity())
      check.fail({"tokens up to the ", capacity(), " there is room for"}, tokens);
  }

  void copy_items(const kv_tokens& other) {
    for (idx_t b = 0; b < batch(); ++b) memory_.copy_from(other.memory_, b, b, length(b));
  }

  kv_memory<S> memory_;
};

/// kv_cache, paged_cache: all tokens of all items.
template <class Cache>
concept key_value_cache = requires(Cache& cache) {
  typename Cache::value_type;
  { step_access::of(cache).pages() } -> std::same_as<page_tables>;
  step_access::of(cache).cut(0, 0);
};

}}}  // namespace attn::ATTN_ISA::detail
