// attn: the inside of sliding_window_cache (sliding_window_step.hpp): a ring, and the global positions.
#pragma once

#include <attn/core/detail/cached_sequences.hpp>
#include <attn/softmax/detail/global_positions.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What the queries of a stream see: `left` keys before their own, `dilation` apart, and the global positions.
struct stream_window {
  idx_t left = 0;
  std::span<const idx_t> dilations{};
  global_lists globals{};

  bool one_dilation() const { return dilations.size() <= 1; }
  idx_t dilation(idx_t query_head) const {
    return (std::min)(step_of_head(dilations, query_head), furthest_position);  // a larger one reaches no key either
  }
  void check_heads(const validator& check, idx_t query_heads) const {
    if (!one_dilation()) check.equal("query heads = dilations of the cache", std::ssize(dilations), query_heads);
  }
};

template <class S>
class window_tokens : public cached_tokens {
  static_assert(row_format<S>::tail == 0,
                "attn: a sliding_window_cache has no elements of attn::int4 or attn::int8_channels; give the window of "
                "a step over a kv_cache or paged_cache");

 public:
  using value_type = S;

  /// In memory without rows, which becomes the cache's own, or in the caller's.
  template <class Options>
  window_tokens(kv_memory<S> memory, const Options& options)
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
  bool rotated() const { return memory_.rotated(); }
  static page_tables pages() { return {}; }
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

}}}  // namespace attn::ATTN_ISA::detail
