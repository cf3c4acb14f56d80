// attn: the linear layer.
//
//   out = x W^T + b
//
//   attn::project(x, out, {.weight = w});           // Eigen matrices: x [length, n], w [m, n], out [length, m]
//   attn::project(x, out, {.weight = w, .bias = b}, threads);
//
// Shapes   x [B, L, n], weight [m, n] (a row for every output, as PyTorch keeps it; the [n, m] of TensorFlow, Flax and
//          GPT-2 as a transposed view, as fast: .weight = w.transpose(); or packed_weights.hpp), bias [m], which may be
//          left out, out [B, L, m]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Cost     2 B L n m operations. Scratch: the packed weight, about n m numbers, unless it was packed before, and
//          48 (n + m) numbers per thread. With L up to eight, as in decoding, a weight with rows or columns of stride 1
//          is read in place, and with B L up to 48 any is packed 64 outputs at a time: scratch is then 96 n numbers at
//          most and 40000 per thread, and threads share the outputs.
//          In place a batch of many short sequences is multiplied at .5 to .6 of the peak, since each gets the numbers
//          it gets alone; packed weights, or the tokens of all items as one sequence [1, B L, n], reach the rate of
//          many tokens.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Every number of out is one sum whose order depends on L, n and the weight's storage only, not on other rows. Eigen's
// products do not guarantee this, and may allocate memory; the products here are as fast with Clang 14 (0.82 of a
// core's peak) and 1.3 to 1.6 times as fast with GCC 12 (512 x 512 weights, 4096 tokens, AVX-512).
#pragma once

#include <attn/layers/detail/token_products.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct project_weights {
  weight_field<S> weight{};
  view_field<const S, 1> bias{};
};

namespace detail {

/// One of the projections of a sequence.
template <class P>
struct projection {
  linear_weight<P> weight;
  output_tokens<sum_type<P>> out;
};

template <class P>
void project_few_tokens(const input_tokens<sum_type<P>>& x, const projection<P>& p, execution& exec) {
  using T = sum_type<P>;
  auto [rows, packed] = exec.shared_scratch([&](arena& m) {
    return std::pair{row_buffer<T>(m, (std::min)(token_block, x.count), x.dim, width<T>), packed_tokens<P>(m, x.dim)};
  });
  for (idx_t first = 0; first < x.count; first += token_block) {
    const idx_t count = (std::min)(token_block, x.count - first);
    for (idx_t r = 0; r < count; ++r) x.load(first + r, rows.row(r));
    few_token_products<T, P>(
        rows, count, x.length, p.weight, packed, exec,
        [&](idx_t r, idx_t output, idx_t n, const T* values) { p.out.store(first + r, output, n, values); });
  }
}

/// Several projections of one sequence, with the weights packed.
template <class P>
void project_many_tokens(const input_tokens<sum_type<P>>& x, std::span<const projection<P>> list, execution& exec) {
  using T = sum_type<P>;
  const weight_panels<P>* const weights = exec.shared_scratch([&](arena& memory) {
    auto next = list.begin();
    return memory.allocate_list(std::ssize(list), [&](arena& m) { return weight_panels<P>(m, (next++)->weight); });
  });
  pack_weights<P>({weights, list.size()}, exec);
  idx_t widest = 0;
  for (const auto& p : list) widest = (std::max)(widest, p.weight.outputs);
  exec.for_each(ceil_div(x.count, token_block), [&](idx_t task, int worker) {
    const idx_t begin = task * token_block, rows = (std::min)(token_block, x.count - begin);
    auto [packed, sums] = exec.scratch(worker, [&](arena& memory) {
      return std::pair{packed_tokens<P>(memory, x.dim), row_buffer<T>(memory, token_block, widest, panel_width<T>)};
    });
    packed.pack([&](idx_t r) { return x.at(begin + r); }, rows, x.strides[2], x.packing->template as<P>());
    for (std::size_t n = 0; n < list.size(); ++n) {
      multiply_tokens(packed, weights[n], 0, list[n].weight.outputs, sums);
      for (idx_t r = 0; r < rows; ++r) list[n].out.store(begin + r, sums.row(r));
    }
  });
}

/// Several projections of one sequence.
template <class P>
void run_projections(const input_tokens<sum_type<P>>& x, std::span<const projection<P>> list, execution& exec) {
  if (x.count == 0) return;
  double weights = 0;
  for (const auto& p : list) weights += static_cast<double>(p.weight.outputs) * static_cast<double>(x.dim);
  const auto limit = exec.limit_threads(
      {.operations = 2 * static_cast<double>(x.count) * weights, .bytes = double(sizeof(P)) / numbers_of<P> * weights});
  if (std::ranges::none_of(list, [&](const projection<P>& p) { return has_few_tokens(x, p.weight); }))
    return project_many_tokens<P>(x, list, exec);
  for (const auto& p : list) project_few_tokens<P>(x, p, exec);
}

template <class S>
void run_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const project_weights<S>& w,
                 execution& exec) {
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> one{{w.weight, w.bias}, out};
    run_projections<P>(x, {&one, 1}, exec);
  });
}

template <class S>
[[gnu::noinline]] void call_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                    const project_weights<S>& w, execution& exec) {
  layer_views check{"project", x, out, false};
  check.linear("weight", w.weight, "bias", w.bias, x.extent(2));
  check.out_dim(w.weight.extent(0), " = weight rows");
  run_project<S>(x, out, w, exec);
}

}  // namespace detail

/// out = x W^T + b. See the top of the file.
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
