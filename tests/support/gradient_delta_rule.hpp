#pragma once
// The backward pass of delta_rule: a problem as a gradient case, and what the library makes of it.
#include "support/call_delta_rule.hpp"
#include "support/gradient_state.hpp"

namespace testing {

// The inputs of a problem, in the order of their gradients; those not given are empty.
inline constexpr std::size_t delta_rule_count = 6;
inline const std::vector<std::string> delta_rule_names = {"q", "k", "v", "beta", "log_decay", "initial_state"};

// The results are out and, unless `out_alone`, the final state.
inline gradient_case case_of(const delta_rule_problem& p, bool out_alone = false, std::string name = {}) {
  const auto& x = p.x;
  return {std::move(name), delta_rule_names, {x.q, x.k, x.v, x.beta, x.log_decay, x.initial_state},
          [options = p.options, out_alone](const std::vector<tensor<variable>>& in) {
            auto r = reference::delta_rule<variable>({in[0], in[1], in[2], in[3], in[4], in[5]}, options);
            std::vector<tensor<variable>> results{std::move(r.out)};
            if (!out_alone) results.push_back(std::move(r.final_state));
            return results;
          }};
}

using delta_rule_asked = asked_gradients<delta_rule_count>;

// d_results: of out, and of the final state or empty.
template <class S>
tensors gradients_by(const delta_rule_problem& p, const tensors& d_results, attn::execution& execution,
                     const delta_rule_asked& a = {}) {
  using T = real<S>;
  const delta_rule_memory<S> m(p);
  const tensor<S> d_out = cast<S>(d_results[0]);
  const tensor<T> d_state = d_results.size() > 1 ? cast<T>(d_results[1]) : tensor<T>{};
  const auto fresh = [&]<class N>(const tensor<N>& like) {
    tensor<N> x = like;
    std::fill(x.data.begin(), x.data.end(), static_cast<N>(a.before));
    return x;
  };
  tensor<S> q = fresh(m.q), k = fresh(m.k), v = fresh(m.v);
  tensor<T> beta = fresh(m.beta), log_decay = fresh(m.log_decay), initial_state = fresh(m.initial_state);
  attn::delta_rule_gradients<S> g;
  if (a.of[0]) g.q = view(q);
  if (a.of[1]) g.k = view(k);
  if (a.of[2]) g.v = view(v);
  if (a.of[3] && given(beta)) g.beta = row_view(beta);
  if (a.of[4] && given(log_decay)) g.log_decay = view(log_decay);
  if (a.of[5] && given(initial_state)) g.initial_state = view(initial_state);
  g.d_final_state = optional_view(d_state);
  g.accumulate = a.accumulate;
  compiled_delta_rule<S>::backward(view(m.q), view(m.k), view(m.v), view(d_out), g, m.options, execution);
  tensors all = {cast<double>(q),    cast<double>(k),         cast<double>(v),
                 cast<double>(beta), cast<double>(log_decay), cast<double>(initial_state)};
  for (std::size_t n = 0; n < delta_rule_count; ++n)
    if (!a.of[n]) all[n] = {};
  return all;
}
template <class S>
tensors gradients_by(const delta_rule_problem& p, const tensors& d_results, const delta_rule_asked& a = {}) {
  attn::execution serial;
  return gradients_by<S>(p, d_results, serial, a);
}

}  // namespace testing
