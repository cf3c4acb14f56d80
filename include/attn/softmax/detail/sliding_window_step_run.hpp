// attn: the driver of sliding_window_step, token by token, over a ring or over a cache of all tokens.
#pragma once

#include <attn/softmax/detail/sliding_window_run.hpp>
#include <attn/softmax/detail/stream_driver.hpp>
#include <attn/softmax/detail/window_tokens.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Up to so many queries of a residue class of a head are attended in place; more share packed keys (64 queries, left =
/// 128, Zen 4: 0.53 of the time).
inline constexpr idx_t window_in_place = 16;

/// Tokens of a cache that keeps all of them, and has those of the chunk already: kv_cache, paged_cache.
struct all_tokens {
  static constexpr bool adjacent_globals = false;  // whether the rows of global positions are adjacent

  stream_window window;
  const sequence_lengths& lengths;
  bool in_place = true;  // all heads, or those with few queries

  /// Whether a head is attended in place, which depends on no other.
  bool takes(idx_t b, idx_t h) const {
    return in_place || lengths.queries(b) <= window_in_place * window.dilation(h);
  }
  /// Tokens before the chunk's.
  idx_t before(idx_t b) const { return lengths.keys(b) - lengths.queries(b); }
  /// Position p lies in row p % ring().
  idx_t ring() const { return (std::numeric_limits<idx_t>::max)(); }
  /// The row of global position g of the item's list.
  idx_t global_row(idx_t, idx_t position) const { return position; }
  /// Stores token t of the chunk.
  void put(idx_t, idx_t, idx_t) const {}
};

/// Tokens of a ring, which takes those of the chunk one by one.
template <class S, class C>
struct ring_tokens {
  static constexpr bool adjacent_globals = true;

  window_tokens<C>& cache;
  const tensor_view<const S>&k_new, v_new;
  stream_window window = cache.window();

  idx_t before(idx_t b) const { return cache.length(b); }
  idx_t ring() const { return cache.capacity(); }
  idx_t global_row(idx_t g, idx_t) const { return ring() + g; }
  void put(idx_t b, idx_t kv, idx_t t) const { cache.put(k_new, v_new, b, kv, t); }
  bool takes(idx_t, idx_t) const { return true; }
};

/// The plan of a step. Source says where the tokens of the stream are stored, as all_tokens does.
template <class S, class Score, class C, class Source>
struct window_step : stream_plan<S, Score, C> {
  using base = stream_plan<S, Score, C>;
  using base::in, base::shape;

  const Source& source;
  const stream_window& window = source.window;

  idx_t heads_of_task() const { return shape.group(); }
  idx_t together() const { return window.one_dilation() ? shape.group() : 1; }
  idx_t seen() const {
    idx_t longest = 0;
    for (idx_t b = 0; b < shape.batch; ++b) longest = (std::max)(longest, source.before(b));
    return (std::min)(window.left + 1, longest + shape.queries);
  }
  double read() const { return static_cast<double>(shape.queries) * static_cast<double>(seen()); }
  bool takes(idx_t b, idx_t h) const { return source.takes(b, h); }
  /// The rows of a tile that lie in several pages.
  struct scratch {
    idx_t* list;
    row_list<C> keys, values;
  };
  scratch layout(arena& memory) const {
    const idx_t most = in.pages ? stream_tile_of<C> : 0;
    return {memory.allocate<idx_t>(most), row_list<C>::layout(memory, most), row_list<C>::layout(memory, most)};
  }
  void begin(idx_t b, idx_t kv, idx_t t) const { source.put(b, kv, t); }
  idx_t position(idx_t b, idx_t t) const { return source.before(b) + t; }

  template <class Take>
  void rows(idx_t b, idx_t head, idx_t t, const scratch& s, const Take& take_rows) const {
    const idx_t p = position(b, t), d = window.dilation(head), ring = source.ring();
    const global_list global = window.globals(b);
    const idx_t known = global.before(p + 1);
    const bool global_query = known > 0 && global[known - 1] == p;
    const idx_t step = global_query ? 1 : d,
                // before the first key: none
                first = global_query || p < 0 ? 0 : p - (std::min)(window.left, p / d) * d;
    const idx_t kv = head / shape.group();
    const auto keys = in.key_rows(b, kv), values = in.value_rows(b, kv);
    // Every stride-th row from `row` on, in one or more pages, which change no tile: a tile of several is put together.
    // Tiles of codes, which are used in place and may be in several pages, end where those of all rows do.
    const auto take = [&](idx_t row, idx_t stride, idx_t rows, index_map positions) {
      constexpr idx_t tile = stream_tile_of<C>;
      if constexpr (coded<C>)
        if (stride == 1 && !positions.list) {
          for (const idx_t end = row + rows, first_position = positions.first - row; row < end; row += rows) {
            rows = (std::min)(end - row, row % tile ? tile - row % tile : stream_chunk - row % stream_chunk);
            take_rows(keys, values, {first_position, 1, nullptr}, row, row + rows, end);
          }
          return;
        }
      while (rows > 0) {
        const auto k = keys.from(row), v = values.from(row);
        idx_t some = (std::min)({rows, (k.rows - 1) / stride + 1, stream_chunk});
        if (some < rows) some -= some % tile;
        if (some > 0) {
          take_rows(every(k, stride, some), every(v, stride, some), positions, 0, some, 0);
        } else {
          some = (std::min)(rows, tile);
          for (idx_t n = 0; n < some; ++n) s.list[n] = row + n * stride;
          const std::span<const idx_t> list(s.list, static_cast<std::size_t>(some));
          take_rows(s.keys.of(keys, list), s.values.of(values, list), positions, 0, some, 0);
        }
        row += some * stride, rows -= some;
        positions.first += some * positions.step;
        if (positions.list) positions.list += some;
      }
    };
    // The window lies in the ring in one run, or in two.
    for (idx_t from = first; from <= p;) {
      const idx_t rows = (std::min)((p - from) / step, (ring - 1 - from % ring) / step) + 1;
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
  }
};

/// The checked window of a call over a cache of all tokens.
template <class S, class Options>
sliding_window_options<S> window_of_call(const validator& check, const Options& window, const attention_shape& shape) {
  check_window(check, window, shape.batch);
  if (window.rotate) check.fail("no rotate in a window, which is an option of the cache", "one");
  stream_window{window.left, window.dilation}.check_heads(check, shape.heads);
  return {.causal = true, .left = window.left, .dilation = window.dilation,
          .global_positions = window.global_positions, .global_counts = window.global_counts};
}

template <class S, class Score, class C, class Source>
void attend_stream_window(softmax_call<S, Score, C> call, const Source& source) {
  const auto terms = call.exec.workspace([&](arena& memory) { return call.layout_terms(memory, std::nullopt); });
  call.prepare_terms(*terms, [&](idx_t b) { return source.before(b) + call.lengths.queries(b); });
  attend_streamed(call, window_step<S, Score, C, Source>{{call}, source});
}

/// A step over a cache that has the tokens of the queries. Many of them share the keys that sliding_window packs.
template <class S, class Score, class C>
void run_sliding_window_step(const softmax_call<S, Score, C>& call, const sliding_window_options<S>& options) {
  const auto lists = call.exec.workspace([&](arena& memory) { return global_lists::layout(memory, options); });
  const stream_window seen{(std::min)(options.left, furthest_position), options.dilation, lists->set(options)};
  all_tokens tokens{seen, call.lengths};
  if constexpr (!coded<C>) {
    if (call.exec.invariant()) return run_sliding_window(call, options);
    tokens.in_place = false;
    idx_t taken = 0;
    const attention_shape& s = call.shape;
    for (idx_t n = 0; n < s.batch * s.heads; ++n) taken += tokens.takes(n / s.heads, n % s.heads);
    if (taken < s.batch * s.heads) run_sliding_window(call, options, window_in_place);
    if (taken == 0 && s.batch * s.heads > 0) return;
  }
  attend_stream_window(call, tokens);
}

/// A step over a ring, which takes the tokens of the chunk one by one.
template <class S, class Score, class C>
void run_sliding_window_step(const softmax_call<S, Score, C>& call, window_tokens<C>& ring,
                             const tensor_view<const S>& k_new, const tensor_view<const S>& v_new) {
  attend_stream_window(call, ring_tokens<S, C>{ring, k_new, v_new});
}

}}}  // namespace attn::ATTN_ISA::detail
