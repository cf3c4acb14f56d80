// attn: attention by locality-sensitive hashing.
//
//   Queries are keys: k_j = q_j / |q_j|. In each of several rounds a random rotation R puts every token into a bucket,
//   argmax [q R; -q R]; tokens are sorted by (bucket, position) and cut into chunks; a chunk's queries see the keys of
//   their own chunk and of the one before it. out_i is the softmax attention (full_softmax.hpp) over the keys of all
//   rounds, one offered in several rounds counted in each, and over itself only if there is no other.
//                                                         Kitaev, Kaiser, Levskaya 2020, "Reformer"
//
//   attn::lsh(q, v, out, {.rounds = 4, .buckets = 64, .chunk = 64, .seed = 7});
//   const auto rotations = attn::draw_rotations<float>(heads, 4, dim, 64, 7);      // once, for many calls
//   attn::lsh(q, v, out, {.rounds = 4, .buckets = 64, .rotations = rotations, .causal = true});
//
// Shapes   q [B, H, L, D], v [B, Hkv, L, Dv], out [B, H, L, Dv]; Hkv divides H; rotations
//          [H or 1, rounds, D, buckets / 2].
// Cost     2 B H L rounds (2 chunk (D + Dv) + D buckets / 2) operations. Scratch a head under way: about
//          L (2 D + 2 Dv + 1.5 rounds) numbers.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// With causal, a query sees no key after its position; but which earlier ones it meets depends on how all tokens sort,
// the later ones too, as in the original.
#pragma once

#include <attn/core/random.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/lsh_hashing.hpp>
#include <attn/softmax/row_states.hpp>

namespace attn {

/// Options of lsh for elements of type S.
template <class S>
struct lsh_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Hashes of every token, >= 1: more find more of the keys that matter.
  index rounds = 4;
  /// Even, >= 2.
  index buckets = 64;
  /// Tokens of a chunk, >= 1.
  index chunk = 64;
  /// Chunks seen before and after the own one.
  index lookback = 1, lookahead = 0;
  /// The chunks of all rounds on one ring, as published: the first of a round looks back to the last of the round
  /// before.
  bool wrap = false;
  /// Random numbers of this seed, the same for all heads, unless rotations are given.
  std::uint64_t seed = 0;
  tensor_view<const real, 4> rotations{};
  /// No key after the query's own position.
  bool causal = false;
  /// Factor of q.k: `scale` if given, else 1 / sqrt(D), or 1 unless `scaled`, as in the original.
  std::optional<real> scale{};
  bool scaled = true;
  /// k = q / sqrt(|q|^2 + D norm_eps), >= 0.
  real norm_eps = 0;
  /// True lengths, one per batch item. Rows of padding are 0 in out.
  std::span<const index> lengths{};
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// ALiBi: -slope |distance of positions|, one slope a head.
  std::span<const real> alibi_slopes{};
  /// A logit per head that joins the denominator and has no value.
  std::span<const real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, L].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// The chunks of one round over n sorted tokens, and where a token's keys lie in the round's slab: `before` slots of
/// earlier rounds' chunks, the n tokens, `after` slots of later rounds' chunks. Without `wrap` there are none of those.
struct lsh_ring {
  index n = 0, chunk = 1, chunks = 0, rounds = 1;
  index lookback = 0, lookahead = 0;
  bool wrap = false;

  lsh_ring(index length, index rounds_, index chunk_, index back, index ahead, bool wrap_)
      : n(length), chunk(std::clamp<index>(chunk_, 1, std::max<index>(1, length))), rounds(rounds_), wrap(wrap_) {
    chunks = ceil_div(n, chunk);
    const index all = wrap ? chunks * rounds : chunks;  // once around is enough
    lookback = std::min(back, all);
    lookahead = std::min(ahead, all);
  }

  /// Tokens before chunk c, counted from chunk 0 of this round; c may lie in another round.
  index tokens_before(index c) const {
    const index round = floor_div(c, chunks);
    return round * n + (c - round * chunks) * chunk;
  }
  index before() const { return wrap && n ? -tokens_before(-lookback) : 0; }
  index after() const { return wrap && n ? tokens_before(chunks + lookahead) - n : 0; }
  index slots() const { return before() + n + after(); }
  /// Slots of this or any shorter length.
  index most_slots() const { return n + (wrap ? (lookback + lookahead) * chunk : 0); }

  /// The slots the sorted token t sees.
  key_span span(index t) const {
    const index own = t / chunk;
    index first = own - lookback, last = own + lookahead;
    if (!wrap) first = std::max<index>(first, 0), last = std::min(last, chunks - 1);
    return {before() + tokens_before(first), before() + tokens_before(last + 1)};
  }

  /// The round and the place in its order of a slot of round r.
  std::pair<index, index> source(index r, index slot) const {
    const index at = slot - before(), turn = floor_div(at, n), round = r + turn;
    return {round - floor_div(round, rounds) * rounds, at - turn * n};
  }
};

/// The terms of a score; then the keys that are not for the query: its own and, if causal, later ones.
template <class T, class Score>
struct lsh_terms {
  score_terms<T, Score> terms;
  const index* place;  // of every token: its slot
  key_span tokens;     // slots outside stand for earlier or later rounds
  bool causal;

  static constexpr bool any() { return true; }
  void apply(T* s, index count, index i, const index_map& where, index slot) const {
    constexpr T hidden = -std::numeric_limits<T>::infinity();
    if (terms.any()) terms.apply(s, count, i, where, slot);
    const index* const token = where.list + slot;
    if (causal)
      for (index n = 0; n < count; ++n) s[n] = token[n] >= i ? hidden : s[n];
    else if (slot < tokens.begin || slot + count > tokens.end)
      for (index n = 0; n < count; ++n) s[n] = token[n] == i ? hidden : s[n];
    else if (const index own = place[i] - slot; own >= 0 && own < count)
      s[own] = hidden;
  }
};

/// What the threads share of one head under way.
template <class T>
struct lsh_head {
  T* rotations;          // packed: lsh_hashes
  T* keys;               // [L][D]: q made unit
  std::int32_t* bucket;  // [rounds][L]
  index* order;          // [rounds][L]: tokens by (bucket, position)
  index* place;          // [L]: the slot of a token in this round
  index* token;          // of every slot in this round
  key_slab<T> slab;
  row_states<T> states;
};

/// One call, after its checks.
template <class S, class Score>
struct lsh_call {
  using T = compute_type<S>;
  static constexpr index stretch = 512;  // tokens a task hashes or packs

  const tensor_view<const S>&q, &v;
  const tensor_view<S>& out;
  const lsh_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;

  index half() const { return options.buckets / 2; }
  lsh_ring ring(index b) const {
    return {lengths.keys(b), options.rounds, options.chunk, options.lookback, options.lookahead, options.wrap};
  }
  lsh_ring longest() const {
    return {shape.keys, options.rounds, options.chunk, options.lookback, options.lookahead, options.wrap};
  }

  lsh_head<T> layout(carver& memory) const {
    const index slots = longest().most_slots(), all = options.rounds * shape.keys;
    return {memory.take<T>(lsh_hashes<T>::packed_size(options.rounds, half(), shape.dim)),
            memory.take<T>(shape.keys * shape.dim),
            memory.take<std::int32_t>(all),
            memory.take<index>(all),
            memory.take<index>(shape.keys),
            memory.take<index>(slots),
            key_slab<T>::layout(memory, slots, shape.dim, shape.dim_v),
            row_states<T>::layout(memory, shape.queries, shape.dim_v)};
  }

  /// Keys and buckets of tokens [begin, end).
  void hash(const lsh_head<T>& head, index b, index h, index begin, index end, T* panel) const {
    const auto x = head_of(q, b, h);
    for (index i = begin; i < end; ++i)
      make_unit<T>(x.row(i), x.col_stride, shape.dim, options.norm_eps, head.keys + i * shape.dim);
    const lsh_hashes<T> hashes{head.rotations, options.rounds, half(), shape.dim};
    hashes.hash(head.keys, begin, end, panel, head.bucket, shape.keys);
  }

  /// Tokens of one round by (bucket, position).
  void sort(const lsh_head<T>& head, index b, index round, index* first) const {
    const index n = lengths.keys(b);
    const std::int32_t* const bucket = head.bucket + round * shape.keys;
    std::fill_n(first, options.buckets + 1, index(0));
    for (index i = 0; i < n; ++i) ++first[bucket[i] + 1];
    for (index x = 0; x < options.buckets; ++x) first[x + 1] += first[x];
    for (index i = 0; i < n; ++i) head.order[round * shape.keys + first[bucket[i]]++] = i;
  }

  /// Slots [begin, end) of one round.
  void pack(const lsh_head<T>& head, const lsh_ring& on, index b, index h, index round, index begin, index end) const {
    for (index slot = begin; slot < end; ++slot) {
      const auto [from, at] = on.source(round, slot);
      head.token[slot] = head.order[from * shape.keys + at];
      if (slot >= on.before() && slot < on.before() + on.n) head.place[head.token[slot]] = slot;
    }
    const matrix_view<const T> keys{head.keys, shape.keys, shape.dim, shape.dim, 1};
    key_slab<T> slab = head.slab;
    slab.where = {0, 1, head.token};
    slab.pack(keys, head_of(v, b, h / shape.group()), begin, end);
  }

  /// Sorted tokens [begin, end) of one round, at most max_rows.
  void attend_rows(const lsh_head<T>& head, const lsh_ring& on, index b, index h, index round, index begin, index end,
                   row_block<T>& block) const {
    key_slab<T> slab = head.slab;
    slab.where = {0, 1, head.token};
    block.begin(head_of(q, b, h), {0, 1, head.order + round * shape.keys + begin}, end - begin, terms.query_factor());
    if (round > 0) head.states.resume(block);
    for (index t = begin; t < end; ++t) block.span[t - begin] = on.span(t);
    const auto head_terms = terms.for_head(b, h, 0);
    attend(block, slab, lsh_terms<T, Score>{head_terms, head.place, {on.before(), on.before() + on.n}, options.causal});
    if (round + 1 < options.rounds) return head.states.save(block);
    for (index row = 0; row < block.rows; ++row)
      if (block.top[row] == -std::numeric_limits<T>::infinity()) see_itself(head, head_terms, b, h, row, block);
    finish(block, head_of(out, b, h), per_head(options.sinks, h), row_of(options.lse, b, h), options.lse.stride(2));
  }

  /// A row that no round offered another key.
  [[gnu::noinline]] void see_itself(const lsh_head<T>& head, const score_terms<T, Score>& head_terms, index b, index h,
                                    index row, row_block<T>& block) const {
    const index i = block.where[row];
    const auto x = head_of(q, b, h), value = head_of(v, b, h / shape.group());
    T score = 0;
    for (index d = 0; d < shape.dim; ++d)
      score += static_cast<T>(x.row(i)[d * x.col_stride]) * terms.query_factor() * head.keys[i * shape.dim + d];
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.top[row] = score;
    block.sum[row * width<T>] = T(1);
    for (index d = 0; d < shape.dim_v; ++d)
      block.out[row * block.out_stride + d] = static_cast<T>(value.row(i)[d * value.col_stride]);
  }

  /// Row blocks: whole chunks where several fit, else a chunk in equal parts.
  struct row_blocks {
    index unit, parts, step;
    explicit row_blocks(index chunk)
        : unit(std::max<index>(1, max_rows / chunk) * chunk),
          parts(ceil_div(unit, max_rows)),
          step(parts == 1 ? unit : round_up(ceil_div(unit, parts), tile_rows)) {}
    index count(index n) const { return ceil_div(n, unit) * parts; }
    std::pair<index, index> rows(index task, index n) const {
      const index begin = task / parts * unit + task % parts * step;
      return {begin, std::min({begin + step, (task / parts + 1) * unit, n})};
    }
  };

  /// Heads [begin, begin + count) of all batch items.
  void attend_heads(index begin, index count, const lsh_head<T>* heads, const tensor_view<const T>& rotations,
                    execution& where) const {
    const auto each = [&](index parts, auto&& body) {  // body(head, its batch item and number, part, worker)
      where.for_each(count * parts, [&](index task, int worker) {
        const index n = task % count, at = begin + n;
        body(heads[n], at / shape.heads, at % shape.heads, task / count, worker);
      });
    };
    const index stretches = ceil_div(shape.keys, stretch);
    each(1, [&](const lsh_head<T>& head, index, index h, index, int) {
      lsh_hashes<T>::pack(rotations, rotations.extent(0) == 1 ? 0 : h, head.rotations);
    });
    each(stretches, [&](const lsh_head<T>& head, index b, index h, index part, int worker) {
      T* const panel =
          where.scratch(worker, [&](carver& memory) { return memory.take<T>(shape.dim * panel_width<T>); });
      hash(head, b, h, std::min(part * stretch, lengths.keys(b)), std::min((part + 1) * stretch, lengths.keys(b)),
           panel);
    });
    each(options.rounds, [&](const lsh_head<T>& head, index b, index, index round, int worker) {
      sort(head, b, round,
           where.scratch(worker, [&](carver& memory) { return memory.take<index>(options.buckets + 1); }));
    });
    for (index round = 0; round < options.rounds; ++round) {
      each(ceil_div(longest().most_slots(), stretch), [&](const lsh_head<T>& head, index b, index h, index part, int) {
        const lsh_ring on = ring(b);
        const index from = part * stretch, to = std::min(from + stretch, on.slots());
        if (from < to) pack(head, on, b, h, round, from, to);
      });
      const row_blocks blocks(longest().chunk);
      each(blocks.count(shape.keys), [&](const lsh_head<T>& head, index b, index h, index part, int worker) {
        const lsh_ring on = ring(b);
        const auto [from, to] = blocks.rows(part, on.n);
        if (from >= to) return;
        auto block =
            where.scratch(worker, [&](carver& memory) { return row_block<T>::layout(memory, shape.dim, shape.dim_v); });
        attend_rows(head, on, b, h, round, from, to, block);
      });
    }
    each(1, [&](const lsh_head<T>&, index b, index h, index, int) {
      clear_rows(head_of(out, b, h), lengths.keys(b), shape.keys, row_of(options.lse, b, h), options.lse.stride(2));
    });
  }

  void run(execution& where) const {
    // A wave of heads keeps the threads busy; serial, it is one head.
    const index all = shape.batch * shape.heads,
                wave = std::min<index>(all, where.threads() == 1 ? 1 : 2 * where.threads());
    const index drawn = options.rotations ? 0 : options.rounds * shape.dim * half();
    T* numbers = nullptr;
    const lsh_head<T>* heads = where.shared_scratch([&](carver& memory) {
      numbers = memory.take<T>(drawn);
      auto* list = memory.take<lsh_head<T>>(wave);
      for (index n = 0; n < wave; ++n) {
        const lsh_head<T> head = layout(memory);
        if (list) list[n] = head;
      }
      return list;
    });
    tensor_view<const T> rotations = options.rotations;
    if (!options.rotations) {
      draw_rotations_into(numbers, drawn, options.seed, 0);
      rotations = {numbers, {1, options.rounds, shape.dim, half()}};
    }
    for (index begin = 0; begin < all; begin += wave)
      attend_heads(begin, std::min(wave, all - begin), heads, rotations, where);
  }
};

/// Everything lsh refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_lsh(const door& at, const tensor_view<const S>& q,
                                                       const tensor_view<const S>& v, const tensor_view<S>& out,
                                                       const lsh_options<S>& options) {
  at.readable("v", v);
  const tensor_view<const S> k = q.slice(1, 0, v.extent(1));  // the keys are the queries', but not their heads
  const attention_shape shape = check_attention(at, q, k, v, out);
  check_length_list(at, "lengths", options.lengths, shape.batch, shape.keys);
  check_softmax_options(at, shape, options, q, k, v, out);
  at.at_least("rounds", 1, options.rounds);
  at.at_least("buckets", 2, options.buckets);
  if (options.buckets % 2 != 0) at.refuse("an even number of buckets", options.buckets);
  if (options.buckets > std::numeric_limits<std::int32_t>::max() / 2)
    at.refuse("buckets that fit into 30 bits", options.buckets);
  at.at_least("chunk", 1, options.chunk);
  at.at_least("lookback", 0, options.lookback);
  at.at_least("lookahead", 0, options.lookahead);
  at.fits("buckets of all tokens", {options.rounds, shape.keys});
  at.fits("rotations", {options.rounds, shape.dim, options.buckets});
  if (!(options.norm_eps >= 0 && std::isfinite(options.norm_eps)))
    at.refuse("a finite norm_eps >= 0", static_cast<double>(options.norm_eps));
  if (options.scale && !options.scaled) at.refuse("either a scale, or scaled = false", "both");
  if (const auto& r = options.rotations; r) {
    at.readable("rotations", r);
    at.broadcasts("rotations heads", shape.heads, r.extent(0));
    at.equal("rotations rounds = rounds", options.rounds, r.extent(1));
    at.equal("rotations rows = query dim", shape.dim, r.extent(2));
    at.equal("rotations columns = buckets / 2 =", options.buckets / 2, r.extent(3));
    at.apart("out", out, "rotations", r);
    at.apart("lse", options.lse, "rotations", r);
  }
  return {shape, {shape.queries, shape.keys, options.lengths, options.lengths}};
}

template <class S, class Score>
void lsh(const door& at, const tensor_view<const S>& q, const tensor_view<const S>& v, const tensor_view<S>& out,
         const lsh_options<S>& options, Score& score, execution& where) {
  using T = compute_type<S>;
  const auto [shape, lengths] = check_lsh(at, q, v, out, options);
  const T scale = options.scaled ? scale_or_default(options.scale, shape.dim) : T(1);
  lsh_call<S, Score>{q, v, out, options, shape, lengths, {options.softcap, {}, options.alibi_slopes, &score, scale}}
      .run(where);
}

}  // namespace detail

/// Attention by locality-sensitive hashing; `score(s, batch, head, i, j)` may replace the score s of query row i and
/// key row j, after every other term; -infinity masks the key.
template <viewable Q, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, Score&& score,
         execution& where) {
  detail::require_one_element_type<const Q&, const Q&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  detail::lsh<S>(detail::door("lsh"), as_view(q), as_view(v), as_view(out), options, score, where);
}

template <viewable Q, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, Score&& score) {
  execution serial;
  lsh(q, v, out, options, score, serial);
}

template <viewable Q, viewable V, viewable O>
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, execution& where) {
  lsh(q, v, out, options, detail::no_score{}, where);
}

template <viewable Q, viewable V, viewable O>
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options = {}) {
  execution serial;
  lsh(q, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
