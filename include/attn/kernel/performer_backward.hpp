// attn: the gradients of FAVOR+ attention.
//
//   attn::performer_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//
// The formulas of linear_backward.hpp, and the chain rule through phi (performer.hpp): maxima that only stabilise have
// no gradient; with feature_eps the maximum is part of the formula and has one, where it is attained; with center_keys
// the mean has one. Choromanski et al. 2021, "Rethinking attention with performers"
//
// Shapes   q, k, v, features and the options as the forward call's, d_out as out. Neither out nor anything else of the
//          forward call is needed. Gradients have the shapes of what they are of; dk and dv are summed over grouped
//          queries, those of features over what shares them.
// Cost     2.5 times the forward call's operations, causal about 3 times. Scratch per thread: about 10 m 64 numbers
//          more than the forward call's; causal one state of (m + 1) Dv numbers per 1024 tokens and 16 more, of more
//          than 16384 tokens at most sqrt(L) / 8 and as many more, where threads share heads some 32 states and as many
//          times 64 (m + Dv) numbers beside these; Lk (D + Dv) numbers where query heads have features of their own but
//          share keys, Lk D with feature_eps or center_keys. With the gradient of features, B H m D (Hkv, where those
//          are shared) for all threads.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// Gradients are those of logarithms of features, weights are at most 4, and pairs that underflow are recomputed:
// nothing overflows, however long queries and keys are. Where log features are beyond 1e6 (double: 1e14), that is,
// queries or keys have a norm of about 1e3 (1e7), the rounding error of their difference affects the weights, and
// gradients become inaccurate.
#pragma once

#include <attn/kernel/detail/performer_features_backward.hpp>
#include <attn/kernel/detail/sums_backward_run.hpp>
#include <attn/kernel/performer.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct performer_gradients {
  view_field<S> q{}, k{}, v{};
  view_field<S, 3> features{};   // as features, summed over what shares them
  bool accumulate = false;  // add to what is there instead of writing it over

  operator detail::kernel_gradients<S>() const {
    return {.q = q, .k = k, .v = v, .features = features, .accumulate = accumulate};
  }
};

/// The gradients of performer; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Features = performer_options<element_of<const Q&>>,
          class Options = performer_options<element_of<const Q&>>>
void performer_backward(const Q& q, const K& k, const V& v, const Features& features, const D& d_out,
                        const performer_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<performer_options<S>>(options);
  detail::call_views check{"performer_backward"};
  const auto views = detail::with_features(detail::backward_views_of<S>(q, k, v, d_out), features);
  auto call = detail::check_kernel_backward(check, views, gradients, given);
  detail::performer_features<compute_type<S>> map(call.forward);
  detail::performer_features_backward<compute_type<S>> back(map);
  call.forward.map = &map, call.map = &back;
  detail::run_sums_backward(call, detail::plain_execution_of("performer_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
