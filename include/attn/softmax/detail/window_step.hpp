// attn: a step of sliding-window attention, token by token, over a ring or over a cache of all tokens.
#pragma once

#include <attn/softmax/detail/global_positions.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What the queries of a stream see: `left` keys before their own, `dilation` apart, and the global positions.
struct stream_window {
  idx_t left = 0;
  std::span<const idx_t> dilations{};
  global_lists globals{};

  bool one_dilation() const { return dilations.size() <= 1; }
  idx_t dilation(idx_t query_head) const {
    const idx_t given = dilations.empty() ? 1 : dilations[one_dilation() ? 0 : static_cast<std::size_t>(query_head)];
    return std::min(given, furthest_position);  // a larger one reaches no key either
  }
  void check_heads(const validator& check, idx_t query_heads) const {
    if (!one_dilation()) check.equal("query heads = dilations of the cache", std::ssize(dilations), query_heads);
  }
};

/// Source describes where the tokens of the stream are stored:
///   using element_type = C;
///   stream_window window() const;
///   idx_t before(idx_t b) const;                         tokens before the chunk's
///   idx_t ring() const;                                  position p lies in row p % ring()
///   idx_t global_row(idx_t g, idx_t position) const;     the row of global position g of the item's list
///   static constexpr bool adjacent_globals;              whether these rows are adjacent
///   cache_rows<const C> keys(idx_t b, idx_t kv) const;   values likewise
///   void put(idx_t b, idx_t kv, idx_t t) const;          stores token t of the chunk
template <class S, class Score, class Source>
struct window_step {
  using T = compute_type<S>;
  using C = typename Source::element_type;

  const softmax_call<S, Score>& in;
  const Source& source;
  stream_window window = source.window();
  const attention_shape& shape = in.shape;

  struct scratch {
    stream_queries<T, C> rows;
    online_softmax<T> state;
    long_softmax<T> total;
  };
  scratch layout(arena& memory) const {
    return {stream_queries<T, C>::layout(memory, shape.group(), shape.dim, shape.dim_v, bool(in.relative_queries)),
            online_softmax<T>::layout(memory, shape.group(), shape.dim_v),
            long_softmax<T>::layout(memory, shape.group(), shape.dim_v)};
  }

  /// Attends token t of the chunk, of the `count` query heads from `head` on, which share a dilation.
  void attend_token(idx_t b, idx_t kv, idx_t t, idx_t head, idx_t count, scratch& s) const {
    const idx_t p = source.before(b) + t, d = window.dilation(head), ring = source.ring();
    const global_list global = window.globals(b);
    const idx_t known = global.before(p + 1);
    const bool global_query = known > 0 && global[known - 1] == p;
    const idx_t step = global_query ? 1 : d,
                first = global_query || p < 0 ? 0 : p - std::min(window.left, p / d) * d;  // before the first key: none
    const auto query = [&](const auto& q) { return q ? q.slice(2, t, 1) : q; };
    s.rows.begin(query(in.q), query(in.relative_queries), b, head, count, 1, in.terms.query_factor());
    s.state.rows = count;
    s.state.clear();
    const auto keys = source.keys(b, kv), values = source.values(b, kv);
    long_sums sums(s.state, s.total, count, stream_chunk);
    const auto token_terms = for_query(in.terms.for_head(b, head, p), t);
    // Every stride-th row from `row` on, in one or more pages.
    const auto take = [&](idx_t row, idx_t stride, idx_t rows, index_map positions) {
      while (rows > 0) {
        const auto k = keys.from(row), v = values.from(row);
        const idx_t some = std::min({rows, (k.rows - 1) / stride + 1, stream_chunk});
        sums.next(some);
        attend_stream(s.rows, every(k, stride, some), every(v, stride, some), positions, 0, some, token_terms,
                      stream_limit{some}, s.state);
        row += some * stride, rows -= some;
        positions.first += some * positions.step;
        if (positions.list) positions.list += some;
      }
    };
    // The window lies in the ring in one run, or in two.
    for (idx_t from = first; from <= p;) {
      const idx_t rows = std::min((p - from) / step, (ring - 1 - from % ring) / step) + 1;
      take(from % ring, step, rows, {from, step, nullptr});
      from += rows * step;
    }
    // Global keys before the window, or between its keys, run by run.
    const auto outside = [&](idx_t position) { return position < first || (p - position) % d != 0; };
    for (idx_t g = 0; g < known && !global_query; ++g) {
      idx_t end = g;
      while (end < known && outside(global[end]) && (end == g || Source::adjacent_globals)) ++end;
      if (end == g) continue;
      take(source.global_row(g, global[g]), 1, end - g, {0, 1, global.data() + g});
      g = end - 1;
    }
    sums.finish();
    for (idx_t r = 0; r < count; ++r) in.finish_row(s.state, r, b, head + r, t);
  }

  void run() const {
    idx_t longest = 0;
    for (idx_t b = 0; b < shape.batch; ++b) longest = std::max(longest, source.before(b));
    const idx_t tokens = shape.queries, group = shape.group(), heads = window.one_dilation() ? group : 1;
    const idx_t seen = std::min(window.left + 1, longest + tokens);
    const auto limit = in.limit_threads(seen, static_cast<double>(tokens) * static_cast<double>(seen));
    in.exec.for_each(shape.batch * shape.kv_heads, [&](idx_t task, int worker) {
      const idx_t b = task / shape.kv_heads, kv = task % shape.kv_heads;
      scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      for (idx_t t = 0; t < in.lengths.queries(b); ++t) {
        source.put(b, kv, t);
        for (idx_t h = kv * group; h < (kv + 1) * group; h += heads) attend_token(b, kv, t, h, heads, s);
      }
      for (idx_t h = kv * group; h < (kv + 1) * group; ++h) in.clear_padding(b, h);
    });
  }
};
/// Checks the window of a stream.
template <class Options>
void check_stream_window(const validator& check, const Options& options, idx_t batch) {
  check.at_least("left", 0, options.left);
  for (idx_t d : options.dilation) check.at_least("dilation", 1, d);
  check_global_positions(check, options, batch);
}

template <class S, class Score, class Source>
window_step(const softmax_call<S, Score>&, const Source&) -> window_step<S, Score, Source>;

/// A checked step.
template <class S, class Score, class Source>
void attend_stream_window(softmax_call<S, Score> call, const Source& source) {
  const auto terms = call.exec.workspace([&](arena& memory) { return call.layout_terms(memory, std::nullopt); });
  call.prepare_terms(*terms, [&](idx_t b) { return source.before(b) + call.lengths.queries(b); });
  window_step{call, source}.run();
}

/// A cache that keeps all tokens and already has those of the chunk: kv_cache, paged_cache.
template <class Inside>
struct cache_source {
  using element_type = typename Inside::value_type;
  static constexpr bool adjacent_globals = false;

  const Inside& cache;
  const sequence_lengths& lengths;
  stream_window seen;
  tensor_view<const element_type> all_keys = cache.keys(), all_values = cache.values();
  page_tables pages = cache.pages();

  stream_window window() const { return seen; }
  idx_t before(idx_t b) const { return lengths.keys(b) - lengths.queries(b); }
  idx_t ring() const { return std::numeric_limits<idx_t>::max(); }
  idx_t global_row(idx_t, idx_t position) const { return position; }
  cache_rows<const element_type> keys(idx_t b, idx_t kv) const { return {all_keys, b, kv, cache.dim(), true, pages}; }
  cache_rows<const element_type> values(idx_t b, idx_t kv) const {
    return {all_values, b, kv, cache.value_dim(), cache.values_in_keys(), pages};
  }
  void put(idx_t, idx_t, idx_t) const {}
};
template <class Inside>
cache_source(const Inside&, const sequence_lengths&, const stream_window&) -> cache_source<Inside>;

}}}  // namespace attn::ATTN_ISA::detail
