// attn: states of constant size, one for each batch item.
//
// Batch items are sequences of their own: each has its number of tokens, and a ring of keep + 1 places in memory with
// the states after its last tokens. Rollback only changes which place is the item's.
#pragma once

#include <attn/core/detail/eigen.hpp>
#include <attn/core/detail/item_sequences.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How operators see the states: the location of each.
template <class N>
struct item_memory {
  struct ring {
    idx_t place = 0, kept = 0;  // of the item's state; tokens that can be undone
  };

  N* data = nullptr;
  const ring* rings = nullptr;
  const idx_t* tokens = nullptr;  // so far
  idx_t size = 0, keep = 0;       // numbers of a place; tokens that can be undone, at most

  explicit operator bool() const { return rings != nullptr; }
  bool empty(idx_t b) const { return tokens[b] == 0; }
  /// How many of `count` tokens cannot be undone once all of them are fed: they come first.
  idx_t beyond_kept(idx_t count) const { return std::max<idx_t>(0, count - keep); }
  /// Item b after it was fed `fed` tokens of `count`. Tokens that can be undone do not overwrite the state before them.
  N* at(idx_t b, idx_t fed = 0, idx_t count = 0) const {
    const idx_t place = rings[b].place + std::max<idx_t>(0, fed - beyond_kept(count));
    return data + (b * (keep + 1) + (place > keep ? place - keep - 1 : place)) * size;
  }
};

/// Up to this many tokens a step computes them one by one; for more, a chunk is faster.
inline constexpr idx_t few_tokens = 3;

/// The base of what such states have inside. State::clear(b) makes the place of item b that before the first token.
template <class State, class N>
class item_state : public sequence_items {
 public:
  std::size_t bytes() const { return memory_.size() * sizeof(N); }

  void reset(idx_t b) {
    length(b) = 0;
    ring(b).kept = 0;
    static_cast<State*>(this)->clear(b);
  }
  /// Only the places that can be reached: the item's, and those of the tokens that can be undone.
  void copy(idx_t from, idx_t to) {
    for (idx_t p = 0; p < places(); ++p)
      if (reached(from, p)) std::copy_n(item(from) + p * size_, size_, item(to) + p * size_);
    ring(to) = ring(from);
  }
  void exchange(idx_t a, idx_t b) {
    for (idx_t p = 0; p < places(); ++p)
      if (N* const x = item(a) + p * size_; reached(a, p) || reached(b, p))
        std::swap_ranges(x, x + size_, item(b) + p * size_);
    std::swap(ring(a), ring(b));
  }

  /// How many of the last tokens can be undone, of every item or of one: at most `keep`, none of those before a reset.
  idx_t kept() const {
    idx_t least = batch() > 0 ? keep_ : 0;
    for (const auto& r : rings_) least = (std::min)(least, r.kept);
    return least;
  }
  idx_t kept(idx_t item) const { return rings_[static_cast<std::size_t>(check_item(item))].kept; }
  /// Undoes the last m tokens of every item or of one, to the last bit. Throws std::invalid_argument for more than
  /// kept().
  void rollback(idx_t m) {
    check_undo(m, kept());
    for (idx_t b = 0; b < batch(); ++b) rollback(b, m);
  }
  void rollback(idx_t item, idx_t m) {
    check_undo(m, kept(item));
    auto& r = ring(item);
    r.place = (r.place + places() - m) % places();
    r.kept -= m;
    length(item) -= m;
  }
  /// After this, no earlier token can be undone.
  void forget_kept() {
    for (auto& r : rings_) r.kept = 0;
  }

  item_memory<N> items() const {
    return {const_cast<N*>(memory_.data()), rings_.data(), lengths_.data(), size_, keep_};
  }
  tensor_view<const N> memory() const {
    return {memory_.data(), {static_cast<idx_t>(memory_.size()), 1, 1, 1}};
  }

  /// Feeds the tokens of a chunk. Of each item, those that cannot be undone come first: all at once by at_once(lengths)
  /// if they are more than `few`. All others are fed one by one by one_by_one(first), from token first.keys(b) on, which
  /// also clears the padding. An exception leaves all items reset.
  template <class AtOnce, class OneByOne>
  void feed(const sequence_lengths& tokens, AtOnce&& at_once, OneByOne&& one_by_one, idx_t few = few_tokens) {
    const auto of = [&](idx_t count) {
      const idx_t first = items().beyond_kept(count);
      return first > few ? first : 0;
    };
    bool any_at_once = false, any_one_by_one = false;
    for (idx_t b = 0; b < batch(); ++b) {
      const idx_t count = tokens.keys(b), first = at_once_[static_cast<std::size_t>(b)] = of(count);
      any_at_once |= first > 0, any_one_by_one |= count > first;
    }
    const idx_t longest = of(tokens.full_keys);
    sequence_lengths first{longest, longest, {}, {}};
    if (!tokens.given_keys.empty()) first.given_queries = first.given_keys = at_once_;
    do_or_undo(
        [&] {
          if (any_at_once) at_once(first);
          if (any_one_by_one || !tokens.given_keys.empty()) one_by_one(first);
        },
        [&] {
          for (idx_t b = 0; b < batch(); ++b) reset(b);
        });
    for (idx_t b = 0; b < batch(); ++b) {
      auto& r = ring(b);
      const idx_t count = tokens.keys(b);
      r.place = (r.place + (std::min)(count, keep_)) % places();
      r.kept = (std::min)(r.kept + count, keep_);
      length(b) += count;
    }
  }

 protected:
  /// Throws std::invalid_argument for extents that are negative or too large. Call allocate() before anything else.
  item_state(const char* name, idx_t batch, idx_t keep) : sequence_items(name), keep_(keep) {
    const validator check{name};
    check.at_least("batch", 0, batch);
    check.at_least("keep", 0, keep);
    check.fits("kept tokens", {keep, 1});
  }
  /// Memory of `size` numbers for each item, a checked size, with all items before their first token.
  void allocate(idx_t batch, idx_t size) {
    const auto items = static_cast<std::size_t>(batch);
    size_ = size;
    memory_.resize(items * static_cast<std::size_t>(item_size()));
    rings_.resize(items), lengths_.resize(items), at_once_.resize(items);
    for (idx_t b = 0; b < batch; ++b) reset(b);
  }
  idx_t places() const { return keep_ + 1; }

 private:
  using ring_type = typename item_memory<N>::ring;
  idx_t item_size() const { return places() * size_; }
  bool reached(idx_t b, idx_t p) { return (ring(b).place - p + places()) % places() <= ring(b).kept; }
  N* item(idx_t b) { return memory_.data() + b * item_size(); }
  ring_type& ring(idx_t b) { return rings_[static_cast<std::size_t>(b)]; }
  void check_undo(idx_t m, idx_t kept) const {
    if (m < 0 || m > kept)
      validator(name_).fail({"tokens to undo from 0 to ", kept, ", those kept of the last ", keep_}, m);
  }

  idx_t keep_, size_ = 0;
  std::vector<N, Eigen::aligned_allocator<N>> memory_;
  std::vector<ring_type> rings_;
  std::vector<idx_t> at_once_;  // of a call
};

}}}  // namespace attn::ATTN_ISA::detail
