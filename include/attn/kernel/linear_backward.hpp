// attn: the gradients of linear attention.
//
//   attn::linear_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//   attn::linear_backward(q, k, v, d_out, {.q = dq, .decay = dg}, {.causal = true, .decay = g});
//   attn::linear_backward(q, k, v, d_out, {.log_decay = dg, .bonus = du, .initial_state = ds, .d_final_state = d_end},
//                         {.causal = true, .normalise = false, .log_decay = g, .bonus = u, .initial_state = s});
//   attn::linear_backward(q, k, v, d_out, {.q = dq}, {}, attn::feature_maps::relu{});
//   attn::linear_backward(q, k, v, d_out, {.q = dq}, {}, [](float x) { return x * x; },
//                         [](float x, float d) { return 2 * x * d; });                     // own map and its derivative
//
// With n_i = 1 / (phi(q_i)^T z + eps), D_i = d_out_i . out_i and the sums S, z of the keys a query sees (linear.hpp):
//   d phi(q_i) = n_i (S d_out_i - D_i z),   R = sum_i phi(q_i) n_i d_out_i^T,   y = - sum_i phi(q_i) n_i D_i,
//   d phi(k_j) = R v_j + y,   dv_j = R^T phi(k_j),   causal: R, y over i >= j;   d g_t = <dL/dS_t, S_(t-1)>
//                                    Katharopoulos et al. 2020, appendix; decay: by the chain rule, nothing divided by it
// R and y start from d_final_state and d_final_weights, the gradients of final_state and final_weights; their values
// before the first key are the gradients of initial_state and initial_weights. Where log_decay is -infinity its
// gradient is 0.
//
// The derivative of a map of numbers is map_backward(x, d) = d map'(x); that of a map of tokens is map_backward(token,
// d_phi, d_token) on spans, which writes d_token. The maps of feature_maps need none.
//
// Shapes   q, k, v and the options as the forward call's, d_out as out. Neither out nor anything else of the forward
//          call is needed: final_state and final_weights are not read. Gradients have the shapes of what they are of;
//          dk and dv are summed over grouped queries.
// Cost     2.5 times the forward call's operations, causal about 3 times; with log_decay, a bonus, a scale or states
//          threads do not share heads. Scratch per thread: as the forward call's, causal one state of (D + 1) Dv
//          numbers per 1024 tokens and 16 more, of more than 16384 tokens at most sqrt(L) / 8 and as many more;
//          where threads share heads some 32 states and as many times 64 (D + Dv) numbers beside these; where decay is
//          per query head and keys are shared, Lk (D + Dv) numbers.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/kernel/detail/map_features_backward.hpp>
#include <attn/kernel/detail/recurrence_backward_run.hpp>
#include <attn/kernel/detail/sums_backward_run.hpp>
#include <attn/kernel/linear.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct linear_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<real, 3> decay{};       // as decay: [B, H or Hkv, Lk]
  view_field<real> log_decay{};      // as log_decay: [B, H or Hkv, Lk, 1 or D]
  view_field<real, 2> bonus{};       // [H, D], the sum over the batch
  view_field<real> initial_state{};
  view_field<real, 3> initial_weights{};
  /// Inputs, as final_state and final_weights: 0 unless given.
  view_field<const real> d_final_state{};
  view_field<const real, 3> d_final_weights{};
  bool accumulate = false;  // add to what is there instead of writing it over

  operator detail::kernel_gradients<S>() const {
    return {.q = q, .k = k, .v = v, .gate = decay, .log_decay = log_decay, .bonus = bonus,
            .initial_state = initial_state, .initial_weights = initial_weights, .d_final_state = d_final_state,
            .d_final_weights = d_final_weights, .accumulate = accumulate};
  }
};

/// The gradients of linear; options, feature map, its derivative and execution may each be left out. See the top of the
/// file.
template <viewable Q, viewable K, viewable V, viewable D, class Options = linear_options<element_of<const Q&>>,
          class Map = feature_maps::elu_plus_one, class MapBackward = detail::own_derivative>
void linear_backward(const Q& q, const K& k, const V& v, const D& d_out,
                     const linear_gradients<element_of<const Q&>>& gradients, Options&& options = {}, Map&& map = {},
                     MapBackward&& map_backward = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<linear_options<S>>(options);
  const auto& feature = detail::callable_or_default<feature_maps::elu_plus_one>(map);
  const auto& derivative = detail::callable_or_default<detail::own_derivative>(map_backward);
  if constexpr (detail::require_map_backward<decltype(feature), decltype(derivative), compute_type<S>>()) {
    detail::call_views check{"linear_backward"};
    const auto views = detail::backward_views_of<S>(q, k, v, d_out);
    auto call = detail::check_kernel_backward(check, views, gradients, given);
    auto features = detail::map_features<S>(feature, call.forward.shape.dim);
    detail::check_linear_backward(check, call, features.features);
    auto back = detail::map_features_backward(features, derivative);
    call.forward.map = &features, call.map = &back;
    detail::run_linear_backward(call, detail::plain_execution_of("linear_backward", exec, options, map, map_backward));
  }
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN_IN(T) void run_linear_backward(const kernel_backward_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
