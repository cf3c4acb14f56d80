// attn: the token shift of RWKV: every token is mixed with the one before it, channel by channel.
//
//   out_t = x_t + mix (x_(t-1) - x_t)                                           Peng et al. 2023; mix 1 gives x_(t-1)
//
//   attn::token_shift(x, out, {.mix = m}, threads);         // RWKV-7: one call for each of x_r, x_w, x_k, ...
//   attn::token_shift(x, out, {.mix = m}, {.initial_state = before, .final_state = after});
//   attn::token_shift(x, out);                              // the token before alone
//
// RWKV-4 stores 1 - mix.
//
// Shapes   x and out [B, L, C], mix [C], states [B, C]: the token before the first one. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic; states are tokens, of the element type. Out shares no
//          memory with x, nor one state with the other.
// Cost     3 operations a number: the time of copying x. Scratch: mix, and per thread three tokens.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Token by token: token_shift_step.hpp.
#pragma once

#include <attn/layers/detail/token_shift_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct token_shift_weights {
  view_field<const S, 1> mix{};   // 1 unless given
};

template <class S>
struct token_shift_options {
  list_view<idx_t> lengths{};                // true lengths, one per batch item; rows of padding are 0 in out
  view_field<const S, 2> initial_state{};    // 0 unless given
  view_field<S, 2> final_state{};            // written if given: the last token of the true length
};

template <viewable X, viewable O, class Weights = token_shift_weights<element_of<const X&>>,
          class Options = token_shift_options<element_of<const X&>>>
void token_shift(const X& x, O&& out, Weights&& weights = {}, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<token_shift_weights<S>, true>(weights);
  const auto& given = detail::options_or_default<token_shift_options<S>>(options);
  const tensor_view<const S, 2> before = given.initial_state;
  const tensor_view<S, 2> after = given.final_state;
  detail::layer_views check{"token_shift", from, to, false};
  detail::check_token_shift(check, w.mix, given.lengths);
  check.option("initial_state", before);
  detail::check_shift_state(check, "initial_state", before);
  if (given.final_state) check.write("final_state", after);
  detail::check_shift_state(check, "final_state", after);

  detail::run_token_shift<compute_type<S>>({{from, before, 2}, tensor_view<const S, 1>(w.mix), given.lengths}, to,
                                           detail::plain_execution_of("token_shift", exec, options, weights));
  if (given.final_state)
    detail::store_last_tokens<S>(from, given.lengths, detail::as_last_tokens(before), detail::as_last_tokens(after));
}

}}  // namespace attn::ATTN_ISA
