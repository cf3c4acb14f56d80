// attn: the driver of few queries over many keys, as in the steps of a cache. A task takes up to task_rows rows, the
// queries of some heads of one key head, through one chunk of the keys, by one of two kernels:
//
//   streamed    rows in codes, and up to queries_in_place queries: the streaming kernel, keys in place
//   in blocks   the blockwise kernel; block_keys keys at a time are packed, and attended by all rows while they are in
//               the second-level cache
//
// With execution::set_invariant() all rows take the second, whose tiles then have fixed places, and keys are not
// divided into chunks: a row gets the bits that it gets among the many queries of full_softmax_run.hpp. Where there is
// one tile of rows, nothing is packed (keys_in_place.hpp).
//
// So the keys are read once, and scratch memory does not depend on their number. The chunks of a row are merged in
// order; kernels, chunks and blocks depend on the shape alone.
//
// Batch items that share the first pages of a cache are a task together: what they share is read once, for the rows of
// all; then each goes on with its own keys. Both kernels take a row through the same tiles as without the others: no
// bit depends on what is shared.
#pragma once

#include <attn/core/detail/function_ref.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/shared_prefixes.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class C, class P>
struct few_queries_driver {
  using T = compute_type<S>;

  static constexpr bool in_codes = coded<C>;
  static constexpr idx_t most_queries = 64;  // of a task
  static constexpr idx_t task_rows = 256;    // their states stay in the second-level cache
  static constexpr idx_t usual_block = 256;  // keys that are packed at a time
  static constexpr idx_t moved_keys = 1024;  // streamed: the sums of long rows are moved after so many keys

  const softmax_call<S, Score, C>& in;
  const attention_shape& shape = in.shape;
  const sequence_lengths& lengths = in.lengths;
  const bool fixed = in.exec.invariant();
  const idx_t block_keys = fixed ? key_block : usual_block;  // packed at a time
  const idx_t chunk_keys = fixed ? std::max<idx_t>(1, shape.keys) : stream_chunk;

  /// Whether the driver takes the queries of a batch item. More of them, and few keys, are attended sooner if all keys
  /// are packed once; rows in codes are multiplied faster as they are (64 queries: 0.53 of the time).
  static bool takes(const softmax_call<S, Score, C>& call, idx_t b) {
    if (in_codes) return true;
    const idx_t queries = call.lengths.queries(b);
    const bool many_keys = call.lengths.keys(b) > 2 * usual_block;
    return !call.maximum && (queries <= queries_in_place || (queries <= most_queries && many_keys));
  }
  /// By the queries alone, though heads without groups gain by reading more of them in place (8 queries, bf16: 0.55 of
  /// the time): a head gets the bits that it gets without the others of its group.
  static bool streamed(const softmax_call<S, Score, C>& call, idx_t b) {
    return in_codes || (!call.exec.invariant() && call.lengths.queries(b) <= queries_in_place);
  }

  /// What a task attends: some queries, from `first` on, of heads [head, head + heads) of a set of batch items, to keys
  /// from `begin` on. `number` is that of an item in the order of `sets`; rows are those of one item after another.
  struct work {
    idx_t set, head, heads, first, begin, rows;
  };

  /// How the rows of all batch items are divided into tasks.
  const idx_t queries_of_task = std::clamp<idx_t>(shape.queries, 1, most_queries),
              group = shape.group(),
              heads_of_task = std::clamp<idx_t>(task_rows / queries_of_task, 1, std::max<idx_t>(1, group)),
              parts = ceil_div(group, heads_of_task), runs = ceil_div(shape.queries, queries_of_task),
              chunks = std::max<idx_t>(1, ceil_div(shape.keys, chunk_keys));
  shared_prefixes sets{};

  [[gnu::noinline]] work of(idx_t task) const {
    const auto next = [&](idx_t count) { return std::exchange(task, task / count) % count; };
    const idx_t chunk = next(chunks), run = next(runs), from = next(parts) * heads_of_task,
                kv = next(shape.kv_heads);
    work w{.set = task, .head = kv * group + from, .heads = (std::min)(heads_of_task, group - from),
           .first = run * queries_of_task, .begin = chunk * chunk_keys, .rows = 0};
    w.rows = rows(w, first_item(w), last_item(w));
    return w;
  }
  idx_t first_item(const work& w) const { return sets.first[w.set]; }
  idx_t last_item(const work& w) const { return sets.first[w.set + 1]; }
  [[gnu::noinline]] idx_t queries(const work& w, idx_t number) const {
    const idx_t b = sets.items[number];
    return takes(in, b) ? std::clamp<idx_t>(lengths.queries(b) - w.first, 0, queries_of_task) : 0;
  }
  /// Row r is query r % queries() of a head.
  idx_t rows(const work& w, idx_t number) const { return w.heads * queries(w, number); }
  idx_t rows(const work& w, idx_t begin, idx_t end) const {
    idx_t sum = 0;
    for (idx_t number = begin; number < end; ++number) sum += rows(w, number);
    return sum;
  }
  /// Whether the rows of an item are long: their large weights are added by themselves (move_large_weights), though a
  /// state takes no more than stream_chunk keys.
  bool is_long(idx_t number) const { return !fixed && lengths.keys(sets.items[number]) > long_segment; }
  /// The keys that an item attends end here.
  idx_t end(const work& w, idx_t number) const {
    return (std::min)(w.begin + chunk_keys, in.end_of(sets.items[number], w.first + queries(w, number) - 1));
  }
  /// The keys whose sums are moved together with those of key j: up to places where tiles of every item end, long or
  /// not, that is, within pages or between them.
  key_range moved_range(const work& w, idx_t j) const {
    const idx_t page = in.pages.page_rows, pages = page > 0 ? (std::max)(page, moved_keys / page * page) : moved_keys;
    const idx_t first = j / pages * pages;
    if (page <= moved_keys) return {first, first + pages};
    const idx_t from = (std::max)(w.begin, first), begin = from + (j - from) / moved_keys * moved_keys;
    return {begin, (std::min)(begin + moved_keys, first + page)};
  }
  /// Those that it attends together with the item before it: up to a place where tiles of both end.
  [[gnu::noinline]] idx_t common_end(const work& w, idx_t number) const {
    const idx_t common = sets.common[number], one = end(w, number - 1), other = end(w, number);
    if (one == other && common >= one) return one;
    // Tiles of codes may be in several pages.
    const idx_t least = streamed(in, sets.items[number]) ? in.pages.page_rows : block_keys,
                step = in_codes ? stream_tile_of<C> : least;
    return (std::min)({common, one, other}) / step * step;
  }

  void run() {
    bool alone = chunks == 1 && !in.pages && !in.terms.skip.given();
    for (idx_t b = 0; b < shape.batch; ++b) alone = alone && (streamed(in, b) || !takes(in, b));
    if (alone) return run_streamed();
    const idx_t threads = in.exec.active_threads(), of_item = shape.kv_heads * parts * runs * chunks;
    const auto order =
        in.exec.workspace([&](arena& memory) { return shared_prefixes::layout(memory, shape.batch); });
    sets = *order;
    for (idx_t b = 0; b < shape.batch; ++b)
      sets.kinds()[b] = takes(in, b) ? 1 + streamed(in, b) : 0;
    sets.find(in.pages, shape.batch,
              (std::min)(task_rows / (heads_of_task * queries_of_task), ceil_div(shape.batch * of_item, threads)));
    const auto layout = [&](arena& memory) {
      return online_softmax<T>::layout(memory, sets.largest * heads_of_task * queries_of_task, shape.dim_v);
    };
    const bool any_long = !fixed && shape.keys > long_segment;
    const auto workspace = in.exec.workspace([&](arena& memory) {
      return std::pair(layout(memory), any_long ? layout(memory) : online_softmax<T>{});
    });
    // Of the rows in progress, which may continue in the next wave.
    online_softmax<T> total = workspace->first, lost = workspace->second;
    const idx_t size = threads == 1 ? 1 : 4 * threads;
    for (const auto& some : waves_of(in.exec, sets.sets * of_item, size, layout)) {
      some.for_each(1, [&](idx_t task, online_softmax<T>& state, idx_t, int worker) {
        const work w = of(task);
        state.rows = w.rows;
        state.clear();
        if (state.rows == 0) return;
        if constexpr (in_codes)
          attend_streamed(w, state, worker);
        else
          streamed(in, sets.items[first_item(w)]) ? attend_streamed(w, state, worker)
                                                  : attend_in_blocks(w, state, worker);
      });
      for (idx_t n = 0; n < some.count; ++n) {
        const idx_t chunk = (some.first + n) % chunks;
        const work w = of(some.first + n);
        total.rows = lost.rows = w.rows;
        if (chunk == 0) {
          total.clear();
          if (any_long) lost.clear();
        }
        for (idx_t number = first_item(w), row = 0; number < last_item(w); ++number) {
          const idx_t each = queries(w, number);
          for (idx_t r = 0; r < w.heads * each; ++r, ++row) {
            total.merge_row(row, some.scratch[n], is_long(number) ? &lost : nullptr);
            if (chunk + 1 < chunks) continue;
            if (is_long(number)) total.settle_row(row, lost);
            in.finish_row(total, row, sets.items[number], w.head + r / each, w.first + r % each);
          }
        }
      }
    }
  }

  /// The same where a task sees all keys of its rows in place, and batch items share none: it ends its rows.
  void run_streamed() const {
    struct memory {
      stream_queries<T, C> queries;
      online_softmax<T> state;
    };
    const idx_t most = heads_of_task * queries_of_task, tasks = shape.kv_heads * parts * runs;
    in.exec.for_each(shape.batch * tasks, [&](idx_t task, int worker) {
      const idx_t b = task / tasks, n = task % tasks, kv = n / (parts * runs), part = n / runs % parts,
                  first = n % runs * queries_of_task, head = kv * group + part * heads_of_task,
                  own_heads = (std::min)(heads_of_task, (kv + 1) * group - head),
                  each = (std::min)(queries_of_task, lengths.queries(b) - first);
      if (each <= 0 || !takes(in, b)) return;
      auto [queries, state] = in.exec.scratch(worker, [&](arena& m) {
        return memory{layout_queries(m, most), online_softmax<T>::layout(m, most, shape.dim_v)};
      });
      queries.rotated = in.rotated_keys;
      state.rows = own_heads * each;
      state.clear();
      queries.begin(in.q, in.relative_queries, {b, head, first, in.shift(b), in.skip_limit(b)}, state.rows, each,
                    in.terms.query_factor());
      attend_stream(queries, in.key_rows(b, kv), in.value_rows(b, kv), {}, 0, in.end_of(b, first + each - 1), in.terms,
                    in.limit(), state, in.visible_keys(b));
      for (idx_t h = 0, row = 0; h < own_heads; ++h)
        for (idx_t i = 0; i < each; ++i) in.finish_row(state, row++, b, head + h, first + i);
    });
  }
  stream_queries<T, C> layout_queries(arena& memory, idx_t rows) const {
    return stream_queries<T, C>::layout(memory, rows, shape.dim, shape.dim_v, in.own_relative());
  }

  /// attend(begin, end, first, last) for the keys [first, last) that the items [begin, end) see together, from
  /// `first_key` on; then for what some of them have in common, and for what each has alone.
  [[gnu::noinline]] void share_keys(const work& w, idx_t begin, idx_t end_item, idx_t first_key,
                                    function_ref<void(idx_t, idx_t, idx_t, idx_t)> attend) const {
    idx_t last_key = end(w, begin);
    for (idx_t number = begin + 1; number < end_item; ++number) last_key = (std::min)(last_key, common_end(w, number));
    if (first_key < last_key) attend(begin, end_item, first_key, last_key);
    if (end_item - begin == 1) return;
    for (idx_t next = begin; next < end_item;) {
      const idx_t from = next++;
      while (next < end_item && common_end(w, next) > last_key) ++next;
      share_keys(w, from, next, (std::max)(first_key, last_key), attend);
    }
  }

  void attend_streamed(const work& w, const online_softmax<T>& state, int worker) const {
    const bool any_long = std::same_as<stream_operand<T, C>, T> && shape.keys > long_segment;  // others err by more
    long_softmax<T> total{};
    auto all = in.exec.scratch(worker, [&](arena& memory) {
      if (any_long) total = long_softmax<T>::layout(memory, state.rows, shape.dim_v);
      return layout_queries(memory, state.rows);
    });
    all.rows = 0, all.rotated = in.rotated_keys;
    for (idx_t number = first_item(w); number < last_item(w); ++number) {
      const idx_t b = sets.items[number];
      all.add(in.q, in.relative_queries, {b, w.head, w.first, in.shift(b), in.skip_limit(b)}, rows(w, number),
              queries(w, number), in.terms.query_factor());
    }
    if (any_long) total.clear(state.rows);
    if (in.terms.skip.given()) raise_maxima(w, all, state);
    share_keys(w, first_item(w), last_item(w), w.begin, [&](idx_t begin, idx_t end, idx_t first, idx_t last) {
      const idx_t row = rows(w, first_item(w), begin), count = rows(w, begin, end);
      for (idx_t from = first, to = last; from < last; from = to) {
        const key_range moved = moved_range(w, from);
        if (any_long) to = (std::min)(last, moved.end);
        if (any_long && from == moved.begin) move_sums(w, begin, end, from, all, state, total);
        attend_keys(w, sets.items[begin], all, state, row, count, from, to);
      }
    });
    for (idx_t number = first_item(w); any_long && number < last_item(w); ++number) {
      move_sums(w, number, number + 1, end(w, number), all, state, total);
      const idx_t row = rows(w, first_item(w), number), count = rows(w, number);
      if (is_long(number)) total.part(row, count).settle(state.part(row, count), count, true);
    }
  }

  /// Where keys may be left out, the maxima are raised by a few of those that are often the largest, the first and the
  /// queries' own, whether they are of the chunk or not.
  [[gnu::noinline]] void raise_maxima(const work& w, const stream_queries<T, C>& all,
                                      const online_softmax<T>& state) const {
    constexpr idx_t some = 16, least = 1024;  // keys
    for (idx_t number = first_item(w); number < last_item(w); ++number) {
      const idx_t b = sets.items[number], row = rows(w, first_item(w), number), count = rows(w, number),
                  own = count > 0 ? in.end_of(b, w.first + queries(w, number) - 1) : 0;
      if (end(w, number) - w.begin < least || !in.terms.skip.of_item(lengths.keys(b)).leaves_out()) continue;
      for (idx_t from : {idx_t(0), own - some})
        attend_keys(w, b, all, state, row, count, from, from + some, stream_pass::maxima);
    }
  }
  /// Rows [row, row + count), of batch item b and of those beside it, attend keys [from, to).
  [[gnu::noinline]] void attend_keys(const work& w, idx_t b, const stream_queries<T, C>& all,
                                     const online_softmax<T>& state, idx_t row, idx_t count, idx_t from, idx_t to,
                                     stream_pass pass = stream_pass::weights) const {
    const idx_t kv = w.head / group;
    attend_stream(all.part(row, count), in.key_rows(b, kv), in.value_rows(b, kv), {}, from, to, in.terms, in.limit(),
                  state.part(row, count), in.visible_keys(b), pass);
  }
  /// Moves the sums of the keys up to `end`, of the long rows of some items, to `total`. Where one key has nearly all
  /// of their weight, it has swallowed others of its tile: they are attended again, a few at a time.
  [[gnu::noinline]] void move_sums(const work& w, idx_t begin, idx_t end_item, idx_t end,
                                   const stream_queries<T, C>& queries, const online_softmax<T>& state,
                                   const long_softmax<T>& total) const {
    constexpr idx_t some = 16;
    const idx_t first = (std::max)(w.begin, moved_range(w, end - 1).begin);
    for (idx_t number = begin; first < end && number < end_item; ++number) {
      if (!is_long(number)) continue;
      for (idx_t r = rows(w, first_item(w), number), last = r + rows(w, number); r < last; ++r) {
        const online_softmax<T> one = state.part(r, 1);
        const long_softmax<T> sums = total.part(r, 1);
        if (*one.sum > T(1) && *one.sum < T(1) + T(1) / 1024) {
          std::fill_n(one.row(0), one.stride, T(0)), *one.sum = 0;
          for (idx_t from = first; from < end; from += some) {
            attend_keys(w, sets.items[number], queries, state, r, 1, from, (std::min)(end, from + some),
                        stream_pass::again);
            sums.add(one, 1);
          }
        }
        sums.add(one, 1);
      }
    }
  }

  /// Those of a block of this item that has attended the keys up to `end`.
  long_row_sums<P> sums_of(const row_block<P>& block, idx_t number, idx_t end) const {
    long_row_sums<P> sums = block.sums(is_long(number));
    if (fixed) sums.resume_at(end);
    return sums;
  }

  void attend_in_blocks(const work& w, const online_softmax<T>& state, int worker) const {
    // Terms are those of one head, and so is what is left out; without any, short tiles of several heads become tall
    // ones.
    const bool alone = in.terms.any() || in.terms.skip.given() || in.terms.dropout || in.terms.by_distance ||
                       in.terms.by_position;
    const auto heads_of_block = [&](idx_t number) {
      return alone ? 1 : std::clamp<idx_t>(max_rows / std::max<idx_t>(1, queries(w, number)), 1, w.heads);
    };
    const auto blocks_of = [&](idx_t begin, idx_t end) {
      idx_t sum = 0;
      for (; begin < end; ++begin) sum += ceil_div(w.heads, heads_of_block(begin));
      return sum;
    };
    idx_t most = 0;  // rows of a block
    for (idx_t number = first_item(w); number < last_item(w); ++number)
      most = (std::max)(most, heads_of_block(number) * queries(w, number));
    const idx_t count = blocks_of(first_item(w), last_item(w));
    // One tile reads keys and values in place; packing them would take longer than its products (one token, 4 heads a
    // key head, 128 channels, Zen 4: 0.6 of the time).
    using stored = typename row_keys<P>::number;
    const bool in_rows = fixed && count == 1 && most <= tile_rows && detail::in_rows<P>(in);
    struct scratch {
      row_keys<P> keys;
      row_block<P>* rows;
      const stored **key_rows, **value_rows;
    };
    const scratch s = in.exec.scratch(worker, [&](arena& memory) {
      const idx_t listed = in_rows ? key_block + slots_ahead : 0;
      return scratch{row_keys<P>::layout(memory, in_rows ? 0 : block_keys, shape.dim, shape.dim_v),
                     memory.allocate_list(count, [&](arena& m) {
                       return row_block<P>::layout(m, shape.dim, shape.dim_v, bool(in.terms.by_distance),
                                                   round_up(most, tile_rows));
                     }),
                     memory.allocate<const stored*>(listed), memory.allocate<const stored*>(listed)};
    });
    // visit(block, batch item, head) for the blocks of some items.
    const auto for_each_block = [&](idx_t begin, idx_t end, const auto& visit) {
      for (row_block<P>* block = s.rows + blocks_of(first_item(w), begin); begin < end; ++begin)
        for (idx_t h = 0; h < w.heads; h += heads_of_block(begin), ++block) visit(*block, begin, w.head + h);
    };
    for_each_block(first_item(w), last_item(w), [&](row_block<P>& block, idx_t number, idx_t h) {
      const idx_t b = sets.items[number], each = queries(w, number),
                  rows = (std::min)(heads_of_block(number), w.head + w.heads - h) * each;
      const index_map which{w.first, 1, nullptr};
      if (alone)
        in.begin(block, b, h, in.query(b, h), which, rows);
      else
        block.begin([&](idx_t r) { return in.query(b, h + r / each).row(w.first + r % each); }, in.q.stride(3), which,
                    rows, in.terms.query_factor());
      block.fixed = fixed;
      if (is_long(number)) block.total.clear(rows);
    });

    share_keys(w, first_item(w), last_item(w), w.begin, [&](idx_t from, idx_t to, idx_t first, idx_t last) {
      const idx_t b = sets.items[from], kv = w.head / shape.group();
      const auto keys = in.key_rows(b, kv);
      const auto values = in.value_rows(b, kv);
      row_keys<P> packed = s.keys;
      line_prefetcher next;
      next.add(keys, first), next.add(values, first);
      packed.next = &next;
      for (idx_t begin = first; begin < last; begin += block_keys) {
        const idx_t end = (std::min)(begin + block_keys, last);
        next.set_end((std::min)(end + block_keys, in.visible_keys(b)));
        packed.positions = {begin, 1, nullptr};
        if constexpr (std::same_as<C, stored>)
          if (in_rows) {
            const idx_t last_slot = in.visible_keys(b) - 1 - begin;
            list_rows(keys, packed.positions, 0, key_block + slots_ahead, last_slot, s.key_rows);
            list_rows(values, packed.positions, 0, key_block + slots_ahead, last_slot, s.value_rows);
            packed.key_rows = s.key_rows, packed.value_rows = s.value_rows;
          }
        for (idx_t j = begin, some = packed.wide; j < end && !in_rows; j += some) {
          next.fetch(j + 3 * some);
          packed.pack(keys, values, j - begin, (std::min)(j + some, end) - begin);
        }
        for_each_block(from, to, [&](row_block<P>& block, idx_t number, idx_t h) {
          const idx_t item = sets.items[number], each = queries(w, number);
          for (idx_t r = 0; r < block.rows; ++r)
            block.ranges[r] = {0, std::clamp(in.end_of(item, w.first + r % each), begin, end) - begin};
          long_row_sums<P> sums = sums_of(block, number, begin);
          attend(block, packed, in.terms_for(item, h), no_prefetch{}, &sums);
        });
      }
    });
    idx_t row = 0;
    for_each_block(first_item(w), last_item(w), [&](row_block<P>& block, idx_t number, idx_t) {
      sums_of(block, number, end(w, number)).finish();
      for (idx_t r = 0; r < block.rows; ++r) state.copy_row(row++, block.state, r);
    });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
