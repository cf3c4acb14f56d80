// attn: the backward pass of topk_blocks.hpp, in waves of key heads, query head by query head:
//   1. queries choose their blocks and are sorted by them, as in the forward pass
//   2. round by round, with the final lse: dQ is added up row by row; for dK and dV the entries of the round are divided
//      into parts with separate sums
//   3. the parts' sums are added in order and stored
#pragma once

#include <attn/softmax/detail/softmax_backward_call.hpp>
#include <attn/softmax/detail/topk_driver.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class S, class Score, class ScoreBackward>
struct topk_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const topk_shape& blocks;
  const attention_shape& shape = in.shape;
  topk_choice<S> choice{in.shape, in.lengths(), blocks, in.q, in.k};

  idx_t stride_k() const { return backward_keys<P>::stride(shape.dim); }
  idx_t stride_v() const { return backward_keys<P>::stride(shape.dim_v); }
  /// The last vector of a block reaches beyond its keys.
  idx_t slots() const { return shape.keys + panel_width<T>; }
  idx_t all_blocks() const { return blocks.blocks + 1; }
  /// Number of parts of the entries of a round. It depends on the length only, so that threads do not change the sums.
  static idx_t parts_of(idx_t queries) { return std::clamp<idx_t>(queries / 2048, 1, 4); }
  idx_t parts() const { return parts_of(shape.queries); }

  /// Memory that all threads share for one key head of one batch item.
  struct head_scratch {
    typename topk_choice<S>::head_scratch choice;  // of the query head in progress
    T* dq;                                          // [Lq][stride_k]: sums of that head; null: not wanted
    T *d_keys, *d_values;                           // [parts][slots][stride]
    T *key_errors, *value_errors;                   // of these, with many queries
    bool* begun;                                    // [parts][all_blocks]: whether the sums of a block were begun
    T* slopes;                                      // [parts]: sums of the gradient of the slope
  };
  head_scratch layout(arena& memory) const {
    return {.choice = choice.layout(memory, 1),
            .dq = memory.allocate<T>(in.dq ? shape.queries * stride_k() : 0),
            .d_keys = in.dk ? memory.allocate<T>(parts() * slots() * stride_k()) : nullptr,
            .d_values = in.dv ? memory.allocate<T>(parts() * slots() * stride_v()) : nullptr,
            .key_errors = in.dk && many_queries(shape.queries) ? memory.allocate<T>(parts() * slots() * stride_k())
                                                               : nullptr,
            .value_errors = in.dv && many_queries(shape.queries) ? memory.allocate<T>(parts() * slots() * stride_v())
                                                                 : nullptr,
            .begun = memory.allocate<bool>(parts() * all_blocks()),
            .slopes = memory.allocate<T>(parts())};
  }

  /// Scratch of one thread: a block of rows, and the keys they see.
  struct thread_scratch {
    backward_rows<P> rows;
    backward_scratch<P> kernel;
    backward_keys<P> keys;
    key_range* ranges;  // [max_rows]
    T* dq;              // [max_rows][stride_k]
    typename topk_choice<S>::thread_scratch choice;
  };
  thread_scratch scratch(int worker) const {
    return in.forward.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v),
                            .kernel = in.layout_scratch(memory),
                            .keys = {.keys = packed_keys<P>::layout(memory, blocks.block, shape.dim, shape.dim),
                                     .values = packed_keys<P>::layout(memory, blocks.block, shape.dim_v, 0)},
                            .ranges = memory.allocate<key_range>(max_rows),
                            .dq = in.dq ? memory.allocate<T>(max_rows * stride_k()) : nullptr,
                            .choice = choice.layout_scratch(memory)};
    });
  }

  /// Entries [first, first + count) of a round, which attend one block.
  template <class Terms, class Back>
  void differentiate_run(const topk_head& h, const head_scratch& p, idx_t part, idx_t round, idx_t block, idx_t first,
                         idx_t count, const thread_scratch& s, const Terms& terms, Back& back) const {
    const bool last = round == blocks.rounds, begins = last ? blocks.choices(first + h.shift) == 0 : round == 0;
    const idx_t begin = block * blocks.block, end = h.seen(round, first + count - 1).end;
    if (end == 0) return;  // before the first key
    backward_keys<P> keys = s.keys;
    keys.keys.positions = {begin, 1, nullptr};
    keys.fill(head_of(in.k, h.batch, h.head / shape.group()), head_of(in.v, h.batch, h.head / shape.group()), 0, end);
    if (p.d_keys) keys.d_keys = p.d_keys + (part * slots() + begin) * stride_k();
    if (p.d_values) keys.d_values = p.d_values + (part * slots() + begin) * stride_v();
    if (p.key_errors) keys.key_errors = p.key_errors + (part * slots() + begin) * stride_k();
    if (p.value_errors) keys.value_errors = p.value_errors + (part * slots() + begin) * stride_v();
    if (!std::exchange(p.begun[part * all_blocks() + block], true)) clear_sums(p, part, block);
    const idx_t step = rows_of_run(count);
    for (idx_t n = first; n < first + count; n += step) {
      const idx_t rows = std::min(step, first + count - n);
      const index_map which = h.rows(round, n);
      in.pack_rows(s.rows, h.batch, h.head, head_of(in.q, h.batch, h.head), which, rows);
      for (idx_t r = 0; r < rows; ++r) s.ranges[r] = h.seen(round, n + r);
      if (s.dq) std::fill_n(s.dq, round_up(rows, tile_rows) * stride_k(), T(0));
      for (idx_t r = 0; s.dq && !begins && r < rows; ++r)
        std::copy_n(p.dq + which[r] * stride_k(), stride_k(), s.dq + r * stride_k());
      differentiate(s.rows, rows, s.ranges, which, keys, terms, s.kernel, s.dq, stride_k(), back);
      if (!s.dq) continue;
      for (idx_t r = 0; r < rows; ++r) {
        if (last)
          store_gradient_row(s.dq + r * stride_k(), in.terms().scale, head_of(in.dq, h.batch, h.head), n + r,
                             in.accumulate);
        else
          std::copy_n(s.dq + r * stride_k(), stride_k(), p.dq + which[r] * stride_k());
      }
    }
  }
  void clear_sums(const head_scratch& p, idx_t part, idx_t block) const {
    const idx_t first = part * slots() + block * blocks.block,
                count = std::min(blocks.block, shape.keys - block * blocks.block);
    for (T* x : {p.d_keys, p.key_errors})
      if (x) std::fill_n(x + first * stride_k(), count * stride_k(), T(0));
    for (T* x : {p.d_values, p.value_errors})
      if (x) std::fill_n(x + first * stride_v(), count * stride_v(), T(0));
  }

  /// One part of a round of one query head.
  void differentiate_part(idx_t key_head, idx_t in_group, const head_scratch& p, idx_t round, idx_t part,
                          int worker) const {
    const topk_head h = choice.head(key_head, in_group, p.choice, 0);
    const idx_t parts = parts_of(h.queries), count = h.count_of(round);
    if (in_group == 0 && round == 0) std::fill_n(p.begun + part * all_blocks(), all_blocks(), false);
    if (round == 0) p.slopes[part] = T(0);
    if (part >= parts) return;
    auto head_terms = in.terms().for_head(h.batch, h.head, h.shift);
    auto back = in.back(head_terms);
    const thread_scratch s = scratch(worker);
    h.for_each_run(round, count * part / parts, count * (part + 1) / parts, [&](idx_t block, idx_t n, idx_t some) {
      differentiate_run(h, p, part, round, block, n, some, s, head_terms, back);
    });
    p.slopes[part] += back.d_slope();
  }

  /// Stores the gradients of the keys of a block, from the sums of all parts; beyond the last block, zeros for padding.
  void store_block(idx_t key_head, const head_scratch& p, idx_t block) const {
    const idx_t b = key_head / shape.kv_heads, keys = in.lengths().keys(b), begin = block * blocks.block,
                end = std::min(begin + blocks.block, shape.keys), real = std::min(end, keys);
    const backward_keys<P> sums{.keys = {.dim = shape.dim}, .values = {.dim = shape.dim_v},
                                .d_keys = p.d_keys, .d_values = p.d_values,
                                .key_errors = p.key_errors, .value_errors = p.value_errors};
    if (!p.begun[block]) clear_sums(p, 0, block);
    for (idx_t part = 1; part < parts(); ++part) {
      if (!p.begun[part * all_blocks() + block]) continue;
      sums.settle(part * slots() + begin, part * slots() + real);
      add_sums(p.d_keys, part * slots() * stride_k(), begin * stride_k(), real * stride_k());
      add_sums(p.d_values, part * slots() * stride_v(), begin * stride_v(), real * stride_v());
    }
    sums.store(in.dk, in.dv, b, key_head % shape.kv_heads, begin, end, keys, in.terms().scale, in.accumulate);
  }

  void differentiate_wave(const wave<head_scratch>& key_heads) const {
    const auto for_each = [&](idx_t steps, const auto& body) {
      key_heads.for_each(steps, [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
        body(key_head, p.choice, step, scratch(worker).choice);
      });
    };
    choice.add_up(for_each);
    for (idx_t in_group = 0; in_group < shape.group(); ++in_group) {
      choice.choose(in_group, 1, for_each);
      for (idx_t round = 0; round <= blocks.rounds; ++round)
        key_heads.for_each(parts(), [&](idx_t key_head, const head_scratch& p, idx_t part, int worker) {
          differentiate_part(key_head, in_group, p, round, part, worker);
        });
      for (idx_t n = 0; in.d_slopes && n < key_heads.count; ++n)
        for (idx_t part = 0; part < parts(); ++part)
          in.slope_sums[(key_heads.first + n) * shape.group() + in_group] += key_heads.scratch[n].slopes[part];
    }
    if (in.dk || in.dv)
      key_heads.for_each(all_blocks(), [&](idx_t key_head, const head_scratch& p, idx_t block, int) {
        store_block(key_head, p, block);
      });
  }

  double operations() const {
    const double seen = static_cast<double>(std::min((blocks.rounds + 1) * blocks.block, shape.keys));
    return 2 * static_cast<double>(shape.batch * shape.heads) * static_cast<double>(shape.queries) * seen *
           static_cast<double>(3 * shape.dim + 2 * shape.dim_v);
  }

  void run() const {
    if (!in.dq && !in.dk && !in.dv && !in.d_slopes) return;
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = 3 * shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    for_each_wave(
        exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<head_scratch>& w) { differentiate_wave(w); });
    for (idx_t x = 0; in.dq && !in.accumulate && x < shape.batch * shape.heads; ++x) {
      const idx_t b = x / shape.heads;  // rows that see no key, and padding
      const matrix_view<S> dq = head_of(in.dq, b, x % shape.heads);
      clear_rows(dq, 0, std::clamp<idx_t>(in.lengths().queries(b) - in.lengths().keys(b), 0, shape.queries));
      clear_rows(dq, in.lengths().queries(b), shape.queries);
    }
  }
};
template <class S, class Score, class ScoreBackward>
topk_backward_driver(const softmax_backward_call<S, Score, ScoreBackward>&, const topk_shape&)
    -> topk_backward_driver<S, Score, ScoreBackward>;

}  // namespace attn::inline ATTN_ISA::detail
