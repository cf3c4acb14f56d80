// attn: the run of project_backward, and of the gradients of several projections of one sequence.
#pragma once

#include <attn/layers/detail/project_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct project_gradients;

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
  input_tokens<T> direct;  // added to dx, if given

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
    for (idx_t r = 0; dx.given() && direct.data && r < rows; ++r) direct.load(first + r, block.dx.row(r));
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

/// The gradients of several projections of one sequence, dx being the sum over them, and of `direct`, if that is given.
template <class P>
void run_projections_backward(const input_tokens<sum_type<P>>& x, const gradient_memory<sum_type<P>>& dx,
                              std::span<const projection_gradient<P>> list, execution& exec,
                              const input_tokens<sum_type<P>>& direct = tensor_view<const sum_type<P>, 3>()) {
  bool any = dx.given();
  for (const auto& p : list) any = any || p.weight.given() || p.bias.given();
  if (any) projections_backward_driver<P>{x, dx, list, direct}.run(exec);
}

template <class S>
[[gnu::noinline]] void call_project_backward(const tensor_view<const S, 3>& x, const project_weights<S>& w,
                                             const tensor_view<const S, 3>& d_out, const project_gradients<S>& g,
                                             execution& exec) {
  using T = compute_type<S>;
  using P = product_type<S>;
  const tensor_view<const S, 3>& all = w.weight.per_head();
  layer_views check{"project_backward", x, d_out, layer_views::backward_pass{}};
  check.gradient("x", g.x, x);
  const auto layout = [](const auto& weight) {
    return weight.per_head() ? memory_layout(weight.per_head()) : memory_layout(weight);
  };
  check.gradient("weight", layout(g.weight), layout(w.weight));
  if (g.weight && layout(g.weight).rank != layout(w.weight).rank)
    check.fail(all ? "the gradient of weight as a view [heads, outputs, inputs]" : "the gradient of weight as a matrix",
               error_text::list(layout(g.weight).extents, layout(g.weight).rank));
  check.gradient("bias", g.bias, w.bias);
  check_project<S>(check, w);
  if (!all) {
    const projection_gradient<P> one(w.weight, token_sum<T>(d_out), g.weight, g.bias, g.accumulate);
    return run_projections_backward<P>(x, {g.x, g.accumulate}, {&one, 1}, exec);
  }
  const idx_t outputs = all.extent(1), inputs = all.extent(2);
  const auto limit = exec.limit_threads(work_of_heads<S>(x, all, 2));
  for_each_head(all.extent(0), exec.active_threads(), exec, [&](idx_t h, execution& e) {
    const tensor_view<S, 2> d_weight = g.weight ? g.weight.head(h) : tensor_view<S, 2>();
    const projection_gradient<P> one(w.weight.head(h), token_sum<T>(head_of_tokens(d_out, h, outputs)), d_weight,
                                     head_of_list<S>(g.bias, h, outputs), g.accumulate);
    run_projections_backward<P>(head_of_tokens(x, h, inputs), {head_of_tokens<S>(g.x, h, inputs), g.accumulate},
                                {&one, 1}, e);
  });
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_projections_backward(const input_tokens<compute_type<S>>&,                                \
  const gradient_memory<compute_type<S>>&, std::span<const projection_gradient<product_type<S>>>, execution&,     \
  const input_tokens<compute_type<S>>&)
#include <attn/core/detail/compiled.hpp>
