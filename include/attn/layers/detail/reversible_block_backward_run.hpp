// attn: the checks and the run of the gradients of reversible_block.
#pragma once

#include <attn/layers/detail/reversible_block_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct reversible_block_gradients;

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
}}  // namespace attn::ATTN_ISA
