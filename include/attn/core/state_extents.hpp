// attn: the extents a state or cache is made for.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});
#pragma once

#include <attn/core/detail/attention_shape.hpp>

#include <vector>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a state that keeps keys and values, or sums over their channels.
struct state_extents {
  idx_t batch = 1;
  /// Key heads.
  idx_t heads = 1;
  /// Of keys.
  idx_t dim = 0;
  /// Of values; that of keys unless given.
  idx_t value_dim = -1;
};

/// How many tokens of a chunk a cache or state takes: of item b the first lengths[b]; all unless given.
struct append_options {
  list_view<idx_t> lengths{};
};

/// Extents of a state of kernel attention: linear_state, performer_state, rfa_state.
struct kernel_state_extents {
  idx_t batch = 1;
  /// Key heads; query heads where features, decay or gate differ between those.
  idx_t heads = 1;
  /// Features of a token: those of the map of linear, or the rows of W of performer and rfa.
  idx_t features = 0;
  idx_t value_dim = 0;
  /// Tokens that rollback can undo.
  idx_t keep = 0;
};

namespace detail {

/// The same with value_dim filled in. Throws std::invalid_argument for extents that are negative or beyond memory.
inline state_extents check_state_extents(const validator& check, state_extents e) {
  if (e.value_dim == -1) e.value_dim = e.dim;
  check.at_least("batch", 0, e.batch);
  check.at_least("heads", 0, e.heads);
  check.at_least("dim", 0, e.dim);
  check.at_least("value_dim", 0, e.value_dim);
  check.fits("batch items", {e.batch, sizeof(idx_t)});
  check.fits("batch * heads * dims", {e.batch, e.heads, std::max(e.dim, e.value_dim)});
  return e;
}

/// Reorders what batch items have: item n becomes what item order[n] was. copy(from, to) overwrites an item, exchange(a,
/// b) swaps two; items whose content is still needed are overwritten last, and cycles are resolved by swaps.
template <class Copy, class Exchange>
void reorder_items(const validator& check, std::span<const idx_t> order, idx_t batch, const Copy& copy,
                   const Exchange& exchange) {
  check.one_per("order", "batch item", batch, static_cast<idx_t>(order.size()));
  for (idx_t n : order)
    if (n < 0 || n >= batch) check.fail({"batch items from 0 to ", batch - 1}, n);
  std::vector<idx_t> source(order.begin(), order.end()), readers(order.size(), 0), free;
  const auto at = [](std::vector<idx_t>& list, idx_t n) -> idx_t& { return list[static_cast<std::size_t>(n)]; };
  for (idx_t n = 0; n < batch; ++n)
    if (at(source, n) != n) ++at(readers, at(source, n));
  for (idx_t n = 0; n < batch; ++n)
    if (at(source, n) != n && at(readers, n) == 0) free.push_back(n);
  while (!free.empty()) {
    const idx_t to = free.back(), from = std::exchange(at(source, to), to);
    free.pop_back();
    copy(from, to);
    if (--at(readers, from) == 0 && at(source, from) != from) free.push_back(from);
  }
  for (idx_t n = 0; n < batch; ++n)
    for (idx_t to = n; at(source, to) != to;) {
      const idx_t from = std::exchange(at(source, to), to);
      if (from == n) break;
      exchange(to, from);
      to = from;
    }
}

/// Batch items as independent sequences, of any number of tokens each.
class sequence_items {
 public:
  /// Number of tokens so far: of the longest item, or of one.
  idx_t tokens() const { return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end()); }
  idx_t tokens(idx_t item) const { return length(check_item(item)); }
  /// tokens(b) of every item.
  std::span<const idx_t> lengths() const { return lengths_; }
  idx_t batch() const { return static_cast<idx_t>(lengths_.size()); }

  /// For the step: tokens of the longest item after a chunk of `count`, of which item b takes given[b] or all.
  idx_t tokens_after(idx_t count, std::span<const idx_t> given) const {
    idx_t most = 0;
    for (idx_t b = 0; b < batch(); ++b) most = std::max(most, length(b) + taken_of(b, count, given));
    return most;
  }

 protected:
  explicit sequence_items(const char* name) : name_(name) {}

  static idx_t taken_of(idx_t b, idx_t count, std::span<const idx_t> given) {
    return given.empty() ? count : given[static_cast<std::size_t>(b)];
  }
  idx_t& length(idx_t b) { return lengths_[static_cast<std::size_t>(b)]; }
  idx_t length(idx_t b) const { return lengths_[static_cast<std::size_t>(b)]; }
  idx_t check_item(idx_t b) const {
    if (b < 0 || b >= batch()) validator(name_).fail({"a batch item from 0 to ", batch() - 1}, b);
    return b;
  }

  const char* name_;
  std::vector<idx_t> lengths_;
};

/// The extents of a cache of tokens.
class token_state : public sequence_items {
 public:
  /// Key heads.
  idx_t heads() const { return extents_.heads; }
  idx_t dim() const { return extents_.dim; }
  idx_t value_dim() const { return extents_.value_dim; }

  /// For the step: checks k and v of a call, of which item b takes the first given[b] tokens, or all.
  void check_tokens(const validator& check, const memory_layout& k, const memory_layout& v,
                    std::span<const idx_t> given) const {
    detail::check_tokens(check, batch(), heads(), dim(), value_dim(), k, v);
    check_length_list(check, "lengths", given, batch(), k.extents[2]);
  }

 protected:
  /// Throws std::invalid_argument for extents that are negative or beyond memory.
  token_state(const char* name, const state_extents& extents)
      : sequence_items(name), extents_(check_state_extents(validator(name), extents)) {
    lengths_.resize(static_cast<std::size_t>(extents_.batch));
  }

  void check_kept(idx_t kept, idx_t tokens) const {
    if (kept < 0 || kept > tokens) validator(name_).fail({"tokens to keep from 0 to ", tokens}, kept);
  }

  state_extents extents_;
};

}  // namespace detail
}}  // namespace attn::ATTN_ISA
