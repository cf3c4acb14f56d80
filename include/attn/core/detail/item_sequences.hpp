// attn: batch items as independent sequences, of any number of tokens each: what caches and states offer for them, and
// what they keep for the steps.
#pragma once

#include <attn/core/state_extents.hpp>

#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The lengths of the items: the base of what caches and states have inside.
class sequence_items {
 public:
  /// Number of tokens so far: of the longest item, or of one.
  idx_t tokens() const { return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end()); }
  idx_t tokens(idx_t item) const { return length(check_item(item)); }
  /// tokens(b) of every item.
  std::span<const idx_t> lengths() const { return lengths_; }
  idx_t batch() const { return static_cast<idx_t>(lengths_.size()); }

  /// Tokens of the longest item after a chunk of `count`, of which item b takes given[b] or all.
  idx_t tokens_after(idx_t count, std::span<const idx_t> given) const {
    idx_t most = 0;
    for (idx_t b = 0; b < batch(); ++b) most = (std::max)(most, length(b) + taken_of(b, count, given));
    return most;
  }
  static idx_t taken_of(idx_t b, idx_t count, std::span<const idx_t> given) {
    return given.empty() ? count : given[static_cast<std::size_t>(b)];
  }
  void advance(idx_t count, std::span<const idx_t> given) {
    for (idx_t b = 0; b < batch(); ++b) length(b) += taken_of(b, count, given);
  }
  idx_t& length(idx_t b) { return lengths_[static_cast<std::size_t>(b)]; }
  idx_t length(idx_t b) const { return lengths_[static_cast<std::size_t>(b)]; }
  idx_t check_item(idx_t b) const {
    if (b < 0 || b >= batch()) validator(name_).fail({"a batch item from 0 to ", batch() - 1}, b);
    return b;
  }

 protected:
  explicit sequence_items(const char* name) : name_(name) {}

  const char* name_;
  std::vector<idx_t> lengths_;
};

/// The public interface of caches and states. Inside is for the steps alone; it has, besides sequence_items,
///   void reset(idx_t b);                    item b begins a new sequence
///   void copy(idx_t from, idx_t to);        the content of another item, before its length
///   void exchange(idx_t a, idx_t b);        the content of both, before their lengths
template <class Inside>
class item_sequences : protected Inside {
  friend struct step_access;

 public:
  using Inside::tokens, Inside::lengths, Inside::batch;

  /// Every item, or one, begins a new sequence; the memory stays.
  void reset() {
    for (idx_t b = 0; b < batch(); ++b) Inside::reset(b);
  }
  void reset(idx_t item) { Inside::reset(this->check_item(item)); }
  /// Item `to` becomes what item `from` is, to the last bit: a branch.
  void copy_item(idx_t from, idx_t to) {
    if (this->check_item(from) == this->check_item(to)) return;
    Inside::copy(from, to);
    this->length(to) = this->length(from);
  }
  /// Item n becomes what item order[n] was, for all n: the survivors of a beam search. Throws std::invalid_argument for
  /// a list of another size, or for items that do not exist.
  void reorder(list_view<idx_t> order) {
    const validator check{this->name_};
    check.one_per("order", "batch item", batch(), static_cast<idx_t>(order.size()));
    for (idx_t n : order)
      if (n < 0 || n >= batch()) check.fail({"batch items from 0 to ", batch() - 1}, n);
    // Items whose content is still needed are overwritten last, and cycles are resolved by swaps.
    std::vector<idx_t> source(order.begin(), order.end()), readers(order.size(), 0), free;
    const auto at = [](std::vector<idx_t>& list, idx_t n) -> idx_t& { return list[static_cast<std::size_t>(n)]; };
    for (idx_t n = 0; n < batch(); ++n)
      if (at(source, n) != n) ++at(readers, at(source, n));
    for (idx_t n = 0; n < batch(); ++n)
      if (at(source, n) != n && at(readers, n) == 0) free.push_back(n);
    while (!free.empty()) {
      const idx_t to = free.back(), from = std::exchange(at(source, to), to);
      free.pop_back();
      copy_item(from, to);
      if (--at(readers, from) == 0 && at(source, from) != from) free.push_back(from);
    }
    for (idx_t n = 0; n < batch(); ++n)
      for (idx_t to = n; at(source, to) != to;) {
        const idx_t from = std::exchange(at(source, to), to);
        if (from == n) break;
        Inside::exchange(to, from);
        std::swap(this->length(to), this->length(from));
        to = from;
      }
  }

 protected:
  using Inside::Inside;
};

/// The way from a cache or state to its inside, for the steps that feed it, and from a pool to its memory.
struct step_access {
  template <class Inside>
  static Inside& of(item_sequences<Inside>& x) {
    return x;
  }
  template <class Inside>
  static const Inside& of(const item_sequences<Inside>& x) {
    return x;
  }
  template <class Pool>
  static auto& memory_of(Pool& pool) {
    return pool.memory_;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
