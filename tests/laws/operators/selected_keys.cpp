#include "reference/selected_keys.hpp"

#include "laws/operators/patterns.hpp"
#include "laws/operators/span.hpp"
#include "laws/stored.hpp"
#include "support/run_selected_keys.hpp"

namespace testing::selected_keys_law {
namespace {

struct selected_entry {
  std::string name;
  idx_t block = 1, count = 9;
  bool causal = true, of_heads = true;
  bool scores = false;  // softcap, sinks, ALiBi, scale, a mask, a score function
  bool all = false;     // lists name all keys
  bool sinks = false;
  idx_t span = 0;  // if not 0, it is given, and where the first queries are

  idx_t tokens() const { return block * std::max<idx_t>(span, 1); }  // of a name
};

// Entry m of the list of a query: its own key, or the last complete one, and others that may be anywhere up to some
// way behind it.
idx_t name_of(const selected_entry& e, idx_t h, idx_t i, idx_t m) {
  if (e.all) return (m * 37 + i) % e.count;
  if (m == 2) return e.span ? (i + 1) / e.span - 1 : i / e.block;
  random_source random(static_cast<std::uint64_t>(((e.of_heads ? h : 0) * 1000 + i) * 16 + m));
  return random.below(i / e.tokens() + 9) - 1;
}

// Rows [first, first + queries) of the lists, over so many keys, or over those up to each query's position.
void fill(const selected_entry& e, const law_shape& s, idx_t b, idx_t first, idx_t queries, idx_t keys,
          tensor<std::int32_t>& to) {
  for (idx_t h = 0; h < to.heads(); ++h)
    for (idx_t i = 0; i < queries; ++i)
      for (idx_t m = 0; m < e.count; ++m) {
        const idx_t name = name_of(e, s.first_head + h, first + i, m);
        const idx_t end = keys < 0 ? (first + i + 1) * e.block / e.tokens() : keys;
        to(b, h, i, m) = static_cast<std::int32_t>(name * e.block < end ? name : -1);
      }
}
tensor<std::int32_t> lists_for(const selected_entry& e, const law_shape& s, idx_t batch = 1) {
  return tensor<std::int32_t>(batch, e.of_heads ? s.heads : 1, s.queries, e.count, -1);
}

template <class T>
struct parameters {
  selected_entry entry;
  law_shape shape;
  tensor<std::int32_t> lists;
  law_mask mask{};
  std::vector<T> slopes{}, sinks{}, d_slopes{}, d_sinks{};
  score_of<T> score{};
  mutable std::vector<idx_t> first{};  // of the last call

  parameters(const selected_entry& e, const law_shape& s, idx_t batch = 1)
      : entry(e), shape(s), lists(lists_for(e, s, batch)) {
    for (idx_t b = 0; b < batch; ++b) fill(e, s, b, 0, s.queries, s.keys, lists);
    if (e.scores) slopes = law_slopes<T>(s), sinks = law_sinks<T>(s), score = own_score_of<T>(s), mask = law_mask(s);
    if (e.sinks) sinks = law_sinks<T>(s);
    first.resize(static_cast<std::size_t>(s.batch));
    d_slopes = slopes, d_sinks = sinks;
  }

  template <class Options>
  Options options(const auto& call) const {
    Options o;
    o.block = entry.block;
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    if constexpr (requires { o.causal; }) {
      o.causal = entry.causal;
      if (entry.scores) o.mask = mask.view();
    }
    o.alibi_slopes = slopes, o.sinks = sinks;
    o.lse = call.lse;
    call.set_lengths(o);
    if constexpr (requires { o.span; })
      if (entry.span) set_first_positions(shape, call, first), o.span = entry.span, o.first_position = first;
    o.indices = attn::tensor_view<const std::int32_t>(lists.data.data(), lists.extents);
    return o;
  }
};

template <class T>
bound<T> bind_selected(const selected_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    using form = compiled_selected_keys<T>;
    form::call(call.q, call.k, call.v, call.out, p->template options<typename form::options>(call), p->score,
               *call.execution);
  };
}

template <class T>
backward_binder<T> selected_backward(const selected_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      using form = compiled_selected_keys<T>;
      typename form::gradients g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.scores) g.alibi_slopes = p->d_slopes;
      if (!p->sinks.empty()) g.sinks = p->d_sinks;
      form::backward(call.q, call.k, call.v, call.out, call.d_out, g,
                     p->template options<typename form::options>(call), p->score, own_score_backward<T>,
                     *call.execution);
      call.give(p->d_slopes, p->d_sinks);
    };
  };
}

// A step knows no mask of the whole sequence: the entry's own has none.
template <class T>
binder<T> selected_stream(const selected_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    auto cache = std::make_shared<attn::kv_cache<T>>(
        attn::state_extents{.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim});
    cache->reserve(s.queries);
    return [cache, s, p = std::make_shared<parameters<T>>(entry, s, s.batch)](const law_call<T>& call) {
      using form = compiled_selected_keys<T>;
      const idx_t n = call.q.extent(2);
      tensor<std::int32_t>& lists = p->lists;
      for (idx_t b = 0; b < s.batch; ++b)
        fill(p->entry, s, b, cache->tokens(b), n, -1, lists);
      auto options = p->template options<typename form::step_options>(call);
      options.indices = attn::tensor_view<const std::int32_t>(lists.data.data(), lists.extents).slice(2, 0, n);
      form::step(*cache, call.q, call.k, call.v, call.out, options, p->score, *call.execution);
    };
  };
}

template <class T>
binder<T> span_stream(const selected_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    auto feed = std::make_shared<span_feed<T>>(s, entry.span);
    return [feed, s, p = std::make_shared<parameters<T>>(entry, s, s.batch)](const law_call<T>& call) {
      using form = compiled_selected_keys<T>;
      const idx_t n = call.q.extent(2);
      const std::vector<idx_t>& first = feed->first;
      feed->append(call);
      for (idx_t b = 0; b < s.batch; ++b) fill(p->entry, s, b, first[static_cast<std::size_t>(b)], n, -1, p->lists);
      auto options = p->template options<typename form::cached_options>(call);
      options.indices = options.indices.slice(2, 0, n), options.first_position = first;
      form::cached(feed->cache, call.q, call.out, options, *call.execution);
    };
  };
}

// Over a cache of all keys.
template <class T>
binder<T> bind_cached(const selected_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    return [s, p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
      using form = compiled_selected_keys<T>;
      attn::kv_cache<T> cache({.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim});
      cache.append(call.k, call.v);
      form::cached(cache, call.q, call.out, p->template options<typename form::cached_options>(call), *call.execution);
    };
  };
}

template <class T>
law_operator<T> operator_of(const selected_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = !entry.scores && !entry.sinks;
  op.bind = [entry](const law_shape& s) { return bind_selected<T>(entry, s); };
  op.backward = selected_backward<T>(entry);
  if (entry.causal && !entry.scores) op.stream = entry.span ? span_stream<T>(entry) : selected_stream<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      reference::selected_keys_options o;
      o.causal = p->entry.causal, o.block = p->entry.block, o.indices = cast<idx_t>(p->lists);
      if (p->entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
      o.alibi_slopes = call.parameter(p->slopes), o.sinks = call.parameter(p->sinks);
      o.score = mask_for_reference(p->shape, call, p->entry.scores, p->entry.scores);
      call.set_lengths(o);
      if (p->entry.span)
        set_first_positions(p->shape, call, p->first), o.span = p->entry.span, o.first_positions = p->first;
      return reference::selected_keys(call.q, call.k, call.v, o);
    };
  };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
    const idx_t tokens = entry.span ? (j + 1) * entry.span - 1 : j;
    if (entry.causal && tokens > i + s.keys - s.queries) return false;
    if (entry.scores && !mask_sees(s.first_batch + b, s.first_head + h, i, j)) return false;
    for (idx_t m = 0; m < entry.count; ++m)
      if (name_of(entry, s.first_head + h, i, m) == j / entry.block) return true;
    return false;
  };
  return op;
}

template <class T>
void add_selected_keys(std::vector<law_operator<T>>& all) {
  const auto limit = [](const selected_entry& entry) {
    return [entry](const law_shape& s) { return bind_selected<T>(entry, s); };
  };
  const auto everything = [](idx_t block, idx_t count, bool causal = false) {
    return selected_entry{.name = "", .block = block, .count = count, .causal = causal, .of_heads = false, .all = true};
  };
  law_operator<T> op = operator_of<T>({.name = "selected_keys"});
  op.limits.push_back({"all keys", limit(everything(1, 300, true)), full_binder<T>(true)});
  op.limits.push_back({"all blocks", limit(everything(32, 10)), full_binder<T>(false)});
  op.limits.push_back({"a block of the length", limit(everything(1000, 1)), full_binder<T>(false)});
  op.long_rows.push_back({.name = "all blocks", .bind = limit(everything(1024, 600)),
                          .backward = selected_backward<T>(everything(1024, 600))});
  // Without gradients: selected_keys_backward.hpp says by how much they err.
  op.long_rows.push_back({.name = "all blocks, row by row", .bind = limit(everything(8, 65536))});
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "selected_keys of everything", .block = 3, .of_heads = false, .scores = true}));
  all.push_back(operator_of<T>({.name = "selected_keys, blocks", .block = 16, .count = 4}));
  all.push_back(operator_of<T>({.name = "selected_keys, blocks, of everything", .block = 20, .count = 5,
                                .causal = false, .scores = true}));
  all.push_back(operator_of<T>({.name = "selected_keys, keys of 3 tokens, sinks", .sinks = true, .span = 3}));
  const selected_entry causal{.name = "", .sinks = true}, placed{.name = "", .sinks = true, .span = 1};
  all.back().limits = {same_form<T>("a token a key", operator_of<T>(placed), operator_of<T>(causal)),
                       {"a token a key of a cache", bind_cached<T>(placed), bind_cached<T>(causal), true}};
}
const law_entries entries("selected_keys", [](auto& all) { add_selected_keys(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  static const tensor<idx_t> keys = random_lists(5, 1, 1, stored::length, 40, stored::length),
                             blocks = random_lists(6, 1, 1, stored::length, 4, (stored::length + 23) / 24);
  all.push_back(stored_softmax<compiled_selected_keys, S>("selected_keys", true,
                                                          [](auto& o) { o.indices = lists_view(keys); }));
  all.push_back(stored_softmax<compiled_selected_keys, S>("selected_keys, keys of 3 tokens", true, [](auto& o) {
    o.span = 3, o.first_position = 0, o.indices = lists_view(keys);
  }));
  all.push_back(stored_softmax<compiled_selected_keys, S>(
      "selected_keys, blocks", false, [](auto& o) { o.block = 24, o.indices = lists_view(blocks); }));
}
const stored_entries stored_form("selected_keys", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::selected_keys_law
