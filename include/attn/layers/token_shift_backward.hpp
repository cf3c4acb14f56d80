// attn: the gradients of token_shift.
//
//   with x_(-1) the initial state, d_out 0 outside the sequence:
//   dx_t = (1 - mix) d_out_t + mix d_out_(t+1), also for t = -1, where the first term is 0; the last one plus
//   d_final_state
//   dmix = sum over tokens of d_out_t (x_(t-1) - x_t)
//
//   attn::token_shift_backward(x, {.mix = m}, d_out, {.x = dx, .mix = dm}, {}, threads);
//   attn::token_shift_backward(x, {.mix = m}, d_out, {.x = dx, .initial_state = ds, .d_final_state = after},
//                              {.initial_state = s});
//
// Shapes   x, weights, options as the forward call's, d_out as its out; no results needed; gradients as their inputs.
// Cost     6 operations a number. Scratch: mix, and per thread ten tokens.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/layers/detail/token_shift_backward_run.hpp>
#include <attn/layers/token_shift.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct token_shift_gradients {
  view_field<S, 3> x{};
  view_field<S, 1> mix{};
  view_field<S, 2> initial_state{};
  view_field<const S, 2> d_final_state{};   // an input, as final_state; 0 unless given
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = token_shift_weights<element_of<const X&>>,
          class Options = token_shift_options<element_of<const X&>>>
void token_shift_backward(const X& x, const Weights& weights, const D& d_out,
                          const token_shift_gradients<element_of<const X&>>& gradients, Options&& options = {},
                          execution_ref exec = {}) {
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<token_shift_weights<S>>(weights);
  const auto& given = detail::options_or_default<token_shift_options<S>>(options);
  const auto& g = gradients;
  const tensor_view<const S, 2> before = given.initial_state, d_final = g.d_final_state;
  detail::layer_views check{"token_shift_backward", from, d, detail::layer_views::backward_pass{}};
  detail::check_token_shift(check, w.mix, given.lengths);
  check.option("initial_state", before);
  check.option("d_final_state", d_final);
  detail::check_shift_state(check, "initial_state", before);
  detail::check_shift_state(check, "d_final_state", d_final);
  check.gradient("x", g.x, from);
  check.gradient("mix", g.mix, w.mix);
  check.gradient("initial_state", g.initial_state, given.initial_state);

  detail::run_token_shift_backward<T>(
      {.forward = {{from, before, 2}, tensor_view<const S, 1>(w.mix), given.lengths},
       .d = {d, tensor_view<const S, 2>(), 2}, .d_final = d_final,
       .dx = {tensor_view<S, 3>(g.x), g.accumulate}, .d_initial = {tensor_view<S, 2>(g.initial_state), g.accumulate},
       .d_mix = {tensor_view<S, 1>(g.mix), g.accumulate}},
      detail::plain_execution_of("token_shift_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
