// attn: the work of topk_blocks.hpp, in waves of key heads:
//   1. the keys of every block are added up, unless a cache has the sums; queries choose their blocks, and are sorted
//      by them, round by round (topk_choice.hpp)
//   2. round by round, the own blocks last: pack the keys of a block, attend the queries that chose it; the states of
//      rows are stored between one round and the next
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/row_states.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/topk_choice.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr idx_t topk_segment = 512;  // entries of a round that are a task
inline constexpr idx_t few_sums = 32;       // so many sums are added up without compensation

template <class S, class Score, class P = product_type<S>>
struct topk_driver {
  using T = compute_type<S>;

  const softmax_call<S, Score>& in;
  const topk_shape& blocks;
  const T* sums = nullptr;
  idx_t sums_stride = 0;
  const attention_shape& shape = in.shape;
  topk_choice<S> choice{in.shape, in.lengths, blocks, in.q, in.k, sums, sums_stride};

  struct head_scratch {
    typename topk_choice<S>::head_scratch choice;
    row_states<T>* states;  // per query head, if there are several rounds
  };
  head_scratch layout(arena& memory) const {
    return {.choice = choice.layout(memory, shape.group()),
            .states = memory.allocate_list(blocks.rounds > 0 ? shape.group() : 0,
                                           [&](arena& m) {
                                             return row_states<T>::layout(m, in.out, blocks.rounds > few_sums);
                                           })};
  }

  /// Scratch of one thread: a block of rows, and the keys they see.
  struct thread_scratch {
    row_block<P> rows;
    packed_keys<P> keys;
    typename topk_choice<S>::thread_scratch choice;
  };
  thread_scratch scratch(int worker) const {
    return in.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.rows = row_block<P>::layout(memory, shape.dim, shape.dim_v),
                            .keys = packed_keys<P>::layout(memory, blocks.block, shape.dim, shape.dim_v),
                            .choice = choice.layout_scratch(memory)};
    });
  }

  /// Whether so few tiles add to the sums of a row that rounding loses little: it then resumes them before a run.
  bool few_tiles() const { return blocks.rounds * ceil_div(blocks.block, key_block) <= few_sums; }

  /// Entries [first, first + count) of a round, which attend one block.
  void attend_run(const topk_head& h, const row_states<T>* states, idx_t round, idx_t block, idx_t first, idx_t count,
                  const thread_scratch& s) const {
    packed_keys<P> keys = s.keys;
    keys.positions = {block * blocks.block, 1, nullptr};
    keys.pack(in.key(h.batch, h.head), in.value(h.batch, h.head), 0, h.seen(round, first + count - 1).end);
    const auto head_terms = in.terms.for_head(h.batch, h.head, h.shift);
    const bool last = round == blocks.rounds, resumes = last ? blocks.choices(first + h.shift) > 0 : round > 0;
    row_states<T> aside{};
    if (!last || resumes) aside = states->of(in.out, h.batch, h.head);
    row_block<P> rows = s.rows;
    const idx_t step = rows_of_run(count);
    for (idx_t n = first; n < first + count; n += step) {
      rows.begin(in.query(h.batch, h.head), h.rows(round, n), std::min(step, first + count - n),
                 in.terms.query_factor());
      if (resumes && few_tiles())
        aside.resume(rows);
      else if (resumes)
        aside.resume_maxima(rows);
      for (idx_t r = 0; r < rows.rows; ++r) rows.ranges[r] = h.seen(round, n + r);
      attend(rows, keys, head_terms);
      if (resumes && !few_tiles())
        aside.resume_sums(rows, last);
      else if (!resumes && !last)
        aside.clear_errors(rows);
      if (last)
        in.finish(rows, h.batch, h.head);
      else
        aside.save(rows);
    }
  }

  void attend_wave(const wave<head_scratch>& key_heads) const {
    const idx_t group = shape.group();
    const auto for_each = [&](idx_t steps, const auto& body) {
      key_heads.for_each(steps, [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
        body(key_head, p.choice, step, scratch(worker).choice);
      });
    };
    choice.add_up(for_each);
    choice.choose(0, group, for_each);
    for (idx_t round = 0; round <= blocks.rounds; ++round)
      key_heads.for_each(group * ceil_div(shape.queries, topk_segment),
                     [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
                       const idx_t in_group = step % group, begin = step / group * topk_segment;
                       const topk_head h = choice.head(key_head, in_group, p.choice, in_group);
                       const idx_t end = std::min(begin + topk_segment, h.count_of(round));
                       if (begin >= end) return;
                       const thread_scratch s = scratch(worker);
                       const row_states<T>* const states = blocks.rounds > 0 ? p.states + in_group : nullptr;
                       h.for_each_run(round, begin, end, [&](idx_t block, idx_t n, idx_t count) {
                         attend_run(h, states, round, block, n, count, s);
                       });
                     });
    key_heads.for_each(group, [&](idx_t key_head, const head_scratch&, idx_t in_group, int) {
      in.clear_padding(key_head / shape.kv_heads, key_head % shape.kv_heads * group + in_group);
    });
  }

  double operations() const {
    const double seen = static_cast<double>(std::min((blocks.rounds + 1) * blocks.block, shape.keys));
    return static_cast<double>(shape.batch * shape.heads) * static_cast<double>(shape.queries) *
           (2 * seen * static_cast<double>(shape.dim + shape.dim_v) + static_cast<double>(blocks.blocks * shape.dim));
  }

  void run() const {
    execution& exec = in.exec;
    const auto limit = exec.limit_threads({.operations = operations()});
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = shape.queries * shape.group() * (2 * blocks.rounds * idx_t(sizeof(idx_t)) +
                                                         (shape.dim + shape.dim_v) * idx_t(sizeof(T)));
    for_each_wave(
        exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<head_scratch>& w) { attend_wave(w); });
  }
};
template <class S, class Score>
topk_driver(const softmax_call<S, Score>&, const topk_shape&, const compute_type<S>* = nullptr, idx_t = 0)
    -> topk_driver<S, Score>;

template <class S, class Score>
void attend_topk(const softmax_call<S, Score>& in, const topk_shape& blocks, const compute_type<S>* sums = nullptr,
                 idx_t sums_stride = 0) {
  with_products<S>(in.exec, [&]<class P>(std::type_identity<P>) {
    topk_driver<S, Score, P>{in, blocks, sums, sums_stride}.run();
  });
}

}  // namespace attn::inline ATTN_ISA::detail
