// attn: scratch memory of the backward pass of kernel attention.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/kernel/detail/chunk_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Scratch memory of one worker beside the forward pass's; one number per token of a chunk unless noted.
template <class T>
struct kernel_backward_scratch {
  kernel_scratch<T> forward;
  T *q_d, *k_d;              // gradients of features
  T *q_later, *k_later;      // features of queries for R, n_i included; those of keys for R
  T *v_columns, *d_columns;  // values and d_out [value dim][chunk]
  T* d_panels;               // d_out as panels
  T *scores, *products, *products_t, *factors;  // [key][query], [key][query], [query][key], [key][query]
  T *dv, *dx;                // rows [chunk][stride], columns [dim][chunk]
  T *dot, *normal, *sums_normal, *own_normal, *delta, *minus_delta, *log_scale, *row_normal, *key_factor, *d_sizes;
  T *gate_scores, *gate_queries, *gate_keys;  // for the gradient of gates: see gate_gradients.hpp
  operand_pairs operands{};                  // of one product at a time, where elements are multiplied as bf16 pairs

  static kernel_backward_scratch layout(arena& memory, const kernel_scratch<T>& forward, const attention_shape& shape,
                                        idx_t features, bool log_scaled, bool gated, bool paired) {
    kernel_backward_scratch x;
    x.forward = forward;
    const idx_t phi = (features + tile_rows) * kernel_chunk, square = kernel_chunk * kernel_chunk;
    const auto allocate = [&](idx_t count, std::initializer_list<T**> arrays) {
      for (T** each : arrays) *each = memory.allocate<T>(count);
    };
    allocate(phi, {&x.q_d, &x.k_d});
    x.q_later = forward.q_phi, x.k_later = forward.k_phi;  // no longer needed when these are computed
    if (!log_scaled) allocate(phi, {&x.q_later});
    if (gated) allocate(phi, {&x.k_later});
    allocate((shape.dim_v + tile_rows) * kernel_chunk, {&x.v_columns, &x.d_columns});
    allocate(kernel_chunk * forward.stride, {&x.d_panels, &x.dv});
    allocate(square, {&x.scores, &x.products, &x.products_t, &x.factors});
    allocate((shape.dim + tile_rows) * kernel_chunk, {&x.dx});
    allocate(kernel_chunk, {&x.dot, &x.normal, &x.sums_normal, &x.own_normal, &x.delta, &x.minus_delta, &x.log_scale,
                            &x.row_normal, &x.key_factor, &x.d_sizes, &x.gate_queries, &x.gate_keys});
    allocate(gated ? square : 0, {&x.gate_scores});
    if (has_pairs<T> && paired) {
      constexpr idx_t wide = panel_width<T>;
      const idx_t most =
          (std::max)({phi, (shape.dim_v + tile_rows) * kernel_chunk, square + tile_rows * kernel_chunk,
                    round_up(features, wide) * std::max<idx_t>(kernel_chunk, round_up(shape.dim_v, wide)),
                    kernel_chunk * round_up(shape.dim_v, wide)});
      for (bf16_pair** each : {&x.operands.left, &x.operands.right}) *each = memory.allocate<bf16_pair>(most / 2);
    }
    return x;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
