// attn: softmax attention over the neighbours of each token on a grid of 1, 2 or 3 axes.
//
//   out_i = softmax attention (full_softmax.hpp) over the tokens that are neighbours of token i along every axis. Of
//   n tokens along an axis, those i, j whose coordinates have one residue of `dilation` count, in their own numbering:
//     leader     g = min(floor(i / stride) stride + floor(stride / 2), n - 1), which has the neighbours of its group
//     neighbours `kernel` tokens, from g - floor(kernel / 2) on, moved inside where they reach beyond the axis
//     causal     g = min(floor(i / stride) stride + stride - 1, n - 1): g - kernel + 1 to i, those that there are
//   With `shift` coordinates are (i - shift) mod the axis; tokens of the axis' end and of its beginning, which then are
//   neighbours, do not see each other.
//       Hassani et al. 2023, "Neighborhood Attention"; with stride = kernel, a divisor of the axis, the windows of
//       Swin, Liu et al. 2021, and with shift = kernel / 2 its shifted ones
//
//   attn::neighborhood(q, k, v, out, {.grid = {64, 64}, .kernel = {13, 13}});
//   attn::neighborhood(q, k, v, out, {.grid = {56, 56}, .kernel = {7, 7}, .stride = {7, 7}, .shift = {3, 3},
//                                     .relative_bias = table});
//   attn::neighborhood(q, k, v, out, {.grid = {16, 32, 32}, .kernel = {4, 7, 7}, .causal_axes = {true, false, false}});
//
// Shapes   as full_softmax, Lq = Lk = the product of the grid, tokens in row-major order: the last axis runs fastest.
// Cost     2 B H (D + Dv) operations for every neighbour of a query. Scratch: for every key head in progress
//          Lk (D + Dv) numbers; 8 Lk indices.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/neighborhood_run.hpp>

#include <array>

namespace attn { inline namespace ATTN_ISA {

/// One number for each axis of a grid: {64, 64}. None: the default for all.
class per_axis {
 public:
  constexpr per_axis() = default;
  constexpr per_axis(std::initializer_list<idx_t> numbers) : per_axis(std::span(numbers.begin(), numbers.size())) {}
  constexpr explicit per_axis(std::span<const idx_t> numbers) : axes_(std::ssize(numbers)) {
    for (std::size_t a = 0; a < (std::min)(numbers.size(), numbers_.size()); ++a) numbers_[a] = numbers[a];
  }
  constexpr idx_t axes() const { return axes_; }
  constexpr idx_t operator[](idx_t axis) const { return numbers_[static_cast<std::size_t>(axis)]; }

 private:
  std::array<idx_t, 3> numbers_{};
  idx_t axes_ = 0;
};

/// Options of neighborhood for elements of type S.
template <class S>
struct neighborhood_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::relative_bias | detail::fields::softcap | detail::fields::sinks |
                                     detail::fields::lse | detail::fields::skip;

  /// Tokens along each of 1 to 3 axes.
  per_axis grid{};
  /// Neighbours along each axis, >= 1.
  per_axis kernel{};
  /// So many tokens have the neighbours of one of them: 1 (unless given) to kernel.
  per_axis stride{};
  /// Distance between neighbours: 1 (unless given) to axis / kernel.
  per_axis dilation{};
  /// 1: a token sees none after it along this axis. 0 unless given.
  per_axis causal_axes{};
  /// Where the numbering begins: 0 (unless given) to axis - 1.
  per_axis shift{};
  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// A bias by offset, [H or 1, product of 2 kernel - 1]: in row-major order, the key's numbers less the query's plus
  /// kernel - 1. Swin's table of the query's less the key's is this one read backwards.
  view_field<const real, 2> relative_bias{};
  /// As in full_softmax_options.
  std::optional<real> softcap{};
  list_view<real> sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Attention over the neighbours on a grid; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = neighborhood_options<element_of<const Q&>>,
          class Score = detail::no_score>
void neighborhood(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
                  execution_ref exec = {}) {
  auto call = detail::checked_call<neighborhood_options>("neighborhood", q, k, v, out, options, score, exec);
  detail::run_neighborhood(call, detail::checked_grid(call.views, call.shape, call.options));
}

}}  // namespace attn::ATTN_ISA
