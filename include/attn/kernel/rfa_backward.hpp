// attn: the gradients of random feature attention.
//
//   attn::rfa_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//   attn::rfa_backward(q, k, v, features, d_out, {.q = dq, .gate = dg}, {.causal = true, .gate = g});
//
// The formulas of linear_backward.hpp, and with t = W x / (|x| + norm_eps), dt = cos t d sin t - sin t d cos t:
//   dx = y / (|x| + norm_eps) - x (y.x) / (|x| (|x| + norm_eps)^2),  y = W^T dt
//   d g_t = <dL/dS_t, S_(t-1) - phi(k_t) v_t^T>       Peng et al. 2021, "Random feature attention"
//
// Shapes   q, k, v, features and the options as the forward call's, d_out as out. Neither out nor anything else of the
//          forward call is needed. Gradients have the shapes of what they are of; dk and dv are summed over grouped
//          queries, those of features over what shares them.
// Cost     2.5 times the forward call's operations, causal about 3 times. Scratch per thread: about 16 m 64 numbers
//          more than the forward call's; causal one state of (2m + 1) Dv numbers per 1024 tokens and 16 more, of more
//          than 16384 tokens at most sqrt(L) / 8 and as many more, where threads share heads some 32 states and as many
//          times 64 (2m + Dv) numbers beside these; where query heads have features or gates of their own but share
//          keys, Lk (D + Dv) numbers. With the gradient of features, B H m D (Hkv, where those are shared) for all
//          threads.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// The gradient of a token of zeros is y / norm_eps, or zero with norm_eps 0.
#pragma once

#include <attn/kernel/detail/rfa_features_backward.hpp>
#include <attn/kernel/detail/sums_backward_run.hpp>
#include <attn/kernel/rfa.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct rfa_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<S, 3> features{};   // as features, summed over what shares them
  view_field<real, 3> gate{};    // as gate: [B, H or Hkv, Lk]
  bool accumulate = false;  // add to what is there instead of writing it over

  operator detail::kernel_gradients<S>() const {
    return {.q = q, .k = k, .v = v, .features = features, .gate = gate, .accumulate = accumulate};
  }
};

/// The gradients of rfa; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Features = rfa_options<element_of<const Q&>>,
          class Options = rfa_options<element_of<const Q&>>>
void rfa_backward(const Q& q, const K& k, const V& v, const Features& features, const D& d_out,
                  const rfa_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                  execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<rfa_options<S>>(options);
  detail::call_views check{"rfa_backward"};
  const auto views = detail::with_features(detail::backward_views_of<S>(q, k, v, d_out), features);
  auto call = detail::check_kernel_backward(check, views, gradients, given);
  detail::rfa_features<compute_type<S>> map(call.forward);
  detail::rfa_features_backward<compute_type<S>> back(map);
  call.forward.map = &map, call.map = &back;
  detail::run_sums_backward(call, detail::plain_execution_of("rfa_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
