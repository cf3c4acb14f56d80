// attn: the gradients of project.
//
//   dx = d_out W,   dW = sum over tokens of d_out^T x,   db = sum over tokens of d_out         (out = x W^T + b)
//
//   attn::project(x, out, {.weight = w, .bias = b}, threads);
//   attn::project_backward(x, {.weight = w, .bias = b}, d_out, {.x = dx, .weight = dw, .bias = db}, threads);
//
// Shapes   x and weights as the forward call's, d_out as its out, which is not needed; gradients have the shapes of
//          what they are of. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Cost     2 B L n m operations for each of dx and dW. Scratch: packed, the weight, and 480 tokens of x and d_out (with
//          more than four threads as many again for every four); the sums of dW, n m numbers; per thread 96 (n + m)
//          numbers.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients that share memory with an input or one
//          another, before anything is written.
//
// Sums over the tokens of all batch items are split at fixed places: any number of threads gives the same bits. A token
// whose d_out is 0 adds nothing, whatever its x is: so padding, NaN or not, has no part in dW.
#pragma once

#include <attn/layers/detail/weight_gradients.hpp>
#include <attn/layers/project.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of project_weights.
template <class S>
struct project_weight_gradients {
  view_field<S, 2> weight{};
  view_field<S, 1> bias{};
};

/// The gradients project_backward writes: those given. S is the element type of the call.
template <class S>
struct project_gradients {
  view_field<S, 3> x{};
  view_field<S, 2> weight{};
  view_field<S, 1> bias{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

namespace detail {

/// One of the projections of a sequence, backward.
template <class P>
struct projection_gradient {
  using T = sum_type<P>;

  linear_weight<P> transposed;
  token_sum<T> d;  // the gradient of what was projected
  gradient_memory<T> weight, bias;

  template <class S>
  projection_gradient(const tensor_view<const S, 2>& w, const token_sum<T>& d_projected,
                      const tensor_view<S, 2>& d_weight, const tensor_view<S, 1>& d_bias, bool accumulate)
      : transposed(detail::transposed(w), {}), d(d_projected), weight(d_weight, accumulate), bias(d_bias, accumulate) {}
  idx_t outputs() const { return transposed.inputs; }
};

/// A call of run_projections_backward: several projections of one sequence x.
template <class P>
struct projections_backward_driver {
  using T = sum_type<P>;

  input_tokens<T> x;
  gradient_memory<T> dx;
  std::span<const projection_gradient<P>> list;

  /// What the threads share.
  struct shared_buffers {
    weight_panels<P>* weights;
    input_panels<P> inputs;
    weight_sums<P>* sums;
  };
  /// A worker's block of tokens.
  struct block_buffers {
    row_buffer<T> d, x, dx;
    packed_tokens<P> packed;
    T* spare;
  };

  bool any_weight() const {
    return std::any_of(list.begin(), list.end(), [](const auto& p) { return p.weight.given(); });
  }
  idx_t widest() const {
    idx_t widest = 0;
    for (const auto& p : list) widest = (std::max)(widest, p.outputs());
    return widest;
  }

  shared_buffers layout(arena& memory, idx_t chunks) const {
    shared_buffers all{};
    auto next = list.begin();
    if (dx.given())
      all.weights =
          memory.allocate_list(std::ssize(list), [&](arena& m) { return weight_panels<P>(m, (next++)->transposed); });
    all.inputs = {memory, x.dim, any_weight() ? chunks : 0};
    next = list.begin();
    all.sums = memory.allocate_list(std::ssize(list), [&](arena& m) {
      const auto& p = *next++;
      return weight_sums<P>(m, p.weight, p.bias, p.outputs(), all.inputs, chunks);
    });
    return all;
  }

  block_buffers layout_block(arena& memory) const {
    return {row_buffer<T>(memory, token_block, widest()), row_buffer<T>(memory, token_block, x.dim),
            row_buffer<T>(memory, token_block, x.dim, panel_width<T>), packed_tokens<P>(memory, widest()),
            memory.allocate<T>(widest())};
  }

  void run_block(idx_t first, idx_t rows, const chunk_place& place, const shared_buffers& shared,
                 block_buffers block) const {
    bool is_used[token_block] = {};
    if (dx.given()) clear_buffer(block.dx, rows);
    for (std::size_t n = 0; n < list.size(); ++n) {
      const auto& p = list[n];
      block.d.stride = p.outputs();
      for (idx_t r = 0; r < rows; ++r) {
        p.d.load(first + r, block.d.row(r), block.spare);
        is_used[r] = is_used[r] || !is_zero(block.d.row(r), p.outputs());
      }
      if (shared.sums[n].wanted()) shared.sums[n].d.put(place, block.d, rows, 0, p.outputs());
      if (!dx.given()) continue;
      block.packed.inputs = p.outputs();
      block.packed.pack([&](idx_t r) { return block.d.row(r); }, rows);
      add_token_products(block.packed, shared.weights[n], block.dx);
    }
    for (idx_t r = 0; dx.given() && r < rows; ++r) dx.put(first + r, 0, x.dim, block.dx.row(r));
    if (!any_weight()) return;
    for (idx_t r = 0; r < rows; ++r)
      if (is_used[r])
        x.load(first + r, block.x.row(r));
      else
        std::fill_n(block.x.row(r), x.dim, T(0));
    shared.inputs.put(place, block.x, rows, 0, x.dim);
  }

  void run(execution& exec) const {
    double products = 0;
    for (const auto& p : list)
      products += static_cast<double>(p.outputs()) * static_cast<double>(x.dim) * (dx.given() + p.weight.given());
    const auto limit = exec.limit_threads(
        {.operations = 2 * static_cast<double>(x.count) * products, .bytes = 2 * sizeof(T) * products});
    const idx_t together = chunks_together(exec, x.count);
    const shared_buffers shared = exec.shared_scratch([&](arena& memory) { return layout(memory, together); });
    if (dx.given()) pack_weights<P>({shared.weights, list.size()}, exec);
    sum_over_tokens<P>(x.count, together, {shared.sums, list.size()}, exec,
                       [&](idx_t first, idx_t rows, const chunk_place& place, int worker) {
                         const auto block = exec.scratch(worker, [&](arena& memory) { return layout_block(memory); });
                         run_block(first, rows, place, shared, block);
                       });
  }
};

/// The gradients of several projections of one sequence, dx being the sum over them.
template <class P>
void run_projections_backward(const input_tokens<sum_type<P>>& x, const gradient_memory<sum_type<P>>& dx,
                              std::span<const projection_gradient<P>> list, execution& exec) {
  bool any = dx.given();
  for (const auto& p : list) any = any || p.weight.given() || p.bias.given();
  if (any) projections_backward_driver<P>{x, dx, list}.run(exec);
}

}  // namespace detail

/// The gradients of project. See the top of the file.
template <viewable X, viewable D, class Weights = project_weights<element_of<const X&>>>
void project_backward(const X& x, const Weights& weights, const D& d_out,
                      const project_gradients<element_of<const X&>>& gradients, execution_ref exec = {}) {
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& [weight, bias] = detail::weights_of<project_weights<S>>(weights);
  detail::layer_views check{"project_backward", from, d, detail::layer_views::backward_pass{}};
  check.gradient("x", gradients.x, from);
  check.gradient("weight", gradients.weight, weight);
  check.gradient("bias", gradients.bias, bias);
  check.linear("weight", weight, "bias", bias, from.extent(2));
  check.out_dim(weight.extent(0), " = weight rows");
  using P = detail::product_type<S>;
  const detail::projection_gradient<P> one(weight, detail::token_sum<T>(d), gradients.weight, gradients.bias,
                                           gradients.accumulate);
  detail::run_projections_backward<P>(from, {gradients.x, gradients.accumulate}, {&one, 1}, exec.get());
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_projections_backward(const input_tokens<compute_type<S>>&,                                \
  const gradient_memory<compute_type<S>>&, std::span<const projection_gradient<product_type<S>>>, execution&)
#include <attn/core/detail/compiled.hpp>
