// attn: Fourier mixing of tokens.
//
//   out = Re(F_L(F_D(x)))                          Lee-Thorp et al. 2021, "FNet: Mixing Tokens with Fourier Transforms"
//   out_lc = sum over t, d of x_td cos(2 pi (l t / L + c d / D))
//
//   attn::fnet(x, out);                            // Eigen matrices [length, dim]
//   attn::fnet(x, out, {.lengths = lengths}, threads);
//
// F_L is the discrete Fourier transform over tokens, F_D that over the hidden dim; nothing is normalised. Of the
// transform only the real part is kept, so it has no inverse: x_td and its reflection x_(-t mod L, -d mod D) have
// the same result.
//
// Shapes   x and out [B, H, L, D]; every [b, h] is transformed separately, so pass the whole hidden dim of a model as
//          D. Any L and D, primes too. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     5/4 B H L D log2(L D) operations, a quarter of two complex transforms. A direction whose length has a prime
//          factor above 41 takes five times its share: the whole then takes two to three times as long. Scratch, in
//          rows of two vectors (32 floats with AVX-512): L for every row's width of the channels 0 to D / 2, for one
//          [b, h], with threads for one each or for as many as fit in 512 KiB a thread; per thread D, and for such a
//          prime factor 2 L or 2 D more. Tables: about 8 L + 5 D numbers, twice that for such a prime factor.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form, and no such option: every number of the result depends on every token.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/fourier/detail/fnet_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct fnet_options {
  /// True lengths, one per batch item: the transform runs over these, and rows of padding are 0 in out.
  list_view<idx_t> lengths{};
};

namespace detail {

inline void check_fnet(const memory_layout& x, const memory_layout& out, std::span<const idx_t> lengths) {
  call_views views("fnet");
  views.read("x", x);
  views.write("out", out, {{"out batch = x batch", x.extents[0]}, {"out heads = x heads", x.extents[1]},
                           {"out length = x length", x.extents[2]}, {"out dim = x dim", x.extents[3]}});
  check_length_list(views, "lengths", lengths, x.extents[0], x.extents[2]);
}

}  // namespace detail

template <viewable X, viewable O, class Options = fnet_options<element_of<const X&>>>
void fnet(const X& x, O&& out, Options&& options = {}, execution_ref exec = {}) {
  detail::require_one_element_type<const X&, const X&, const X&, O>();
  using S = element_of<const X&>;
  const tensor_view<const S> from = as_view(x);
  const tensor_view<S> to = as_view(out);
  const auto& given = detail::options_or_default<fnet_options<S>>(options);
  detail::check_fnet(from, to, given.lengths);
  detail::run_fnet<S>({.x = from, .out = to, .lengths = given.lengths},
                      detail::plain_execution_of("fnet", exec, options));
}

}}  // namespace attn::ATTN_ISA
