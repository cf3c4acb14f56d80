// attn: the global positions of sliding_window: keys that every query sees, queries that see every key.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/execution.hpp>

#include <algorithm>
#include <span>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Those of a batch item: ascending, each once.
struct global_list {
  std::span<const idx_t> positions{};

  bool empty() const { return positions.empty(); }
  const idx_t* data() const { return positions.data(); }
  idx_t operator[](idx_t g) const { return positions[static_cast<std::size_t>(g)]; }
  bool contains(idx_t position) const { return std::binary_search(positions.begin(), positions.end(), position); }
  /// How many are before `end`.
  idx_t before(idx_t end) const { return std::lower_bound(positions.begin(), positions.end(), end) - positions.begin(); }
};

/// Those of all batch items, from options that give them: one list for all of them, or one for each.
struct global_lists {
  idx_t lists = 0, most = 0;
  idx_t *positions = nullptr, *counts = nullptr;  // [lists][most], [lists]

  global_list operator()(idx_t b) const {
    if (lists == 0) return {};
    const idx_t n = lists == 1 ? 0 : b;
    return {{positions + n * most, static_cast<std::size_t>(counts[n])}};
  }

  /// Without memory.
  template <class Options>
  static global_lists sizes(const Options& options) {
    const auto &all = options.global_positions, &of_items = options.global_counts;
    if (all.empty()) return {};
    if (of_items.empty()) return {1, std::ssize(all)};
    return {std::ssize(of_items), *std::max_element(of_items.begin(), of_items.end())};
  }
  template <class Options>
  static global_lists layout(arena& memory, const Options& options) {
    global_lists all = sizes(options);
    all.positions = memory.allocate<idx_t>(all.lists * all.most);
    all.counts = memory.allocate<idx_t>(all.lists);
    return all;
  }
  /// Sorts them into the memory.
  template <class Options>
  const global_lists& set(const Options& options) const {
    const idx_t* from = options.global_positions.data();
    for (idx_t n = 0; n < lists; ++n) {
      const idx_t given = options.global_counts.empty() ? most : options.global_counts[static_cast<std::size_t>(n)];
      idx_t *const list = positions + n * most, *const end = std::copy_n(from, given, list);
      if (!std::is_sorted(list, end)) std::sort(list, end);
      counts[n] = std::unique(list, end) - list;
      from += given;
    }
    return *this;
  }
};

/// Checks a window and its global positions.
template <class Options>
void check_window(const validator& check, const Options& options, idx_t batch) {
  check.at_least("left", 0, options.left);
  for (idx_t d : options.dilation) check.at_least("dilation", 1, d);
  for (idx_t position : options.global_positions) check.at_least("global positions", 0, position);
  if (options.global_counts.empty()) return;
  check.one_per("global_counts", "batch item", batch, std::ssize(options.global_counts));
  idx_t all = 0;
  for (idx_t count : options.global_counts) {
    check.at_least("global counts", 0, count);
    all += (std::min)(count, std::ssize(options.global_positions) + 1);
  }
  check.equal("sum of global_counts = global positions", std::ssize(options.global_positions), all);
}

}}}  // namespace attn::ATTN_ISA::detail
