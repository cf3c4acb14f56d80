// attn: the checks of pooled_tokens, its call and its run.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/call_views.hpp>
#include <attn/layers/detail/pooled_windows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The window, and whether the channels of x can be halves. Returns those of a result.
[[gnu::noinline]] inline idx_t check_windows(const validator& check, idx_t channels, idx_t window, bool overlap) {
  check.at_least("window", 1, window);
  if (overlap && channels % 2 != 0) check.fail("an even number of channels of x, where windows overlap", channels);
  return overlap ? channels / 2 : channels;
}

/// Checks what the forward call, the step and the backward pass have in common.
[[gnu::noinline]] inline void check_pooled(call_views& check, const memory_layout& x, const memory_layout& logits,
                                           const memory_layout& bias, idx_t window, std::span<const idx_t> lengths) {
  check.fits("x batch * heads * length", {x.extents[0], x.extents[1], x.extents[2]});  // also where there is no channel
  check.fits("a window", {window, std::max<idx_t>(x.extents[3], 1), 8});
  if (logits.given()) check.read_like("logits", logits, "x", x);
  if (bias.given())
    check.read("bias", bias, {{"bias heads", x.extents[1], or_one},
                              {"bias length = window", window},
                              {"bias channels = x channels", x.extents[3]}});
  check_length_list(check, "lengths", lengths, x.extents[0], x.extents[2]);
}

/// The bias of every head, from one for each or one for all.
template <class S>
tensor_view<S, 4> by_head(const tensor_view<S, 3>& bias, idx_t batch, idx_t heads) {
  if (!bias) return {};
  return {bias.data(), {batch, heads, bias.extent(1), bias.extent(2)},
          {0, bias.extent(0) == 1 ? 0 : bias.stride(0), bias.stride(1), bias.stride(2)}};
}

template <class S>
pooled_tokens_driver<compute_type<S>> make_pooled(const tensor_view<const S>& x, const tensor_view<const S>& logits,
                                                const tensor_view<const S, 3>& bias, idx_t window, bool overlap,
                                                std::span<const idx_t> lengths) {
  return {{x}, {logits}, by_head(bias, x.extent(0), x.extent(1)), x.extent(0), x.extent(1), x.extent(2), window,
          overlap ? x.extent(3) / 2 : x.extent(3), overlap, lengths, {}};
}

/// Tasks are segments of the windows of a head. Rows of out beyond an item's windows become 0.
template <class T>
void run_pooled_tokens(const pooled_tokens_driver<T>& call, const rows_of_heads<T>& out, execution& exec) {
  const idx_t rows = out.extents[2], segment = pooling_segment(call.window), segments = ceil_div(rows, segment);
  if (rows == 0 || call.dim == 0) return;
  const auto limit = exec.limit_threads({.operations = (call.weighted() ? 32 : 1) * call.numbers(),
                                         .bytes = 2 * sizeof(T) * call.numbers()});
  exec.for_each(call.batch * call.heads * segments, [&](idx_t task, int worker) {
    const auto memory = exec.scratch(
        worker, [&](arena& from) { return pooling_memory<T>(from, round_up(call.dim, width<T>)); });
    memory.clear();
    const auto head = call.head_of(task / segments);
    const idx_t begin = task % segments * segment, end = (std::min)(begin + segment, rows);
    const idx_t complete = (std::min)(end, head.windows);
    const bool in_place = out.in_place(call.dim);
    pooled_rows<T> tile;
    for (idx_t w = begin; w < end; w += tile.windows) {
      char* const to = out.at(head.b, head.h, w, 0);
      tile.result = in_place ? reinterpret_cast<T*>(to) : memory.spare, tile.result_step = out.strides[2];
      tile.windows = in_place && w < complete ? call.windows_together(head, w, complete) : 1;
      if (w < complete) call.pool(head, w, memory, tile);
      out.store(w < complete ? tile.result : memory.zeros, call.dim, to);
    }
  });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_pooled_tokens(const pooled_tokens_driver<T>&, const rows_of_heads<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
