// attn: the plan of lsh.hpp, for one head at a time:
//   1. hash   keys from queries, and the bucket of every token in every round
//   2. sort   the tokens of every round by (bucket, position)
// A round is a stage, a query set are the tokens of whole chunks of that order, whose keys are made from the queries
// and packed together.
#pragma once

#include <attn/softmax/detail/lsh_hashing.hpp>
#include <attn/softmax/detail/sparse_driver.hpp>

#include <algorithm>
#include <numeric>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct lsh_options;

namespace detail {

inline constexpr idx_t lsh_segment = 512;  // tokens of a task

/// The chunks of one round over n sorted tokens, and the packed slots their queries see: before() slots of earlier
/// rounds' chunks, the n tokens, then those of later rounds' chunks. Without `wrap` there are only the n tokens.
struct lsh_chunks {
  idx_t n, chunk, chunks, rounds, lookback, lookahead;
  bool wrap;

  template <class Options>
  lsh_chunks(idx_t n_, const Options& o) : n(n_), rounds(o.rounds), wrap(o.wrap) {
    chunk = std::clamp<idx_t>(o.chunk, 1, std::max<idx_t>(1, n));
    chunks = ceil_div(n, chunk);
    const idx_t others = std::max<idx_t>(0, (wrap ? chunks * rounds : chunks) - 1);
    lookback = (std::min)(o.lookback, others);
    lookahead = (std::min)(o.lookahead, wrap ? others - lookback : others);
  }

  /// Tokens before chunk c, counted from chunk 0 of this round; c may lie in another round.
  idx_t tokens_before(idx_t c) const {
    const idx_t round = floor_div(c, chunks);
    return round * n + (c - round * chunks) * chunk;
  }
  idx_t before() const { return wrap && n ? -tokens_before(-lookback) : 0; }
  /// Number of slots, for this or any shorter length.
  idx_t most_slots() const { return n + (wrap ? (lookback + lookahead) * chunk : 0); }

  /// The slots the sorted token t sees.
  key_range slots_of(idx_t t) const {
    const idx_t own = t / chunk;
    idx_t first = own - lookback, last = own + lookahead;
    if (!wrap) first = std::max<idx_t>(first, 0), last = (std::min)(last, chunks - 1);
    return {before() + tokens_before(first), before() + tokens_before(last + 1)};
  }

  /// Number of sorted tokens of a task: whole chunks, so many that the keys it packs are mostly seen by its own
  /// queries, and still fit in the second-level cache.
  idx_t tokens_per_task() const {
    return chunk * std::max<idx_t>(ceil_div(lsh_segment, chunk), 2 * (lookback + lookahead));
  }
  /// Number of slots that the tokens of a task see, for this or any shorter length.
  idx_t slots_per_task() const {
    return (std::min)(most_slots(), tokens_per_task() + (lookback + lookahead) * chunk);
  }

  /// Of a slot of round r: the round it belongs to, and its rank in the order of that round.
  std::pair<idx_t, idx_t> source(idx_t r, idx_t slot) const {
    const idx_t at = slot - before(), turn = floor_div(at, n), round = r + turn;
    return {round - floor_div(round, rounds) * rounds, at - turn * n};
  }
};

/// Memory that the threads share for one head.
template <class T>
struct lsh_tables {
  T* rotations = nullptr;  // packed: pack_rotations
  T* factor = nullptr;     // [L]: of q, to make it a key
  idx_t* rank = nullptr;   // [rounds][L]: the bucket of a token; after the sort, its rank in the order
  idx_t* order = nullptr;  // [rounds][L]: tokens by (bucket, position)
};

template <class S>
struct lsh_head {
  idx_t batch, head, length;
  matrix_view<const S> query;
  lsh_tables<compute_type<S>> tables;
};

template <class S>
struct lsh_plan : row_plan {
  static constexpr bool keys_are_queries = true;

  using T = compute_type<S>;
  using head = lsh_head<S>;

  const lsh_options<S>& options;
  const attention_shape& shape;
  const sequence_lengths& lengths;
  tensor_view<const S> q;
  tensor_view<const T> rotations;

  idx_t half() const { return options.buckets / 2; }
  idx_t rotation_size() const { return round_up(half(), tile_rows) * shape.dim; }  // of one round, packed
  idx_t segments() const { return ceil_div(shape.keys, lsh_segment); }
  /// Slots of the keys that a task packs, at most.
  idx_t capacity() const { return lsh_chunks(shape.keys, options).slots_per_task(); }

  using item_scratch = lsh_tables<T>;
  item_scratch layout(arena& memory, idx_t) const {
    const idx_t all = options.rounds * shape.keys;
    return {.rotations = memory.allocate<T>(options.rounds * rotation_size()),
            .factor = memory.allocate<T>(shape.keys), .rank = memory.allocate<idx_t>(all),
            .order = memory.allocate<idx_t>(all)};
  }
  struct thread_scratch {
    T* keys;              // [panel_width][D], of whole packets: to be packed
    T* panel;             // the same, packed, to be hashed
    idx_t* bucket_begin;  // [buckets + 1]: where the next token of a bucket goes; null with many buckets
    idx_t* token;         // of every slot of the keys of a task
  };
  thread_scratch layout_scratch(arena& memory) const {
    return {.keys = memory.allocate<T>(panel_width<T> * round_up(shape.dim, width<T>)),
            .panel = memory.allocate<T>(panel_width<T> * shape.dim),
            .bucket_begin = memory.allocate<idx_t>(many_buckets(shape.keys) ? 0 : options.buckets + 1),
            .token = memory.allocate<idx_t>(capacity())};
  }
  /// Whether so many tokens are sorted sooner than buckets are counted.
  bool many_buckets(idx_t tokens) const { return options.buckets > 4 * tokens; }
  lsh_head<S> head_at(idx_t x, const item_scratch& p, idx_t) const {
    const idx_t b = x / shape.heads, h = x % shape.heads;
    return {b, h, lengths.keys(b), head_of(q, b, h), p};
  }
  const idx_t* order_of(const lsh_head<S>& h, idx_t round) const { return h.tables.order + round * shape.keys; }

  /// The keys of all tokens as the rows of a matrix. A row is made when it is asked for, and stays until panel_width
  /// others are.
  struct made_keys {
    static constexpr idx_t col_stride = 1;

    matrix_view<const S> query;
    const T* factor;
    T* memory;
    mutable idx_t next = 0;

    [[gnu::noinline]] const T* row(idx_t i) const {
      T* const key = memory + next++ % panel_width<T> * round_up(query.cols, width<T>);
      const S* const x = query.row(i);
      for (idx_t d = 0, stride = query.col_stride; d < query.cols; d += width<T>)
        store<T>(key + d, mul(load_part<T>(x + d * stride, stride, query.cols - d), broadcast<T>(factor[i])));
      return key;
    }
  };
  template <class Rows>
  made_keys key_rows(const lsh_head<S>& h, const Rows&, const thread_scratch& s) const {
    return {h.query, h.tables.factor, s.keys};
  }

  /// The score of query i and key j before the terms, by plain loops.
  T plain_score(const lsh_head<S>& h, idx_t i, idx_t j, T query_factor) const {
    const S *const x = h.query.row(i), *const y = h.query.row(j);
    T score = 0;
    for (idx_t d = 0; d < shape.dim; ++d)
      score += static_cast<T>(x[d * h.query.col_stride]) * query_factor *
               (static_cast<T>(y[d * h.query.col_stride]) * h.tables.factor[j]);
    return score;
  }

  /// Factors and buckets of tokens [begin, end).
  void hash(const lsh_head<S>& h, idx_t begin, idx_t end, const thread_scratch& s) const {
    const made_keys keys = key_rows(h, h.query, s);
    for (idx_t i = begin; i < end; i += panel_width<T>) {
      const idx_t count = std::min<idx_t>(panel_width<T>, end - i);
      for (idx_t n = i; n < i + count; ++n)
        h.tables.factor[n] = key_factor<T>(h.query.row(n), h.query.col_stride, shape.dim, options.norm_eps);
      pack_panels_across<T>([&](idx_t n) { return keys.row(i + n); }, count, shape.dim, 1, s.panel);
      for (idx_t round = 0; round < options.rounds; ++round)
        hash_panel(h.tables.rotations + round * rotation_size(), half(), shape.dim, s.panel, count,
                   h.tables.rank + round * shape.keys + i);
    }
  }

  /// Tokens of one round by (bucket, position).
  void sort(const lsh_head<S>& h, idx_t round, idx_t* bucket_begin) const {
    const idx_t n = h.length;
    idx_t *const rank = h.tables.rank + round * shape.keys, *const order = h.tables.order + round * shape.keys;
    if (many_buckets(n)) {
      std::iota(order, order + n, idx_t(0));
      std::sort(order, order + n, [&](idx_t i, idx_t j) { return rank[i] != rank[j] ? rank[i] < rank[j] : i < j; });
      for (idx_t at = 0; at < n; ++at) rank[order[at]] = at;
      return;
    }
    std::fill_n(bucket_begin, options.buckets + 1, idx_t(0));
    for (idx_t i = 0; i < n; ++i) ++bucket_begin[rank[i] + 1];
    for (idx_t x = 0; x < options.buckets; ++x) bucket_begin[x + 1] += bucket_begin[x];
    for (idx_t i = 0; i < n; ++i) {
      const idx_t at = bucket_begin[rank[i]]++;
      order[at] = i;
      rank[i] = at;
    }
  }

  void prepare(idx_t first, idx_t, const for_each_step<item_scratch, thread_scratch>& for_each) const {
    for_each(idx_t(1), [&](idx_t x, const item_scratch& p, idx_t, const thread_scratch&) {
      const idx_t h = (x + first) % shape.heads;
      pack_rotations<T>(rotations, rotations.extent(0) == 1 ? 0 : h, p.rotations);
    });
    for_each(segments(), [&](idx_t x, const item_scratch& p, idx_t part, const thread_scratch& s) {
      const lsh_head<S> h = head_at(x + first, p, 0);
      hash(h, (std::min)(part * lsh_segment, h.length), (std::min)((part + 1) * lsh_segment, h.length), s);
    });
    for_each(options.rounds, [&](idx_t x, const item_scratch& p, idx_t round, const thread_scratch& s) {
      sort(head_at(x + first, p, 0), round, s.bucket_begin);
    });
  }

  /// `per_score` for a query and a key, and the hashes.
  double operations(idx_t per_score) const {
    const lsh_chunks c(shape.keys, options);
    const idx_t keys = (c.lookback + 1 + c.lookahead) * c.chunk, hashes = shape.batch * shape.heads * c.n * c.rounds;
    return static_cast<double>(keys * per_score + 2 * shape.dim * half()) * static_cast<double>(hashes);
  }

  idx_t stages() const { return options.rounds; }
  idx_t tasks(idx_t, idx_t, idx_t) const { return segments(); }
  template <class Visit>
  void sets(const lsh_head<S>& h, idx_t round, idx_t task, const thread_scratch& s, const Visit& visit) const {
    const lsh_chunks chunks(h.length, options);
    const idx_t begin = task * chunks.tokens_per_task(), end = (std::min)(begin + chunks.tokens_per_task(), h.length);
    if (begin >= end) return;
    const key_range slot_range = slots_of(chunks, begin, end);
    for (idx_t slot = slot_range.begin; slot < slot_range.end; ++slot) {
      const auto [from, at] = chunks.source(round, slot);
      s.token[slot - slot_range.begin] = order_of(h, from)[at];
    }
    // Row blocks are whole chunks where several fit, else equal parts of a chunk.
    visit(query_set{.stage = round, .number = begin, .rows = {0, 1, order_of(h, round) + begin}, .count = end - begin,
                    .unit = std::max<idx_t>(1, max_rows / chunks.chunk) * chunks.chunk, .first = round == 0,
                    .last = round + 1 == options.rounds});
  }
  template <class Visit>
  void keys(const lsh_head<S>& h, const query_set& set, const thread_scratch& s, const Visit& visit) const {
    const lsh_chunks chunks(h.length, options);
    const key_range slot_range = slots_of(chunks, set.number, set.number + set.count);
    const idx_t own = chunks.before() - slot_range.begin;  // the slot of this round's first token
    const auto excluded = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own;
    visit(seen_keys{.positions = {0, 1, s.token}, .slot_count = slot_range.end - slot_range.begin,
                    .excluded = {.what = excluded, .offset = h.tables.rank + set.stage * shape.keys,
                                 .known = {own, own + chunks.n}}},
          [&](idx_t row) {
            const key_range seen = chunks.slots_of(set.number + row);
            return key_range{seen.begin - slot_range.begin, seen.end - slot_range.begin};
          });
  }
  /// In sorted order the next rows lie anywhere in memory.
  template <class Rows>
  void prefetch_next(const lsh_head<S>& h, const query_set& set, idx_t row, idx_t count, const Rows& x) const {
    const lsh_chunks chunks(h.length, options);
    const idx_t begin = set.number + row + chunks.tokens_per_task();
    for (idx_t t = begin; t < (std::min)(begin + count, chunks.n); ++t) {
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

  /// The slots that the sorted tokens [begin, end) of a round see.
  static key_range slots_of(const lsh_chunks& chunks, idx_t begin, idx_t end) {
    return {chunks.slots_of(begin).begin, chunks.slots_of(end - 1).end};
  }

 private:
  template <class P, class Terms>
  [[gnu::noinline]] void attend_self(const lsh_head<S>& h, idx_t row, row_block<P>& block, const Terms& terms,
                                     const matrix_view<const S>& value) const {
    const idx_t i = block.positions[row];
    const S* const own = value.row(i);
    const auto head_terms = terms.for_head(h.batch, h.head, 0);
    T score = plain_score(h, i, i, head_terms.query_factor());
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.state.maximum[row] = score;
    block.state.sum[row * width<T>] = T(1) + (score - score);  // not a number where the score is not finite
    for (idx_t d = 0; d < value.cols; ++d) block.state.row(row)[d] = static_cast<T>(own[d * value.col_stride]);
  }
};

/// The checks of the options that only lsh has, and the settings of a call.
template <class S, class Score>
void set_lsh_options(call_views& views, softmax_call<S, Score>& call, const lsh_options<S>& options) {
  const attention_shape& shape = call.shape;
  check_length_list(views, "lengths", options.lengths, shape.batch, shape.keys);
  check_rounds(views, options.rounds);
  check_buckets(views, options.buckets);
  views.at_least("chunk", 1, options.chunk);
  views.at_least("lookback", 0, options.lookback);
  views.at_least("lookahead", 0, options.lookahead);
  views.fits("buckets of all tokens", {options.rounds, shape.keys});
  views.fits("rotations", {options.rounds, shape.dim, options.buckets});
  if (!(options.norm_eps >= 0 && std::isfinite(options.norm_eps)))
    views.fail("a finite norm_eps >= 0", static_cast<double>(options.norm_eps));
  if (options.scale && !options.scaled) views.fail("either a scale, or scaled = false", "both");
  views.option("rotations", options.rotations, {{"rotations heads", shape.heads, or_one},
                                                {"rotations rounds = rounds", options.rounds},
                                                {"rotations rows = query dim", shape.dim},
                                                {"rotations columns = buckets / 2 =", options.buckets / 2}});
  call.lengths = {shape.queries, shape.keys, options.lengths, options.lengths};
  call.terms.scale = scale_or_default(options.scale, options.scaled ? shape.dim : 1);
}

/// The keys are the queries, but the number of key heads is that of the values.
template <class Q, class V>
auto lsh_keys(const char* name, const Q& q, const V& v) {
  const auto values = as_view(v);
  validator(name).readable("v", values);
  return as_view(q).slice(1, 0, values.extent(1));
}

/// body(plan) for the plan of a call, with the rotations given or drawn ones.
template <class S, class Score, class Body>
void with_lsh_plan(const softmax_call<S, Score>& in, const lsh_options<S>& options, const Body& body) {
  using T = compute_type<S>;
  const auto with = [&](const tensor_view<const T>& rotations) {
    body(lsh_plan<S>{{}, options, in.shape, in.lengths, in.q, rotations});
  };
  if (options.rotations) return with(options.rotations);
  const idx_t half = options.buckets / 2, drawn = options.rounds * in.shape.dim * half;
  const auto numbers = in.exec.workspace([&](arena& memory) { return memory.allocate<T>(drawn); });
  fill_rotations(*numbers, drawn, options.seed, 0);
  with({*numbers, {1, options.rounds, in.shape.dim, half}});
}

template <class S, class Score>
void run_lsh(const softmax_call<S, Score>& call, const lsh_options<S>& options) {
  with_lsh_plan(call, options, [&](const auto& plan) { run_plan(call, plan); });
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
