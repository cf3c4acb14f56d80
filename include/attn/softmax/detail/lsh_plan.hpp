// attn: the plan of lsh.hpp: tokens are hashed and sorted (lsh_order.hpp); a round is a stage, a query set are the
// tokens of whole chunks in sorted order, whose keys are made from the queries and packed together.
#pragma once

#include <attn/softmax/detail/lsh_order.hpp>
#include <attn/softmax/detail/sparse_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Options>
struct lsh_plan : lsh_order<S, Options> {
  static constexpr bool keys_are_queries = true;

  using base = lsh_order<S, Options>;
  using typename base::T, typename base::thread_scratch;
  using base::options, base::order_of;

  idx_t stages() const { return options.rounds; }
  idx_t tasks(idx_t, idx_t, idx_t) const { return base::segments(); }
  template <class Visit>
  void sets(const lsh_head<S>& h, idx_t round, idx_t task, const thread_scratch& s, const Visit& visit) const {
    const lsh_chunks chunks(h.length, options);
    const idx_t begin = task * chunks.tokens_per_task(), end = std::min(begin + chunks.tokens_per_task(), h.length);
    if (begin >= end) return;
    const key_range slots = slots_of(chunks, begin, end);
    for (idx_t slot = slots.begin; slot < slots.end; ++slot) {
      const auto [from, at] = chunks.source(round, slot);
      s.token[slot - slots.begin] = order_of(h, from)[at];
    }
    visit(query_set{.stage = round, .number = begin, .rows = {0, 1, order_of(h, round) + begin}, .count = end - begin,
                    .unit = chunks.rows_per_unit(max_rows), .first = round == 0, .last = round + 1 == options.rounds});
  }
  template <class Visit>
  void keys(const lsh_head<S>& h, const query_set& set, const thread_scratch& s, const Visit& visit) const {
    const lsh_chunks chunks(h.length, options);
    const key_range slots = slots_of(chunks, set.number, set.number + set.count);
    const idx_t own = chunks.before() - slots.begin;  // the slot of this round's first token
    const auto excluded = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own;
    visit(seen_keys{.positions = {0, 1, s.token}, .slots = slots.end - slots.begin,
                    .excluded = {.what = excluded, .offset = h.tables.rank + set.stage * base::shape.keys,
                                 .known = {own, own + chunks.n}}},
          [&](idx_t row) {
            const key_range seen = chunks.slots_of(set.number + row);
            return key_range{seen.begin - slots.begin, seen.end - slots.begin};
          });
  }
  /// In sorted order the next rows lie anywhere in memory.
  template <class Rows>
  void prefetch_next(const lsh_head<S>& h, const query_set& set, idx_t row, idx_t count, const Rows& x) const {
    const lsh_chunks chunks(h.length, options);
    const idx_t begin = set.number + row + chunks.tokens_per_task();
    for (idx_t t = begin; t < std::min(begin + count, chunks.n); ++t) {
      prefetch_row(x.query, order_of(h, set.stage)[t]);
      prefetch_row(x.value, order_of(h, set.stage)[t]);
    }
  }

  /// A row that has seen no other key in any round attends itself.
  template <class P, class Terms, class Rows>
  void complete(const lsh_head<S>& h, row_block<P>& block, const Terms& terms, const Rows& x) const {
    for (idx_t row = 0; row < block.rows; ++row)
      if (block.state.row_sum(row) == T(0)) attend_self(h, row, block, terms, x.value);
  }

  idx_t numbers(const attention_shape& s) const { return s.keys * (4 * options.rounds + s.dim + 2 * s.dim_v); }

 protected:
  /// The slots that the sorted tokens [begin, end) of a round see.
  static key_range slots_of(const lsh_chunks& chunks, idx_t begin, idx_t end) {
    return {chunks.slots_of(begin).begin, chunks.slots_of(end - 1).end};
  }

  template <class P, class Terms>
  [[gnu::noinline]] void attend_self(const lsh_head<S>& h, idx_t row, row_block<P>& block, const Terms& terms,
                                     const matrix_view<const S>& value) const {
    const idx_t i = block.positions[row];
    const S* const own = value.row(i);
    const auto head_terms = terms.for_head(h.batch, h.head, 0);
    T score = base::plain_score(h, i, i, head_terms.query_factor());
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.state.maximum[row] = score;
    block.state.sum[row * width<T>] = T(1) + (score - score);  // not a number where the score is not finite
    for (idx_t d = 0; d < value.cols; ++d) block.state.row(row)[d] = static_cast<T>(own[d * value.col_stride]);
  }
};

/// body(plan) for the plan of a call, with the rotations given or drawn ones.
template <class S, class Score, class Options, class Body>
void with_lsh_plan(const softmax_call<S, Score>& in, const Options& options, const Body& body) {
  using T = compute_type<S>;
  const auto with = [&](const tensor_view<const T>& rotations) {
    body(lsh_plan<S, Options>{{{}, options, in.shape, in.lengths, in.q, rotations}});
  };
  if (options.rotations) return with(options.rotations);
  const idx_t half = options.buckets / 2, drawn = options.rounds * in.shape.dim * half;
  const auto numbers = in.exec.workspace([&](arena& memory) { return memory.allocate<T>(drawn); });
  fill_rotations(*numbers, drawn, options.seed, 0);
  with({*numbers, {1, options.rounds, in.shape.dim, half}});
}

}}}  // namespace attn::ATTN_ISA::detail
