// attn: the linear layer.
//
//   out = x W^T + b
//
//   attn::project(x, out, {.weight = w});           // Eigen matrices: x [length, n], w [m, n], out [length, m]
//   attn::project(x, out, {.weight = w, .bias = b}, threads);
//   attn::project(x, out, {.weight = of_heads});    // a view [heads, m, n]: every head of x by its own matrix
//
// Shapes   x [B, L, n], weight [m, n] (a row for every output, as PyTorch keeps it; the [n, m] of TensorFlow, Flax and
//          GPT-2 as a transposed view, as fast: .weight = w.transpose(); or packed_weights.hpp), bias [m], which may be
//          left out, out [B, L, m]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums. One
//          weight for each head (RWKV, xLSTM; block-diagonal): [heads, m, n], x [B, L, heads n], bias [heads m], out
//          [B, L, heads m]; each head gives what its matrix alone gives.
// Cost     2 B L n m operations, for every head. Scratch: the packed weight, about n m numbers, unless it was packed
//          before, and 48 (n + m) numbers per thread. With L up to eight, as in decoding, a weight with rows or columns
//          of stride 1 is read in place, and with B L up to 48 any is packed 64 outputs at a time: scratch is then 96 n
//          numbers at most and 40000 per thread, and threads share the outputs; or the heads, where there are as many.
//          In place a batch of many short sequences is multiplied at .5 to .6 of the peak, since each gets the numbers
//          it gets alone; packed weights, or the tokens of all items as one sequence [1, B L, n], reach the rate of
//          many tokens. Packed weights are of one matrix, not of heads.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Every number of out is one sum whose order depends on L, n and the weight's storage only, not on other rows. Eigen's
// products do not guarantee this, and may allocate memory; the products here are as fast with Clang 14 (0.82 of a
// core's peak) and 1.3 to 1.6 times as fast with GCC 12 (512 x 512 weights, 4096 tokens, AVX-512).
#pragma once

#include <attn/layers/detail/field_per_head.hpp>
#include <attn/layers/detail/project_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// A matrix [m, n], packed or not, or a view [heads, m, n].
template <class S>
using project_weight = detail::field_per_head<weight_field<S>, const S>;

template <class S>
struct project_weights {
  project_weight<S> weight{};
  view_field<const S, 1> bias{};
};

namespace detail {

/// What a head of a projection reads and writes.
template <class T>
tensor_view<T, 3> head_of_tokens(const tensor_view<T, 3>& x, idx_t h, idx_t dim) {
  return x ? x.slice(2, h * dim, dim) : x;
}
template <class T>
tensor_view<T, 1> head_of_list(const tensor_view<T, 1>& x, idx_t h, idx_t dim) {
  return x ? x.slice(0, h * dim, dim) : x;
}
/// `products` of every token with every number of the weights.
template <class S>
work_estimate work_of_heads(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& weight, double products) {
  const double numbers = static_cast<double>(weight.size());
  return {.operations = 2 * products * static_cast<double>(x.extent(0) * x.extent(1)) * numbers,
          .bytes = products * sizeof(S) * numbers};
}

/// With one matrix: what other layers call.
template <class S>
void run_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const project_weights<S>& w,
                 execution& exec) {
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> one{{w.weight, w.bias}, out};
    run_projections<P>(x, {&one, 1}, exec);
  });
}

template <class S>
void run_project_per_head(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const project_weights<S>& w,
                          execution& exec) {
  const tensor_view<const S, 3>& all = w.weight.per_head();
  const idx_t heads = all.extent(0);
  if (heads == 0 || x.extent(0) * x.extent(1) == 0) return;
  const auto limit = exec.limit_threads(work_of_heads<S>(x, all, 1));
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const auto list = exec.workspace([&](arena& memory) {
      idx_t h = -1;
      return memory.allocate_list(heads, [&](arena&) {
        ++h;
        return head_projection<P>{{{w.weight.head(h), head_of_list<const S>(w.bias, h, all.extent(1))},
                                   head_of_tokens(out, h, all.extent(1))},
                                  head_of_tokens(x, h, all.extent(2))};
      });
    });
    // All heads of a block of tokens together, which are adjacent in memory.
    const std::span<const head_projection<P>> parts(*list, static_cast<std::size_t>(heads));
    if (!has_few_tokens(parts[0].x, parts[0].weight, exec))
      return project_many_tokens<P>(parts, exec, [&](std::size_t n) -> const auto& { return parts[n].x; });
    for_each_head(heads, exec.active_threads(), exec, [&](idx_t h, execution& e) {
      const projection<P>& one = (*list)[h];
      run_projections<P>((*list)[h].x, {&one, 1}, e);
    });
  });
}

/// The checks of a weight, or of one for each head.
template <class S>
void check_project(layer_views& check, const project_weights<S>& w) {
  const tensor_view<const S, 3>& all = w.weight.per_head();
  const idx_t dim = check.x.extents[2];
  if (!all) {
    check.linear("weight", w.weight, "bias", w.bias, dim);
    return check.out_dim(w.weight.extent(0), " = weight rows");
  }
  check.read("weight", all);
  const idx_t outputs = check.fits("heads * outputs", {all.extent(0), all.extent(1)});
  if (check.fits("heads * inputs", {all.extent(0), all.extent(2)}) != dim)
    check.fail({"weight [heads, outputs, inputs] with heads x inputs = x dim ", dim},
               error_text::list(all.extents().data(), 3));
  check.fits("a packed weight", {round_up(all.extent(1), panel_width<float>), all.extent(2)});
  check.list("bias", w.bias, "output of all heads", outputs);
  check.out_dim(outputs, " = heads x outputs of weight");
}

template <class S>
[[gnu::noinline]] void call_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                    const project_weights<S>& w, execution& exec) {
  layer_views check{"project", x, out, false};
  check_project<S>(check, w);
  w.weight.per_head() ? run_project_per_head<S>(x, out, w, exec) : run_project<S>(x, out, w, exec);
}

}  // namespace detail

template <viewable X, viewable O, class Weights = project_weights<element_of<const X&>>>
void project(const X& x, O&& out, const Weights& weights, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_project<S>(from, to, detail::weights_of<project_weights<S>>(weights), exec.get());
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_project<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                     \
  const project_weights<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
