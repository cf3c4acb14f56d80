// attn: patterns. A pattern is a small value that says which query sees which keys; pattern_softmax.hpp attends by it.
//
//   struct paragraphs {                                      // every query sees the paragraph it stands in
//     std::vector<attn::index> starts;                       // 0, ..., the end of the last one
//     attn::index groups(const attn::sequence&) const { return std::ssize(starts) - 1; }
//     attn::position_range queries(const attn::sequence&, attn::index group) const {
//       return {starts[group], starts[group + 1]};
//     }
//     void keys(const attn::sequence& s, attn::index group, auto&& see) const { see(queries(s, group)); }
//   };
//   std::puts(attn::draw_pattern(paragraphs{{0, 5, 16}}, 16).c_str());
//
// Queries that share keys form a group; every query is in one group. keys() calls `see` for what a group sees:
//   see(range)                       keys at range.begin, + step, ... below range.end
//   see(list)                        keys of a list, ascending
//   see(range or list, of_query)     of which the query at position p sees those in the range of_query(p), of
//                                    step 1, only
//   see.others(range or list)        but for the one at the query's own position
// What lies outside the sequence is cut off, and with `causal` what lies after the query: a pattern need not care. A
// key told twice counts twice. The work is that of the keys told: where several groups see the same ranges of step 1,
// keys are packed once for all of them; what else a group sees, it gathers.
//
// Queries stand at positions: query i at i + Lk - Lq, the last one at the last key, the first maybe below 0. Both
// lengths are true ones. draw_pattern shows who sees whom.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/softmax/detail/packed_keys.hpp>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace attn::inline ATTN_ISA {

/// One head of one batch item, without its padding: what a pattern is asked about.
struct sequence {
  index batch = 0, head = 0;
  index queries = 0, keys = 0;
  bool causal = false;

  /// The position of the first query.
  index first() const { return keys - queries; }
};

/// Positions begin, begin + step, ... below end.
struct position_range {
  index begin = 0, end = 0, step = 1;
};

/// Two patterns as one; no query may see a key by both.
template <class First, class Second>
struct joined_patterns {
  First first;
  Second second;
};

namespace detail {

/// Those of the positions that lie in [low, high).
inline position_range cut(position_range r, index low, index high) {
  if (r.step < 1) validator("pattern").fail("ranges of a step >= 1", r.step);
  if (r.begin < low) {
    index beyond = (r.begin % r.step - low % r.step) % r.step;  // no difference of positions: that may overflow
    if (beyond < 0) beyond += r.step;
    r.begin = low + std::min(beyond, high - low);
  }
  r.end = std::max(r.begin, std::min(r.end, high));
  r.step = std::min(r.step, std::max<index>(1, high - low));  // one that leads beyond the end
  return r;
}
constexpr index count_of(const position_range& r) { return ceil_div(r.end - r.begin, r.step); }

/// A set of keys that the queries of a group see, cut to the sequence. Slot n holds key where[n].
struct key_set {
  index_map positions;
  index count = 0;
  bool itself = true;              // does a query see the key at its own position?
  list_view<index> given{};  // the list as the pattern gave it

  bool contiguous() const { return !positions.list && positions.step == 1; }

  /// Slots whose keys lie before `position`.
  index slots_before(index position) const {
    if (positions.list) return std::lower_bound(positions.list, positions.list + count, position) - positions.list;
    if (position <= positions.first) return 0;
    return position > positions[count - 1] ? count : ceil_div(position - positions.first, positions.step);
  }

  /// Lists are only read where they ascend from 0 on.
  void check_list(const validator& check) const {
    if (given.empty()) return;
    if (given[0] < 0) check.fail("listed keys >= 0", given[0]);
    const auto fall = std::adjacent_find(given.begin(), given.end(), std::greater_equal<index>());
    if (fall != given.end()) check.fail("listed keys that ascend", text({fall[0], " before ", fall[1]}));
  }

  /// The slots the query at position p sees.
  template <class OfQuery>
  key_range span_of(const sequence& s, index p, const OfQuery& of_query) const {
    const position_range seen = of_query(p);
    const index end = s.causal ? std::min(seen.end, p + 1) : seen.end;
    return {slots_before(seen.begin), slots_before(end)};
  }
};

/// The `see` of a pattern: take(set, of_query) gets every set of keys that is not empty.
template <class Take>
class key_visitor {
 public:
  key_visitor(const sequence& s, Take& take) : sequence_(s), take_(take) {}

  template <class Keys>
  void operator()(const Keys& keys) const {
    give(set_of(keys), all());
  }
  template <class Keys, class OfQuery>
  void operator()(const Keys& keys, const OfQuery& of_query) const {
    give(set_of(keys), of_query);
  }
  template <class Keys>
  void others(const Keys& keys) const {
    key_set set = set_of(keys);
    set.itself = false;
    give(set, all());
  }

 private:
  auto all() const {
    return [n = sequence_.keys](index) { return position_range{0, n}; };
  }
  key_set set_of(const position_range& given) const {
    const position_range r = cut(given, 0, sequence_.keys);
    return {{r.begin, r.step, nullptr}, count_of(r), true};
  }
  key_set set_of(std::span<const index> list) const {
    const index count = std::lower_bound(list.begin(), list.end(), sequence_.keys) - list.begin();
    return {{0, 1, list.data()}, count, true, list};
  }
  template <class OfQuery>
  void give(const key_set& set, const OfQuery& of_query) const {
    if (set.count > 0) take_(set, of_query);
  }

  const sequence& sequence_;
  Take& take_;
};

struct ignored_keys {
  template <class Keys, class... OfQuery>
  void operator()(const Keys&, const OfQuery&...) const {}
  template <class Keys>
  void others(const Keys&) const {}
};

template <class P>
concept single_pattern = requires(const P& p, const sequence& s, index group, const ignored_keys& see) {
  { p.groups(s) } -> std::convertible_to<index>;
  { p.queries(s, group) } -> std::convertible_to<position_range>;
  p.keys(s, group, see);
};

template <class P>
inline constexpr bool is_joined = false;
template <class A, class B>
inline constexpr bool is_joined<joined_patterns<A, B>> = true;

/// f(pattern, is it the first, is it the last) for every single pattern of a join.
template <class P, class F>
void for_each_part(const P& pattern, F&& f, bool first = true, bool last = true) {
  if constexpr (is_joined<P>) {
    for_each_part(pattern.first, f, first, false);
    for_each_part(pattern.second, f, false, last);
  } else {
    f(pattern, first, last);
  }
}

/// The queries of a group, cut to the sequence.
template <class P>
position_range queries_of(const P& pattern, const sequence& s, index group) {
  return cut(pattern.queries(s, group), s.first(), s.keys);
}

template <class P, class Take>
void visit_keys(const P& pattern, const sequence& s, index group, Take&& take) {
  pattern.keys(s, group, key_visitor<std::remove_reference_t<Take>>(s, take));
}

}  // namespace detail

/// What says which query sees which keys.
template <class P>
concept pattern = detail::single_pattern<P> || detail::is_joined<P>;

/// How many pairs of query and key the pattern names.
template <pattern P>
index count_pairs(const P& pattern, const sequence& s) {
  index pairs = 0;
  detail::for_each_part(pattern, [&](const auto& part, bool, bool) {
    for (index g = 0, groups = part.groups(s); g < groups; ++g) {
      const position_range queries = detail::queries_of(part, s, g);
      detail::visit_keys(part, s, g, [&](const detail::key_set& set, const auto& of_query) {
        set.check_list(detail::validator("count_pairs"));
        for (index p = queries.begin; p < queries.end; p += queries.step) {
          const auto [begin, end] = set.span_of(s, p, of_query);
          if (begin >= end) continue;
          const index own = set.slots_before(p);
          pairs += end - begin - (!set.itself && own >= begin && own < end && set.positions[own] == p);
        }
      });
    }
  });
  return pairs;
}

/// The pattern over `length` tokens as text, a row for each query: '#' for a key it sees, '.' for one it does not.
template <pattern P>
std::string draw_pattern(const P& pattern, index length, bool causal = false, index head = 0) {
  const sequence s{0, head, length, length, causal};
  const index width = length + 1;
  std::string rows;
  for (index i = 0; i < length; ++i) rows += std::string(static_cast<std::size_t>(length), '.') + '\n';
  detail::for_each_part(pattern, [&](const auto& part, bool, bool) {
    for (index g = 0; g < part.groups(s); ++g) {
      const position_range queries = detail::queries_of(part, s, g);
      detail::visit_keys(part, s, g, [&](const detail::key_set& set, const auto& of_query) {
        set.check_list(detail::validator("draw_pattern"));
        for (index p = queries.begin; p < queries.end; p += queries.step) {
          const auto [begin, end] = set.span_of(s, p, of_query);
          for (index slot = begin; slot < end; ++slot)
            if (set.itself || set.positions[slot] != p) rows[static_cast<std::size_t>(p * width + set.positions[slot])] = '#';
        }
      });
    }
  });
  return rows;
}

}  // namespace attn
