#pragma once
// Problems of linear with everything it has beyond its family: decays, bonus, scale and states; how the library is
// given them, and its backward pass.
#include <array>

#include "reference/linear_decay.hpp"
#include "support/call_kernel.hpp"
#include "support/gradient_state.hpp"

namespace testing {

struct linear_decay_problem {
  reference::linear_inputs<double> x;
  reference::linear_decay_options options;
};

enum class decays { none, token, channel, factor };  // factor: `decay` in the place of its logarithm

struct linear_decay_shape {
  idx_t batch = 2, heads = 2, kv_heads = 2, queries = 77, keys = 77, dim = 9, value_dim = 5;
  decays kind = decays::channel;
  idx_t decay_heads = 2, state_heads = 0;  // 0: as many as there are sums
  bool bonus = false, states = false;
  reference::linear_feature feature = reference::linear_feature::identity;  // elu_plus_one: normalised
};

inline linear_decay_problem random_linear_decay(const linear_decay_shape& s, std::uint64_t seed = 1) {
  using reference::linear_feature;
  linear_decay_problem p;
  p.x.q = random_normal(9 * seed, s.batch, s.heads, s.queries, s.dim);
  p.x.k = random_normal(9 * seed + 1, s.batch, s.kv_heads, s.keys, s.dim);
  p.x.v = random_normal(9 * seed + 2, s.batch, s.kv_heads, s.keys, s.value_dim);
  const idx_t features = s.feature == linear_feature::products ? 2 * s.dim : s.dim;
  random_source random(9 * seed + 3);
  if (s.kind != decays::none) {
    tensor<double> g(s.batch, s.decay_heads, s.keys, s.kind == decays::channel ? features : 1);
    for (double& x : g.data) {  // from mild ones to ones of which nothing is left
      const idx_t which = random.below(40);
      x = which == 0 ? -reference::infinity : which == 1 ? -30 : which < 6 ? 0 : which == 6 ? -1e-6
                                                                                      : -0.3 * random.uniform();
      if (s.kind == decays::factor) x = std::exp(x);
    }
    (s.kind == decays::factor ? p.x.decay : p.x.log_decay) = std::move(g);
  }
  const auto positive = [&](tensor<double> x) {  // where there are denominators, away from 0
    for (double& each : x.data) each = std::abs(each);
    return x;
  };
  if (s.bonus) p.x.bonus = positive(random_normal(9 * seed + 4, 1, s.heads, 1, features));
  if (s.states) {
    const idx_t heads = s.state_heads ? s.state_heads : p.x.sums_heads();
    p.x.initial_state = random_normal(9 * seed + 5, s.batch, heads, features, s.value_dim);
    p.x.initial_weights = positive(random_normal(9 * seed + 6, s.batch, heads, 1, features));
  }
  p.options.causal = true;
  p.options.eps = 0.5;
  p.options.feature = s.feature;
  p.options.normalise = s.feature != linear_feature::identity;
  return p;
}

template <class S>
linear_decay_problem rounded(linear_decay_problem p) {
  for (tensor<double>* x : {&p.x.q, &p.x.k, &p.x.v}) *x = rounded<S>(*x);
  for (tensor<double>* x : {&p.x.decay, &p.x.log_decay, &p.x.bonus, &p.x.initial_state, &p.x.initial_weights})
    *x = rounded<real<S>>(*x);
  p.options.scale = static_cast<double>(static_cast<real<S>>(p.options.scale));
  return p;
}

// [.., 1, n] as a view of one axis less.
template <class T>
attn::tensor_view<T, 3> rows_or_none(tensor<T>& x) {
  if (x.empty()) return {};
  return {x.data.data(), {x.batch(), x.heads(), x.length() * x.dim()}};
}
template <class T>
attn::tensor_view<T, 2> bonus_or_none(tensor<T>& x) {
  if (x.empty()) return {};
  return {x.data.data(), {x.heads(), x.dim()}};
}
template <class T>
attn::tensor_view<T> view_or_none(tensor<T>& x) {
  return x.empty() ? attn::tensor_view<T>() : view(x);
}

// The memory of a problem in element type S, and the library's options for it.
template <class S>
struct linear_decay_memory {
  using T = real<S>;
  tensor<S> q, k, v;
  tensor<T> decay, log_decay, bonus, initial_state, initial_weights, final_state, final_weights;
  attn::linear_options<S> options;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  key_mask_bytes mask;

  explicit linear_decay_memory(const linear_decay_problem& p)
      : q(cast<S>(p.x.q)), k(cast<S>(p.x.k)), v(cast<S>(p.x.v)), decay(cast<T>(p.x.decay)),
        log_decay(cast<T>(p.x.log_decay)), bonus(cast<T>(p.x.bonus)), initial_state(cast<T>(p.x.initial_state)),
        initial_weights(cast<T>(p.x.initial_weights)), lengths(p.options.lengths),
        query_lengths(p.options.query_lengths), key_lengths(p.options.key_lengths), mask(p.options.key_mask) {
    options.key_mask = mask.view();
    options.causal = p.options.causal;
    options.lengths = lengths, options.query_lengths = query_lengths, options.key_lengths = key_lengths;
    options.eps = static_cast<T>(p.options.eps);
    options.normalise = p.options.normalise;
    options.scale = static_cast<T>(p.options.scale);
    options.decay = rows_or_none(decay);
    options.log_decay = view_or_none(log_decay);
    options.bonus = bonus_or_none(bonus);
    options.initial_state = view_or_none(initial_state);
    options.initial_weights = rows_or_none(initial_weights);
  }
  linear_decay_memory(const linear_decay_memory&) = delete;

  attn::linear_step_options<S> step_options(idx_t begin, idx_t count) const {
    attn::linear_step_options<S> o;
    o.eps = options.eps, o.normalise = options.normalise, o.scale = options.scale, o.bonus = options.bonus;
    o.key_mask = mask.view(begin, count);
    if (options.decay) o.decay = options.decay.slice(2, begin, count);
    if (options.log_decay) o.log_decay = options.log_decay.slice(2, begin, count);
    return o;
  }
};

struct linear_decay_result {
  tensor<double> out, final_state, final_weights;
  bool operator==(const linear_decay_result&) const = default;
};

// out and the final sums start as rubbish.
template <class S>
linear_decay_result run(const linear_decay_problem& p, attn::execution& execution) {
  linear_decay_memory<S> m(p);
  const idx_t features = p.options.feature == reference::linear_feature::products ? 2 * p.x.k.dim() : p.x.k.dim();
  tensor<S> out(p.x.q.batch(), p.x.q.heads(), p.x.q.length(), p.x.v.dim(), S(7));
  m.final_state = tensor<real<S>>(p.x.q.batch(), p.x.sums_heads(), features, p.x.v.dim(), real<S>(7));
  m.final_weights = tensor<real<S>>(p.x.q.batch(), p.x.sums_heads(), 1, features, real<S>(7));
  m.options.final_state = view_or_none(m.final_state);
  m.options.final_weights = rows_or_none(m.final_weights);
  compiled_linear<S>::call(view(std::as_const(m.q)), view(std::as_const(m.k)), view(std::as_const(m.v)), view(out),
                           m.options, p.options.feature, execution);
  return {cast<double>(out), cast<double>(m.final_state), cast<double>(m.final_weights)};
}
template <class S>
linear_decay_result run_serially(const linear_decay_problem& p) {
  attn::execution serial;
  return run<S>(p, serial);
}

// The inputs of a problem, in the order of their gradients; those not given are empty.
inline constexpr std::size_t linear_decay_count = 8;
inline const std::vector<std::string> linear_decay_names = {
    "q", "k", "v", "decay", "log_decay", "bonus", "initial_state", "initial_weights"};

inline tensors inputs_of(const linear_decay_problem& p) {
  const auto& x = p.x;
  return {x.q, x.k, x.v, x.decay, x.log_decay, x.bonus, x.initial_state, x.initial_weights};
}

// The results are out, and the final sums.
inline gradient_case case_of(const linear_decay_problem& p) {
  return {{}, linear_decay_names, inputs_of(p), [options = p.options](const std::vector<tensor<variable>>& in) {
            auto r = reference::linear(
                reference::linear_inputs<variable>{in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7]}, options);
            return std::vector<tensor<variable>>{r.out, r.final_state, r.final_weights};
          }};
}

using linear_decay_asked = asked_gradients<linear_decay_count>;

// d_results: of out, and of the final sums or empty.
template <class S>
tensors decay_gradients_by(const linear_decay_problem& p, const tensors& d_results, attn::execution& execution,
                     const linear_decay_asked& a = {}) {
  using T = real<S>;
  const linear_decay_memory<S> m(p);
  const tensor<S> d_out = cast<S>(d_results[0]);
  tensor<T> d_state, d_weights;
  if (d_results.size() > 1) d_state = cast<T>(d_results[1]);
  if (d_results.size() > 2) d_weights = cast<T>(d_results[2]);
  const auto fresh = [&]<class N>(const tensor<N>& like) {
    tensor<N> x = like;
    std::fill(x.data.begin(), x.data.end(), static_cast<N>(a.before));
    return x;
  };
  tensor<S> q = fresh(m.q), k = fresh(m.k), v = fresh(m.v);
  tensor<T> decay = fresh(m.decay), log_decay = fresh(m.log_decay), bonus = fresh(m.bonus),
            state = fresh(m.initial_state), weights = fresh(m.initial_weights);
  attn::linear_gradients<S> g;
  if (a.of[0]) g.q = view(q);
  if (a.of[1]) g.k = view(k);
  if (a.of[2]) g.v = view(v);
  if (a.of[3]) g.decay = rows_or_none(decay);
  if (a.of[4]) g.log_decay = view_or_none(log_decay);
  if (a.of[5]) g.bonus = bonus_or_none(bonus);
  if (a.of[6]) g.initial_state = view_or_none(state);
  if (a.of[7]) g.initial_weights = rows_or_none(weights);
  g.d_final_state = view_or_none(d_state);
  g.d_final_weights = rows_or_none(d_weights);
  g.accumulate = a.accumulate;
  compiled_linear<S>::backward(view(m.q), view(m.k), view(m.v), view(d_out), g, m.options, p.options.feature,
                               execution);
  tensors all = {cast<double>(q),         cast<double>(k),     cast<double>(v),     cast<double>(decay),
                 cast<double>(log_decay), cast<double>(bonus), cast<double>(state), cast<double>(weights)};
  for (std::size_t n = 0; n < linear_decay_count; ++n)
    if (!a.of[n]) all[n] = {};
  return all;
}
template <class S>
tensors decay_gradients_by(const linear_decay_problem& p, const tensors& d_results, const linear_decay_asked& a = {}) {
  attn::execution serial;
  return decay_gradients_by<S>(p, d_results, serial, a);
}

}  // namespace testing
