// attn: the reversible residual block: its input is recovered from its output, so a stack need store no activations.
//
//   y1 = x1 + f(x2),  y2 = x2 + g(y1);   back:  x2 = y2 - g(y1),  x1 = y1 - f(x2)
//                                        Gomez et al. 2017, "The reversible residual network"; Kitaev et al. 2020
//
//   attn::reversible_block(x, out, f, g, threads);                // out may be x: a stack needs one sequence
//   attn::reversible_block_inverse(out, x, f, g, threads);
//   attn::reversible_block(x, x, f, g, {.remainder = r});         // float, double: nothing is lost in deep stacks
//
// Shapes   x and out [B, L, 2 D]: x1 and x2 in the halves of each row. float, double, Eigen::half or Eigen::bfloat16.
// Mixers   f(x, out, execution) and g likewise, with views [B, L, D]; each fills out. They must give the same result
//          for the same input: every operator of this library does, for any number of threads.
// Cost     that of f and g. Scratch, beside theirs: half a sequence.
// Exact    but for the rounding of the sums: one block and its inverse return x to about a unit in the last place of
//          the larger of x and y. When a stack is inverted, the functions of earlier blocks amplify the rounding errors
//          of later ones, the more the larger their derivatives are: the input of 24 layers of random attention and
//          tanh was recovered to 5e-7 in float where weights have gain 0.25, to 4e-6 with gain 0.5, to 1e-4 with gain
//          1. With a remainder all of them were recovered to the last bit, as were 400 layers, or 200 in double. For
//          16-bit types a remainder reduces the error: with gain 0.5 Eigen::half to 2e-4 instead of 2e-2,
//          Eigen::bfloat16 to 3e-2 instead of 0.2.
// Throws   std::invalid_argument for shapes that do not fit, an odd width among them, before anything is written;
//          exceptions of f and g are passed on. If the second of them throws, half of out, and of the remainder, is
//          already written: in place, that half of x is lost.
#pragma once

#include <attn/layers/detail/reversible_block_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of reversible_block and its inverse for elements of type S.
template <class S>
struct reversible_block_options {
  /// The rounding errors of all sums so far, [B, L, 2 D]: zeros before the first block, changed by every block and
  /// every inverse.
  view_field<S, 3> remainder{};
};

template <viewable X, viewable O, class F, class G, class Options = reversible_block_options<element_of<const X&>>>
void reversible_block(const X& x, O&& out, F&& f, G&& g, Options&& options = {}, execution_ref exec = {}) {
  detail::reversible("reversible_block", 1, x, out, f, g, options, exec);
}

/// Back: x from what reversible_block made of it, with the same f and g and the remainder it left.
template <viewable Y, viewable O, class F, class G, class Options = reversible_block_options<element_of<const Y&>>>
void reversible_block_inverse(const Y& y, O&& out, F&& f, G&& g, Options&& options = {}, execution_ref exec = {}) {
  detail::reversible("reversible_block_inverse", -1, y, out, g, f, options, exec);
}

}}  // namespace attn::ATTN_ISA
