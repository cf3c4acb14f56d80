// attn: the mean over the tokens of each sequence, by which encoders make one vector of a text.
//
//   out_b = mean over the tokens i < lengths_b with mask_(b, i) of x_(b, i); zeros where there are none
//
//   attn::mean_pool(x, out);                                       // x [length, dim], out [1, dim]: Eigen matrices
//   attn::mean_pool(x, out, {.lengths = lengths}, threads);
//   attn::mean_pool(x, out, {.mask = seen}, threads);
//
// Shapes   x [B, L, D], out [B, D], mask [B or 1, L] of bool or bytes. float, double, or Eigen::half / Eigen::bfloat16
//          in memory with float sums.
// Cost     B L D additions. Scratch: 768 numbers per thread. Tasks are 256 numbers of one batch item.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Whatever lies in other tokens, NaN or not, changes nothing. Sums are taken 64 tokens at a time and then added in
// double, at places that do not depend on threads or batch.
#pragma once

#include <attn/layers/detail/mean_pool_run.hpp>

namespace attn { inline namespace ATTN_ISA {

struct mean_pool_options {
  list_view<idx_t> lengths{};  // true lengths, one per batch item
  key_mask_view mask{};  // [B or 1, L]; false for a token that is left out
};

template <viewable X, viewable O, class Options = mean_pool_options>
void mean_pool(const X& x, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<O&>>, "attn: the sequences of a layer must have one element type");
  const auto from = detail::as_sequence(x);
  const auto& given = detail::options_or_default<mean_pool_options>(options);
  detail::call_mean_pool<S>(from, detail::as_rows(out), {given.lengths, given.mask, from.extent(1)},
                            detail::plain_execution_of("mean_pool", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_mean_pool<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                   \
  const pool_choice&, execution&)
#include <attn/core/detail/compiled.hpp>
