#pragma once
// delta_rule with plain arguments, compiled once for all tests (call_delta_rule.cpp); its problems, and how the library
// is given them.
#include <attn/kernel/delta_rule_backward.hpp>
#include <attn/kernel/delta_rule_step.hpp>

#include "reference/delta_rule.hpp"
#include "support/call.hpp"
#include "support/measure.hpp"
#include "support/problem.hpp"
#include "support/run.hpp"

namespace testing {

template <class S>
struct compiled_delta_rule {
  using options = attn::delta_rule_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, attn::execution&);
  static void step(attn::delta_rule_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const attn::delta_rule_step_options<S>&, attn::execution&);
  static void append(attn::delta_rule_state<S>&, in_view<S> k, in_view<S> v, const attn::delta_rule_step_options<S>&,
                     attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out,
                       const attn::delta_rule_gradients<S>&, const options&, attn::execution&);
};

struct delta_rule_problem {
  reference::delta_rule_inputs<double> x;
  reference::delta_rule_options options;
};

// What a random problem has: q and k are shared by the heads of `group` values each.
struct delta_rule_shape {
  idx_t batch = 2, key_heads = 2, group = 1, length = 65, dim = 16, value_dim = 16;
  bool beta = true, state = false;
  int decays = 0;  // per token: 0, 1 or dim
};

// From mild decays to ones of which nothing is left: 0 and minus infinity among them.
inline tensor<double> random_log_decay(std::uint64_t seed, idx_t batch, idx_t heads, idx_t length, idx_t dim) {
  random_source random(seed);
  tensor<double> x(batch, heads, length, dim);
  for (double& g : x.data) {
    const idx_t kind = random.below(40);
    g = kind == 0 ? -reference::infinity : kind == 1 ? -30 : kind < 6 ? 0 : -0.3 * random.uniform();
  }
  return x;
}

// Keys are of length 1 at most, and beta from 0 to 2 like the originals': then no step makes the state longer.
inline delta_rule_problem random_delta_rule(const delta_rule_shape& s, std::uint64_t seed = 1) {
  const idx_t heads = s.key_heads * s.group;
  delta_rule_problem p;
  p.x.q = random_normal(7 * seed, s.batch, s.key_heads, s.length, s.dim);
  p.x.k = random_normal(7 * seed + 1, s.batch, s.key_heads, s.length, s.dim);
  p.x.v = random_normal(7 * seed + 2, s.batch, heads, s.length, s.value_dim);
  random_source random(7 * seed + 3);
  for (idx_t row = 0; row < s.batch * s.key_heads * s.length; ++row) {
    double squares = 0;
    double* const k = p.x.k.data.data() + row * s.dim;
    for (idx_t d = 0; d < s.dim; ++d) squares += k[d] * k[d];
    const double factor = (1 - 0.4 * random.uniform()) / std::sqrt(squares);
    for (idx_t d = 0; d < s.dim; ++d) k[d] *= factor;
  }
  if (s.beta) {
    p.x.beta = tensor<double>(s.batch, heads, s.length, 1);
    for (double& b : p.x.beta.data) b = random.below(9) == 0 ? 0 : 2 * random.uniform() * random.uniform();
  }
  if (s.decays) p.x.log_decay = random_log_decay(7 * seed + 4, s.batch, heads, s.length, s.decays == 1 ? 1 : s.dim);
  if (s.state) p.x.initial_state = random_normal(7 * seed + 5, s.batch, heads, s.dim, s.value_dim);
  return p;
}

inline reference::result expected(const delta_rule_problem& p) {
  auto r = reference::delta_rule(p.x, p.options);
  return {std::move(r.out), {}, std::move(r.final_state)};
}

template <class S>
delta_rule_problem rounded(delta_rule_problem p) {
  for (tensor<double>* x : {&p.x.q, &p.x.k, &p.x.v}) *x = rounded<S>(*x);
  for (tensor<double>* x : {&p.x.beta, &p.x.log_decay, &p.x.initial_state}) *x = rounded<real<S>>(*x);
  return p;
}

// What a token has of it.
inline std::vector<tensor<double>*> rows_of(delta_rule_problem& p) {
  return {&p.x.q, &p.x.k, &p.x.v, &p.x.beta, &p.x.log_decay};
}

template <class T>
bool given(const tensor<T>& x) {
  return x.extents != tensor<T>().extents;
}
template <class T>
attn::tensor_view<const T> optional_view(const tensor<T>& x) {
  return given(x) ? view(x) : attn::tensor_view<const T>();
}
template <class T>
attn::tensor_view<const T, 3> optional_rows(const tensor<T>& x) {
  if (!given(x)) return {};
  return {x.data.data(), {x.batch(), x.heads(), x.length()}};
}

// The memory of a problem in element type S, and the library's options for it.
template <class S>
struct delta_rule_memory {
  using T = real<S>;
  tensor<S> q, k, v;
  tensor<T> beta, log_decay, initial_state;
  attn::delta_rule_options<S> options;

  explicit delta_rule_memory(const delta_rule_problem& p)
      : q(cast<S>(p.x.q)), k(cast<S>(p.x.k)), v(cast<S>(p.x.v)), beta(cast<T>(p.x.beta)),
        log_decay(cast<T>(p.x.log_decay)), initial_state(cast<T>(p.x.initial_state)), lengths_(p.options.lengths),
        mask_(p.options.key_mask) {
    options.key_mask = mask_.view();
    if (p.options.scale) options.scale = static_cast<T>(*p.options.scale);
    if (p.options.unit_norm_eps) options.unit_norm_eps = static_cast<T>(*p.options.unit_norm_eps);
    options.lengths = lengths_;
    options.beta = optional_rows(beta);
    options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(initial_state);
  }
  delta_rule_memory(const delta_rule_memory&) = delete;

  attn::delta_rule_step_options<S> step_options(idx_t begin, idx_t count) const {
    attn::delta_rule_step_options<S> o;
    o.scale = options.scale, o.unit_norm_eps = options.unit_norm_eps, o.key_mask = mask_.view(begin, count);
    if (options.beta) o.beta = options.beta.slice(2, begin, count);
    if (options.log_decay) o.log_decay = options.log_decay.slice(2, begin, count);
    return o;
  }

 private:
  std::vector<idx_t> lengths_;
  key_mask_bytes mask_;
};

// out and the final state start as rubbish: rows that should be zero must have been written.
template <class S>
reference::result run(const delta_rule_problem& p, attn::execution& execution, bool with_state = true) {
  delta_rule_memory<S> m(p);
  tensor<S> out(p.x.v.batch(), p.x.v.heads(), p.x.v.length(), p.x.v.dim(), S(7));
  tensor<real<S>> state(p.x.v.batch(), p.x.v.heads(), p.x.k.dim(), p.x.v.dim(), real<S>(7));
  if (with_state) m.options.final_state = view(state);
  compiled_delta_rule<S>::call(view(std::as_const(m.q)), view(std::as_const(m.k)), view(std::as_const(m.v)), view(out),
                               m.options, execution);
  return {cast<double>(out), {}, with_state ? cast<double>(state) : tensor<double>{}};
}
template <class S>
reference::result run_serially(const delta_rule_problem& p, bool with_state = true) {
  attn::execution serial;
  return run<S>(p, serial, with_state);
}

}  // namespace testing
