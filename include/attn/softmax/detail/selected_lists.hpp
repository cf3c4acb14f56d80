// attn: the lists of selected_keys.hpp as its kernels read them: what the list of a query names, ascending, each once,
// whatever its order. Lists that ascend already are copied; others go through a set of bits, in time linear in their
// length and in the range they name.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/packing.hpp>
#include <attn/core/execution.hpp>
#include <attn/core/index_view.hpp>

#include <bit>

namespace attn { inline namespace ATTN_ISA { namespace detail {

struct selected_lists {
  index_view indices{};
  idx_t block = 1;            // keys of a name; a size beyond the length means the same as the length
  idx_t keys = 0, names = 0;  // of the arrays: keys, and how many names they have
  idx_t heads = 0, group = 1; // query heads, and those of a key head

  idx_t longest() const { return (std::min)(indices.extent(3), names); }
  /// Whether the query heads of a key head have one list.
  bool per_key_head() const { return group == 1 || indices.extent(1) != heads; }
  /// The list of a query head.
  idx_t list_of(idx_t head) const {
    const idx_t lists = indices.extent(1);
    return lists == 1 ? 0 : lists == heads ? head : head / group;
  }

  /// A bit for every name. Call clear() before named_by(), which leaves them as they were.
  std::uint64_t* layout(arena& memory) const { return memory.allocate<std::uint64_t>(words()); }
  void clear(std::uint64_t* bits) const { std::fill_n(bits, words(), std::uint64_t(0)); }

  /// What query i of a head names below `end`, in `list`. Returns how many.
  idx_t named_by(idx_t b, idx_t head, idx_t i, idx_t end, std::uint64_t* bits, idx_t* list) const {
    return indices.typed([&](const auto& x) {
      if (x.extent(3) == 0) return idx_t(0);
      const auto* const entry = &x(x.extent(0) == 1 ? 0 : b, list_of(head), i, 0);
      const idx_t stride = x.stride(3), all = x.extent(3);
      if (stride == 1 && ascend(entry, all, end)) {  // as those of lightning_indexer: compilers vectorise both loops
        for (idx_t n = 0; n < all; ++n) list[n] = entry[n];
        return all;
      }
      idx_t count = 0, last = -1, n = 0;
      for (; n < all; ++n) {
        const idx_t name = entry[n * stride];
        if (name < 0 || name >= end) continue;
        if (name <= last) return by_bits(entry, stride, all, end, bits, list);
        list[count++] = last = name;
      }
      return count;
    });
  }
  /// The keys that it sees below `end`, in `list`. Returns how many. `scratch` has room for longest().
  idx_t keys_of(idx_t b, idx_t head, idx_t i, idx_t end, std::uint64_t* bits, idx_t* scratch, idx_t* list) const {
    if (block == 1) return named_by(b, head, i, end, bits, list);
    const idx_t count = named_by(b, head, i, ceil_div(end, block), bits, scratch);
    idx_t n = 0;
    for (idx_t m = 0; m < count; ++m)
      for (idx_t j = scratch[m] * block; j < (std::min)((scratch[m] + 1) * block, end); ++j) list[n++] = j;
    return n;
  }

 private:
  idx_t words() const { return names / 64 + 1; }

  /// Whether all entries are names below `end`, ascending.
  template <class Index>
  static bool ascend(const Index* entry, idx_t all, idx_t end) {
    if (entry[0] < 0 || entry[all - 1] >= end) return false;
    idx_t descents = 0;
    for (idx_t n = 1; n < all; ++n) descents += entry[n] <= entry[n - 1];
    return descents == 0;
  }

  template <class Index>
  [[gnu::noinline]] static idx_t by_bits(const Index* entry, idx_t stride, idx_t all, idx_t end, std::uint64_t* bits,
                                           idx_t* list) {
    idx_t low = end, high = -1, count = 0;
    for (idx_t n = 0; n < all; ++n) {
      const idx_t name = entry[n * stride];
      if (name < 0 || name >= end) continue;
      bits[name / 64] |= std::uint64_t(1) << name % 64;
      low = (std::min)(low, name), high = (std::max)(high, name);
    }
    for (idx_t word = low / 64; high >= 0 && word <= high / 64; ++word)
      for (std::uint64_t set = std::exchange(bits[word], 0); set != 0; set &= set - 1)
        list[count++] = word * 64 + std::countr_zero(set);
    return count;
  }
};

/// The lists of a call over arrays of so many keys. Rows of padding may hold anything; `beyond`: there may be names of
/// keys to come.
inline selected_lists check_lists(call_views& views, const attention_shape& s, const sequence_lengths& lengths,
                                  const index_view& indices, idx_t block, bool beyond = false) {
  views.at_least("block", 1, block);
  const idx_t names = ceil_div(s.keys, block);
  indices.typed([&](const auto& x) {
    views.read("indices", x, {{"index batch", s.batch, or_one}});
    if (const idx_t lists = x.extent(1); lists != s.heads && lists != s.kv_heads && lists != 1)
      views.fail({"index heads 1, ", s.kv_heads, " or ", s.heads}, lists);
    views.equal("index rows = query length", s.queries, x.extent(2));
    for (idx_t b = 0; b < x.extent(0); ++b) {
      idx_t rows = 0;
      for (idx_t item = b; item < (x.extent(0) == 1 ? s.batch : b + 1); ++item)
        rows = (std::max)(rows, lengths.queries(item));
      for (idx_t h = 0; h < x.extent(1); ++h)
        for (idx_t i = 0; i < rows; ++i) {
          idx_t low = -1, high = -1;
          for (idx_t n = 0; n < x.extent(3); ++n) {
            const idx_t name = x(b, h, i, n);
            low = (std::min)(low, name), high = (std::max)(high, name);
          }
          if (low < -1 || (high >= names && !beyond))
            views.fail({block == 1 ? "keys from -1 to " : "blocks from -1 to ", names - 1}, low < -1 ? low : high);
        }
    }
  });
  return {.indices = indices, .block = std::clamp<idx_t>(block, 1, std::max<idx_t>(1, s.keys)), .keys = s.keys,
          .names = names, .heads = s.heads, .group = std::max<idx_t>(1, s.group())};
}

}}}  // namespace attn::ATTN_ISA::detail
