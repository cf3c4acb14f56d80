// attn: selected_keys.hpp query by query, with the rows of its keys read where they lie: for lists of single keys, and
// for steps over any cache.
//
// Not by the sparse driver, whose kernel packs keys: the keys of one query serve the query heads of one list alone, and
// packing them takes longer than attending them. The streaming kernel (streaming.hpp) reads rows in place, for up to
// four query heads at once. Measured on Zen 4, 8 heads of 64, 4096 tokens: with lists of 256 keys for each head 0.07 of
// the sparse driver's time, with lists of 128 that 8 heads share 0.03; with blocks of 8 keys 1.05, and of 16 more.
#pragma once

#include <attn/softmax/detail/selected_lists.hpp>
#include <attn/softmax/detail/stream_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class C = S>
struct selected_rows : stream_plan<S, Score, C> {
  using base = stream_plan<S, Score, C>;
  using base::in, base::shape;
  static constexpr idx_t most_heads = 16;  // that are attended together: those of a larger group are divided

  const selected_lists& lists;

  idx_t longest() const { return (std::min)(lists.longest() * lists.block, shape.keys); }
  /// Query heads with one list that are attended together.
  idx_t together() const { return lists.per_key_head() ? (std::min)(shape.group(), most_heads) : 1; }
  idx_t heads_of_task() const { return together(); }
  idx_t queries_of_task() const { return 16; }
  idx_t seen() const { return longest(); }
  double read() const {
    const double once = static_cast<double>(longest()) * static_cast<double>(shape.queries);
    return lists.per_key_head() ? once : once * double(shape.group());
  }

  struct scratch {
    std::uint64_t* bits;
    idx_t *names, *list;  // of a query: its names, its keys
    row_list<C> keys, values;
  };
  scratch layout(arena& memory) const {
    const idx_t most = longest();
    return {.bits = lists.layout(memory), .names = memory.allocate<idx_t>(lists.longest()),
            .list = memory.allocate<idx_t>(most), .keys = row_list<C>::layout(memory, most),
            .values = row_list<C>::layout(memory, most)};
  }
  void begin_task(const scratch& s) const { lists.clear(s.bits); }
  /// The keys that query i of a head sees.
  std::span<const idx_t> list_of(idx_t b, idx_t h, idx_t i, const scratch& s) const {
    return {s.list, static_cast<std::size_t>(lists.keys_of(b, h, i, in.end_of(b, i), s.bits, s.names, s.list))};
  }
  template <class Take>
  void rows(idx_t b, idx_t h, idx_t i, const scratch& s, const Take& take) const {
    const std::span<const idx_t> list = list_of(b, h, i, s);
    const cache_rows<const C> k = in.key_rows(b, h / shape.group()), v = in.value_rows(b, h / shape.group());
    const auto k_rows = s.keys.of(k, list);
    const auto v_rows = s.values.of(v, list, k, k_rows);
    for (idx_t from = 0, keys = std::ssize(list); from < keys; from += stream_chunk)
      take(k_rows, v_rows, {0, 1, list.data()}, from, (std::min)(from + stream_chunk, keys), keys);
  }
};

/// Attends the call with the rows of keys in place.
template <class S, class Score, class C>
void run_selected_keys_step(const softmax_call<S, Score, C>& call, const selected_lists& lists) {
  attend_streamed(call, selected_rows<S, Score, C>{{call}, lists});
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_selected_keys_step(const softmax_call<S, no_score>&, const selected_lists&)
#include <attn/core/detail/compiled.hpp>
