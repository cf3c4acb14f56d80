#pragma once
// Runs a problem through pointwise, forward and backward.
#include "reference/pointwise.hpp"
#include "support/call_pointwise.hpp"
#include "support/gradient.hpp"
#include "support/run.hpp"

namespace testing {

using pointwise_problem = problem<reference::pointwise_options>;

inline reference::result expected(const pointwise_problem& p) {
  return reference::pointwise(p.q, p.k, p.v, p.options);
}

template <class S>
pointwise_problem rounded(pointwise_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.bias = rounded<real<S>>(p.options.bias), p.options.row_weights = rounded<real<S>>(p.options.row_weights);
  p.options.weight = static_cast<double>(static_cast<real<S>>(p.options.weight));
  p.options.shift = static_cast<double>(static_cast<real<S>>(p.options.shift));
  round_options<S>(p.options);
  return p;
}

// The library's options for a problem, and the memory they point to.
template <class S>
struct stored_pointwise {
  explicit stored_pointwise(const reference::pointwise_options& given)
      : from(given), slopes(cast<real<S>>(given.alibi_slopes)), bias(cast<real<S>>(given.bias)),
        rows(cast<real<S>>(given.row_weights)), table(cast<real<S>>(given.relative_bias)), seen(given.key_mask) {}
  stored_pointwise(const stored_pointwise&) = delete;

  attn::pointwise_options<S> options() const {
    attn::pointwise_options<S> o{.activation = static_cast<attn::pointwise_activation>(from.kind),
                                 .causal = from.causal};
    if (from.scale) o.scale = static_cast<real<S>>(*from.scale);
    if (from.softcap) o.softcap = static_cast<real<S>>(*from.softcap);
    o.lengths = from.lengths, o.query_lengths = from.query_lengths, o.key_lengths = from.key_lengths;
    o.first_position = from.first_position;
    if (from.left >= 0) o.left = from.left;
    if (from.right >= 0) o.right = from.right;
    o.weight = static_cast<real<S>>(from.weight), o.shift = static_cast<real<S>>(from.shift);
    o.row_weights = table_view(rows), o.relative_bias = table_view(table);
    if (!bias.empty()) o.bias = view(bias);
    o.key_mask = seen.view(), o.alibi_slopes = slopes;
    return o;
  }

  reference::pointwise_options from;
  std::vector<real<S>> slopes;
  tensor<real<S>> bias, rows, table;
  key_mask_bytes seen;
};

// out starts as rubbish: rows that should be zero must have been written.
template <class S>
reference::result run(const pointwise_problem& p, attn::execution& execution) {
  const stored_pointwise<S> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  compiled_pointwise<S>::call(view(q), view(k), view(v), view(out), stored.options(), {}, execution);
  return {cast<double>(out), {}};
}
template <class S>
reference::result run(const pointwise_problem& p) {
  attn::execution serial;
  return run<S>(p, serial);
}

// f(name, x) for all that a problem may be differentiated by.
template <class Problem, class F>
void each_pointwise_input(Problem& p, F&& f) {
  f("q", p.q), f("k", p.k), f("v", p.v), f("bias", p.options.bias), f("relative_bias", p.options.relative_bias);
  f("row_weights", p.options.row_weights);
}

inline gradient_case case_of(const pointwise_problem& p) {
  gradient_case c;
  each_pointwise_input(p, [&](const char* name, const tensor<double>& x) {
    if (!x.empty()) c.names.push_back(name), c.inputs.push_back(x);
  });
  c.forward = [p, names = c.names](const std::vector<tensor<variable>>& inputs) {
    struct {
      tensor<variable> q, k, v;
      reference::basic_pointwise_options<variable> options;
    } x;
    copy_choices(p.options, x.options);
    for (double slope : p.options.alibi_slopes) x.options.alibi_slopes.push_back(slope);
    each_pointwise_input(x, [&](const std::string& name, tensor<variable>& to) {
      for (std::size_t n = 0; n < names.size(); ++n)
        if (names[n] == name) to = inputs[n];
    });
    return std::vector<tensor<variable>>{reference::pointwise(x.q, x.k, x.v, x.options).out};
  };
  return c;
}

// The gradients of a case made of `p`; `accumulate` adds them to `start`.
template <class S>
named_tensors library_gradients(const pointwise_problem& p, const tensor<double>& d_result, attn::execution& execution,
                                bool accumulate = false, double start = 7) {
  const stored_pointwise<S> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d_out = cast<S>(d_result);
  const auto like = [&]<class E>(const tensor<E>& x) {
    tensor<E> y = x;
    y.data.assign(y.data.size(), static_cast<E>(static_cast<float>(start)));
    return y;
  };
  tensor<S> dq = like(q), dk = like(k), dv = like(v);
  tensor<real<S>> bias = like(stored.bias), table = like(stored.table), rows = like(stored.rows);
  typename compiled_pointwise<S>::gradients g{.q = view(dq), .k = view(dk), .v = view(dv), .accumulate = accumulate};
  if (!bias.empty()) g.bias = view(bias);
  if (!table.empty()) g.relative_bias = {table.data.data(), {table.length(), table.dim()}};
  if (!rows.empty()) g.row_weights = {rows.data.data(), {rows.length(), rows.dim()}};
  compiled_pointwise<S>::backward(view(q), view(k), view(v), {}, view(d_out), g, stored.options(), {}, {}, execution);
  return {{"q", cast<double>(dq)},          {"k", cast<double>(dk)},
          {"v", cast<double>(dv)},          {"bias", cast<double>(bias)},
          {"relative_bias", cast<double>(table)}, {"row_weights", cast<double>(rows)}};
}

}  // namespace testing
