// attn: the work of lsh.hpp, in waves of heads:
//   1. hash     keys from queries, and the bucket of every token in every round
//   2. sort     tokens of every round by (bucket, position)
//   3. attend   round by round: pack the keys of whole chunks in sorted order, attend their queries; rows are set aside
//               between one round and the next
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/lsh_hashing.hpp>
#include <attn/softmax/detail/row_states.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The chunks of one round over n sorted tokens, and the packed slots their queries see: before() slots of earlier
/// rounds' chunks, the n tokens, then those of later rounds' chunks. Without `wrap` there are only the n tokens.
struct lsh_chunks {
  index n, chunk, chunks, rounds, lookback, lookahead;
  bool wrap;

  template <class Options>
  lsh_chunks(index n_, const Options& o) : n(n_), rounds(o.rounds), wrap(o.wrap) {
    chunk = std::clamp<index>(o.chunk, 1, std::max<index>(1, n));
    chunks = ceil_div(n, chunk);
    const index others = std::max<index>(0, (wrap ? chunks * rounds : chunks) - 1);
    lookback = std::min(o.lookback, others);
    lookahead = std::min(o.lookahead, wrap ? others - lookback : others);
  }

  /// Tokens before chunk c, counted from chunk 0 of this round; c may lie in another round.
  index tokens_before(index c) const {
    const index round = floor_div(c, chunks);
    return round * n + (c - round * chunks) * chunk;
  }
  index before() const { return wrap && n ? -tokens_before(-lookback) : 0; }
  /// Slots of this or any shorter length.
  index most_slots() const { return n + (wrap ? (lookback + lookahead) * chunk : 0); }

  /// The slots the sorted token t sees.
  key_range slots_of(index t) const {
    const index own = t / chunk;
    index first = own - lookback, last = own + lookahead;
    if (!wrap) first = std::max<index>(first, 0), last = std::min(last, chunks - 1);
    return {before() + tokens_before(first), before() + tokens_before(last + 1)};
  }

  /// The round and the rank in its order of a slot of round r.
  std::pair<index, index> source(index r, index slot) const {
    const index at = slot - before(), turn = floor_div(at, n), round = r + turn;
    return {round - floor_div(round, rounds) * rounds, at - turn * n};
  }
};

template <class S, class Options, class Score>
struct lsh_driver {
  using T = compute_type<S>;
  static constexpr index segment = 512;  // tokens of a task

  const tensor_view<const S>&q, &v;
  const tensor_view<S>& out;
  const Options& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;

  /// What the threads share of one head.
  struct head_scratch {
    T* rotations;  // packed: pack_rotations
    T* factor;     // [L]: of q, to make it a key
    index* rank;   // [rounds][L]: the bucket of a token; after the sort, its rank in the order
    index* order;  // [rounds][L]: tokens by (bucket, position)
    row_states<T> states;
  };
  head_scratch layout(arena& memory) const {
    const index all = options.rounds * shape.keys;
    return {.rotations = memory.allocate<T>(options.rounds * round_up(half(), tile_rows) * shape.dim + width<T>),
            .factor = memory.allocate<T>(shape.keys), .rank = memory.allocate<index>(all),
            .order = memory.allocate<index>(all), .states = row_states<T>::layout(memory, out)};
  }

  /// Scratch of one thread: a block of rows, and the keys they see.
  struct thread_scratch {
    row_block<T> block;
    packed_keys<T> packed;
    index* token;         // of every slot
    T* keys;              // [panel_width][D]: to be packed
    T* panel;             // the same, packed, to be hashed
    index* bucket_begin;  // [buckets + 1]: where the next token of a bucket goes
  };
  thread_scratch scratch(execution& exec, int worker) const {
    const lsh_chunks chunks(shape.keys, options);
    const index slots =
        std::min(chunks.most_slots(), tokens_per_task(chunks) + (chunks.lookback + chunks.lookahead) * chunks.chunk);
    return exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.block = row_block<T>::layout(memory, shape.dim, shape.dim_v),
                            .packed = packed_keys<T>::layout(memory, slots, shape.dim, shape.dim_v),
                            .token = memory.allocate<index>(slots),
                            .keys = memory.allocate<T>(panel_width<T> * shape.dim),
                            .panel = memory.allocate<T>(panel_width<T> * shape.dim),
                            .bucket_begin = memory.allocate<index>(options.buckets + 1)};
    });
  }

  /// One head of one batch item.
  struct head_view {
    index batch, head, length;
    matrix_view<const S> query, value;
    const head_scratch& scratch;
  };
  head_view head(index n, const head_scratch& s) const {
    const index b = n / shape.heads, h = n % shape.heads;
    return {b, h, lengths.keys(b), head_of(q, b, h), head_of(v, b, h / shape.group()), s};
  }

  index half() const { return options.buckets / 2; }
  /// Sorted tokens a task attends: whole chunks, so many that what it packs is mostly seen by its own queries, yet
  /// stays in the second-level cache.
  static index tokens_per_task(const lsh_chunks& c) {
    return c.chunk * std::max<index>(ceil_div(segment, c.chunk), 2 * (c.lookback + c.lookahead));
  }

  struct key_rows {
    T* keys;
    index dim;
    T* operator()(index n) const { return keys + n * dim; }
  };
  void make_key(const head_view& h, index i, T* key) const {
    const S* const x = h.query.row(i);
    const T factor = h.scratch.factor[i];
    if (const index stride = h.query.col_stride; stride == 1)
      for (index d = 0; d < shape.dim; ++d) key[d] = static_cast<T>(x[d]) * factor;
    else
      for (index d = 0; d < shape.dim; ++d) key[d] = static_cast<T>(x[d * stride]) * factor;
  }

  /// Factors and buckets of tokens [begin, end).
  void hash(const head_view& h, index begin, index end, const thread_scratch& s) const {
    const key_rows key{s.keys, shape.dim};
    for (index i = begin; i < end; i += panel_width<T>) {
      const index count = std::min<index>(panel_width<T>, end - i);
      for (index n = 0; n < count; ++n) {
        h.scratch.factor[i + n] = key_factor<T>(h.query.row(i + n), h.query.col_stride, shape.dim, options.norm_eps);
        make_key(h, i + n, key(n));
      }
      pack_panels_across<T>(key, count, shape.dim, 1, s.panel);
      for (index round = 0; round < options.rounds; ++round)
        hash_panel(h.scratch.rotations + round * round_up(half(), tile_rows) * shape.dim, half(), shape.dim, s.panel,
                   count, h.scratch.rank + round * shape.keys + i);
    }
  }

  /// Tokens of one round by (bucket, position).
  void sort(const head_view& h, index round, index* bucket_begin) const {
    const index n = h.length;
    index *const rank = h.scratch.rank + round * shape.keys, *const order = h.scratch.order + round * shape.keys;
    std::fill_n(bucket_begin, options.buckets + 1, index(0));
    for (index i = 0; i < n; ++i) ++bucket_begin[rank[i] + 1];
    for (index x = 0; x < options.buckets; ++x) bucket_begin[x + 1] += bucket_begin[x];
    for (index i = 0; i < n; ++i) {
      const index at = bucket_begin[rank[i]]++;
      order[at] = i;
      rank[i] = at;
    }
  }

  /// Packs the slots [begin, end) of one round.
  packed_keys<T> pack(const head_view& h, const lsh_chunks& chunks, index round, key_range slots,
                      const thread_scratch& s) const {
    const key_rows key{s.keys, shape.dim};
    packed_keys<T> packed = s.packed;
    packed.positions = {0, 1, s.token};
    for (index slot = slots.begin; slot < slots.end; ++slot) {
      const auto [from, at] = chunks.source(round, slot);
      s.token[slot - slots.begin] = h.scratch.order[from * shape.keys + at];
    }
    const index count = slots.end - slots.begin;
    for (index slot = 0; slot < count; slot += panel_width<T>) {
      const index some = std::min<index>(panel_width<T>, count - slot);
      for (index n = 0; n < some; ++n) make_key(h, s.token[slot + n], key(n));
      packed.pack_keys(key, 1, slot, slot + some);
      packed.pack_values(h.value, slot, slot + some);
    }
    return packed;
  }

  /// Sorted tokens [begin, end) of one round, whole chunks.
  void attend_chunks(const head_view& h, index round, index begin, index end, const thread_scratch& s) const {
    const lsh_chunks chunks(h.length, options);
    const key_range slots{chunks.slots_of(begin).begin, chunks.slots_of(end - 1).end};
    const packed_keys<T> keys = pack(h, chunks, round, slots, s);
    const index* const order = h.scratch.order + round * shape.keys;
    const row_states<T> states = h.scratch.states.of(out, h.batch, h.head);
    const matrix_view<T> state_rows{states.out, states.rows, states.cols, states.stride, 1};
    const index own = chunks.before() - slots.begin;  // the slot of this round's first token
    auto head_terms = terms.for_head(h.batch, h.head, 0);
    head_terms.excluded = {.what = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own,
                           .offset = h.scratch.rank + round * shape.keys,
                           .known = {own, own + chunks.n}};
    row_block<T> block = s.block;
    // Row blocks: whole chunks where several fit, else a chunk in equal parts.
    const index unit = std::max<index>(1, max_rows / chunks.chunk) * chunks.chunk,
                step = round_up(ceil_div(unit, ceil_div(unit, max_rows)), tile_rows);
    for (index first = begin, last; first < end; first = last) {
      last = std::min({first + step, first + unit - (first - begin) % unit, end});
      block.begin(h.query, {0, 1, order + first}, last - first, terms.query_factor());
      if (round > 0) states.resume(block);
      for (index t = first; t < last; ++t) {
        const key_range seen = chunks.slots_of(t);
        block.ranges[t - first] = {seen.begin - slots.begin, seen.end - slots.begin};
      }
      attend(block, keys, head_terms, [&](index r, index n) {  // rows that come next, sorted, lie anywhere in memory
        for (index t = first + r; t < first + r + n; ++t) {
          if (const index next = round > 0 ? t + unit : t; next < chunks.n)
            prefetch_row(state_rows, order[next]);
          if (const index next = t + tokens_per_task(chunks); next < chunks.n) {
            prefetch_row(h.query, order[next]);
            prefetch_row(h.value, order[next]);
          }
        }
      });
      if (round + 1 < options.rounds) {
        states.save(block);
        continue;
      }
      for (index row = 0; row < block.rows; ++row)
        if (block.state.row_sum(row) == T(0)) attend_self(h, row, block);
      finish(block, head_of(out, h.batch, h.head), per_head(options.sinks, h.head),
             row_of(options.lse, h.batch, h.head), options.lse.stride(2));
    }
  }

  /// A row that has seen no other key in any round.
  [[gnu::noinline]] void attend_self(const head_view& h, index row, row_block<T>& block) const {
    const index i = block.positions[row];
    const S *const x = h.query.row(i), *const value = h.value.row(i);
    const auto head_terms = terms.for_head(h.batch, h.head, 0);
    T score = 0;
    for (index d = 0; d < shape.dim; ++d)
      score += static_cast<T>(x[d * h.query.col_stride]) * terms.query_factor() *
               (static_cast<T>(x[d * h.query.col_stride]) * h.scratch.factor[i]);
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.state.maximum[row] = score;
    block.state.sum[row * width<T>] = T(1) + (score - score);  // not a number where the score is not finite
    for (index d = 0; d < shape.dim_v; ++d) block.state.row(row)[d] = static_cast<T>(value[d * h.value.col_stride]);
  }

  void attend_heads(const wave<head_scratch>& heads, const tensor_view<const T>& rotations) const {
    const index segments = ceil_div(shape.keys, segment);
    const auto for_each = [&](index steps, const auto& body) {
      heads.for_each(steps, [&](index n, const head_scratch& s, index step, int worker) {
        body(head(n, s), step, scratch(heads.exec, worker));
      });
    };
    heads.for_each(1, [&](index n, const head_scratch& s, index, int) {
      pack_rotations<T>(rotations, rotations.extent(0) == 1 ? 0 : n % shape.heads, s.rotations);
    });
    for_each(segments, [&](const head_view& h, index part, const thread_scratch& s) {
      hash(h, std::min(part * segment, h.length), std::min((part + 1) * segment, h.length), s);
    });
    for_each(options.rounds,
             [&](const head_view& h, index round, const thread_scratch& s) { sort(h, round, s.bucket_begin); });
    for (index round = 0; round < options.rounds; ++round)
      for_each(segments, [&](const head_view& h, index part, const thread_scratch& s) {
        const index step = tokens_per_task({h.length, options}), begin = part * step;
        if (begin < h.length) attend_chunks(h, round, begin, std::min(begin + step, h.length), s);
      });
    for_each(1, [&](const head_view& h, index, const thread_scratch&) {
      clear_rows(head_of(out, h.batch, h.head), h.length, shape.keys, row_of(options.lse, h.batch, h.head),
                 options.lse.stride(2));
    });
  }

  void run(execution& exec) const {
    const lsh_chunks c(shape.keys, options);
    const index keys = (c.lookback + 1 + c.lookahead) * c.chunk, hashes = shape.batch * shape.heads * c.n * c.rounds;
    const double per_hash = static_cast<double>(keys * (shape.dim + shape.dim_v) + shape.dim * half());
    const auto limit = exec.limit_threads({.operations = 2 * per_hash * static_cast<double>(hashes)});
    const index drawn = options.rotations ? 0 : options.rounds * shape.dim * half();
    auto numbers = exec.workspace([&](arena& memory) { return memory.allocate<T>(drawn); });
    tensor_view<const T> rotations = options.rotations;
    if (!rotations) {
      fill_rotations(*numbers, drawn, options.seed, 0);
      rotations = {*numbers, {1, options.rounds, shape.dim, half()}};
    }
    // In the caches, per head: its tables, queries, values and results.
    const index heads = shape.batch * shape.heads, numbers_per_token = 4 * options.rounds + shape.dim + 2 * shape.dim_v,
                bytes = shape.keys * numbers_per_token * static_cast<index>(sizeof(T));
    for_each_wave(
        exec, heads, wave_size(exec, heads, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<head_scratch>& w) { attend_heads(w, rotations); });
  }
};

}  // namespace attn::inline ATTN_ISA::detail
