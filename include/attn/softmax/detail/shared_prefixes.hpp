// attn: batch items whose sequences begin with the same pages of a cache, which are attended together.
#pragma once

#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/execution.hpp>

#include <algorithm>
#include <numeric>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The batch items in an order where those with the same first pages are adjacent, in sets that are attended together.
struct shared_prefixes {
  idx_t* items = nullptr;   // [batch]
  idx_t* common = nullptr;  // [batch]: tokens in the first pages that item n of this order has in common with n - 1
  idx_t* first = nullptr;   // [sets + 1]: number of the first item of a set
  idx_t sets = 0, largest = 0;

  static constexpr idx_t least_common = 64;  // tokens; fewer are read as fast from the first caches

  static shared_prefixes layout(arena& memory, idx_t batch) {
    return {memory.allocate<idx_t>(batch), memory.allocate<idx_t>(batch), memory.allocate<idx_t>(batch + 1)};
  }

  /// Where kinds are, before find(): one of every batch item.
  idx_t* kinds() const { return first; }
  /// Sets of up to `most` items of one kind.
  [[gnu::noinline]] void find(const page_tables& pages, idx_t batch, idx_t most) {
    std::iota(items, items + batch, idx_t(0));
    std::fill_n(common, batch, idx_t(0));
    if (pages && batch > 1 && most > 1) {
      const idx_t* const kinds = first;
      const auto before = [&](idx_t a, idx_t b) {
        if (kinds[a] != kinds[b]) return kinds[a] < kinds[b];
        const auto &one = pages.tables[a], &other = pages.tables[b];
        const auto [x, y] = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
        if (x != one.end() && y != other.end()) return *x < *y;
        return x == one.end() && (y != other.end() || a < b);
      };
      for (idx_t n = 1; n < batch; ++n) {  // std::sort is 4 KB of code in every program
        idx_t* place = items + n;
        const idx_t item = *place;
        for (idx_t low = 0, high = n; low < high;) {
          const idx_t middle = (low + high) / 2;
          before(item, items[middle]) ? high = middle : low = middle + 1;
          place = items + low;
        }
        std::copy_backward(place, items + n, items + n + 1);
        *place = item;
      }
      for (idx_t n = 1; n < batch; ++n) {
        const auto &a = pages.tables[items[n - 1]], &b = pages.tables[items[n]];
        if (kinds[items[n - 1]] == kinds[items[n]])
          common[n] = (std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin()) * pages.page_rows;
      }
    }
    sets = largest = 0;
    for (idx_t n = 0; n < batch; ++n) {
      if (sets == 0 || common[n] < least_common || n - first[sets - 1] == most) first[sets++] = n;
      largest = (std::max)(largest, n + 1 - first[sets - 1]);
    }
    first[sets] = batch;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
