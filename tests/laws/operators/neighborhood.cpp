#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"
#include "support/run_neighborhood.hpp"

namespace testing::neighborhood_law {
namespace {

struct neighborhood_entry {
  std::string name;
  int axes = 1;
  idx_t kernel = 1, stride = 1, dilation = 1;
  bool causal = false;  // along all axes
  bool shift = false;   // by half a kernel
  bool scores = false;  // softcap, sinks, scale, a bias, a score function
};

// The length as a grid whose last axes are at most 10 and 3 long, and what fits in it.
reference::neighborhood_options options_of(const neighborhood_entry& entry, idx_t length) {
  reference::neighborhood_options o;
  idx_t rest = length;
  for (int a = 1; a < entry.axes; ++a) {
    idx_t most = a == 1 ? 10 : 3;
    while (rest % most != 0) --most;
    o.grid.insert(o.grid.begin(), most), rest /= most;
  }
  o.grid.insert(o.grid.begin(), rest);
  for (idx_t n : o.grid) {
    const idx_t tokens = std::max<idx_t>(n, 1), kernel = std::min(entry.kernel, tokens);
    o.kernel.push_back(kernel), o.stride.push_back(std::min(entry.stride, kernel));
    o.dilation.push_back(std::min(entry.dilation, tokens / kernel));
    o.causal_axes.push_back(entry.causal), o.shift.push_back(entry.shift ? kernel / 2 : 0);
  }
  return o;
}

template <class T>
struct parameters {
  neighborhood_entry entry;
  reference::neighborhood_options given;
  std::vector<T> sinks, d_sinks;
  tensor<T> table, d_table;
  score_of<T> score;
  law_shape shape;

  parameters(const neighborhood_entry& e, const law_shape& s)
      : entry(e), given(options_of(e, s.queries)), shape(s) {
    if (!e.scores) return;
    sinks = law_sinks<T>(s), score = own_score_of<T>(s);
    table = cast<T>(offset_table(given.kernel, s.heads));
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t n = 0; n < table.dim(); ++n)
        table(0, 0, h, n) = static_cast<T>((7 * n + 5 * (s.first_head + h)) % 13) / 8;
    d_sinks = sinks, d_table = table;
  }
  attn::neighborhood_options<T> options(const auto& call) const {
    attn::neighborhood_options<T> o;
    library_form<T, reference::neighborhood_options>::set(given, o);
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.sinks = sinks, o.relative_bias = table_view(table), o.lse = call.lse;
    return o;
  }
};

template <class T>
bound<T> bind_neighborhood(const neighborhood_entry& entry, const law_shape& shape) {
  return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
    compiled_neighborhood<T>::call(call.q, call.k, call.v, call.out, p->options(call), p->score, *call.execution);
  };
}

template <class T>
backward_binder<T> neighborhood_backward(const neighborhood_entry& entry) {
  return [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      attn::neighborhood_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.scores)
        g.sinks = p->d_sinks, g.relative_bias = {p->d_table.data.data(), {p->d_table.length(), p->d_table.dim()}};
      compiled_neighborhood<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call), p->score,
                                         own_score_backward<T>, *call.execution);
      call.give(p->d_sinks, p->d_table.data);
    };
  };
}

template <class T>
law_operator<T> operator_of(const neighborhood_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal, op.averages = !entry.scores;
  op.cross = op.padding = false;
  op.bind = [entry](const law_shape& s) { return bind_neighborhood<T>(entry, s); };
  op.backward = neighborhood_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      reference::neighborhood_options o = p->given;
      if (p->entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
      o.sinks = call.parameter(p->sinks), o.relative_bias = call.parameter(p->table);
      o.score = mask_for_reference(p->shape, call, false, p->entry.scores);
      return reference::neighborhood(call.q, call.k, call.v, o);
    };
  };
  op.sees = [entry](const law_shape& s, idx_t, idx_t, idx_t i, idx_t j) {
    return reference::offset_entry(options_of(entry, s.queries), i, j) >= 0;
  };
  return op;
}

template <class T>
void add_neighborhood(std::vector<law_operator<T>>& all) {
  const auto limit = [](const neighborhood_entry& entry) {
    return [entry](const law_shape& s) { return bind_neighborhood<T>(entry, s); };
  };
  all.push_back(operator_of<T>({.name = "neighborhood", .axes = 2, .kernel = 5}));
  all.back().limits = {{"a kernel of the whole axis", limit({.name = "", .kernel = 1000}), full_binder<T>(false)},
                       {"of both axes", limit({.name = "", .axes = 2, .kernel = 1000}), full_binder<T>(false)},
                       {"causal", limit({.name = "", .kernel = 1000, .causal = true}), full_binder<T>(true)}};
  all.back().without = {{"padding", "there are no lengths"},
                        {"cross", "queries and keys are one grid"},
                        {"stream", "there is no step"},
                        {"long_rows", "as many queries as keys"}};
  all.push_back(operator_of<T>(
      {.name = "neighborhood of one axis, causal", .kernel = 40, .stride = 3, .dilation = 2, .causal = true}));
  all.push_back(operator_of<T>({.name = "neighborhood, shifted windows", .axes = 2, .kernel = 4, .stride = 4,
                                .shift = true}));
  all.push_back(operator_of<T>({.name = "neighborhood of everything", .axes = 3, .kernel = 3, .stride = 2,
                                .dilation = 2, .causal = true, .shift = true, .scores = true}));
}
const law_entries entries("neighborhood", [](auto& all) { add_neighborhood(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_neighborhood, S>("neighborhood", false, [](auto& o) {
    o.grid = {10, 15}, o.kernel = {5, 7};
  }));
  all.push_back(stored_softmax<compiled_neighborhood, S>("neighborhood causal", true, [](auto& o) {
    o.grid = {stored::length}, o.kernel = {40}, o.causal_axes = {true};
  }));
}
const stored_entries stored_form("neighborhood", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::neighborhood_law
