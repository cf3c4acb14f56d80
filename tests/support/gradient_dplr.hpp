#pragma once
// The backward pass of dplr: a problem as a gradient case, and what the library makes of it.
#include "support/call_dplr.hpp"
#include "support/gradient_state.hpp"

namespace testing {

// The inputs of a problem, in the order of their gradients; those not given are empty.
inline constexpr std::size_t dplr_count = 7;
inline const std::vector<std::string> dplr_names = {"q", "k", "v", "a", "b", "log_decay", "initial_state"};

inline gradient_case case_of(const dplr_problem& p, std::string name = {}) {
  const auto& x = p.x;
  return {std::move(name), dplr_names, {x.q, x.k, x.v, x.a, x.b, x.log_decay, x.initial_state},
          [options = p.options](const std::vector<tensor<variable>>& in) {
            auto r = reference::dplr<variable>({in[0], in[1], in[2], in[3], in[4], in[5], in[6]}, options);
            return std::vector<tensor<variable>>{std::move(r.out), std::move(r.final_state)};
          }};
}

using dplr_asked = asked_gradients<dplr_count>;

// d_results: of out, and of the final state or empty.
template <class S>
tensors gradients_by(const dplr_problem& p, const tensors& d_results, attn::execution& execution,
                     const dplr_asked& asked = {}) {
  using T = real<S>;
  const dplr_memory<S> m(p);
  const tensor<S> d_out = cast<S>(d_results[0]);
  const tensor<T> d_state = d_results.size() > 1 ? cast<T>(d_results[1]) : tensor<T>{};
  const auto fresh = [&]<class N>(const tensor<N>& like) {
    tensor<N> x = like;
    std::fill(x.data.begin(), x.data.end(), static_cast<N>(asked.before));
    return x;
  };
  tensor<S> q = fresh(m.q), k = fresh(m.k), v = fresh(m.v), a = fresh(m.a), b = fresh(m.b);
  tensor<T> log_decay = fresh(m.log_decay), initial_state = fresh(m.initial_state);
  attn::dplr_gradients<S> g;
  if (asked.of[0]) g.q = view(q);
  if (asked.of[1]) g.k = view(k);
  if (asked.of[2]) g.v = view(v);
  if (asked.of[3]) g.a = view(a);
  if (asked.of[4]) g.b = view(b);
  if (asked.of[5] && given(log_decay)) g.log_decay = view(log_decay);
  if (asked.of[6] && given(initial_state)) g.initial_state = view(initial_state);
  g.d_final_state = optional_view(d_state);
  g.accumulate = asked.accumulate;
  compiled_dplr<S>::backward(m.views(), view(d_out), g, m.options, execution);
  tensors all = {cast<double>(q), cast<double>(k),         cast<double>(v),            cast<double>(a),
                 cast<double>(b), cast<double>(log_decay), cast<double>(initial_state)};
  for (std::size_t n = 0; n < dplr_count; ++n)
    if (!asked.of[n]) all[n] = {};
  return all;
}
template <class S>
tensors gradients_by(const dplr_problem& p, const tensors& d_results, const dplr_asked& asked = {}) {
  attn::execution serial;
  return gradients_by<S>(p, d_results, serial, asked);
}

}  // namespace testing
