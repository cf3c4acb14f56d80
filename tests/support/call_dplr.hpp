#pragma once
// dplr with plain arguments, compiled once for all tests (call_dplr.cpp); its problems, and how the library is given
// them.
#include <attn/kernel/dplr_backward.hpp>
#include <attn/kernel/dplr_step.hpp>

#include "reference/dplr.hpp"
#include "support/call_delta_rule.hpp"

namespace testing {

// What a call reads, beside its options.
template <class S>
struct dplr_views {
  in_view<S> q, k, v, a, b;

  dplr_views tokens(idx_t begin, idx_t count) const {
    const auto part = [&](const in_view<S>& x) { return x.slice(2, begin, count); };
    return {part(q), part(k), part(v), part(a), part(b)};
  }
};

template <class S>
struct compiled_dplr {
  using options = attn::dplr_options<S>;
  static void call(const dplr_views<S>&, out_view<S> out, const options&, attn::execution&);
  static void step(attn::dplr_state<S>&, const dplr_views<S>&, out_view<S> out, const attn::dplr_step_options<S>&,
                   attn::execution&);
  static void append(attn::dplr_state<S>&, const dplr_views<S>&, const attn::dplr_step_options<S>&, attn::execution&);
  static void backward(const dplr_views<S>&, in_view<S> d_out, const attn::dplr_gradients<S>&, const options&,
                       attn::execution&);
};

struct dplr_problem {
  reference::dplr_inputs<double> x;
  reference::dplr_options options;
};

struct dplr_shape {
  idx_t batch = 2, heads = 2, length = 65, dim = 16, value_dim = 16;
  bool state = false;
  int decays = 0;  // per token: 0, 1 or dim
};

// As RWKV-7 has them, a = -κ and b = κ times rates from 0 to 1, one per channel, κ of length 1 at most: then no step
// makes the state longer by much.
inline void draw_reads(std::uint64_t seed, tensor<double>& a, tensor<double>& b) {
  random_source random(seed);
  for (std::size_t row = 0; a.dim() > 0 && row < a.data.size(); row += static_cast<std::size_t>(a.dim())) {
    double squares = 0;
    const auto each = [&](auto&& f) {
      for (std::size_t d = row; d < row + static_cast<std::size_t>(a.dim()); ++d) f(a.data[d], b.data[d]);
    };
    each([&](double& x, double&) { x = 2 * random.uniform() - 1, squares += x * x; });
    const double factor = (0.6 + 0.4 * random.uniform()) / std::sqrt(squares);
    each([&](double& x, double& y) { x *= factor, y = -x * random.uniform(); });
  }
}

inline dplr_problem random_dplr(const dplr_shape& s, std::uint64_t seed = 1) {
  dplr_problem p;
  const auto draw = [&](std::uint64_t n, idx_t dim) {
    return random_normal(11 * seed + n, s.batch, s.heads, s.length, dim);
  };
  p.x.q = draw(0, s.dim), p.x.k = draw(1, s.dim), p.x.v = draw(2, s.value_dim);
  p.x.a = p.x.b = tensor<double>(s.batch, s.heads, s.length, s.dim);
  draw_reads(11 * seed + 3, p.x.a, p.x.b);
  if (s.decays) p.x.log_decay = random_log_decay(11 * seed + 4, s.batch, s.heads, s.length, s.decays == 1 ? 1 : s.dim);
  if (s.state) p.x.initial_state = random_normal(11 * seed + 5, s.batch, s.heads, s.dim, s.value_dim);
  return p;
}

inline reference::result expected(const dplr_problem& p) {
  auto r = reference::dplr(p.x, p.options);
  return {std::move(r.out), {}, std::move(r.final_state)};
}

template <class S>
dplr_problem rounded(dplr_problem p) {
  for (tensor<double>* x : {&p.x.q, &p.x.k, &p.x.v, &p.x.a, &p.x.b}) *x = rounded<S>(*x);
  for (tensor<double>* x : {&p.x.log_decay, &p.x.initial_state}) *x = rounded<real<S>>(*x);
  return p;
}

// What a token has of it.
inline std::vector<tensor<double>*> rows_of(dplr_problem& p) {
  return {&p.x.q, &p.x.k, &p.x.v, &p.x.a, &p.x.b, &p.x.log_decay};
}

// The memory of a problem in element type S, and the library's options for it.
template <class S>
struct dplr_memory {
  using T = real<S>;
  tensor<S> q, k, v, a, b;
  tensor<T> log_decay, initial_state;
  attn::dplr_options<S> options;

  explicit dplr_memory(const dplr_problem& p)
      : q(cast<S>(p.x.q)), k(cast<S>(p.x.k)), v(cast<S>(p.x.v)), a(cast<S>(p.x.a)), b(cast<S>(p.x.b)),
        log_decay(cast<T>(p.x.log_decay)), initial_state(cast<T>(p.x.initial_state)), lengths_(p.options.lengths),
        mask_(p.options.key_mask) {
    options.key_mask = mask_.view();
    if (p.options.scale) options.scale = static_cast<T>(*p.options.scale);
    options.lengths = lengths_;
    options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(initial_state);
  }
  dplr_memory(const dplr_memory&) = delete;

  dplr_views<S> views() const { return {view(q), view(k), view(v), view(a), view(b)}; }
  attn::dplr_step_options<S> step_options(idx_t begin, idx_t count) const {
    attn::dplr_step_options<S> o;
    o.scale = options.scale, o.key_mask = mask_.view(begin, count);
    if (options.log_decay) o.log_decay = options.log_decay.slice(2, begin, count);
    return o;
  }

 private:
  std::vector<idx_t> lengths_;
  key_mask_bytes mask_;
};

// out and the final state start as rubbish: rows that should be zero must have been written.
template <class S>
reference::result run(const dplr_problem& p, attn::execution& execution) {
  dplr_memory<S> m(p);
  tensor<S> out(p.x.v.batch(), p.x.v.heads(), p.x.v.length(), p.x.v.dim(), S(7));
  tensor<real<S>> state(p.x.v.batch(), p.x.v.heads(), p.x.k.dim(), p.x.v.dim(), real<S>(7));
  m.options.final_state = view(state);
  compiled_dplr<S>::call(m.views(), view(out), m.options, execution);
  return {cast<double>(out), {}, cast<double>(state)};
}
template <class S>
reference::result run_serially(const dplr_problem& p) {
  attn::execution serial;
  return run<S>(p, serial);
}

}  // namespace testing
