// attn: patterns. A pattern is a small value that says which query sees which keys; pattern_softmax.hpp uses it.
//
//   struct paragraphs {                                      // every query sees the paragraph it is in
//     std::vector<attn::idx_t> starts;                       // 0, ..., the end of the last one
//     attn::idx_t query_sets(const attn::pattern_shape&) const { return std::ssize(starts) - 1; }
//     attn::position_range queries(const attn::pattern_shape&, attn::idx_t set) const {
//       return {starts[set], starts[set + 1]};
//     }
//     void keys(const attn::pattern_shape& shape, attn::idx_t set, auto&& see) const { see(queries(shape, set)); }
//   };
//   std::puts(attn::pattern_text(paragraphs{{0, 5, 16}}, 16).c_str());
//
// Queries that share keys form a query set; every query is in exactly one. keys() calls `see` for the keys of a set:
//   see(range)                       keys at range.begin, + step, ... below range.end
//   see(list)                        a list of keys, ascending
//   see(range or list, of_query)     of which the query at position p sees those in the range of_query(p), whose step
//                                    is 1
//   see.except_self(range or list)   without the key at the query's own position
// Keys outside the sequence are ignored, and with `causal` also those after the query, so a pattern need not exclude
// them. A key given twice counts twice. The work is proportional to the keys given. Where several query sets see the
// same ranges of step 1, keys are packed once for all of them; all other keys are gathered per query set.
//
// Positions are those of keys: query i is at position i + Lk - Lq, the last one at the last key; the first may be below
// 0. Lk and Lq are true lengths.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/function_ref.hpp>
#include <attn/softmax/detail/packed_keys.hpp>

#include <algorithm>
#include <span>
#include <string>

namespace attn { inline namespace ATTN_ISA {

/// One head of one batch item without its padding: what a pattern is evaluated for.
struct pattern_shape {
  idx_t batch = 0, head = 0;
  idx_t queries = 0, keys = 0;
  bool causal = false;

  /// The position of the first query.
  idx_t first_position() const { return keys - queries; }

  /// For patterns of blocks: a size clamped to the sequence; a larger size means the same and might overflow.
  idx_t clamped(idx_t size) const { return std::clamp<idx_t>(size, 1, std::max<idx_t>(1, queries + keys)); }
  idx_t first_block(idx_t size) const { return detail::floor_div(first_position(), size); }
  /// Number of blocks of keys.
  idx_t blocks(idx_t size) const { return detail::ceil_div(keys, size); }
};

/// Positions begin, begin + step, ... below end.
struct position_range {
  idx_t begin = 0, end = 0, step = 1;
};

/// Two patterns as one; no query may see a key in both.
template <class First, class Second>
struct joined_patterns {
  First first;
  Second second;
};

namespace detail {

/// The positions of a range that lie in [low, high).
inline position_range clip(position_range r, idx_t low, idx_t high) {
  if (r.step < 1) validator("pattern").fail("ranges of a step >= 1", r.step);
  if (r.begin < low) {
    idx_t beyond = (r.begin % r.step - low % r.step) % r.step;  // a difference of positions may overflow
    if (beyond < 0) beyond += r.step;
    r.begin = low + (std::min)(beyond, high - low);
  }
  r.end = (std::max)(r.begin, (std::min)(r.end, high));
  r.step = (std::min)(r.step, std::max<idx_t>(1, high - low));  // a larger one leads beyond the end as well
  return r;
}
constexpr idx_t count_of(const position_range& r) { return ceil_div(r.end - r.begin, r.step); }

/// The positions seen by the query at a position; null: all.
using query_range = function_ref<position_range(idx_t)>;

/// A set of keys that the queries of a query set see, clipped to the sequence. Slot n holds key positions[n].
struct key_set {
  index_map positions;
  idx_t count = 0;
  bool self = true;                 // whether a query sees the key at its own position
  std::span<const idx_t> listed{};  // the list as the pattern gave it

  bool contiguous() const { return !positions.list && positions.step == 1; }

  /// Number of slots whose keys are before `position`.
  idx_t slots_before(idx_t position) const {
    if (positions.list) return std::lower_bound(positions.list, positions.list + count, position) - positions.list;
    if (position <= positions.first) return 0;
    return position > positions[count - 1] ? count : ceil_div(position - positions.first, positions.step);
  }

  /// Checks that a list ascends and does not begin below 0.
  void check_list(const validator& check) const {
    if (listed.empty()) return;
    if (listed[0] < 0) check.fail("listed keys >= 0", listed[0]);
    const auto fall = std::adjacent_find(listed.begin(), listed.end(), std::greater_equal<idx_t>());
    if (fall != listed.end()) check.fail("listed keys that ascend", error_text{fall[0], " before ", fall[1]});
  }

  /// The slots seen by the query at position p.
  key_range slots_of(const pattern_shape& s, idx_t p, const query_range& of_query) const {
    const position_range seen = of_query ? of_query(p) : position_range{0, s.keys};
    const idx_t end = s.causal ? (std::min)(seen.end, p + 1) : seen.end;
    return {slots_before(seen.begin), slots_before(end)};
  }
};

/// Called for every key set that is not empty.
using visit_keys = function_ref<void(const key_set&, const query_range&)>;

/// The argument `see` of a pattern's keys().
struct key_visitor {
  idx_t keys;
  const visit_keys& visit;

  void operator()(const position_range& range, const query_range& of_query = {}) const { give(range, of_query, true); }
  void operator()(std::span<const idx_t> list, const query_range& of_query = {}) const { give(list, of_query, true); }
  void except_self(const position_range& range) const { give(range, {}, false); }
  void except_self(std::span<const idx_t> list) const { give(list, {}, false); }

 private:
  void give(const position_range& range, const query_range& of_query, bool self) const {
    const position_range r = clip(range, 0, keys);
    const key_set set{.positions = {r.begin, r.step, nullptr}, .count = count_of(r), .self = self};
    if (set.count > 0) visit(set, of_query);
  }
  void give(std::span<const idx_t> list, const query_range& of_query, bool self) const {
    const idx_t count = std::lower_bound(list.begin(), list.end(), keys) - list.begin();
    if (count > 0) visit({.positions = {0, 1, list.data()}, .count = count, .self = self, .listed = list}, of_query);
  }
};

/// Number of patterns that are joined in one: 1 for a single pattern, 0 for a type that is not a pattern.
template <class P>
inline constexpr int patterns_in = requires(const P& p, const pattern_shape& s, idx_t set, const key_visitor& see) {
  { p.query_sets(s) } -> std::convertible_to<idx_t>;
  { p.queries(s, set) } -> std::convertible_to<position_range>;
  p.keys(s, set, see);
};
template <class A, class B>
inline constexpr int patterns_in<joined_patterns<A, B>> =
    patterns_in<A> && patterns_in<B> ? patterns_in<A> + patterns_in<B> : 0;

/// Whether it is known of a pattern that no two of its query sets see the same key.
template <class P>
inline constexpr bool disjoint_keys = false;

/// A pattern with its type erased: drivers are compiled once for all patterns.
class pattern_ref {
 public:
  pattern_ref() = default;
  template <class P>
  explicit pattern_ref(const P& pattern)
      : pattern_(&pattern),
        query_sets_([](auto* p, auto& s) -> idx_t { return static_cast<const P*>(p)->query_sets(s); }),
        queries_([](auto* p, auto& s, idx_t n) -> position_range { return static_cast<const P*>(p)->queries(s, n); }),
        keys_([](auto* p, auto& s, idx_t n, auto& see) { static_cast<const P*>(p)->keys(s, n, see); }),
        disjoint_(disjoint_keys<P>) {}

  bool disjoint() const { return disjoint_; }
  idx_t query_sets(const pattern_shape& s) const { return query_sets_(pattern_, s); }

  /// The queries of a set, clipped to the sequence.
  position_range queries(const pattern_shape& s, idx_t set) const {
    return clip(queries_(pattern_, s, set), s.first_position(), s.keys);
  }

  /// visit(key set, query_range) for the keys of a query set.
  void keys(const pattern_shape& s, idx_t set, const visit_keys& visit) const {
    keys_(pattern_, s, set, {s.keys, visit});
  }

 private:
  const void* pattern_ = nullptr;
  idx_t (*query_sets_)(const void*, const pattern_shape&) = nullptr;
  position_range (*queries_)(const void*, const pattern_shape&, idx_t) = nullptr;
  void (*keys_)(const void*, const pattern_shape&, idx_t, const key_visitor&) = nullptr;
  bool disjoint_ = false;
};

/// The patterns that are joined in one.
template <class P>
std::array<pattern_ref, patterns_in<P>> patterns_of(const P& pattern) {
  if constexpr (patterns_in<P> == 1) {
    return {pattern_ref(pattern)};
  } else {
    std::array<pattern_ref, patterns_in<P>> all;
    std::ranges::copy(patterns_of(pattern.second), std::ranges::copy(patterns_of(pattern.first), all.begin()).out);
    return all;
  }
}

/// visit(position of a query, key set, slots it sees) for every query and key set.
inline void for_each_query(std::span<const pattern_ref> patterns, const pattern_shape& s, const validator& check,
                           const function_ref<void(idx_t, const key_set&, const key_range&)>& visit) {
  for (const pattern_ref& pattern : patterns)
    for (idx_t n = 0, sets = pattern.query_sets(s); n < sets; ++n) {
      const position_range queries = pattern.queries(s, n);
      pattern.keys(s, n, [&](const key_set& set, const query_range& of_query) {
        set.check_list(check);
        for (idx_t p = queries.begin; p < queries.end; p += queries.step) visit(p, set, set.slots_of(s, p, of_query));
      });
    }
}

}  // namespace detail

/// A type that says which query sees which keys.
template <class P>
concept key_pattern = (detail::patterns_in<P> > 0);

/// The keys from `left` before to `right` after the query.
struct window_pattern {
  idx_t left = 128, right = 128;

  static constexpr idx_t rows = 384;  // several row blocks of the kernel share the keys between them

  idx_t query_sets(const pattern_shape& s) const { return detail::ceil_div(s.queries, rows); }
  position_range queries(const pattern_shape& s, idx_t set) const {
    const idx_t begin = s.first_position() + set * rows;
    return {begin, begin + rows};
  }
  void keys(const pattern_shape& s, idx_t set, auto&& see) const {
    const idx_t all = s.queries + s.keys, before = (std::min)(left, all), after = (std::min)(right, all);
    const position_range own = queries(s, set);
    see(position_range{own.begin - before, own.end + after}, [before, after](idx_t p) {
      return position_range{p - before, p + after + 1};
    });
  }
};

/// How many keys all queries together see by the pattern. Throws std::invalid_argument for lists that do not ascend.
template <key_pattern P>
idx_t count_pairs(const P& pattern, const pattern_shape& s) {
  idx_t pairs = 0;
  detail::for_each_query(detail::patterns_of(pattern), s, detail::validator("count_pairs"),
                         [&](idx_t p, const detail::key_set& set, const detail::key_range& slot_range) {
                           if (slot_range.begin >= slot_range.end) return;
                           pairs += slot_range.end - slot_range.begin;
                           if (!set.self && set.positions.find(p, slot_range.begin, slot_range.end) >= 0) --pairs;
                         });
  return pairs;
}

/// The pattern over `length` tokens as text, a row per query: '#' for a key it sees, '.' for one it does not.
template <key_pattern P>
std::string pattern_text(const P& pattern, idx_t length, bool causal = false, idx_t head = 0) {
  const pattern_shape s{.head = head, .queries = length, .keys = length, .causal = causal};
  std::string rows;
  for (idx_t i = 0; i < length; ++i) rows += std::string(static_cast<std::size_t>(length), '.') + '\n';
  detail::for_each_query(detail::patterns_of(pattern), s, detail::validator("pattern_text"),
                         [&](idx_t p, const detail::key_set& set, const detail::key_range& slot_range) {
                           for (idx_t slot = slot_range.begin; slot < slot_range.end; ++slot) {
                             const idx_t key = set.positions[slot];
                             if (set.self || key != p) rows[static_cast<std::size_t>(p * (length + 1) + key)] = '#';
                           }
                         });
  return rows;
}

}}  // namespace attn::ATTN_ISA
