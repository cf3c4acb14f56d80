// attn: exact softmax attention over the keys a pattern names, yours or one of the library's.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys the query sees
//
// pattern.hpp says how a pattern is written.
//
//   attn::pattern_softmax(q, k, v, out, paragraphs{starts});
//   attn::pattern_softmax(q, k, v, out, attn::joined_patterns{paragraphs{starts}, mine}, {.causal = true});
//
// Shapes   as full_softmax.
// Cost     2 (D + Dv) operations for every pair of query and key the pattern names, and one pass over the keys.
//          Scratch: the packed keys and values of a group, a thread; where groups share most of their keys, those of
//          one key head (or of as many as fill the threads), about Lk (D + Dv) numbers. For joined patterns, where
//          rows of out cannot hold what is known so far (16-bit types, strides, dims of no whole vectors), Lq Dv more
//          for every head under way.
// Throws   std::invalid_argument for shapes or options that do not fit, for a pattern whose groups do not hold every
//          query once, for lists that do not ascend from 0 on, and for queries' ranges of a step (asked of the first
//          query of a group), before anything is written.
#pragma once

#include <attn/softmax/full_softmax.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/softmax/pattern.hpp>
#include <attn/softmax/detail/row_states.hpp>

namespace attn::inline ATTN_ISA {

/// Options of pattern_softmax for elements of type S.
template <class S>
struct pattern_softmax_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Nothing after the query's own position.
  bool causal = false;
  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// ALiBi: -slope |distance of positions|, one slope a head.
  list_view<real> alibi_slopes{};
  /// A logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// Scratch of one thread: the rows under way, and the keys a group gathers.
template <class T>
struct pattern_scratch {
  row_block<T> block;
  packed_keys<T> gathered;

  static pattern_scratch layout(arena& memory, index slots, index dim, index dim_v) {
    pattern_scratch s;
    s.block = row_block<T>::layout(memory, dim, dim_v);
    s.gathered = packed_keys<T>::layout(memory, slots, dim, dim_v);
    return s;
  }
};

/// One call, after its checks.
template <class S, class Score, class Pattern>
struct pattern_call {
  using T = compute_type<S>;
  static constexpr index pack_step = 128;  // keys packed at a time, if any of them is seen
  static constexpr bool joined = is_joined<Pattern>;

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  const Pattern& pattern;
  const pattern_softmax_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;
  index gathered = 0;   // slots of the group that gathers most
  bool shared = false;  // are keys packed once for all groups? Else every group packs what it sees.

  sequence sequence_of(index b, index h) const { return {b, h, lengths.queries(b), lengths.keys(b), options.causal}; }

  /// What the groups of a call ask for.
  struct demand {
    index told = 0;                            // keys in ranges of step 1
    index slots_of_all = 0, slots_of_few = 0;  // of the group that sees most: with and without those
  };

  /// Asks for every group once: refuses what cannot be attended, and learns what is best packed by whom.
  void survey(const validator& check, execution& exec) {
    bool* const grouped = exec.shared_scratch([&](arena& memory) { return memory.allocate<bool>(shape.queries); });
    demand sum;
    index keys = 0;
    for (index b = 0; b < shape.batch; ++b) {
      keys += shape.kv_heads * lengths.keys(b);
      for (index h = 0; h < shape.heads; ++h)
        for_each_part(pattern,
                      [&](const auto& part, bool, bool) { survey_part(check, part, sequence_of(b, h), sum, grouped); });
    }
    shared = sum.told > keys + keys / 2;  // what several groups see is packed once for all
    gathered = shared ? sum.slots_of_few : sum.slots_of_all;
  }
  template <class Part>
  void survey_part(const validator& check, const Part& part, const sequence& s, demand& sum, bool* grouped) const {
    std::fill_n(grouped, s.queries, false);
    index held = 0;
    for (index g = 0, groups = part.groups(s); g < groups; ++g) {
      const position_range queries = queries_of(part, s, g);
      for (index p = queries.begin; p < queries.end; p += queries.step, ++held)
        if (std::exchange(grouped[p - s.first()], true))
          check.fail("groups that hold each query once", text({"the one at position ", p, " twice"}));
      index slots[2] = {};
      visit_keys(part, s, g, [&](const key_set& set, const auto& of_query) {
        slots[set.contiguous()] += round_up(set.count + (set.contiguous() ? lead_of(set) : 0), panel_width<T>);
        if (set.contiguous()) sum.told += set.count;
        set.check_list(check);
        if (queries.begin < queries.end)
          if (const position_range seen = of_query(queries.begin); seen.step != 1)
            check.fail("a query's range of step 1", seen.step);
      });
      sum.slots_of_few = std::max(sum.slots_of_few, slots[0]);
      sum.slots_of_all = std::max(sum.slots_of_all, slots[0] + slots[1]);
    }
    if (held != s.queries) check.fail(text({"groups that hold each query once: ", s.queries, " in all"}), held);
  }

  /// Is a set read where all keys of its head lie packed? Else its group packs it.
  bool in_place(const key_set& set) const { return shared && set.contiguous(); }

  /// A range is packed from the beginning of a panel of its head on: whoever packs it, sums come out the same.
  static index lead_of(const key_set& range) { return range.positions.first % panel_width<T>; }
  key_set as_packed(key_set set) const {
    if (!set.contiguous()) return set;
    const index lead = shared ? set.positions.first : lead_of(set);
    set.positions.first -= lead;
    set.count = shared ? shape.keys : set.count + lead;
    return set;
  }

  /// Which stretches of pack_step keys of batch item b the groups of the heads of key head kv read in place.
  void mark(index b, index kv, bool* needed) const {
    std::fill_n(needed, ceil_div(shape.keys, pack_step), false);
    for (index h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h) {
      const sequence s = sequence_of(b, h);
      for_each_part(pattern, [&](const auto& part, bool, bool) {
        for (index g = 0, groups = part.groups(s); g < groups; ++g)
          visit_keys(part, s, g, [&](const key_set& set, const auto&) {
            if (in_place(set))
              for (index n = set.positions.first / pack_step; n * pack_step < set.positions.first + set.count; ++n)
                needed[n] = true;
          });
      });
    }
  }

  /// Asks for the memory of a group that comes next: of its rows, of what is known of them if anything is, and of what
  /// it packs, the part from `begin` to `end` of `count`.
  template <class Part>
  void ask_for(const Part& part, const sequence& s, index g, index begin, index end, index count, bool known) const {
    if (g >= part.groups(s)) return;
    const auto x = head_of(q, s.batch, s.head);
    const auto result = head_of(out, s.batch, s.head);
    const auto key = head_of(k, s.batch, s.head / shape.group()), value = head_of(v, s.batch, s.head / shape.group());
    const position_range queries = queries_of(part, s, g);
    for (index r = begin; r < std::min(end, count_of(queries)); ++r) {
      const index i = queries.begin + r * queries.step - s.first();
      prefetch_row(x, i);
      if (known) prefetch_row(result, i);
    }
    visit_keys(part, s, g, [&](const key_set& set, const auto&) {
      if (in_place(set)) return;
      for (index n = set.count * begin / count; n < set.count * end / count; ++n) {
        prefetch_row(key, set.positions[n]);
        prefetch_row(value, set.positions[n]);
      }
    });
  }

  /// Attends the queries of one group.
  template <class Part>
  void attend_group(const Part& part, bool first, bool last, const sequence& s, index g, const packed_keys<T>& all,
                    const row_states<T>& states, const pattern_scratch<T>& scratch) const {
    const index b = s.batch, h = s.head, kv = h / shape.group();
    const position_range queries = queries_of(part, s, g);
    const index count = count_of(queries);
    if (count == 0) return;
    index used = 0;
    visit_keys(part, s, g, [&](const key_set& set, const auto&) {
      if (in_place(set)) return;
      const key_set packed = as_packed(set);
      scratch.gathered.from(used, packed.positions).pack(head_of(k, b, kv), head_of(v, b, kv), 0, packed.count);
      used += round_up(packed.count, panel_width<T>);
    });

    row_block<T> block = scratch.block;
    const auto result = head_of(out, b, h);
    const index step = round_up(ceil_div(count, ceil_div(count, max_rows)), tile_rows);
    for (index row = 0; row < count; row += step) {
      const index rows = std::min(step, count - row), p0 = queries.begin + row * queries.step;
      block.begin(head_of(q, b, h), {p0 - s.first(), queries.step, nullptr}, rows, terms.query_factor());
      if (!first) states.resume(block);
      used = 0;
      bool asked = false;
      const auto ahead = [&](index r, index n) {
        if (asked) return;
        ask_for(part, s, g + 1, row + r, row + r + n, count, !first);
        for (index i = r; first && i < r + n; ++i) prefetch_row(result, block.positions[i]);
        asked = r + n == rows;
      };
      visit_keys(part, s, g, [&](const key_set& set, const auto& of_query) {
        const key_set packed = as_packed(set);
        const index lead = set.contiguous() ? set.positions.first - packed.positions.first : 0;
        for (index r = 0; r < rows; ++r) {
          const key_range span = set.span_of(s, p0 + r * queries.step, of_query);
          block.ranges[r] = {span.begin + lead, span.end + lead};
        }
        auto seen = terms.for_head(b, h, s.first());
        if (!set.itself) seen.excluded.what = excluded_keys::kind::own;
        if (in_place(set)) return attend(block, all, seen);
        attend(block, scratch.gathered.from(used, packed.positions), seen, ahead);
        used += round_up(packed.count, panel_width<T>);
      });
      if (last)
        finish(block, result, per_head(options.sinks, h), row_of(options.lse, b, h), options.lse.stride(2));
      else
        states.save(block);
    }
  }

  /// What the threads share while some pairs of batch item and key head are under way.
  struct pairs_under_way {
    packed_keys<T>* slabs;     // where keys are packed once for all groups
    row_states<T>* states;  // one a query head, for joined patterns
    bool* needed;           // [pair][stretches]
  };
  pairs_under_way layout(arena& memory, index pairs) const {
    const index heads = joined ? pairs * shape.group() : 0, slabs = shared ? pairs : 0;
    const pairs_under_way held{memory.allocate<packed_keys<T>>(slabs), memory.allocate<row_states<T>>(heads),
                               memory.allocate<bool>(slabs * ceil_div(shape.keys, pack_step))};
    for (index n = 0; n < slabs; ++n) {
      const auto slab = packed_keys<T>::layout(memory, shape.keys, shape.dim, shape.dim_v);
      if (held.slabs) held.slabs[n] = slab;
    }
    for (index n = 0; n < heads; ++n) {
      const auto states = row_states<T>::layout(memory, out);
      if (held.states) held.states[n] = states;
    }
    return held;
  }

  /// Packs what the groups of `count` pairs from `begin` on read in place.
  void pack_pairs(index begin, index count, const pairs_under_way& held, execution& exec) const {
    const index stretches = ceil_div(shape.keys, pack_step);
    for (index n = 0; n < count; ++n)
      mark((begin + n) / shape.kv_heads, (begin + n) % shape.kv_heads, held.needed + n * stretches);
    exec.for_each(count * stretches, [&](index task, int) {
      const index n = task / stretches, b = (begin + n) / shape.kv_heads, kv = (begin + n) % shape.kv_heads;
      const index from = task % stretches * pack_step, to = std::min(from + pack_step, lengths.keys(b));
      if (from < to && held.needed[task]) held.slabs[n].pack(head_of(k, b, kv), head_of(v, b, kv), from, to);
    });
  }

  /// Pairs [begin, begin + count) of batch item and key head.
  void attend_pairs(index begin, index count, execution& exec) const {
    const index group = shape.group();
    const pairs_under_way held = exec.shared_scratch([&](arena& memory) { return layout(memory, count); });
    if (shared) pack_pairs(begin, count, held, exec);
    for_each_part(pattern, [&](const auto& part, bool first, bool last) {
      index groups = 0;
      for (index n = 0; n < count * group; ++n) groups = std::max(groups, part.groups(head(begin, n)));
      exec.for_each(groups * count * group, [&](index task, int worker) {
        const index n = task % (count * group), g = task / (count * group);
        const sequence s = head(begin, n);
        if (g >= part.groups(s)) return;
        const auto scratch = exec.scratch(worker, [&](arena& memory) {
          return pattern_scratch<T>::layout(memory, gathered, shape.dim, shape.dim_v);
        });
        attend_group(part, first, last, s, g, shared ? held.slabs[n / group] : packed_keys<T>{},
                     joined ? held.states[n].of(out, s.batch, s.head) : row_states<T>{}, scratch);
      });
    });
  }
  /// Query head n of the pairs from `begin` on.
  sequence head(index begin, index n) const {
    const index pair = begin + n / shape.group();
    return sequence_of(pair / shape.kv_heads, pair % shape.kv_heads * shape.group() + n % shape.group());
  }

  void run(execution& exec) const {
    // A wave of pairs keeps the threads busy; serial, it is one pair.
    const index pairs = shape.batch * shape.kv_heads, threads = exec.threads();
    const index bytes = std::max<index>(1, shape.keys * (shape.dim + shape.dim_v) * static_cast<index>(sizeof(T)));
    const index wave =
        threads == 1 ? 1 : std::clamp<index>((index(2) << 20) / bytes, threads, std::max(pairs, threads));
    for (index begin = 0; begin < pairs; begin += wave) attend_pairs(begin, std::min(wave, pairs - begin), exec);
    for (index b = 0; b < shape.batch; ++b)
      for (index h = 0; h < shape.heads; ++h)
        clear_rows(head_of(out, b, h), lengths.queries(b), shape.queries, row_of(options.lse, b, h),
                   options.lse.stride(2));
  }
};

/// The part of an operator's options that every pattern has.
template <class S, class Options>
pattern_softmax_options<S> common_options(const Options& o) {
  return {o.causal, o.scale, o.lengths, o.query_lengths, o.key_lengths, o.softcap, o.alibi_slopes, o.sinks, o.lse};
}

template <class S>
std::pair<attention_shape, sequence_lengths> check_pattern_softmax(const validator& check, const tensor_view<const S>& q,
                                                                   const tensor_view<const S>& k,
                                                                   const tensor_view<const S>& v,
                                                                   const tensor_view<S>& out,
                                                                   const pattern_softmax_options<S>& options) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_softmax_options(check, shape, options, q, k, v, out);
  return {shape, lengths};
}

/// A call whose shapes and options have passed their checks; the pattern is checked here.
template <class S, class Pattern, class Score>
void run_pattern_softmax(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
                         const tensor_view<const S>& v, const tensor_view<S>& out, const Pattern& pattern,
                         const pattern_softmax_options<S>& options, const attention_shape& shape,
                         const sequence_lengths& lengths, Score& score, execution& exec) {
  pattern_call<S, Score, Pattern> call{
      q,     k,       v,
      out,   pattern, options,
      shape, lengths, terms_of<compute_type<S>>(options, shape.dim, &score)};
  call.survey(check, exec);
  call.run(exec);
}

}  // namespace detail

/// Attention by a pattern; `score(s, batch, head, i, j)` may replace the score s of query row i and key row j, after
/// every other term; -infinity masks the key.
template <viewable Q, viewable K, viewable V, viewable O, pattern Pattern, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void pattern_softmax(const Q& q, const K& k, const V& v, O&& out, const Pattern& pattern,
                     const pattern_softmax_options<element_of<const Q&>>& options, Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  const detail::validator check("pattern_softmax");
  const auto [shape, lengths] = detail::check_pattern_softmax(check, queries, keys, values, to, options);
  detail::run_pattern_softmax(check, queries, keys, values, to, pattern, options, shape, lengths, score, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, pattern Pattern, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void pattern_softmax(const Q& q, const K& k, const V& v, O&& out, const Pattern& pattern,
                     const pattern_softmax_options<element_of<const Q&>>& options, Score&& score) {
  execution serial;
  pattern_softmax(q, k, v, out, pattern, options, score, serial);
}

template <viewable Q, viewable K, viewable V, viewable O, pattern Pattern>
void pattern_softmax(const Q& q, const K& k, const V& v, O&& out, const Pattern& pattern,
                     const pattern_softmax_options<element_of<const Q&>>& options, execution& exec) {
  pattern_softmax(q, k, v, out, pattern, options, detail::no_score{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, pattern Pattern>
void pattern_softmax(const Q& q, const K& k, const V& v, O&& out, const Pattern& pattern,
                     const pattern_softmax_options<element_of<const Q&>>& options = {}) {
  execution serial;
  pattern_softmax(q, k, v, out, pattern, options, detail::no_score{}, serial);
}

}  // namespace attn
