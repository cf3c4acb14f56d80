// attn: selected_keys.hpp query by query, with the rows of its keys read where they lie: for lists of single keys, and
// for steps over any cache.
//
// Not by the sparse driver, whose kernel packs keys: the keys of one query serve the query heads of one list alone, and
// packing them takes longer than attending them. The streaming kernel (streaming.hpp) reads rows in place, for up to
// four query heads at once. Measured on Zen 4, 8 heads of 64, 4096 tokens: with lists of 256 keys for each head 0.07 of
// the sparse driver's time, with lists of 128 that 8 heads share 0.03; with blocks of 8 keys 1.05, and of 16 more.
#pragma once

#include <attn/softmax/detail/selected_lists.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The rows of keys or values of one list.
template <class C>
struct row_list {
  const C** at;

  static row_list layout(arena& memory, idx_t most) { return {memory.allocate<const C*>(most)}; }
  listed_rows<C> of(const cache_rows<const C>& x, std::span<const idx_t> list) const {
    idx_t n = 0;
    for (const idx_t j : list) at[n++] = x.row(j);
    return {at, n, x.cols, x.col_stride};
  }
};
template <>
struct row_list<std::int8_t> {
  static row_list layout(arena&, idx_t) { return {}; }
  listed_codes of(const cache_rows<const std::int8_t>& x, std::span<const idx_t> list) const {
    return {&x, list.data(), std::ssize(list), x.all.cols};
  }
};

template <class S, class Score, class C = S>
struct selected_rows {
  using T = compute_type<S>;
  static constexpr idx_t most_heads = 16;    // that are attended together: those of a larger group are divided
  static constexpr idx_t queries_of_task = 16;

  const softmax_call<S, Score, C>& in;
  const selected_lists& lists;
  const attention_shape& shape = in.shape;

  idx_t longest() const { return std::min(lists.longest() * lists.block, shape.keys); }
  /// Query heads with one list that are attended together.
  idx_t together() const { return lists.per_key_head() ? std::min(shape.group(), most_heads) : 1; }

  struct scratch {
    std::uint64_t* bits;
    idx_t *names, *list;  // of a query: its names, its keys
    row_list<C> keys, values;
    stream_queries<T, C> queries;
    online_softmax<T> state;
    long_softmax<T> total;
  };
  scratch layout(arena& memory) const {
    const idx_t rows = together(), most = longest();
    return {.bits = lists.layout(memory),
            .names = memory.allocate<idx_t>(lists.longest()),
            .list = memory.allocate<idx_t>(most),
            .keys = row_list<C>::layout(memory, most),
            .values = row_list<C>::layout(memory, most),
            .queries = stream_queries<T, C>::layout(memory, rows, shape.dim, shape.dim_v),
            .state = online_softmax<T>::layout(memory, rows, shape.dim_v),
            .total = long_softmax<T>::layout(memory, rows, shape.dim_v)};
  }

  /// Query i of heads [h, h + count).
  void attend_query(idx_t b, idx_t h, idx_t count, idx_t i, scratch& s) const {
    const idx_t all = in.lengths.keys(b), end = in.causal ? std::clamp<idx_t>(i + in.shift(b) + 1, 0, all) : all;
    const idx_t keys = lists.keys_of(b, h, i, end, s.bits, s.names, s.list);
    const std::span<const idx_t> list(s.list, static_cast<std::size_t>(keys));
    const idx_t kv = h / shape.group();
    const cache_rows<const C> k(in.k, b, kv, shape.dim, true, in.pages),
        v(in.v, b, kv, shape.dim_v, in.v.data() == in.k.data(), in.pages);
    const auto k_rows = s.keys.of(k, list);
    const auto v_rows = s.values.of(v, list);
    const auto terms = for_query(in.terms.for_head(b, 0, i + in.shift(b)), i);
    s.queries.begin(in.q.slice(2, i, 1), b, h, count, 1, in.terms.query_factor());
    s.state.rows = count;
    s.state.clear();
    long_sums sums(s.state, s.total, count, stream_chunk);
    for (idx_t from = 0; from < keys; from += stream_chunk) {
      const idx_t to = std::min(from + stream_chunk, keys);
      sums.next(to - from);
      attend_stream(s.queries, k_rows, v_rows, {0, 1, list.data()}, from, to, terms, stream_limit{to, 0}, s.state,
                    keys);
    }
    sums.finish();
    for (idx_t r = 0; r < count; ++r) in.finish_row(s.state, r, b, h + r, i);
  }

  void run() const {
    const double read = static_cast<double>(longest()) * static_cast<double>(shape.queries);
    const auto limit = in.limit_threads(longest(), lists.per_key_head() ? read : read * double(shape.group()));
    const idx_t heads = together(), of_group = ceil_div(shape.group(), std::max<idx_t>(1, heads)),
                blocks = ceil_div(shape.queries, queries_of_task);
    in.exec.for_each(shape.batch * shape.kv_heads * of_group * blocks, [&](idx_t task, int worker) {
      const idx_t n = task / blocks, first = task % blocks * queries_of_task;
      const idx_t b = n / of_group / shape.kv_heads, kv = n / of_group % shape.kv_heads,
                  h = kv * shape.group() + n % of_group * heads,
                  count = std::min(heads, (kv + 1) * shape.group() - h);
      scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      lists.clear(s.bits);
      for (idx_t i = first; i < std::min(first + queries_of_task, in.lengths.queries(b)); ++i)
        attend_query(b, h, count, i, s);
      for (idx_t head = h; head < h + count; ++head) in.clear_padding(b, head, first, first + queries_of_task);
    });
  }
};

/// Attends the call with the rows of keys in place.
template <class S, class Score, class C>
void attend_selected_rows(const softmax_call<S, Score, C>& call, const selected_lists& lists) {
  selected_rows<S, Score, C>{call, lists}.run();
}

}}}  // namespace attn::ATTN_ISA::detail
