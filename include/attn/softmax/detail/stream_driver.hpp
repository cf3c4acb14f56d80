// attn: the driver of queries that read their keys in place (streaming.hpp), one after another: of steps, and of lists
// of single keys. Plans derive from stream_plan and replace what is different; beside that they have
//
//   scratch, layout(arena)         their own memory of a thread
//   seen(), read()                 keys that a query sees; rows that are read for a key head
//   rows(b, h, i, scratch, take)   take(keys, values, positions, begin, end, wanted_next) for the rows [begin, end), as
//                                  in attend_stream(), that query i of heads [h, h + together()) sees
#pragma once

#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What most plans answer alike.
template <class S, class Score, class C = S>
struct stream_plan {
  const softmax_call<S, Score, C>& in;
  const attention_shape& shape = in.shape;

  /// Query heads and queries of one key head that a task takes.
  idx_t heads_of_task() const { return 1; }
  idx_t queries_of_task() const { return std::max<idx_t>(1, shape.queries); }
  /// Query heads of a task that see the same rows.
  idx_t together() const { return 1; }
  void begin_task(const auto&) const {}
  /// Whether the queries of a head are attended, and its rows of padding cleared.
  bool takes(idx_t, idx_t) const { return true; }
  /// begin(b, kv, i): before query i of a key head.
  void begin(idx_t, idx_t, idx_t) const {}
  idx_t position(idx_t b, idx_t i) const { return i + in.shift(b); }
};

/// The rows of keys or values of one list.
template <class C>
struct row_list {
  const C** at;

  static row_list layout(arena& memory, idx_t most) { return {memory.allocate<const C*>(most)}; }
  listed_rows<C> of(const cache_rows<const C>& x, std::span<const idx_t> list) const {
    const idx_t count = std::ssize(list);
    const idx_t* const row = list.data();
    if (x.pages)
      for (idx_t n = 0; n < count; ++n) at[n] = x.row(row[n]);
    else
      for (idx_t n = 0; n < count; ++n) at[n] = x.data + row[n] * x.row_stride;
    return {at, count, x.cols, x.col_stride};
  }
  /// Those of values, which may be the keys k, of the same list.
  listed_rows<C> of(const cache_rows<const C>& x, std::span<const idx_t> list, const cache_rows<const C>& k,
                    const listed_rows<C>& keys) const {
    if (x.same_places(k)) return {keys.at, keys.rows, x.cols, x.col_stride};
    return of(x, list);
  }
};
template <coded C>
struct row_list<C> {
  static row_list layout(arena&, idx_t) { return {}; }
  listed_codes<C> of(const cache_rows<const C>& x, std::span<const idx_t> list) const {
    return {&x, list.data(), std::ssize(list), x.from(0).cols};
  }
  listed_codes<C> of(const cache_rows<const C>& x, std::span<const idx_t> list, const cache_rows<const C>&,
                     const listed_codes<C>&) const {
    return of(x, list);
  }
};

template <class S, class Score, class C, class Plan>
void attend_streamed(const softmax_call<S, Score, C>& in, const Plan& plan) {
  using T = compute_type<S>;
  const attention_shape& shape = in.shape;
  struct scratch {
    typename Plan::scratch plan;
    stream_queries<T, C> queries;
    online_softmax<T> state;
    long_softmax<T> total;
  };
  const auto layout = [&](arena& memory) {
    const idx_t rows = plan.together();
    return scratch{plan.layout(memory),
                   stream_queries<T, C>::layout(memory, rows, shape.dim, shape.dim_v, in.own_relative()),
                   online_softmax<T>::layout(memory, rows, shape.dim_v),
                   long_softmax<T>::layout(memory, rows, shape.dim_v)};
  };
  const auto attend_query = [&](idx_t b, idx_t h, idx_t count, idx_t i, scratch& s) {
    s.queries.rotated = in.rotated_keys;
    for (idx_t r = 0; r < count; ++r) {  // what is needed when this query is done
      if (i + 1 < in.lengths.queries(b)) prefetch_row(head_of(in.q, b, h + r), i + 1);
      if (!in.out_sums) prefetch_row(in.result(b, h + r), i);
    }
    const auto query = [&](const auto& q) { return q ? q.slice(2, i, 1) : q; };
    s.queries.begin(query(in.q), query(in.relative_queries), {b, h, 0, plan.position(b, i), in.skip_limit(b)}, count, 1,
                    in.terms.query_factor());
    s.state.rows = count;
    s.state.clear();
    long_sums sums(s.state, s.total, count, stream_chunk);
    const auto terms = for_query(in.terms, i);
    plan.rows(b, h, i, s.plan, [&](const auto& keys, const auto& values, const index_map& positions, idx_t begin,
                                   idx_t end, idx_t wanted_next) {
      sums.next(end - begin);
      attend_stream(s.queries, keys, values, positions, begin, end, terms, {}, s.state, wanted_next);
    });
    sums.finish();
    for (idx_t r = 0; r < count; ++r) in.finish_row(s.state, r, b, h + r, i);
  };

  const auto limit = in.limit_threads(plan.seen(), plan.read());
  const idx_t heads = plan.heads_of_task(), together = plan.together(), queries = plan.queries_of_task(),
              of_group = ceil_div(shape.group(), std::max<idx_t>(1, heads)), blocks = ceil_div(shape.queries, queries);
  in.exec.for_each(shape.batch * shape.kv_heads * of_group * blocks, [&](idx_t task, int worker) {
    const idx_t n = task / blocks, first = task % blocks * queries, b = n / of_group / shape.kv_heads,
                kv = n / of_group % shape.kv_heads, h = kv * shape.group() + n % of_group * heads,
                end = (std::min)(h + heads, (kv + 1) * shape.group());
    scratch s = in.exec.scratch(worker, layout);
    plan.begin_task(s.plan);
    for (idx_t i = first; i < (std::min)(first + queries, in.lengths.queries(b)); ++i) {
      plan.begin(b, kv, i);
      for (idx_t head = h; head < end; head += together)
        if (plan.takes(b, head)) attend_query(b, head, (std::min)(together, end - head), i, s);
    }
    for (idx_t head = h; head < end; ++head)
      if (plan.takes(b, head)) in.clear_padding(b, head, first, first + queries);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
