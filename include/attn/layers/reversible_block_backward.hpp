// attn: the gradients of reversible_block, with its input recovered from its output: a stack need store no activations.
//
//   x2 = y2 - g(y1),  x1 = y1 - f(x2);   d1 = dy1 + g_backward(y1, dy2),  dx1 = d1,  dx2 = dy2 + f_backward(x2, d1)
//                                        Gomez et al. 2017, "The reversible residual network", algorithm 1
//
//   attn::reversible_block(x, x, f, g, {.remainder = r});                               // every block, in place
//   attn::reversible_block_backward(x, x, f, g, f_backward, g_backward, d, {.x = d}, {.remainder = r}, threads);
//
// The second line undoes the first: x, d and the remainder go back block by block in the same memory, so that a deep
// stack trains in memory that does not depend on its depth.
//
// Shapes   out, x, d_out and the gradient of x [B, L, 2 D], as in the forward call. x is written: it may be out. The
//          gradient of x may be d_out unless it is added to. The remainder is what the forward call left; afterwards
//          it is what it was before that call. float, double, Eigen::half or Eigen::bfloat16.
// Mixers   f and g as in the forward call, each called once; f_backward(x, out, d_out, dx, execution) and g_backward
//          likewise, with views [B, L, D] and out what f made of x: each writes dx over. They also compute the
//          gradients of their own weights, which reversible_block_backward does not know. Each is called just before
//          its backward pass, so that one buffer can serve all layers for what f or g stores for its backward pass,
//          such as the lse and options.attended of multi_head.
// Cost     that of f and g and of their backward passes. Scratch, beside theirs: two halves of a sequence, three where
//          the gradient of x is added to or not given.
// Exact    as reversible_block_inverse: with a remainder to the last bit.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; exceptions of the mixers are
//          passed on and leave x, its gradient and the remainder partly written.
#pragma once

#include <attn/layers/detail/reversible_block_backward_run.hpp>
#include <attn/layers/reversible_block.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What reversible_block_backward writes beside x. S is the element type of the call.
template <class S>
struct reversible_block_gradients {
  view_field<S, 3> x{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

/// x and its gradient from what reversible_block made of x and the gradient of that. See the top of the file.
template <viewable Y, viewable X, class F, class G, class FBackward, class GBackward, viewable D,
          class Options = reversible_block_options<element_of<const Y&>>>
void reversible_block_backward(const Y& out, X&& x, F&& f, G&& g, FBackward&& f_backward, GBackward&& g_backward,
                               const D& d_out, const reversible_block_gradients<element_of<const Y&>>& gradients,
                               Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Y&>;
  static_assert(detail::token_mixer<F, S> && detail::token_mixer<G, S>,
                "attn: f and g must be callable as f(x, out, execution)");
  static_assert(detail::token_mixer_backward<FBackward, S> && detail::token_mixer_backward<GBackward, S>,
                "attn: f_backward and g_backward must be callable as f_backward(x, out, d_out, dx, execution)");
  const auto [from, to] = detail::sequences_of(out, x);
  const auto d = detail::inputs_of(out, d_out).second;
  const auto remainder = detail::options_or_default<reversible_block_options<S>>(options).remainder;
  detail::check_reversible_backward<S>(from, to, d, gradients, remainder);
  detail::run_reversible_backward<S>(from, to, f, g, f_backward, g_backward, d, gradients, remainder,
                                     detail::plain_execution_of("reversible_block_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
