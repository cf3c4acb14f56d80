// attn: one token of kernel attention: the state is read and written once, in the same pass that computes the results
// of the queries.
#pragma once

#include <attn/kernel/detail/chunk.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Queries whose results one pass over the sums computes.
inline constexpr int step_queries = 4;

/// rows[t][r] = columns[r][t] for t < count: features of a block, token by token. Rows are `stride` apart.
template <class T>
void columns_to_rows(const T* columns, idx_t features, idx_t count, T* rows, idx_t stride) {
  constexpr int w = width<T>;
  for (idx_t t = 0; t < count; t += w)
    for (idx_t r = 0; r < features; r += w) {
      packet<T> square[array_size<w>];
      for (int i = 0; i < w; ++i) square[i] = load<T>(columns + (std::min)(r + i, features - 1) * kernel_chunk + t);
      transpose<T>(square);
      for (int i = 0; i < w && t + i < count; ++i) store<T>(rows + (t + i) * stride + r, square[i]);
    }
}

/// One panel of S: S = decay from + key v^T, stored in `to`, or without a key S = from; `from` and `to` may be the
/// same. out[g] = sum over r of queries[g][r] S[r] or, with `Before`, of `from`.
template <class T, int G, bool Update, bool Before>
void step_panel(const T* from, T* to, idx_t features, const T* key, const T* decay, const T* value, const T* queries,
                idx_t stride, T* out) {
  packet<T> sum[array_size<G>][2], v[2];
  unroll<2>([&](auto half) {
    unroll<G>([&](auto g) { sum[g][half] = zero<T>(); });
    v[half] = Update ? load<T>(value + half * width<T>) : zero<T>();
  });
  for (idx_t r = 0; r < features; ++r) {
    packet<T> x[2];
    unroll<2>([&](auto half) {
      const idx_t at = r * panel_width<T> + half * width<T>;
      x[half] = load<T>(from + at);
      if constexpr (Update) {
        const packet<T> next = fma(broadcast<T>(key[r]), v[half], mul(broadcast<T>(decay[r]), x[half]));
        store<T>(to + at, next);
        if constexpr (!Before) x[half] = next;
      }
    });
    unroll<G>([&](auto g) {
      const packet<T> q = broadcast<T>(queries[g * stride + r]);
      unroll<2>([&](auto half) { sum[g][half] = fma(q, x[half], sum[g][half]); });
    });
  }
  unroll<G>([&](auto g) {
    unroll<2>([&](auto half) { store<T>(out + g * panel_width<T> + half * width<T>, sum[g][half]); });
  });
}

/// The same for all panels and any number of queries; done(g, col, sum) takes the results, col the first column of the
/// panel.
template <bool Before, class T, class Done>
void step_head(const kernel_sums<T>& before, kernel_sums<T>& sums, const T* key, const T* decay, const T* value,
               const T* queries, idx_t stride, idx_t count, Done&& done) {
  alignas(64) T out[step_queries * panel_width<T>];
  for (idx_t col = 0; col < sums.dim_v; col += panel_width<T>)
    for (idx_t g = 0; g == 0 || g < count; g += step_queries) {
      const idx_t some = std::min<idx_t>(step_queries, count - g);
      const T* const q = queries + g * stride;
      const auto pass = [&](auto G) {
        if (Before ? g + step_queries >= count : g == 0)
          step_panel<T, G.value, true, Before>(before.panel(col), sums.panel(col), sums.features, key, decay,
                                               value + col, q, stride, out);
        else
          step_panel<T, G.value, false, Before>((Before ? before : sums).panel(col), nullptr, sums.features, key,
                                                decay, nullptr, q, stride, out);
      };
      if (some == 1)
        pass(std::integral_constant<int, 1>{});
      else  // rows beyond the last query have arbitrary values: the block is padded
        pass(std::integral_constant<int, step_queries>{});
      for (idx_t n = 0; n < some; ++n) done(g + n, col, out + n * panel_width<T>);
    }
}

}}}  // namespace attn::ATTN_ISA::detail
