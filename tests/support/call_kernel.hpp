#pragma once
// The operators of kernel attention with plain arguments, compiled once for all tests (call_linear.cpp and so on).
#include <attn/kernel/linear.hpp>

#include "reference/linear.hpp"
#include "support/call.hpp"
#include "support/measure.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing {

template <class S>
struct compiled_linear {
  using options = attn::linear_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, reference::linear_feature,
                   attn::execution&);
};

// q, k, v and the reference's options.
template <class Options>
struct kernel_problem {
  tensor<double> q, k, v;
  Options options;
};
using linear_problem = kernel_problem<reference::linear_options>;

inline reference::result expected(const linear_problem& p) { return reference::linear(p.q, p.k, p.v, p.options); }

template <class S, class Options>
kernel_problem<Options> rounded(kernel_problem<Options> p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.gate = rounded<real<S>>(p.options.gate);
  return p;
}

template <class T>
attn::tensor_view<const T, 3> gate_view(const tensor<T>& gate) {
  if (gate.empty()) return {};
  return {gate.data.data(), {gate.batch(), gate.heads(), gate.length()}};
}

// The library's options for a problem of the reference. `gate` holds what they point to.
template <class Options, class S>
Options common_options(const reference::kernel_options& from) {
  Options to;
  to.causal = from.causal;
  to.lengths = from.lengths, to.query_lengths = from.query_lengths, to.key_lengths = from.key_lengths;
  to.eps = static_cast<real<S>>(from.eps);
  return to;
}

template <class S>
reference::result run(const linear_problem& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const tensor<real<S>> gate = cast<real<S>>(p.options.gate);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  auto options = common_options<attn::linear_options<S>, S>(p.options);
  options.normalise = p.options.normalise;
  options.decay = gate_view(gate);
  compiled_linear<S>::call(view(q), view(k), view(v), view(out), options, p.options.feature, execution);
  return {cast<double>(out), {}};
}

template <class S, class Problem>
reference::result run_serially(const Problem& p) {
  attn::execution serial;
  return run<S>(p, serial);
}

// Against the reference on the same rounded inputs.
template <class S, class Problem>
double error_of(const Problem& p) {
  const Problem given = rounded<S>(p);
  return relative_error(run_serially<S>(given).out, expected(given).out);
}

}  // namespace testing
