#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/run_pointwise.hpp"

namespace testing::pointwise_law {
namespace {

using kind = reference::pointwise_kind;

struct pointwise_entry {
  std::string name;
  kind f = kind::sigmoid;
  bool causal = false;
  idx_t left = -1, right = -1;  // none: unlimited
  bool scores = false;          // softcap, ALiBi, scale, relative bias, a mask, row weights
};

template <class T>
struct parameters {
  pointwise_entry entry;
  law_shape shape;
  law_mask mask{};
  std::vector<T> slopes{}, d_slopes{};
  tensor<T> table{}, d_table{}, rows{}, d_rows{};

  parameters(const pointwise_entry& e, const law_shape& s) : entry(e), shape(s) {
    if (!e.scores) return;
    mask = law_mask(s), slopes = law_slopes<T>(s), table = law_relative_bias<T>(s);
    rows = tensor<T>(1, 1, s.batch, s.queries);
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t i = 0; i < s.queries; ++i)
        rows(0, 0, b, i) = static_cast<T>((3 * (s.first_batch + b) + i) % 5 + 1) / 4;
    d_slopes = slopes, d_table = table, d_rows = rows;
  }

  template <class Options>
  Options options(const auto& call) const {
    Options o;
    o.activation = static_cast<attn::pointwise_activation>(entry.f);
    o.shift = T(-2), o.weight = T(0.25);
    if (entry.left >= 0) o.left = entry.left;
    if constexpr (requires { o.causal; }) {
      o.causal = entry.causal;
      if (entry.right >= 0) o.right = entry.right;
      if (entry.scores) o.mask = mask.view(), o.row_weights = {rows.data.data(), {rows.length(), rows.dim()}};
    }
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3), o.relative_bias = table_view(table);
    o.alibi_slopes = slopes;
    call.set_lengths(o);
    return o;
  }
};

template <class T>
bound<T> bind_pointwise(const pointwise_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    using form = compiled_pointwise<T>;
    form::call(call.q, call.k, call.v, call.out, p->template options<typename form::options>(call), {},
               *call.execution);
  };
}

template <class T>
backward_binder<T> pointwise_backward(const pointwise_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      using form = compiled_pointwise<T>;
      typename form::gradients g{.q = call.dq, .k = call.dk, .v = call.dv};
      const auto table = [](tensor<T>& x) { return attn::tensor_view<T, 2>(x.data.data(), {x.length(), x.dim()}); };
      if (p->entry.scores)
        g.alibi_slopes = p->d_slopes, g.relative_bias = table(p->d_table), g.row_weights = table(p->d_rows);
      form::backward(call.q, call.k, call.v, {}, call.d_out, g, p->template options<typename form::options>(call), {},
                     {}, *call.execution);
      call.give(p->d_slopes, p->d_table.data, p->d_rows.data);
    };
  };
}

template <class T>
binder<T> pointwise_stream(const pointwise_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    auto cache = std::make_shared<attn::kv_cache<T>>(
        attn::state_extents{.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim});
    cache->reserve(s.queries);
    return [cache, p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
      using options = attn::pointwise_step_options<T>;
      compiled_pointwise<T>::step(*cache, call.q, call.k, call.v, call.out, p->template options<options>(call),
                                  *call.execution);
    };
  };
}

template <class T>
law_operator<T> operator_of(const pointwise_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = op.lse = false;
  op.bind = [entry](const law_shape& s) { return bind_pointwise<T>(entry, s); };
  op.backward = pointwise_backward<T>(entry);
  if (entry.causal && !entry.scores) op.stream = pointwise_stream<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      reference::pointwise_options o;
      const pointwise_entry& e = p->entry;
      o.kind = e.f, o.causal = e.causal, o.left = e.left, o.right = e.right, o.shift = -2, o.weight = 0.25;
      if (e.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
      o.alibi_slopes = call.parameter(p->slopes), o.relative_bias = call.parameter(p->table);
      o.row_weights = call.parameter(p->rows);
      o.score = mask_for_reference(p->shape, call, e.scores, false);
      call.set_lengths(o);
      return reference::pointwise(call.q, call.k, call.v, o);
    };
  };
  if (entry.f == kind::sigmoid || entry.f == kind::silu)  // weights that are exactly 0 add nothing, whatever the value
    op.sees = [entry](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
      const idx_t p = i + s.keys - s.queries;
      return !(entry.causal && j > p) && !(entry.left >= 0 && p - j > entry.left) &&
             !(entry.right >= 0 && j - p > entry.right) &&
             !(entry.scores && !mask_sees(s.first_batch + b, s.first_head + h, i, j));
    };
  return op;
}

template <class T>
void add_pointwise(std::vector<law_operator<T>>& all) {
  const auto limit = [](const pointwise_entry& entry) {
    return [entry](const law_shape& s) { return bind_pointwise<T>(entry, s); };
  };
  law_operator<T> op = operator_of<T>({.name = "pointwise", .causal = true});
  op.limits.push_back({"a window of the length", limit({.name = "", .left = 300, .right = 300}), limit({.name = ""})});
  op.without = {{"averages", "weights do not sum to 1"},
                {"lse", "there is no denominator"},
                {"long_rows", "no weight of a sigmoid is larger than 1"}};
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "pointwise, silu of everything", .f = kind::silu, .left = 90, .right = 20,
                                .scores = true}));
  all.push_back(operator_of<T>({.name = "pointwise, relu in a window", .f = kind::relu, .causal = true, .left = 40}));
  all.push_back(operator_of<T>({.name = "pointwise, squared relu", .f = kind::squared_relu}));
}
const law_entries entries("pointwise", [](auto& all) { add_pointwise(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_pointwise, S>("pointwise", true, [](auto& o) { o.shift = -2; }));
  all.push_back(stored_softmax<compiled_pointwise, S>("pointwise, silu in a window", false, [](auto& o) {
    o.activation = attn::pointwise_activation::silu, o.left = 30, o.right = 10;
  }));
}
const stored_entries stored_form("pointwise", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::pointwise_law
