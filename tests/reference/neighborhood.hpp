#pragma once
// Softmax over the neighbours of a token on a grid (Neighborhood Attention, Hassani 2023; the windows of Swin, Liu
// 2021), axis by axis.
#include <algorithm>

#include "reference/softmax.hpp"

namespace reference {

// One number per axis each; none: the default.
template <class N>
struct basic_neighborhood_options : basic_softmax_options<N> {
  std::vector<idx_t> grid, kernel, stride, dilation, causal_axes, shift;
};
using neighborhood_options = basic_neighborhood_options<double>;

template <class N>
void copy_choices(const neighborhood_options& from, basic_neighborhood_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.grid = from.grid, to.kernel = from.kernel, to.stride = from.stride, to.dilation = from.dilation;
  to.causal_axes = from.causal_axes, to.shift = from.shift;
}

// What neighborhood_options say of one axis.
struct neighborhood_axis {
  idx_t tokens, kernel, stride, dilation, shift;
  bool causal;

  template <class N>
  neighborhood_axis(const basic_neighborhood_options<N>& o, std::size_t a)
      : tokens(o.grid[a]), kernel(o.kernel[a]), stride(o.stride.empty() ? 1 : o.stride[a]),
        dilation(o.dilation.empty() ? 1 : o.dilation[a]), shift(o.shift.empty() ? 0 : o.shift[a]),
        causal(!o.causal_axes.empty() && o.causal_axes[a] != 0) {}

  // The place of a coordinate on the shifted axis.
  idx_t shifted(idx_t x) const { return (x - shift + tokens) % tokens; }
  bool beyond_seam(idx_t x) const { return shifted(x) >= tokens - shift; }
  idx_t number(idx_t x) const { return shifted(x) / dilation; }

  bool sees(idx_t query, idx_t key) const {
    const idx_t residue = shifted(query) % dilation;
    if (shifted(key) % dilation != residue || beyond_seam(query) != beyond_seam(key)) return false;
    const idx_t i = number(query), j = number(key), n = (tokens - residue + dilation - 1) / dilation;
    const idx_t before = kernel / 2, after = before + kernel % 2 - 1;
    if (causal) {
      const idx_t leader = std::min(i / stride * stride + stride - 1, n - 1);
      return j >= leader - before - after && j <= i;
    }
    const idx_t leader = std::min(i / stride * stride + stride / 2, n - 1);
    idx_t first = std::max<idx_t>(leader - before, 0);
    if (leader + after >= n) first += n - after - leader - 1;
    return j >= first && j < first + kernel;
  }
  // Of the key's number from the query's, in the table of a bias.
  idx_t offset(idx_t query, idx_t key) const { return number(key) - number(query) + kernel - 1; }
};

// The entry of a pair in the table of a bias by offset, or -1 where the query does not see the key.
template <class N>
idx_t offset_entry(const basic_neighborhood_options<N>& o, idx_t query, idx_t key) {
  idx_t entry = 0, size = 1;
  for (std::size_t a = o.grid.size(); a-- > 0;) {
    const neighborhood_axis axis(o, a);
    const idx_t i = query % axis.tokens, j = key % axis.tokens;
    if (!axis.sees(i, j)) return -1;
    entry += size * axis.offset(i, j);
    size *= 2 * axis.kernel - 1, query /= axis.tokens, key /= axis.tokens;
  }
  return entry;
}

template <class N>
basic_result<N> neighborhood(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                             const basic_neighborhood_options<N>& o) {
  basic_result<N> into = empty_result(q, v);
  basic_softmax_options<N> plain = o;
  plain.relative_bias = {};
  const tensor<N>& table = o.relative_bias;
  for (idx_t i = 0; i < q.length(); ++i) {
    std::vector<idx_t> seen, entries;
    for (idx_t j = 0; j < k.length(); ++j)
      if (const idx_t entry = offset_entry(o, i, j); entry >= 0) seen.push_back(j), entries.push_back(entry);
    for (idx_t b = 0; b < q.batch(); ++b)
      for (idx_t h = 0; h < q.heads(); ++h) {
        std::vector<N> scores;
        for (std::size_t n = 0; n < seen.size(); ++n) {
          N score = plain_score(plain, q, k, b, h, i, seen[n], 0);
          if (!table.empty()) score += table(0, 0, table.length() == 1 ? 0 : h, entries[n]);
          if (o.score) score = o.score(score, b, h, i, seen[n]);
          scores.push_back(score);
        }
        softmax_row(o, scores, seen, v, b, h, i, into);
      }
  }
  return into;
}

}  // namespace reference
