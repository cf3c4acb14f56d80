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

#include <attn/layers/detail/weight_gradients.hpp>
#include <attn/layers/reversible_block.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What reversible_block_backward writes beside x. S is the element type of the call.
template <class S>
struct reversible_block_gradients {
  view_field<S, 3> x{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

namespace detail {

template <class S, class F, class G, class FBackward, class GBackward>
void run_reversible_backward(const tensor_view<const S, 3>& out, const tensor_view<S, 3>& x, F& f, G& g,
                             FBackward& f_backward, GBackward& g_backward, const tensor_view<const S, 3>& d_out,
                             const reversible_block_gradients<S>& gradients, const tensor_view<S, 3>& remainder,
                             execution& exec) {
  using half_view = tensor_view<const S, 3>;
  using T = compute_type<S>;
  const idx_t dim = out.extent(2) / 2;
  const auto half = [&](const auto& whole, idx_t which) { return whole.slice(2, which * dim, dim); };
  const bool separate = gradients.accumulate || !gradients.x;
  struct buffers {
    tensor_view<S, 3> made, change, d1;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto allocate = [&] { return allocate_sequence<S>(memory, out.extent(0), out.extent(1), dim); };
    const auto made = allocate(), change = allocate();
    return buffers{made, change, separate ? allocate() : half(gradients.x, 0)};
  });
  const tensor_view<S, 3> made = workspace->made, change = workspace->change, d1 = workspace->d1;
  const auto undo = [&](idx_t which) {
    const auto rest = remainder ? half(remainder, which) : remainder;
    add_change<S>(half(out, which), made, T(-1), half(x, which), rest, exec);
  };

  const half_view y1 = half(out, 0), x2 = half(x, 1), dy2 = half(d_out, 1);
  g(y1, made, exec);
  g_backward(y1, half_view(made), dy2, change, exec);
  undo(1);
  add_sequences<T>({half(d_out, 0), change}, {d1, false}, exec);
  f(x2, made, exec);
  f_backward(x2, half_view(made), half_view(d1), change, exec);
  undo(0);
  if (!gradients.x) return;
  add_sequences<T>({dy2, change}, {half(gradients.x, 1), gradients.accumulate}, exec);
  if (gradients.accumulate) add_sequences<T>(token_sum<T>(d1), {half(gradients.x, 0), true}, exec);
}

/// All checks of reversible_block_backward.
template <class S>
void check_reversible_backward(const tensor_view<const S, 3>& out, const tensor_view<S, 3>& x,
                               const tensor_view<const S, 3>& d_out, const reversible_block_gradients<S>& g,
                               const tensor_view<S, 3>& remainder) {
  call_views check{"reversible_block_backward"};
  check.readable("out", out), check.readable("d_out", d_out);
  if (!same_memory(x, out)) check.read("out", out);
  if (g.accumulate || !same_memory(g.x, d_out)) check.read("d_out", d_out);
  check.write("x", x);
  check_same_shape(check, "x", x, "out", out);
  check_same_shape(check, "d_out", d_out, "out", out);
  check.gradient("x", g.x, x);
  check.write("remainder", remainder);
  if (remainder) check_same_shape(check, "remainder", remainder, "out", out);
  if (out.extent(2) % 2 != 0) check.fail("an even width", out.extent(2));
  check.fits("out", {out.extent(0), out.extent(1), std::max<idx_t>(1, out.extent(2))});
}

}  // namespace detail

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
