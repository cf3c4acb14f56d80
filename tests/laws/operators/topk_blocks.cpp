#include "reference/topk_blocks.hpp"

#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"
#include "support/call_topk_blocks.hpp"

namespace testing::topk_blocks_law {
namespace {

struct topk_entry {
  std::string name;
  idx_t block, topk;
  bool scores = false;  // softcap, sinks, ALiBi, scale, a score function
};

template <class T>
struct parameters {
  topk_entry entry;
  law_shape shape;
  std::vector<T> slopes, sinks, d_slopes, d_sinks;
  score_of<T> score;

  parameters(const topk_entry& e, const law_shape& s) : entry(e), shape(s) {
    if (e.scores) slopes = law_slopes<T>(s), sinks = law_sinks<T>(s), score = own_score_of<T>(s);
    d_slopes = slopes, d_sinks = sinks;
  }

  template <class Options>
  Options options(const auto& call) const {
    Options o;
    o.topk = entry.topk;
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.alibi_slopes = slopes, o.sinks = sinks;
    o.lse = call.lse;
    call.set_lengths(o);
    if constexpr (requires { o.block; }) o.block = entry.block;
    return o;
  }
};

template <class T>
bound<T> bind_topk(const topk_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    using options = attn::topk_blocks_options<T>;
    compiled_topk_blocks<T>::call(call.q, call.k, call.v, call.out, p->template options<options>(call),
                                  p->score, *call.execution);
  };
}

template <class T>
backward_binder<T> topk_backward(const topk_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      using options = attn::topk_blocks_options<T>;
      attn::topk_blocks_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.scores) g.alibi_slopes = p->d_slopes, g.sinks = p->d_sinks;
      compiled_topk_blocks<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g,
                                        p->template options<options>(call), p->score, own_score_backward<T>,
                                        *call.execution);
      call.give(p->d_slopes, p->d_sinks);
    };
  };
}

template <class T>
binder<T> topk_stream(const topk_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    auto cache = std::make_shared<attn::topk_blocks_cache<T>>(
        attn::state_extents{.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim},
        attn::topk_blocks_cache_options{.block = entry.block});
    cache->reserve(s.queries);
    return [cache, p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
      using options = attn::topk_blocks_step_options<T>;
      compiled_topk_blocks<T>::step(*cache, call.q, call.k, call.v, call.out, p->template options<options>(call),
                                    p->score, *call.execution);
    };
  };
}

template <class T>
law_operator<T> operator_of(const topk_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = true;
  op.averages = !entry.scores;
  op.bind = [entry](const law_shape& s) { return bind_topk<T>(entry, s); };
  op.backward = topk_backward<T>(entry);
  op.stream = topk_stream<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      reference::topk_blocks_options o;
      o.block = p->entry.block, o.topk = p->entry.topk;
      if (p->entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
      o.alibi_slopes = call.parameter(p->slopes), o.sinks = call.parameter(p->sinks);
      o.score = mask_for_reference(p->shape, call, false, p->entry.scores);
      call.set_lengths(o);
      return reference::topk_blocks(call.q, call.k, call.v, o);
    };
  };
  if (entry.topk >= 300)  // all there are; otherwise the matches say who sees whom
    op.sees = [](const law_shape& s, idx_t, idx_t, idx_t i, idx_t j) { return j <= i + s.keys - s.queries; };
  if (entry.topk == 1)
    op.sees = [block = entry.block](const law_shape& s, idx_t, idx_t, idx_t i, idx_t j) {
      const idx_t position = i + s.keys - s.queries;
      return j <= position && j >= position / block * block;
    };
  return op;
}

template <class T>
void add_topk_blocks(std::vector<law_operator<T>>& all) {
  const auto limit = [](const topk_entry& entry) {
    return [entry](const law_shape& s) { return bind_topk<T>(entry, s); };
  };
  law_operator<T> op = operator_of<T>({.name = "topk_blocks", .block = 16, .topk = 3});
  op.limits.push_back({"as many blocks as there are", limit({"", 8, 300}), full_binder<T>(true)});
  op.limits.push_back({"blocks of one key", limit({"", 1, 300}), full_binder<T>(true)});
  op.limits.push_back({"a block of the length", limit({"", 257, 1}), full_binder<T>(true)});
  op.long_rows.push_back({.name = "all blocks",
                          .bind = limit({"", 1024, 600}),
                          .backward = topk_backward<T>({"", 1024, 600}),
                          .causal = true});
  all.push_back(op);
  all.push_back(
      operator_of<T>({.name = "topk_blocks of everything", .block = 5, .topk = 4, .scores = true}));
  all.push_back(operator_of<T>({.name = "topk_blocks, own blocks alone", .block = 24, .topk = 1}));
  all.push_back(operator_of<T>({.name = "topk_blocks, all blocks", .block = 7, .topk = 300}));
}
const law_entries entries("topk_blocks", [](auto& all) { add_topk_blocks(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_topk_blocks, S>("topk_blocks", true, [](auto& o) { o.block = 24; }));
}
const stored_entries stored_form("topk_blocks", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::topk_blocks_law
