#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"
#include "support/run_multipole.hpp"

namespace testing::multipole_law {
namespace {

struct multipole_entry {
  std::string name;
  idx_t exact, clusters, block, probe = 1;
  idx_t segment = 0, candidate_clusters = 0;  // a segment: causal
  bool scores = false;  // softcap, sinks, scale
  bool assigned = false;
  bool others = false;  // lookback, iterations and seed that are not the default

  idx_t lookback() const { return others ? 3 : std::min<idx_t>(32, block); }
};

template <class T>
struct parameters {
  multipole_entry entry;
  std::vector<T> sinks, d_sinks;
  std::vector<idx_t> assignment;
  law_shape shape;

  parameters(const multipole_entry& e, const law_shape& s) : entry(e), shape(s) {
    if (e.scores) sinks = d_sinks = law_sinks<T>(s);
    for (idx_t n = 0; n < s.batch * s.kv_heads; ++n)
      for (idx_t j = 0; j < s.keys; ++j) assignment.push_back(j * 7 % 5 % e.clusters);
  }

  attn::multipole_options<T> options(const auto& call) const {
    attn::multipole_options<T> o;
    o.exact = entry.exact, o.clusters = entry.clusters, o.block = entry.block, o.probe = entry.probe;
    o.candidate_clusters = entry.candidate_clusters;
    o.causal = entry.segment > 0;
    if (entry.segment > 0) o.segment = entry.segment;
    if (entry.assigned) o.assignment = {assignment.data(), {shape.batch, shape.kv_heads, shape.keys}};
    if (entry.others) o.lookback = entry.lookback(), o.iterations = 2, o.seed = 5;
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.sinks = sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
  reference::multipole_options reference_options(const law_reference_call& call) const {
    reference::multipole_options o;
    o.exact = entry.exact, o.clusters = entry.clusters, o.block = entry.block, o.probe = entry.probe;
    o.candidate_clusters = entry.candidate_clusters;
    o.causal = entry.segment > 0;
    if (entry.segment > 0) o.segment = entry.segment, o.lookback = entry.lookback();
    if (entry.assigned) {
      o.assignment = tensor<double>(shape.batch, shape.kv_heads, shape.keys, 1);
      std::copy(assignment.begin(), assignment.end(), o.assignment.data.begin());
    }
    o.starts = drawn_starts(entry.others ? 5 : 0);
    if (entry.others) o.iterations = 2;
    if (entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
    o.sinks = call.parameter(sinks);
    call.set_lengths(o);
    return o;
  }
};

template <class T>
bound<T> bind_multipole(const multipole_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    compiled_multipole<T>::call(call.q, call.k, call.v, call.out, p->options(call), *call.execution);
  };
}

template <class T>
backward_binder<T> multipole_backward(const multipole_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      attn::multipole_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.scores) g.sinks = p->d_sinks;
      compiled_multipole<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call),
                                      *call.execution);
      call.give(p->d_sinks);
    };
  };
}

template <class T>
law_operator<T> operator_of(const multipole_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.segment > 0;
  op.averages = !entry.scores;
  op.bind = [entry](const law_shape& s) { return bind_multipole<T>(entry, s); };
  op.backward = multipole_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      return reference::multipole(call.q, call.k, call.v, p->reference_options(call));
    };
  };
  // The rest of a cluster is a difference of sums over its members: where few of many are left, digits are lost.
  op.error_factor = 4;
  if (entry.segment == 0) op.queries_mix = true;  // they choose together
  // All rows of a block depend on the mean of the queries by which it chooses: of the `lookback` up to its first.
  if (entry.segment > 0 && entry.exact > 0) op.reach = entry.block - 1 + entry.lookback() - 1;
  // Every key is taken or part of a cluster.
  op.sees = [entry](const law_shape& s, idx_t, idx_t, idx_t i, idx_t j) {
    return entry.segment == 0 || j <= i + s.keys - s.queries;
  };
  return op;
}

template <class T>
void add_multipole(std::vector<law_operator<T>>& all) {
  const auto limit = [](const multipole_entry& entry) {
    return [entry](const law_shape& s) { return bind_multipole<T>(entry, s); };
  };
  law_operator<T> op = operator_of<T>({.name = "multipole", .exact = 20, .clusters = 6, .block = 32, .probe = 8});
  op.limits.push_back({"all keys exact", limit({"", 300, 3, 40, 10}), full_binder<T>(false)});
  op.limits.push_back({"every key its own cluster", limit({"", 5, 300, 40, 10}), full_binder<T>(false)});
  op.limits.push_back({"causal, all keys exact", limit({"", 300, 3, 9, 1, 20}), full_binder<T>(true)});
  op.limits.push_back({"causal, every key its own cluster", limit({"", 5, 20, 9, 1, 20}), full_binder<T>(true)});
  op.limits.push_back({"causal, one segment", limit({"", 5, 2, 9, 1, 300}), full_binder<T>(true)});
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "multipole causal",
                                .exact = 9,
                                .clusters = 3,
                                .block = 12,
                                .probe = 2,
                                .segment = 24,
                                .others = true}));
  all.push_back(operator_of<T>({.name = "multipole with an assignment, few changes",
                                .exact = 2,
                                .clusters = 5,
                                .block = 7,
                                .candidate_clusters = 2,
                                .assigned = true}));
  all.push_back(operator_of<T>({.name = "multipole of everything",
                                .exact = 3,
                                .clusters = 4,
                                .block = 5,
                                .segment = 16,
                                .candidate_clusters = 3,
                                .scores = true}));
  all.push_back(operator_of<T>({.name = "multipole of given clusters",
                                .exact = 7,
                                .clusters = 5,
                                .block = 12,
                                .probe = 4,
                                .assigned = true}));
  // Without choices, which rounding may decide otherwise in a step than in a block.
  law_operator<T> stream =
      operator_of<T>({.name = "multipole of clusters alone", .exact = 0, .clusters = 3, .block = 1, .segment = 16});
  stream.stream = [](const law_shape& s) {
    auto cache = std::make_shared<attn::multipole_cache<T>>(
        attn::state_extents{.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim},
        attn::multipole_cache_options{.exact = 0, .clusters = 3, .segment = 16});
    cache->reserve(s.keys);
    return [cache](const law_call<T>& call) {
      compiled_multipole<T>::step(*cache, call.q, call.k, call.v, call.out, {.lse = call.lse}, *call.execution);
    };
  };
  stream.without = {{"long_rows", "rows see clusters and chosen keys"}};
  all.push_back(stream);
}
const law_entries entries("multipole", [](auto& all) { add_multipole(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back({.name = std::string("multipole") + (causal ? " causal" : ""),
                   .causal = causal,
                   .run = [=](const stored_call<S>& c) {
                     using compiled = compiled_multipole<S>;
                     auto options = c.template options<compiled>(causal);
                     options.exact = 20, options.clusters = 6, options.block = 16;
                     if (causal) options.segment = 32;
                     compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
                     compiled::backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                        c.execution);
                   },
                   .reach = causal ? 16 - 1 + 16 - 1 : 0});  // as above
}
const stored_entries stored_form("multipole", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::multipole_law
