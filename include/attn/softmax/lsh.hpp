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
// Cost     2 B H L rounds (2 chunk (D + Dv) + D buckets / 2) operations. Scratch: 4 L rounds numbers and the packed
//          rotations a head under way (L Dv more where rows of out cannot hold what is known so far: 16-bit types,
//          strides, dims of no whole vectors), and the keys of 512 tokens, or more for long chunks, a thread.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Norms between 1e-18 and 1e18 are told apart from 0 and infinity (float). With causal, a query sees no key after its
// position; but which earlier ones it meets depends on how all tokens sort, the later ones too, as in the original.
#pragma once

#include <attn/core/random.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/softmax/detail/lsh_chunks.hpp>
#include <attn/softmax/detail/lsh_hashing.hpp>
#include <attn/softmax/detail/row_states.hpp>

namespace attn::inline ATTN_ISA {

/// Options of lsh for elements of type S.
template <class S>
struct lsh_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Hashes of every token, >= 1: more find more of the keys that matter.
  index rounds = 4;
  /// Even, from 2 to 2^24.
  index buckets = 64;
  /// Tokens of a chunk, >= 1.
  index chunk = 64;
  /// Chunks seen before and after the own one; each once at most, those before first.
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
  list_view<index> lengths{};
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// ALiBi: -slope |distance of positions|, one slope a head.
  list_view<real> alibi_slopes{};
  /// A logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, L].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// What the threads share of one head under way.
template <class T>
struct lsh_head {
  T* rotations;  // packed: lsh_hashes
  T* factor;     // [L]: of q, to make it a key
  index* place;  // [rounds][L]: the bucket of a token; once sorted, its place in the order
  index* order;  // [rounds][L]: tokens by (bucket, position)
  row_states<T> states;
};

/// Scratch of one thread: the rows under way, and the keys they see.
template <class T>
struct lsh_scratch {
  row_block<T> block;
  packed_keys<T> slab;
  index* token;  // of every slot
  T* unit;       // [panel_width][D]: keys to be packed
  T* panel;      // the same, packed, to be hashed
  index* first;  // [buckets + 1]: of every bucket, the place of its next token

  static lsh_scratch layout(arena& memory, index slots, index dim, index dim_v, index buckets) {
    return {row_block<T>::layout(memory, dim, dim_v),
            packed_keys<T>::layout(memory, slots, dim, dim_v),
            memory.allocate<index>(slots),
            memory.allocate<T>(panel_width<T> * dim),
            memory.allocate<T>(panel_width<T> * dim),
            memory.allocate<index>(buckets + 1)};
  }
};

/// One call, after its checks.
template <class S, class Score>
struct lsh_call {
  using T = compute_type<S>;
  static constexpr index stretch = 512;  // tokens of a task

  const tensor_view<const S>&q, &v;
  const tensor_view<S>& out;
  const lsh_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;

  index half() const { return options.buckets / 2; }
  lsh_ring ring(index n) const {
    return {n, options.rounds, options.chunk, options.lookback, options.lookahead, options.wrap};
  }
  /// Sorted tokens a task attends: whole chunks, so many that what it packs is mostly seen by its own queries, yet
  /// stays in the second-level cache.
  static index attended(const lsh_ring& on) {
    return on.chunk * std::max<index>(ceil_div(stretch, on.chunk), 2 * (on.lookback + on.lookahead));
  }

  lsh_head<T> layout(arena& memory) const {
    const index all = options.rounds * shape.keys;
    return {memory.allocate<T>(lsh_hashes<T>::packed_size(options.rounds, half(), shape.dim)), memory.allocate<T>(shape.keys),
            memory.allocate<index>(all), memory.allocate<index>(all), row_states<T>::layout(memory, out)};
  }
  lsh_scratch<T> scratch(execution& exec, int worker) const {
    const lsh_ring on = ring(shape.keys);
    const index slots = std::min(on.most_slots(), attended(on) + (on.lookback + on.lookahead) * on.chunk);
    return exec.scratch(worker, [&](arena& memory) {
      return lsh_scratch<T>::layout(memory, slots, shape.dim, shape.dim_v, options.buckets);
    });
  }

  /// Factors and buckets of tokens [begin, end).
  void hash(const lsh_head<T>& head, index b, index h, index begin, index end, const lsh_scratch<T>& s) const {
    const auto x = head_of(q, b, h);
    const lsh_hashes<T> hashes{head.rotations, options.rounds, half(), shape.dim};
    const auto unit = [&](index n) { return s.unit + n * shape.dim; };
    for (index i = begin; i < end; i += panel_width<T>) {
      const index count = std::min<index>(panel_width<T>, end - i);
      for (index n = 0; n < count; ++n) {
        head.factor[i + n] = key_factor<T>(x.row(i + n), x.col_stride, shape.dim, options.norm_eps);
        make_key(x.row(i + n), x.col_stride, shape.dim, head.factor[i + n], unit(n));
      }
      pack_panels_across<T>(unit, count, shape.dim, 1, s.panel);
      hashes.hash(s.panel, count, head.place + i, shape.keys);
    }
  }

  /// Tokens of one round by (bucket, position).
  void sort(const lsh_head<T>& head, index b, index round, index* first) const {
    const index n = lengths.keys(b);
    index* const bucket = head.place + round * shape.keys;
    std::fill_n(first, options.buckets + 1, index(0));
    for (index i = 0; i < n; ++i) ++first[bucket[i] + 1];
    for (index x = 0; x < options.buckets; ++x) first[x + 1] += first[x];
    for (index i = 0; i < n; ++i) {
      const index at = first[bucket[i]]++;
      head.order[round * shape.keys + at] = i;
      bucket[i] = at;
    }
  }

  /// Packs the slots [begin, end) of one round.
  packed_keys<T> pack(const lsh_head<T>& head, const lsh_ring& on, index b, index h, index round, key_range slots,
                   const lsh_scratch<T>& s) const {
    packed_keys<T> slab = s.slab;
    slab.positions = {0, 1, s.token};
    for (index slot = slots.begin; slot < slots.end; ++slot) {
      const auto [from, at] = on.source(round, slot);
      s.token[slot - slots.begin] = head.order[from * shape.keys + at];
    }
    const auto x = head_of(q, b, h), values = head_of(v, b, h / shape.group());
    const index count = slots.end - slots.begin;
    for (index slot = 0; slot < count; slot += panel_width<T>) {
      const index some = std::min<index>(panel_width<T>, count - slot);
      for (index n = 0; n < some; ++n) {
        const index i = s.token[slot + n];
        make_key(x.row(i), x.col_stride, shape.dim, head.factor[i], s.unit + n * shape.dim);
      }
      slab.pack_keys([&](index n) { return s.unit + n * shape.dim; }, 1, slot, slot + some);
      slab.pack_values(values, slot, slot + some);
    }
    return slab;
  }

  /// Sorted tokens [begin, end) of one round, whole chunks.
  void attend_stretch(const lsh_head<T>& head, index b, index h, index round, index begin, index end,
                      const lsh_scratch<T>& s) const {
    const lsh_ring on = ring(lengths.keys(b));
    const key_range slots{on.span(begin).begin, on.span(end - 1).end};
    const packed_keys<T> slab = pack(head, on, b, h, round, slots, s);
    const auto x = head_of(q, b, h), values = head_of(v, b, h / shape.group());
    const row_states<T> states = head.states.of(out, b, h);
    const auto head_terms = terms.for_head(b, h, 0);
    const index own = on.before() - slots.begin;  // the slot of this round's first token
    auto seen = head_terms;
    seen.excluded = {.what = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own,
                     .offset = head.place + round * shape.keys,
                     .known = {own, own + on.n}};
    row_block<T> block = s.block;
    const row_blocks blocks(on.chunk);
    for (index part = 0; part < blocks.count(end - begin); ++part) {
      const auto [from, to] = blocks.rows(part, end - begin);
      if (from >= to) continue;
      const index first = begin + from;
      block.begin(x, {0, 1, head.order + round * shape.keys + first}, to - from, terms.query_factor());
      if (round > 0) states.resume(block);
      for (index t = from; t < to; ++t) {
        const key_range span = on.span(begin + t);
        block.ranges[t - from] = {span.begin - slots.begin, span.end - slots.begin};
      }
      attend(block, slab, seen, [&](index r, index n) {  // what comes next, sorted, lies anywhere in memory
        const index* const order = head.order + round * shape.keys;
        for (index t = first + r; t < first + r + n; ++t) {
          if (const index next = round > 0 ? t + blocks.unit : t; next < on.n)  // to go on with, or to begin
            prefetch_row(matrix_view<T>{states.out, states.rows, states.cols, states.stride, 1}, order[next]);
          if (const index next = t + attended(on); next < on.n) {
            prefetch_row(x, order[next]);
            prefetch_row(values, order[next]);
          }
        }
      });
      if (round + 1 < options.rounds) {
        states.save(block);
        continue;
      }
      for (index row = 0; row < block.rows; ++row)
        if (block.state.row_sum(row) == T(0)) see_itself(head, head_terms, b, h, row, block);
      finish(block, head_of(out, b, h), per_head(options.sinks, h), row_of(options.lse, b, h), options.lse.stride(2));
    }
  }

  /// A row that no round offered another key.
  [[gnu::noinline]] void see_itself(const lsh_head<T>& head, const score_terms<T, Score>& head_terms, index b, index h,
                                    index row, row_block<T>& block) const {
    const index i = block.positions[row];
    const auto x = head_of(q, b, h), value = head_of(v, b, h / shape.group());
    T score = 0;
    for (index d = 0; d < shape.dim; ++d)
      score += static_cast<T>(x.row(i)[d * x.col_stride]) * terms.query_factor() *
               (static_cast<T>(x.row(i)[d * x.col_stride]) * head.factor[i]);
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    if (score == -std::numeric_limits<T>::infinity()) return;
    block.state.maximum[row] = score;
    block.state.sum[row * width<T>] = T(1) + (score - score);  // not a number where the score is not finite
    for (index d = 0; d < shape.dim_v; ++d)
      block.state.row(row)[d] = static_cast<T>(value.row(i)[d * value.col_stride]);
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
                    execution& exec) const {
    const auto each = [&](index parts, auto&& body) {  // body(head, its batch item and number, part, worker)
      exec.for_each(count * parts, [&](index task, int worker) {
        const index n = task % count, at = begin + n;
        body(heads[n], at / shape.heads, at % shape.heads, task / count, worker);
      });
    };
    each(1, [&](const lsh_head<T>& head, index, index h, index, int) {
      lsh_hashes<T>::pack(rotations, rotations.extent(0) == 1 ? 0 : h, head.rotations);
    });
    each(ceil_div(shape.keys, stretch), [&](const lsh_head<T>& head, index b, index h, index part, int worker) {
      const index n = lengths.keys(b);
      hash(head, b, h, std::min(part * stretch, n), std::min((part + 1) * stretch, n), scratch(exec, worker));
    });
    each(options.rounds, [&](const lsh_head<T>& head, index b, index, index round, int worker) {
      sort(head, b, round, scratch(exec, worker).first);
    });
    for (index round = 0; round < options.rounds; ++round)
      each(ceil_div(shape.keys, stretch), [&](const lsh_head<T>& head, index b, index h, index part, int worker) {
        const index step = attended(ring(lengths.keys(b))), from = part * step,
                    to = std::min(from + step, lengths.keys(b));
        if (from < to) attend_stretch(head, b, h, round, from, to, scratch(exec, worker));
      });
    each(1, [&](const lsh_head<T>&, index b, index h, index, int) {
      clear_rows(head_of(out, b, h), lengths.keys(b), shape.keys, row_of(options.lse, b, h), options.lse.stride(2));
    });
  }

  void run(execution& exec) const {
    // A wave of heads keeps the threads busy, more of them where they are short: what is under way shares the caches.
    // Serial, it is one head.
    const index all = shape.batch * shape.heads, threads = exec.threads();
    const index wave = std::min(
        all, threads == 1 ? 1 : threads * std::clamp<index>(4 * stretch / std::max<index>(1, shape.keys), 1, 4));
    const index drawn = options.rotations ? 0 : options.rounds * shape.dim * half();
    T* numbers = nullptr;
    const lsh_head<T>* heads = exec.shared_scratch([&](arena& memory) {
      numbers = memory.allocate<T>(drawn);
      auto* list = memory.allocate<lsh_head<T>>(wave);
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
      attend_heads(begin, std::min(wave, all - begin), heads, rotations, exec);
  }
};

/// Everything lsh refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_lsh(const validator& check, const tensor_view<const S>& q,
                                                       const tensor_view<const S>& v, const tensor_view<S>& out,
                                                       const lsh_options<S>& options) {
  check.readable("v", v);
  const tensor_view<const S> k = q.slice(1, 0, v.extent(1));  // the keys are the queries', but not their heads
  const attention_shape shape = check_attention(check, q, k, v, out);
  check_length_list(check, "lengths", options.lengths, shape.batch, shape.keys);
  check_softmax_options(check, shape, options, q, k, v, out);
  check.at_least("rounds", 1, options.rounds);
  check.at_least("buckets", 2, options.buckets);
  if (options.buckets % 2 != 0) check.fail("an even number of buckets", options.buckets);
  if (options.buckets > max_buckets) check.fail(text({"buckets <= ", max_buckets}), options.buckets);
  check.at_least("chunk", 1, options.chunk);
  check.at_least("lookback", 0, options.lookback);
  check.at_least("lookahead", 0, options.lookahead);
  check.fits("buckets of all tokens", {options.rounds, shape.keys});
  check.fits("rotations", {options.rounds, shape.dim, options.buckets});
  if (!(options.norm_eps >= 0 && std::isfinite(options.norm_eps)))
    check.fail("a finite norm_eps >= 0", static_cast<double>(options.norm_eps));
  if (options.scale && !options.scaled) check.fail("either a scale, or scaled = false", "both");
  if (const auto& r = options.rotations; r) {
    check.readable("rotations", r);
    check.broadcasts("rotations heads", shape.heads, r.extent(0));
    check.equal("rotations rounds = rounds", options.rounds, r.extent(1));
    check.equal("rotations rows = query dim", shape.dim, r.extent(2));
    check.equal("rotations columns = buckets / 2 =", options.buckets / 2, r.extent(3));
    check.no_alias("out", out, "rotations", r);
    check.no_alias("lse", options.lse, "rotations", r);
  }
  return {shape, {shape.queries, shape.keys, options.lengths, options.lengths}};
}

template <class S, class Score>
void lsh(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& v, const tensor_view<S>& out,
         const lsh_options<S>& options, Score& score, execution& exec) {
  using T = compute_type<S>;
  const auto [shape, lengths] = check_lsh(check, q, v, out, options);
  const T scale = options.scaled ? scale_or_default(options.scale, shape.dim) : T(1);
  lsh_call<S, Score>{q, v, out, options, shape, lengths, {options.softcap, {}, options.alibi_slopes, &score, scale}}
      .run(exec);
}

}  // namespace detail

/// Attention by locality-sensitive hashing; `score(s, batch, head, i, j)` may replace the score s of query row i and
/// key row j, after every other term; -infinity masks the key.
template <viewable Q, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, Score&& score,
         execution& exec) {
  detail::require_one_element_type<const Q&, const Q&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  detail::lsh<S>(detail::validator("lsh"), as_view(q), as_view(v), as_view(out), options, score, exec);
}

template <viewable Q, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, Score&& score) {
  execution serial;
  lsh(q, v, out, options, score, serial);
}

template <viewable Q, viewable V, viewable O>
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options, execution& exec) {
  lsh(q, v, out, options, detail::no_score{}, exec);
}

template <viewable Q, viewable V, viewable O>
void lsh(const Q& q, const V& v, O&& out, const lsh_options<element_of<const Q&>>& options = {}) {
  execution serial;
  lsh(q, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
