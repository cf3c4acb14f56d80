// attn: one token in the place of m: softmax over the tokens of every complete window, for every channel by itself. The
// keys of compressed attention, and the means of blocks by which keys are chosen.
//
//   out_w[c] = sum over j of softmax_j(z_j[c] + b_(j - wm)[c]) x_j[c]     for tokens j = wm ... wm + m - 1
//       DeepSeek-V4 (2026): its compressor. Logits z and bias b are 0 unless given; without both out_w is the mean.
//   overlap: a token's last D channels count in its own window, its first D in the next one. out_w is one softmax over
//       the first halves of window w - 1, with the first halves of b's rows, and the last halves of window w, with
//       their last halves; window 0 has its own tokens only.
//
//   attn::pooled_tokens(k, means, {.window = 4});
//   attn::pooled_tokens(x, keys, {.window = 4, .overlap = true, .logits = z, .bias = b}, threads);
//
// Shapes   x and z [B, H, L, C], b [H or 1, m, C], out [B, H, L / m rounded down, D]; C = 2 D with overlap, else C = D.
//          float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums; out shares no memory with others.
//          Item b has lengths_b / m rows, rounded down, and zeros behind: an unfinished window gives nothing.
// Cost     an exponential for each number of x, which is most of the time; without logits and bias an addition.
//          Scratch: 34 rows of D numbers per thread.
// Throws   std::invalid_argument for shapes that do not fit, a window below 1, or an overlap with an odd number of
//          channels, before anything is written.
//
// A token with a logit of -infinity is not seen, whatever x has there; where none is seen the result is 0.
// Token by token: pooled_tokens_step.hpp.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/layers/detail/pooled_tokens_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of pooled_tokens for elements of type S.
template <class S>
struct pooled_tokens_options {
  /// True lengths, one per batch item.
  list_view<idx_t> lengths{};
  /// Tokens of a window, to be given.
  idx_t window = 0;
  bool overlap = false;
  view_field<const S> logits{};    // 0 unless given
  view_field<const S, 3> bias{};   // 0 unless given
};

/// Pooled tokens. See the top of the file.
template <viewable X, viewable O, class Options = pooled_tokens_options<element_of<const X&>>>
void pooled_tokens(const X& x, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<O&>>, "attn: x and out must have one element type");
  const auto& given = detail::options_or_default<pooled_tokens_options<S>>(options);
  const tensor_view<const S> from = as_view(x);
  const tensor_view<S> to = as_view(out);
  detail::call_views check{"pooled_tokens"};
  check.read("x", from);
  const idx_t dim = detail::check_windows(check, from.extent(3), given.window, given.overlap);
  detail::check_pooled(check, from, given.logits, given.bias, given.window, given.lengths);
  check.write("out", to, {{"out batch = x batch", from.extent(0)},
                          {"out heads = x heads", from.extent(1)},
                          {"out length = complete windows of x", from.extent(2) / given.window},
                          {given.overlap ? "out dim = half of x channels" : "out dim = x channels", dim}});
  detail::run_pooled_tokens<compute_type<S>>(
      detail::make_pooled<S>(from, given.logits, given.bias, given.window, given.overlap, given.lengths), to,
      detail::plain_execution_of("pooled_tokens", exec, options));
}

}}  // namespace attn::ATTN_ISA
