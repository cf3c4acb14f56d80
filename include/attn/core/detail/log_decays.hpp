// attn: the check that operators with log decays share.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/packing.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks log decays [batch, heads, length, 1 or channels]: <= 0 for the lengths.keys(b) real tokens of item b. Those
/// of channels are as many numbers as the keys, so threads, where they are given, share the heads.
template <class T, class Lengths>
void check_log_decays(const validator& check, const tensor_view<const T>& g, const Lengths& lengths,
                      execution* exec = nullptr) {
  const idx_t heads = g.extent(1), all = g.extent(0) * heads;
  auto check_head = [&](idx_t n, int) __attribute__((noinline)) {
    const idx_t b = n / heads, h = n % heads;
    const matrix_view<const T> rows = head_of(g, b, h);
    const bool column = rows.cols == 1;
    const idx_t keys = lengths.keys(b), count = column ? keys : rows.cols;
    const idx_t stride = column ? rows.row_stride : rows.col_stride;
    for (idx_t t = 0; t < keys; t += column ? keys : 1) {
      const T* const row = rows.row(t);
      packet<T> above = zero<T>();  // numbers above 0, and NaN
      for (idx_t r = 0; r < count; r += width<T>)
        above = add(above, (max)(load_part<T>(row + r * stride, stride, count - r), zero<T>()));
      for (idx_t r = 0; !(sum_lanes(above) <= T(0)) && r < count; ++r)
        if (const T x = row[r * stride]; !(x <= T(0))) check.fail("log_decay <= 0", static_cast<double>(x));
    }
  };
  for (idx_t n = 0; !exec && n < all; ++n) check_head(n, 0);
  if (!exec) return;
  const auto limit = exec->limit_threads({.bytes = static_cast<double>(all * g.extent(2) * g.extent(3)) * sizeof(T)});
  exec->for_each(all, check_head);
}

}}}  // namespace attn::ATTN_ISA::detail
