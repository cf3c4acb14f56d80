// A user's pattern: query sets of every second query, windows, lists and steps.
#include "laws/operators/patterns.hpp"

namespace testing::pattern_softmax_law {
namespace {

// Queries at even positions see a window, those at odd ones every 9th key but their own; all see keys 0, 64 and 101.
bool own_pattern_sees(idx_t position, idx_t key) {
  if (key == 0 || key == 64 || key == 101) return true;
  if (position % 2 == 0) return position - 6 <= key && key <= position + 3;
  return key % 9 == 4 && key != position;
}

// For reference::by_pattern, which asks `sees`.
struct own_pattern_options : reference::softmax_options {};
bool sees(const own_pattern_options&, idx_t, idx_t position, idx_t key, idx_t) {
  return own_pattern_sees(position, key);
}

listed_pattern own_pattern(const law_shape& s) {
  std::vector<idx_t> others, common = {0, 64, 101};
  for (idx_t j = 4; j < s.keys; j += 9) others.push_back(j);
  const idx_t first = (s.keys - s.queries) - 1000;
  const idx_t even = first - first % 2;
  listed_pattern p;
  listed_pattern::query_set near{{even, s.keys, 2}, {{.list = common}}};
  const attn::position_range between[] = {{1, 64}, {65, 101}, {102, s.keys}};
  for (const auto& range : between) near.pieces.push_back({.range = range, .left = 6, .right = 3});
  p.all.push_back(near);
  listed_pattern::query_set far{{even + 1, s.keys, 2}, {{.list = common}}};
  if (!others.empty()) far.pieces.push_back({.list = others, .except_self = true});
  p.all.push_back(far);
  return p;
}

// Everything there is, in one piece for even positions and in two for odd ones.
listed_pattern whole(const law_shape& s) {
  listed_pattern p;
  p.all.push_back({{0, s.keys, 2}, {{.range = {0, s.keys}}}});
  p.all.push_back({{1, s.keys, 2}, {{.range = {0, s.keys / 3}}, {.range = {s.keys / 3, s.keys}}}});
  return p;
}

// Two patterns: keys at even positions, and those at odd ones.
joined_listed_pattern joined(const law_shape& s) {
  joined_listed_pattern p;
  p.first.all.push_back({{0, s.keys}, {{.range = {0, s.keys, 2}}}});
  p.second.all.push_back({{0, s.keys}, {{.range = {1, s.keys, 2}}}});
  return p;
}

template <class T, class Pattern>
bound<T> bind_own(const Pattern& pattern, bool causal) {
  return [pattern, causal](const law_call<T>& call) {
    attn::pattern_softmax_options<T> options;
    options.causal = causal;
    options.lse = call.lse;
    call.set_lengths(options);
    compiled_pattern_softmax<T>::call(call.q, call.k, call.v, call.out, pattern, options, {}, *call.execution);
  };
}

struct own_entry {
  std::string name;
  bool causal = false, everything = false;
};

template <class T>
struct parameters {
  own_entry entry;
  law_shape shape;
  listed_pattern pattern;
  std::vector<T> slopes, sinks, d_slopes, d_sinks;
  law_mask mask;
  score_of<T> score;

  parameters(const own_entry& e, const law_shape& s) : entry(e), shape(s), pattern(own_pattern(s)) {
    if (!e.everything) return;
    slopes = d_slopes = law_slopes<T>(s), sinks = d_sinks = law_sinks<T>(s);
    mask = law_mask(s), score = own_score_of<T>(s);
  }
  attn::pattern_softmax_options<T> options(const auto& call) const {
    attn::pattern_softmax_options<T> o;
    o.causal = entry.causal;
    o.lse = call.lse;
    call.set_lengths(o);
    if (entry.everything) o.softcap = T(2), o.scale = T(0.3), o.mask = mask.view();
    o.alibi_slopes = slopes, o.sinks = sinks;
    return o;
  }
  reference::result reference_of(const law_reference_call& call) const {
    own_pattern_options o;
    o.causal = entry.causal;
    call.set_lengths(o);
    if (entry.everything) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
    o.alibi_slopes = call.parameter(slopes), o.sinks = call.parameter(sinks);
    o.score = mask_for_reference(shape, call, entry.everything, entry.everything);
    return reference::by_pattern(call.q, call.k, call.v, o);
  }
};

template <class T>
law_operator<T> operator_of(const own_entry& entry) {
  const auto bind = [entry](const law_shape& s) { return std::make_shared<parameters<T>>(entry, s); };
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = !entry.everything;
  op.bind = [bind](const law_shape& s) -> bound<T> {
    return [p = bind(s)](const law_call<T>& call) {
      compiled_pattern_softmax<T>::call(call.q, call.k, call.v, call.out, p->pattern, p->options(call), p->score,
                                        *call.execution);
    };
  };
  op.backward = [bind](const law_shape& s) {
    return [p = bind(s)](const law_backward_call<T>& call) {
      attn::pattern_softmax_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.everything) g.alibi_slopes = p->d_slopes, g.sinks = p->d_sinks;
      compiled_pattern_softmax<T>::backward(call.q, call.k, call.v, call.out, p->pattern, call.d_out, g,
                                            p->options(call), p->score, own_score_backward<T>, *call.execution);
      call.give(p->d_slopes, p->d_sinks);
    };
  };
  op.reference = [bind](const law_shape& s) {
    return [p = bind(s)](const law_reference_call& call) { return p->reference_of(call); };
  };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
    const idx_t position = i + s.keys - s.queries;
    if (entry.everything && !mask_sees(s.first_batch + b, s.first_head + h, i, j)) return false;
    return !(entry.causal && j > position) && own_pattern_sees(position, j);
  };
  return op;
}

template <class T>
void add_pattern_softmax(std::vector<law_operator<T>>& all) {
  for (bool causal : {false, true}) {
    law_operator<T> op = operator_of<T>({causal ? "own pattern, causal" : "own pattern", causal});
    op.limits = {{"a pattern of everything", [=](const law_shape& s) { return bind_own<T>(whole(s), causal); },
                  full_binder<T>(causal)},
                 {"two patterns joined", [=](const law_shape& s) { return bind_own<T>(joined(s), causal); },
                  full_binder<T>(causal)}};
    if (!causal) op.long_rows = {{"everything", [](const law_shape& s) { return bind_own<T>(whole(s), false); }}};
    all.push_back(op);
  }
  all.push_back(operator_of<T>({"own pattern of everything", true, true}));
  all.back().without = {{"stream", "there is no step"},
                        {"bfloat16", "block, strided and bigbird are patterns of the same kernel"}};
}
const law_entries entries("pattern_softmax", [](auto& all) { add_pattern_softmax(all); });

}  // namespace
}  // namespace testing::pattern_softmax_law
