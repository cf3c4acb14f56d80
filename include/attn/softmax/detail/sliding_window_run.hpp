// attn: the driver of sliding_window. A task is a chunk of the queries of one residue class of a head's dilation, whose
// keys are packed as the blockwise kernel goes on, or a block of global queries, which attend all keys.
//
// With execution::set_invariant() the slots of the keys of a class are its numbers among all of them, less a multiple
// of the keys of a tile: tiles have the same places for every chunk. Few rows read keys in place.
#pragma once

#include <attn/softmax/detail/global_positions.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct sliding_window_options;

namespace detail {

/// The keys and queries of one residue class, without the global ones, which are handled separately.
struct class_rows {
  idx_t* key_list = nullptr;  // where there are global positions: rows of k that are packed
  idx_t* rank = nullptr;      // how many packed keys are before an entry of the class
  idx_t* row_list = nullptr;  // rows of q that are in a block
  idx_t d = 1, r = 0, shift = 0;  // dilation, class; position of query 0
  global_list globals{};
  idx_t low = 0, high = 0;  // keys packed, the global ones counted

  static class_rows layout(arena& memory, idx_t slot_count, bool globals, idx_t rows) {
    return {.key_list = memory.allocate<idx_t>(globals ? slot_count : 0),
            .rank = memory.allocate<idx_t>(globals ? slot_count + 1 : 0), .row_list = memory.allocate<idx_t>(rows)};
  }

  bool listed() const { return !globals.empty(); }
  /// Begins with an earlier key, whose number among all that are packed is a multiple of `unit`.
  void align(idx_t unit) {
    idx_t before = 0;  // global positions of the class before the first key
    for (idx_t g = 0; listed() && g < globals.before(r + d * low); ++g) before += globals[g] % d == r;
    for (idx_t over = (low - before) % unit; over > 0;) over -= !globals.contains(r + d * --low);
  }
  /// Where the keys [low, high) are to be packed: their map, and their number.
  idx_t keys_to_pack(index_map& positions) const {
    positions = {r + d * low, d, nullptr};
    if (!listed()) return high - low;
    idx_t count = 0;
    for (idx_t t = low; t < high; ++t) {
      rank[t - low] = count;
      if (!globals.contains(r + d * t)) key_list[count++] = r + d * t;
    }
    rank[high - low] = count;
    positions.list = key_list;
    return count;
  }
  /// The slot of key t of the class, or of the next one that is packed.
  idx_t slot(idx_t t) const {
    const idx_t at = std::clamp(t, low, high) - low;
    return listed() ? rank[at] : at;
  }
  /// The rows of the queries [t, stop), and their number.
  idx_t rows_of(idx_t t, idx_t stop, index_map& which) const {
    which = {r + d * t - shift, d, nullptr};
    if (!listed()) return stop - t;
    idx_t rows = 0;
    for (idx_t u = t; u < stop; ++u)
      if (!globals.contains(r + d * u)) row_list[rows++] = r + d * u - shift;
    which.list = row_list;
    return rows;
  }
  /// t of a row.
  idx_t entry(idx_t row) const { return (row + shift - r) / d; }
};

template <class P>
struct window_scratch {
  row_block<P> block;
  row_keys<P> keys, global_keys;
  class_rows rows;
  const typename row_keys<P>::number **key_rows, **value_rows;  // of few rows that read them in place
};

/// Which keys a window has. Keys and queries of residue class r of a head's dilation d are at positions r + d t; in
/// terms of t the window has no dilation.
struct window_sets {
  list_view<idx_t> dilations;
  idx_t left, right, most;           // the window in keys of a class, and all positions, clamped
  idx_t unit;                        // of the places of tiles, where they are fixed: longer where rows may be long
  global_lists globals{};

  template <class Options>
  static window_sets of(const attention_shape& s, const Options& options) {
    idx_t all = s.queries + s.keys;  // no query and key are further apart
    if (options.first_position) all += std::abs(*options.first_position);
    const idx_t right = options.causal ? 0 : options.right;
    const bool may_be_long = options.left > long_segment / 2 || right > long_segment / 2;
    return {options.dilation, (std::min)(options.left, all), (std::min)(right, all), all,
            may_be_long ? long_segment : key_block};
  }

  /// The dilation of one head, clamped so that there are no more classes than positions.
  idx_t dilation(idx_t h) const {
    return (std::min)(step_of_head(dilations, h), std::max<idx_t>(1, most));
  }
  /// t of the first query of class r, for a query shift.
  static idx_t first_of(idx_t shift, idx_t r, idx_t d) {
    return shift > r ? ceil_div(shift - r, d) : -((r - shift) / d);
  }
};

template <class S, class Score, class C, class P>
struct sliding_window_driver : window_sets {
  using T = compute_type<S>;

  const softmax_call<S, Score, C>& in;
  const sliding_window_options<S>& options;
  idx_t chunk;  // queries of a task
  idx_t left_out = 0;  // heads of up to so many queries of a residue class are attended elsewhere
  const attention_shape& shape = in.shape;
  const bool fixed = in.exec.invariant();

  /// Keys or values of a query head, those that are given for global queries or the call's.
  cache_rows<const C> rows_of(idx_t b, idx_t h, bool of_keys, bool for_globals = false) const {
    const idx_t kv = h / shape.group();
    if constexpr (std::same_as<S, C>)
      if (for_globals && options.q_global)
        return cache_rows<const C>(head_of(of_keys ? options.k_global : options.v_global, b, kv));
    return of_keys ? in.key_rows(b, kv) : in.value_rows(b, kv);
  }

  /// Number of chunks of one residue class of head h, for the longest batch item.
  idx_t chunks(idx_t h) const { return ceil_div(ceil_div(shape.queries, dilation(h)), chunk); }

  /// Whether few rows of an invariant execution read keys in place, those of the heads of a group together: packing the
  /// keys of a window for every head takes several times as long.
  bool reads_rows(idx_t b, idx_t h) const {
    if (!fixed || options.q_global || !in_rows<P>(in)) return false;
    if (in.terms.any() || in.terms.dropout || in.terms.by_distance) return false;
    const idx_t first = h / shape.group() * shape.group();
    for (idx_t other = first; other < first + shape.group(); ++other)
      if (dilation(other) != dilation(first)) return false;
    return ceil_div(in.lengths.queries(b), dilation(h)) * shape.group() <= tile_rows;
  }
  /// The queries of a residue class of the heads of a group from h on, which make one tile. It has one chunk.
  void attend_few(idx_t b, idx_t h, idx_t r, window_scratch<P>& s) const {
    const idx_t d = dilation(h), n = in.lengths.keys(b), shift = in.shift(b), keys = n > r ? ceil_div(n - r, d) : 0;
    const idx_t t0 = first_of(shift, r, d), t1 = first_of(in.last_shift(b), r, d);
    if (t0 >= t1) return;
    class_rows& of = s.rows;
    of.d = d, of.r = r, of.shift = shift, of.globals = globals(b);
    of.low = std::clamp(t0 - left, idx_t(0), keys), of.high = std::clamp(t1 + right, of.low, keys);
    const idx_t seen = of.low;
    of.align(unit);
    const auto key = rows_of(b, h, true), value = rows_of(b, h, false);
    const idx_t count = of.keys_to_pack(s.keys.positions);
    index_map positions;
    const idx_t each = of.rows_of(t0, t1, positions), rows = each * shape.group();
    if (rows == 0) return;
    s.block.fixed = true;
    s.block.begin([&](idx_t row) { return in.query(b, h + row / each).row(positions[row % each]); }, in.q.stride(3),
                  positions, rows, in.terms.query_factor());
    const auto attend_rows = [&](row_keys<P> set, idx_t first, idx_t seen_slots, const auto& range_of) {
      if constexpr (std::same_as<C, typename row_keys<P>::number>) {
        const idx_t listed = seen_slots > 0 ? seen_slots + slots_ahead : 0;
        list_rows(key, set.positions, first, listed, seen_slots - 1, s.key_rows);
        list_rows(value, set.positions, first, listed, seen_slots - 1, s.value_rows);
        set.key_rows = s.key_rows, set.value_rows = s.value_rows;
      }
      for (idx_t row = 0; row < rows; ++row) s.block.ranges[row] = range_of(positions[row % each]);
      attend(s.block, set, in.terms.for_head(b, h, shift));
    };
    attend_rows(s.keys, of.slot(seen) / s.keys.wide * s.keys.wide, count, [&](idx_t i) {
      const idx_t u = of.entry(i);
      return key_range{of.slot(u - left), of.slot(u + right + 1)};
    });
    if (of.listed()) {
      s.global_keys.positions.list = of.globals.data();
      attend_rows(s.global_keys, 0, of.globals.before(n), [&](idx_t i) {
        return key_range{0, of.globals.before(in.causal ? (std::min)(n, i + shift + 1) : n)};
      });
    }
    for (idx_t row = 0; row < rows; ++row)
      in.finish_row(s.block.state, row, b, h + row / each, positions[row % each]);
  }

  /// Attends one chunk of the queries of head h whose positions are r modulo its dilation d. In such a class positions
  /// are r + d t, and in terms of t the window has no dilation.
  void attend_chunk(idx_t b, idx_t h, idx_t r, idx_t number, window_scratch<P>& s) const {
    const idx_t d = dilation(h), n = in.lengths.keys(b), shift = in.shift(b);
    const idx_t keys = n > r ? ceil_div(n - r, d) : 0;                          // of the class
    const idx_t t0 = first_of(shift, r, d) + number * chunk;
    const idx_t t1 = (std::min)(t0 + chunk, first_of(in.last_shift(b), r, d));
    if (t0 >= t1) return;
    class_rows& of = s.rows;
    of.d = d, of.r = r, of.shift = shift, of.globals = globals(b);
    of.low = std::clamp(t0 - left, idx_t(0), keys), of.high = std::clamp(t1 + right, of.low, keys);
    const idx_t seen = of.low;
    if (fixed) of.align(unit);
    if (of.listed()) {
      s.global_keys.positions.list = of.globals.data();
      s.global_keys.pack(rows_of(b, h, true), rows_of(b, h, false), 0, of.globals.before(n));
    }
    // Keys are packed block by block: meanwhile the products of the block before fetch them.
    const auto key = rows_of(b, h, true), value = rows_of(b, h, false);
    const auto query = in.query(b, h);
    const idx_t count = of.keys_to_pack(s.keys.positions);
    const auto head_terms = in.terms_for(b, h);
    for (idx_t t = t0, packed = of.slot(seen) / s.keys.wide * s.keys.wide; t < t1; t += max_rows) {
      const idx_t stop = (std::min)(t + max_rows, t1), next_stop = (std::min)(stop + max_rows, t1);
      const idx_t needed = (std::min)(round_up(of.slot(stop + right), s.keys.wide), count);
      if (packed < needed) s.keys.pack(key, value, packed, needed);
      packed = needed;
      line_prefetcher next;
      if (d == 1) {
        next.add(key, (std::min)(stop + right, of.high), (std::min)(next_stop + right, of.high));
        next.add(value, (std::min)(stop + right, of.high), (std::min)(next_stop + right, of.high));
        next.add(query, stop - shift, next_stop - shift);
        next.add(in.result(b, h), t - shift, stop - shift);
      }
      s.keys.next = &next;
      index_map positions;
      const idx_t rows = of.rows_of(t, stop, positions);
      in.begin(s.block, b, h, query, positions, rows);
      for (idx_t row = 0; row < rows; ++row) {
        const idx_t u = of.entry(positions[row]);
        s.block.ranges[row] = {of.slot(u - left), of.slot(u + right + 1)};
      }
      attend(s.block, s.keys, head_terms);
      if (of.listed()) {
        for (idx_t row = 0; row < rows; ++row)
          s.block.ranges[row] = {0, of.globals.before(in.causal ? (std::min)(n, positions[row] + shift + 1) : n)};
        attend(s.block, s.global_keys, head_terms);
      }
      in.finish(s.block, b, h);
    }
  }

  /// Attends up to max_rows global queries, from entry `begin` of the list on, to every key.
  void attend_globals(idx_t b, idx_t h, idx_t begin, window_scratch<P>& s) const {
    const idx_t n = in.lengths.keys(b), shift = in.shift(b);
    const global_list global = globals(b);
    const idx_t end = (std::min)(begin + max_rows, global.before(in.last_shift(b)));
    idx_t rows = 0, *const row_list = s.rows.row_list;
    for (idx_t g = begin; g < end; ++g)
      if (global[g] >= shift) row_list[rows++] = global[g] - shift;
    if (rows == 0) return;
    const bool own = static_cast<bool>(options.q_global);
    const auto head_terms = in.terms_for(b, h);
    const auto key = rows_of(b, h, true, true), value = rows_of(b, h, false, true);
    in.begin(s.block, b, h, own ? head_of(options.q_global, b, h) : in.query(b, h), {0, 1, row_list}, rows);
    const idx_t stop = in.causal ? (std::min)(row_list[rows - 1] + shift + 1, n) : n;
    const idx_t most_keys = (std::min)(s.keys.capacity, long_segment),
                step = fixed ? most_keys / key_block * key_block : most_keys;
    long_row_sums<P> sums = s.block.sums();
    if (stop > long_segment && !fixed) sums.begin();
    for (idx_t at = 0; at < stop; at += step) {
      const idx_t count = (std::min)(step, stop - at);
      s.keys.positions = {at, 1, nullptr};
      s.keys.pack(key, value, 0, count);
      for (idx_t row = 0; row < rows; ++row)
        s.block.ranges[row] = {0, in.causal ? std::clamp(row_list[row] + shift + 1 - at, idx_t(0), count) : count};
      attend(s.block, s.keys, head_terms, no_prefetch{}, &sums);
    }
    sums.finish();
    in.finish(s.block, b, h);
  }

  void run() {
    globals = in.exec.shared_scratch([&](arena& memory) { return global_lists::layout(memory, options); }).set(options);
    const idx_t seen = (std::min)(left + right + 1 + globals.most, shape.keys);
    const auto limit = in.limit_threads(seen, static_cast<double>(seen));
    const idx_t reach = (std::min)(left + right, shape.keys);
    bool any_few = false;
    for (idx_t x = 0; x < shape.batch * shape.heads; ++x) any_few |= reads_rows(x / shape.heads, x % shape.heads);
    const auto layout = [&](arena& memory) {
      const idx_t n = globals.most, slot_count = chunk + reach + (fixed ? unit + n : 0);
      const idx_t listed = any_few ? slot_count + n + slots_ahead : 0;
      using number = typename row_keys<P>::number;
      return window_scratch<P>{row_block<P>::layout(memory, shape.dim, shape.dim_v, bool(in.terms.by_distance)),
                               row_keys<P>::layout(memory, slot_count, shape.dim, shape.dim_v),
                               row_keys<P>::layout(memory, n, shape.dim, shape.dim_v),
                               class_rows::layout(memory, slot_count, n > 0, n > 0 ? max_rows : 0),
                               memory.allocate<const number*>(listed), memory.allocate<const number*>(listed)};
    };
    idx_t chunk_count = 0;  // of the head that has most of them
    for (idx_t h = 0; h < shape.heads; ++h) chunk_count = (std::max)(chunk_count, chunks(h) * dilation(h));
    const idx_t heads = shape.batch * shape.heads, global_blocks = ceil_div(globals.most, max_rows);
    // The global queries, whose work is the longest, go first; then the chunks; the rows of padding last.
    in.exec.for_each(heads * (global_blocks + chunk_count + 1), [&](idx_t task, int worker) {
      const idx_t b = task % heads / shape.heads, h = task % heads % shape.heads, d = dilation(h);
      if (left_out > 0 && in.lengths.queries(b) <= left_out * d) return;
      idx_t n = task / heads;
      if (n < global_blocks) {
        auto scratch = in.exec.scratch(worker, layout);
        return attend_globals(b, h, n * max_rows, scratch);
      }
      n -= global_blocks;
      if (n == chunk_count) return in.clear_padding(b, h);
      if (n >= chunks(h) * d) return;
      if (reads_rows(b, h)) {
        if (n / d > 0 || h % shape.group() != 0) return;
        auto scratch = in.exec.scratch(worker, layout);
        return attend_few(b, h, n % d, scratch);
      }
      auto scratch = in.exec.scratch(worker, layout);
      attend_chunk(b, h, n % d, n / d, scratch);
    });
  }
};

/// Checks the options that only sliding_window has, for a call with this `out`.
template <class S>
void check_window_options(call_views& views, const attention_shape& shape, const sliding_window_options<S>& options,
                          const memory_layout& out) {
  views.read("q_global", options.q_global);
  views.read("k_global", options.k_global);
  views.read("v_global", options.v_global);
  views.at_least("right", 0, options.right);
  if (options.dilation.size() > 1) check_per_head(views, "dilation", options.dilation, shape.heads);
  check_window(views, options, shape.batch);
  const int own = bool(options.q_global) + bool(options.k_global) + bool(options.v_global);
  if (own == 0) return;
  if (own != 3) views.fail("q_global, k_global and v_global together", error_text{"only ", own, " of them"});
  const attention_shape globals =
      check_attention_extents(views, options.q_global, options.k_global, options.v_global, out);
  views.extents({{"q_global dim = query dim", shape.dim, globals.dim},
                 {"k_global heads = key heads", shape.kv_heads, globals.kv_heads},
                 {"k_global length = key length", shape.keys, globals.keys}});
}

/// Queries of a chunk. Longer windows have longer chunks: the keys that neighbouring chunks pack again stay fewer than
/// a chunk's own. (At least 8 blocks, not 4: 0.97 of the time with 128 keys on each side, Zen 4.)
inline idx_t window_chunk(idx_t left, idx_t right) {
  constexpr idx_t most = 20 * max_rows;
  return round_up(std::clamp<idx_t>((std::min)(left, most) + (std::min)(right, most), 8 * max_rows, most), max_rows);
}

template <class S, class Score, class C>
void run_sliding_window(softmax_call<S, Score, C> in, const sliding_window_options<S>& options, idx_t left_out = 0) {
  using Elements = std::conditional_t<std::same_as<C, Eigen::bfloat16>, C, S>;  // that are multiplied
  const window_sets sets = window_sets::of(in.shape, options);
  const auto terms = in.exec.workspace([&](arena& memory) {
    const bool local = options.global_positions.empty();  // global ones are at any distance
    return in.layout_terms(memory, distance_range{in.furthest(), local ? options.dilation : list_view<idx_t>()});
  });
  in.prepare_terms(*terms);
  with_products<Elements>(in.exec, [&]<class P>(std::type_identity<P>) {
    sliding_window_driver<S, Score, C, P>{sets, in, options, window_chunk(sets.left, sets.right), left_out}.run();
  });
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
