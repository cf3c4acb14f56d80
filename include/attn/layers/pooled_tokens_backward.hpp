// attn: the gradients of pooled_tokens.
//
//   with p_j the weight of token j in its window w, g = d_out_w, channel by channel:
//   dx_j = p_j g,   dz_j = p_j (x_j - out_w) g,   db_n = sum over batch items and windows of dz of the window's row n
//   0 for tokens of no complete window; with overlap each half of a token has a window of its own
//
//   attn::pooled_tokens_backward(x, d_out, {.x = dx, .logits = dz, .bias = db},
//                                {.window = 4, .overlap = true, .logits = z, .bias = b}, threads);
//
// Shapes   x and options as the forward call's, d_out as its out, which is not needed. Gradients have the shapes of
//          what they are of. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Cost     3 times the forward call's operations. Scratch: 34 rows of D numbers per thread; for the gradient of the
//          bias twice its numbers, and those of one head for each of a few tasks per thread.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients of what was not given or that share
//          memory with an input or one another, before anything is written.
//
// Sums over windows are split at fixed places: any number of threads gives the same bits.
#pragma once

#include <attn/layers/detail/pooled_tokens_backward_run.hpp>
#include <attn/layers/pooled_tokens.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients pooled_tokens_backward writes: those given. S is the element type of the call.
template <class S>
struct pooled_tokens_gradients {
  view_field<S> x{};
  view_field<S> logits{};
  view_field<S, 3> bias{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

/// The gradients of pooled_tokens. See the top of the file.
template <viewable X, viewable D, class Options = pooled_tokens_options<element_of<const X&>>>
void pooled_tokens_backward(const X& x, const D& d_out, const pooled_tokens_gradients<element_of<const X&>>& gradients,
                            Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<const D&>>, "attn: x and d_out must have one element type");
  const auto& given = detail::options_or_default<pooled_tokens_options<S>>(options);
  const tensor_view<const S> from = as_view(x), d = as_view(d_out);
  detail::call_views check{"pooled_tokens_backward"};
  check.read("x", from);
  const idx_t dim = detail::check_windows(check, from.extent(3), given.window, given.overlap);
  detail::check_pooled(check, from, given.logits, given.bias, given.window, given.lengths);
  check.read("d_out", d, {{"d_out batch = x batch", from.extent(0)},
                          {"d_out heads = x heads", from.extent(1)},
                          {"d_out length = complete windows of x", from.extent(2) / given.window},
                          {given.overlap ? "d_out dim = half of x channels" : "d_out dim = x channels", dim}});
  check.gradient("x", gradients.x, from);
  check.gradient("logits", gradients.logits, given.logits);
  check.gradient("bias", gradients.bias, given.bias);

  const tensor_view<S> dx = gradients.x, d_logits = gradients.logits;
  const tensor_view<S, 3> d_bias = gradients.bias;
  detail::run_pooled_tokens_backward<compute_type<S>>(
      {detail::make_pooled<S>(from, given.logits, given.bias, given.window, given.overlap, given.lengths), d, dx,
       d_logits, detail::by_head(d_bias, 1, d_bias.extent(0)), d_bias.extent(0), gradients.accumulate},
      detail::plain_execution_of("pooled_tokens_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
