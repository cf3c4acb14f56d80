#pragma once
// Runs a problem through long_short.
#include "reference/long_short.hpp"
#include "support/call_long_short.hpp"
#include "support/run_pattern.hpp"

namespace testing {

using long_short_problem = problem<reference::long_short_options>;

template <class S>
long_short_problem rounded(long_short_problem p) {
  auto& o = p.options;
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v), o.logits = rounded<S>(o.logits);
  for (auto* list : {&o.local_gamma, &o.local_beta, &o.global_gamma, &o.global_beta})
    *list = cast<double>(cast<real<S>>(*list));
  o.norm_eps = static_cast<double>(static_cast<real<S>>(o.norm_eps));
  round_options<S>(o);
  return p;
}

template <class S>
reference::result run_long_short(const long_short_problem& p, attn::execution& execution) {
  common_softmax_options<S, attn::long_short_options<S>> stored(p.options);
  const auto& from = p.options;
  auto& o = stored.options;
  o.left = from.left, o.right = from.right, o.block = from.block, o.segment = from.segment;
  const std::vector<real<S>> lists[] = {cast<real<S>>(from.local_gamma), cast<real<S>>(from.local_beta),
                                        cast<real<S>>(from.global_gamma), cast<real<S>>(from.global_beta)};
  o.local_gamma = lists[0], o.local_beta = lists[1], o.global_gamma = lists[2], o.global_beta = lists[3];
  o.norm_eps = static_cast<real<S>>(from.norm_eps);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), logits = cast<S>(from.logits);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  o.lse = row_view(lse);
  compiled_long_short<S>::call(view(q), view(k), view(v), view(out), view(logits), o, execution);
  return {cast<double>(out), cast<double>(lse)};
}
template <class S>
reference::result run_long_short(const long_short_problem& p) {
  attn::execution serial;
  return run_long_short<S>(p, serial);
}

// Against the reference on the same rounded inputs.
template <class S>
errors long_short_errors(const long_short_problem& given) {
  const long_short_problem p = rounded<S>(given);
  const reference::result actual = run_long_short<S>(p), wanted = reference::long_short(p.q, p.k, p.v, p.options);
  return {relative_error(actual.out, wanted.out), relative_error(actual.lse, wanted.lse)};
}

}  // namespace testing
