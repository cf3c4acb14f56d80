// attn: the short convolution before the queries, keys and values of Gated DeltaNet, KDA and Mamba-2: every channel has
// a filter of its own over the last few tokens.
//
//   out_t[c] = f(bias_c + sum over i < w of W[c, i] x_(t-w+1+i)[c])
//       depth-wise and causal, W[c, w - 1] for token t; Poli et al. 2023; Gu & Dao 2023; CausalConvWithState of ONNX
//
//   attn::short_convolution(x, out, {.weight = w, .bias = b}, {.activation = attn::activation::silu}, threads);
//   attn::short_convolution(x, out, {.weight = w}, {.initial_state = before, .final_state = after});
//
// Shapes   x and out [B, L, C], weight [C, w], bias [C], states [B, w - 1, C]: the tokens before the first one, oldest
//          first. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums; states are tokens, of the
//          element type. Out shares no memory with x, nor one state with the other.
// Cost     2 B L C w operations and the activation. Where channels have stride 1, no more time than copying x from
//          memory for w = 4, with silu twice as much. Scratch: the weight, unless channels have stride 1 in
//          it too and there is no silu, and per thread w + 7 rows of C numbers. With silu sums overflow from 0.69 of
//          the largest number on, since they are computed times log2 e.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Token by token: short_convolution_step.hpp.
#pragma once

#include <attn/layers/detail/short_convolution_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct short_convolution_weights {
  view_field<const S, 2> weight{};
  view_field<const S, 1> bias{};   // 0 unless given
};

template <class S>
struct short_convolution_options {
  std::optional<attn::activation> activation{};   // none unless given
  list_view<idx_t> lengths{};                     // true lengths, one per batch item; rows of padding are 0 in out
  view_field<const S, 3> initial_state{};         // 0 unless given
  view_field<S, 3> final_state{};                 // written if given: the last w - 1 tokens of the true length
};

template <viewable X, viewable O, class Weights = short_convolution_weights<element_of<const X&>>,
          class Options = short_convolution_options<element_of<const X&>>>
void short_convolution(const X& x, O&& out, const Weights& weights, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<short_convolution_weights<S>>(weights);
  const auto& given = detail::options_or_default<short_convolution_options<S>>(options);
  detail::layer_views check{"short_convolution", from, to, false};
  const idx_t taps = detail::check_convolution(check, w.weight, w.bias, given.lengths);
  check.option("initial_state", given.initial_state);
  detail::check_convolution_state(check, "initial_state", given.initial_state, taps);
  if (given.final_state) check.write("final_state", given.final_state);
  detail::check_convolution_state(check, "final_state", given.final_state, taps);

  detail::run_short_convolution<compute_type<S>>(
      detail::make_convolution<S>(from, w, given.activation, given.lengths, given.initial_state), to,
      detail::plain_execution_of("short_convolution", exec, options));
  if (given.final_state)
    detail::store_last_tokens<S>(from, given.lengths, given.initial_state, given.final_state);
}

}}  // namespace attn::ATTN_ISA
