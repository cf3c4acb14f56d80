// attn: the work of lsh.hpp, in waves of heads: tokens are hashed and sorted (lsh_order.hpp), then attend round by
// round: pack the keys of whole chunks in sorted order, attend their queries; the states of rows are stored between one
// round and the next.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/softmax/detail/lsh_order.hpp>
#include <attn/softmax/detail/row_states.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class S, class Options, class Score, class P = product_type<S>>
struct lsh_driver {
  using T = compute_type<S>;

  const softmax_call<S, Score>& in;
  const Options& options;
  const attention_shape& shape = in.shape;
  lsh_order<S, Options> tokens{options, in.shape};

  /// Memory that the threads share for one head.
  struct head_scratch {
    lsh_tables<T> tables;
    row_states<T> states;
  };
  head_scratch layout(arena& memory) const {
    return {.tables = tokens.layout(memory), .states = row_states<T>::layout(memory, in.out)};
  }

  /// Scratch of one thread: a block of rows, and the keys they see.
  struct thread_scratch {
    row_block<P> block;
    packed_keys<P> packed;
    idx_t* token;  // of every slot
    typename lsh_order<S, Options>::thread_scratch tokens;
  };
  thread_scratch scratch(int worker) const {
    const idx_t slots = lsh_chunks(shape.keys, options).slots_per_task();
    return in.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.block = row_block<P>::layout(memory, shape.dim, shape.dim_v),
                            .packed = packed_keys<P>::layout(memory, slots, shape.dim, shape.dim_v),
                            .token = memory.allocate<idx_t>(slots),
                            .tokens = tokens.layout_scratch(memory)};
    });
  }

  lsh_head<S> head(idx_t n, const head_scratch& s) const {
    const idx_t b = n / shape.heads, h = n % shape.heads;
    return {b, h, in.lengths.keys(b), in.query(b, h), in.value(b, h), s.tables};
  }

  /// Packs the slots [begin, end) of one round.
  packed_keys<P> pack(const lsh_head<S>& h, const lsh_chunks& chunks, idx_t round, key_range slots,
                      const thread_scratch& s) const {
    packed_keys<P> packed = s.packed;
    packed.positions = {0, 1, s.token};
    tokens.for_each_key_panel(h, chunks, round, slots, s.token, s.tokens, [&](idx_t slot, idx_t some, const auto& key) {
      packed.pack_keys(key, 1, slot, slot + some);
      packed.pack_values(h.value, slot, slot + some);
    });
    return packed;
  }

  /// Sorted tokens [begin, end) of one round, whole chunks.
  void attend_chunks(const lsh_head<S>& h, const row_states<T>& all_states, idx_t round, idx_t begin, idx_t end,
                     const thread_scratch& s) const {
    const lsh_chunks chunks(h.length, options);
    const key_range slots{chunks.slots_of(begin).begin, chunks.slots_of(end - 1).end};
    const packed_keys<P> keys = pack(h, chunks, round, slots, s);
    const idx_t* const order = h.tables.order + round * shape.keys;
    const row_states<T> states = all_states.of(in.out, h.batch, h.head);
    const matrix_view<T> state_rows{states.out, states.rows, states.cols, states.stride, 1};
    const idx_t own = chunks.before() - slots.begin;  // the slot of this round's first token
    auto head_terms = in.terms.for_head(h.batch, h.head, 0);
    head_terms.excluded = {.what = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own,
                           .offset = h.tables.rank + round * shape.keys,
                           .known = {own, own + chunks.n}};
    row_block<P> block = s.block;
    const idx_t unit = chunks.rows_per_unit(max_rows), step = chunks.rows_per_block(max_rows);
    for (idx_t first = begin, last; first < end; first = last) {
      last = std::min({first + step, first + unit - (first - begin) % unit, end});
      block.begin(h.query, {0, 1, order + first}, last - first, in.terms.query_factor());
      if (round > 0) states.resume(block);
      for (idx_t t = first; t < last; ++t) {
        const key_range seen = chunks.slots_of(t);
        block.ranges[t - first] = {seen.begin - slots.begin, seen.end - slots.begin};
      }
      attend(block, keys, head_terms, [&](idx_t r, idx_t n) {  // in sorted order the next rows lie anywhere in memory
        for (idx_t t = first + r; t < first + r + n; ++t) {
          if (const idx_t next = round > 0 ? t + unit : t; next < chunks.n)
            prefetch_row(state_rows, order[next]);
          if (const idx_t next = t + chunks.tokens_per_task(); next < chunks.n) {
            prefetch_row(h.query, order[next]);
            prefetch_row(h.value, order[next]);
          }
        }
      });
      if (round + 1 < options.rounds) {
        states.save(block);
        continue;
      }
      for (idx_t row = 0; row < block.rows; ++row)
        if (block.state.row_sum(row) == T(0)) attend_self(h, row, block);
      in.finish(block, h.batch, h.head);
    }
  }

  /// A row that has seen no other key in any round.
  [[gnu::noinline]] void attend_self(const lsh_head<S>& h, idx_t row, row_block<P>& block) const {
    const idx_t i = block.positions[row];
    const S* const value = h.value.row(i);
    const auto head_terms = in.terms.for_head(h.batch, h.head, 0);
    T score = tokens.plain_score(h, i, i, head_terms.query_factor());
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.state.maximum[row] = score;
    block.state.sum[row * width<T>] = T(1) + (score - score);  // not a number where the score is not finite
    for (idx_t d = 0; d < shape.dim_v; ++d) block.state.row(row)[d] = static_cast<T>(value[d * h.value.col_stride]);
  }

  void attend_heads(const wave<head_scratch>& heads, const tensor_view<const T>& rotations) const {
    tokens.sort_tokens(rotations, [&](idx_t steps, const auto& body) {
      heads.for_each(steps, [&](idx_t n, const head_scratch& s, idx_t step, int worker) {
        body(head(n, s), step, scratch(worker).tokens);
      });
    });
    for (idx_t round = 0; round < options.rounds; ++round)
      heads.for_each(tokens.segments(), [&](idx_t n, const head_scratch& s, idx_t part, int worker) {
        const lsh_head<S> h = head(n, s);
        const idx_t step = lsh_chunks(h.length, options).tokens_per_task(), begin = part * step;
        if (begin < h.length)
          attend_chunks(h, s.states, round, begin, std::min(begin + step, h.length), scratch(worker));
      });
    heads.for_each(1, [&](idx_t n, const head_scratch&, idx_t, int) {
      in.clear_padding(n / shape.heads, n % shape.heads);
    });
  }

  void run() const {
    execution& exec = in.exec;
    const auto limit = exec.limit_threads({.operations = tokens.operations(2 * (shape.dim + shape.dim_v))});
    // Per head, what should stay in the caches: its tables, queries, values and results.
    const idx_t heads = shape.batch * shape.heads, numbers_per_token = 4 * options.rounds + shape.dim + 2 * shape.dim_v,
                bytes = shape.keys * numbers_per_token * static_cast<idx_t>(sizeof(T));
    tokens.with_rotations(exec, [&](const tensor_view<const T>& rotations) {
      for_each_wave(
          exec, heads, wave_size(exec, heads, bytes), [&](arena& memory) { return layout(memory); },
          [&](const wave<head_scratch>& w) { attend_heads(w, rotations); });
    });
  }
};
template <class S, class Score, class Options>
lsh_driver(const softmax_call<S, Score>&, const Options&) -> lsh_driver<S, Options, Score>;

template <class S, class Options, class Score>
void attend_hashed(const softmax_call<S, Score>& in, const Options& options) {
  with_products<S>(in.exec, [&]<class P>(std::type_identity<P>) {
    lsh_driver<S, Options, Score, P>{in, options}.run();
  });
}

}  // namespace attn::inline ATTN_ISA::detail
