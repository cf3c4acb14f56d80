#pragma once
// The operators of kernel attention with plain arguments, compiled once for all tests (call_linear.cpp and so on).
#include <attn/kernel/linear_backward.hpp>
#include <attn/kernel/linear_step.hpp>
#include <attn/kernel/performer_backward.hpp>
#include <attn/kernel/performer_step.hpp>
#include <attn/kernel/rfa_backward.hpp>
#include <attn/kernel/rfa_step.hpp>

#include "reference/linear.hpp"
#include "reference/performer.hpp"
#include "reference/rfa.hpp"
#include "support/call.hpp"
#include "support/measure.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

// The drivers are compiled once, in call_linear.cpp.
extern template struct attn::detail::kernel_call<float>;
extern template struct attn::detail::sums_kernel<float>;
extern template struct attn::detail::sums_driver<float>;
extern template struct attn::detail::kernel_call<double>;
extern template struct attn::detail::sums_kernel<double>;
extern template struct attn::detail::sums_driver<double>;
extern template struct attn::detail::recurrence_driver<attn::detail::rule::add, float>;
extern template struct attn::detail::recurrence_driver<attn::detail::rule::add, double>;
extern template struct attn::detail::kernel_steps<true, float>;
extern template struct attn::detail::kernel_steps<true, double>;
extern template struct attn::detail::kernel_steps<false, float>;
extern template struct attn::detail::kernel_steps<false, double>;
extern template struct attn::detail::sums_kernel_backward<float>;
extern template struct attn::detail::sums_kernel_backward<double>;
extern template struct attn::detail::sums_backward_driver<float>;
extern template struct attn::detail::sums_backward_driver<double>;

namespace testing {

template <class S>
struct compiled_linear {
  using options = attn::linear_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, reference::linear_feature,
                   attn::execution&);
  static void step(attn::linear_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const attn::linear_step_options<S>&, reference::linear_feature, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out, const attn::linear_gradients<S>&,
                       const options&, reference::linear_feature, attn::execution&);
};

// A matrix of features for every head, or for all.
template <class S>
using feature_view = attn::tensor_view<const S, 3>;

template <class S>
struct compiled_performer {
  using options = attn::performer_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, feature_view<S>, const options&,
                   attn::execution&);
  static void step(attn::performer_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   feature_view<S>, const attn::performer_step_options<S>&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, feature_view<S>, in_view<S> d_out,
                       const attn::performer_gradients<S>&, const options&, attn::execution&);
};

template <class S>
struct compiled_rfa {
  using options = attn::rfa_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, feature_view<S>, const options&,
                   attn::execution&);
  static void step(attn::rfa_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, feature_view<S>,
                   const attn::rfa_step_options<S>&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, feature_view<S>, in_view<S> d_out,
                       const attn::rfa_gradients<S>&, const options&, attn::execution&);
};

// q, k, v and the reference's options.
template <class Options>
struct kernel_problem {
  tensor<double> q, k, v;
  Options options;
};
using linear_problem = kernel_problem<reference::linear_options>;
using performer_problem = kernel_problem<reference::performer_options>;
using rfa_problem = kernel_problem<reference::rfa_options>;

inline reference::result expected(const linear_problem& p) { return reference::linear(p.q, p.k, p.v, p.options); }

inline reference::result expected(const performer_problem& p) { return reference::performer(p.q, p.k, p.v, p.options); }
inline reference::result expected(const rfa_problem& p) { return reference::rfa(p.q, p.k, p.v, p.options); }

template <class S, class Options>
kernel_problem<Options> rounded(kernel_problem<Options> p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.gate = rounded<real<S>>(p.options.gate);
  if constexpr (requires { p.options.features; }) p.options.features = rounded<S>(p.options.features);
  return p;
}

template <class T>
attn::tensor_view<const T, 3> gate_view(const tensor<T>& gate) {
  if (gate.extents == tensor<T>().extents) return {};  // not given
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
  const key_mask_bytes seen(p.options.key_mask);
  options.key_mask = seen.view();
  options.normalise = p.options.normalise;
  options.decay = gate_view(gate);
  compiled_linear<S>::call(view(q), view(k), view(v), view(out), options, p.options.feature, execution);
  return {cast<double>(out), {}};
}

// [1, heads, m, D] as [heads, m, D].
template <class T>
attn::tensor_view<const T, 3> features_of(const tensor<T>& w) {
  return {w.data.data(), {w.heads(), w.length(), w.dim()}};
}

// [heads, m, D] as [1, heads, m, D].
template <class T>
tensor<double> features_in_double(const attn::tensor_view<const T, 3>& x) {
  tensor<double> w(1, x.extent(0), x.extent(1), x.extent(2));
  for (idx_t h = 0; h < w.heads(); ++h)
    for (idx_t r = 0; r < w.length(); ++r)
      for (idx_t d = 0; d < w.dim(); ++d) w(0, h, r, d) = static_cast<double>(x(h, r, d));
  return w;
}

template <class S>
reference::result run(const performer_problem& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const tensor<S> w = cast<S>(p.options.features);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  auto options = common_options<attn::performer_options<S>, S>(p.options);
  const key_mask_bytes seen(p.options.key_mask);
  options.key_mask = seen.view();
  options.kernel = static_cast<attn::performer_kernel>(p.options.kernel);
  if (p.options.scale) options.scale = static_cast<real<S>>(*p.options.scale);
  if (p.options.feature_eps) options.feature_eps = static_cast<real<S>>(*p.options.feature_eps);
  options.center_keys = p.options.center_keys;
  compiled_performer<S>::call(view(q), view(k), view(v), view(out), features_of(w), options, execution);
  return {cast<double>(out), {}};
}

template <class S>
reference::result run(const rfa_problem& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const tensor<S> w = cast<S>(p.options.features);
  const tensor<real<S>> gate = cast<real<S>>(p.options.gate);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  auto options = common_options<attn::rfa_options<S>, S>(p.options);
  const key_mask_bytes seen(p.options.key_mask);
  options.key_mask = seen.view();
  options.norm_eps = static_cast<real<S>>(p.options.norm_eps);
  options.gate = gate_view(gate);
  compiled_rfa<S>::call(view(q), view(k), view(v), view(out), features_of(w), options, execution);
  return {cast<double>(out), {}};
}

// Gates with zeros and ones among them.
inline tensor<double> random_gates(idx_t batch, idx_t heads, idx_t length, std::uint64_t seed = 5) {
  random_source random(seed);
  tensor<double> gate(batch, heads, length, 1);
  for (double& g : gate.data) g = random.below(9) == 0 ? 0 : random.below(9) == 0 ? 1 : random.uniform();
  return gate;
}

// Gates from 1/2 to 1, a head's own wherever it stands in a larger batch.
template <class T>
tensor<T> slow_gates(idx_t batch, idx_t heads, idx_t length, idx_t first_batch, idx_t first_head) {
  tensor<T> gate(batch, heads, length, 1);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t h = 0; h < heads; ++h) {
      random_source random(static_cast<std::uint64_t>(16 * (first_batch + b) + first_head + h));
      for (idx_t i = 0; i < length; ++i) gate(b, h, i, 0) = static_cast<T>(0.5 + 0.5 * random.uniform());
    }
  return gate;
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

// Of features of either sign, terms cancel, and what is left of them has fewer digits: the error is measured by the
// size of the terms that numerator and denominator are sums of, which is what rounding acts on.
template <class S, class Problem>
double error_over_terms(const Problem& p) {
  Problem given = rounded<S>(p);
  tensor<double> terms, wanted;
  given.options.terms = &terms;
  wanted = expected(given).out;
  given.options.terms = nullptr;
  const tensor<double> actual = run_serially<S>(given).out;
  if (actual.extents != wanted.extents) return std::numeric_limits<double>::infinity();
  double difference = 0, size = 0;
  for (std::size_t n = 0; n < wanted.data.size(); ++n) {
    difference += (actual.data[n] - wanted.data[n]) * (actual.data[n] - wanted.data[n]);
    size += terms.data[n] * terms.data[n];
  }
  return size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

// More segments than a wave takes, causal and not, against one thread.
template <class S, class Problem, class Make>
bool threads_agree_beyond_one_wave(Make&& make) {
  for (bool causal : {false, true}) {
    constexpr int threads = 2;
    const idx_t length = 1024 * threads * (causal ? 2 * 4 : 16) + 1100;
    Problem p = make(problem_shape{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = length, .keys = length, .dim = 16, .value_dim = 16});
    p.options.causal = causal;
    attn::execution serial, two(threads);
    if (!(run<S>(p, two).out == run<S>(p, serial).out)) return false;
  }
  return true;
}

}  // namespace testing
