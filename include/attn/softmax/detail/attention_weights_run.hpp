// attn: the driver of the operators that give the weights of softmax attention themselves (attention_weights.hpp):
// tiles of scores as the blockwise kernel computes them, and e^(score - lse).
#pragma once

#include <attn/softmax/detail/full_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A call without values.
template <class S, class Score>
struct attention_weights_driver {
  using T = compute_type<S>;
  using P = product_type<S>;
  static constexpr idx_t pack_step = 512, segment = 2048;  // keys packed, and summed, by one task

  const softmax_call<S, Score>& in;
  const attention_shape& shape = in.shape;

  struct scratch {
    row_block<P> block;
    T* block_sums;  // [segment + panel]: of one block of rows
    double* sums;   // of all
  };
  scratch layout(arena& memory) const {
    constexpr idx_t size = segment + 2 * panel_width<T>;
    return {row_block<P>::layout(memory, shape.dim, 0, bool(in.terms.by_distance)), memory.allocate<T>(size),
            memory.allocate<double>(size)};
  }

  /// use(row, first slot, number of slots, weights) for the rows of the block, tile by tile; slots that a row does not
  /// see have weight 0.
  template <class Use>
  void weigh(const row_block<P>& block, const packed_keys<P>& keys, idx_t b, idx_t h, const Use& use) const {
    const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest());
    const auto terms = in.terms.for_head(b, h, in.shift(b));
    const slot_blocks<T> blocks(block.ranges, block.rows);
    for (idx_t at = 0; at < blocks.count; ++at)
      for (idx_t first = 0; first < block.rows; first += tile_rows) {
        const tile t = tile_of(block.ranges, first, block.rows, blocks[at], false, width<T>);
        if (t.low >= t.high || !masked_scores(block.queries_from(t.row), block.relative_from(t.row), block.ranges,
                                              block.positions, keys, t, terms, block.scores,
                                              static_cast<T*>(nullptr), block.factor))
          continue;
        for (idx_t m = 0; m < t.rows; ++m) {
          T* const row = block.scores + m * score_stride;
          const idx_t i = block.positions[t.row + m];
          const auto of = in.lse_of(b, h, i);
          const packet<T> largest = broadcast<T>(of.maximum), log_sum = broadcast<T>(of.log_sum);
          for (idx_t n = 0; n < t.count; n += width<T>) {
            const packet<T> x = load<T>(row + n);
            store<T>(row + n, if_less(x, lowest, zero<T>(), exp2_weight<T>(sub(sub(x, largest), log_sum))));
          }
          const idx_t from = (std::max)(block.ranges[t.row + m].begin, t.first),
                      to = (std::min)(block.ranges[t.row + m].end, t.first + t.count);
          if (terms.dropout && from < to) terms.drop(row + from - t.first, to - from, i, keys.positions, from);
          use(t.row + m, t.first, t.count, row);
        }
      }
  }

  /// Rows which[0 .. count) with the keys they see among [begin, end).
  void begin(row_block<P>& block, idx_t b, idx_t h, const index_map& which, idx_t count, idx_t begin, idx_t end) const {
    in.begin(block, b, h, in.query(b, h), which, count);
    for (idx_t r = 0; r < count; ++r) {
      const idx_t seen = in.end_of(b, which[r]);
      const bool any = in.lse_of(b, h, which[r]).sees();
      block.ranges[r] = {begin, any ? (std::max)(begin, (std::min)(seen, end)) : begin};
    }
  }

  /// Packs the keys of every key head, then task(key head, its keys, step, worker) for `steps` steps.
  template <class Task>
  void run(idx_t steps, const Task& task) const {
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = shape.keys * shape.dim * static_cast<idx_t>(sizeof(T));
    const auto layout_item = [&](arena& memory) { return packed_keys<P>::layout(memory, shape.keys, shape.dim, 0); };
    for (const auto& w : waves_of(in.exec, key_heads, wave_size(in.exec, key_heads, bytes), layout_item)) {
      w.for_each(ceil_div(shape.keys, pack_step), [&](idx_t key_head, packed_keys<P>& keys, idx_t step, int) {
        const idx_t b = key_head / shape.kv_heads, from = step * pack_step;
        const idx_t to = (std::min)(from + pack_step, in.visible_keys(b));
        const auto k = head_of(in.k, b, key_head % shape.kv_heads);
        if (from < to) keys.pack(k, head_of(in.v, b, key_head % shape.kv_heads), from, to);
      });
      w.for_each(steps, task);
    }
  }

  /// to[b, h, n, j] = the weight of key j for query rows[n].
  void write_rows(list_view<idx_t> rows, const tensor_view<T>& to) const {
    const idx_t count = to.extent(2), blocks = ceil_div(count, max_rows), group = shape.group();
    run(blocks * group, [&](idx_t key_head, const packed_keys<P>& keys, idx_t step, int worker) {
      const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads * group + step % group;
      const idx_t n0 = step / group * max_rows, n1 = (std::min)(n0 + max_rows, count);
      scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      const auto target = head_of(to, b, h);
      clear_rows(target, n0, n1);
      idx_t queries[max_rows], places[max_rows], real = 0;
      for (idx_t n = n0; n < n1; ++n) {
        const idx_t row = rows.empty() ? n : rows[static_cast<std::size_t>(n)];
        if (row < in.lengths.queries(b)) queries[real] = row, places[real++] = n;
      }
      begin(s.block, b, h, {0, 1, queries}, real, 0, in.lengths.keys(b));
      weigh(s.block, keys, b, h, [&](idx_t r, idx_t first, idx_t slot_count, const T* weights) {
        const key_range seen = s.block.ranges[r];
        for (idx_t j = (std::max)(first, seen.begin); j < (std::min)(first + slot_count, seen.end); ++j)
          target.row(places[r])[j * target.col_stride] = weights[j - first];
      });
    });
  }

  /// to[b, h, j] = the weights of key j, summed over all queries.
  void write_sums(const tensor_view<T, 3>& to) const {
    const idx_t group = shape.group();
    run(ceil_div(shape.keys, segment) * group, [&](idx_t key_head, const packed_keys<P>& keys, idx_t step, int worker) {
      const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads * group + step % group;
      const idx_t j0 = step / group * segment, j1 = (std::min)(j0 + segment, shape.keys);
      const idx_t size = round_up(j1 - j0, panel_width<T>), queries = in.lengths.queries(b);
      scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      std::fill_n(s.sums, size, 0.0);
      for (idx_t i0 = 0; i0 < queries; i0 += max_rows) {
        begin(s.block, b, h, {i0, 1, nullptr}, (std::min)(max_rows, queries - i0), j0,
              (std::min)(j1, in.lengths.keys(b)));
        std::fill_n(s.block_sums, size, T(0));
        weigh(s.block, keys, b, h, [&](idx_t, idx_t first, idx_t slot_count, const T* weights) {
          T* const sums = s.block_sums + first - j0;
          for (idx_t n = 0; n < slot_count; n += width<T>)
            store<T>(sums + n, add(load<T>(sums + n), load<T>(weights + n)));
        });
        for (idx_t n = 0; n < size; ++n) s.sums[n] += static_cast<double>(s.block_sums[n]);
      }
      for (idx_t j = j0; j < j1; ++j) to(b, h, j) = static_cast<T>(s.sums[j - j0]);
    });
  }
};

/// Writes the weights of `rows`, or their sums over all rows, or both where both are given, by the lse that the forward
/// call wrote, or computed again.
template <class S, class Score>
void run_attention_weights(softmax_call<S, Score>& call, list_view<idx_t> rows,
                           const tensor_view<compute_type<S>>& weights, const tensor_view<compute_type<S>, 3>& sums) {
  const attention_shape& s = call.shape;
  const double pairs = static_cast<double>(s.queries) * static_cast<double>(s.keys);
  const auto limit = call.exec.limit_threads({.operations = s.operations_per_score() * pairs});
  // Weights are e^(score - lse): lse must come from the same kind of products as the scores.
  if (uses_fast_products<S>(call.exec)) call.lse = {};
  const standard_products standard(call.exec);
  const auto terms = call.exec.workspace([&](arena& m) { return call.layout_terms(m, distance_range{call.furthest()}); });
  call.prepare_terms(*terms);
  const auto memory = call.exec.workspace([&](arena& m) { return call.layout_lse(m); });
  if (call.needs_lse(*memory)) full_softmax_driver<S, Score>{call}.run();
  const attention_weights_driver<S, Score> driver{call};
  if (weights) driver.write_rows(rows, weights);
  if (sums) driver.write_sums(sums);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_attention_weights(softmax_call<S, no_score>&, list_view<idx_t>,                           \
  const tensor_view<compute_type<S>>&, const tensor_view<compute_type<S>, 3>&)
#include <attn/core/detail/compiled.hpp>
