// attn: softmax attention approximated by landmarks.
//
//   out = softmax(scale Q K'^T) A^+ softmax(scale Q' K^T) V,  A = softmax(scale Q' K'^T)
//   Xiong et al. 2021, "Nystroemformer: A Nystroem-based algorithm for approximating self-attention"
//
// Q' and K' are the means of m segments of the true sequence: segment a holds the tokens from floor(a L / m) on, up to
// where the next begins.
//
//   attn::nystrom(q, k, v, out, {.landmarks = 64});
//   attn::nystrom(q, k, v, out, {.inverse = attn::pseudo_inverse::exact, .convolution = kernel}, threads);
//
// Where there are no more than m queries or no more than m keys, the result is that of full softmax: every token is a
// landmark.
//
// With key_mask a row of K' is the mean of the keys of its segment that are seen. Where none is, it is left out: its
// column of A is 0, and with it the row of A^+, iterated or exact. Q' has the queries of all tokens.
//
// Shapes   as full_softmax.
// Cost     2 m (Lq + Lk) (D + Dv) operations per head, and 8 iterations m^3 for the inverse; the exact one takes 8 to
//          20 sweeps (16 to 256 landmarks) of 9 m^3, in double. Scratch: per key head, up to 16 partial results of m Dv
//          numbers per query head, and a few matrices m x m: nothing grows with the length.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form, and no such option: a landmark is a mean over tokens on both sides of a query.
#pragma once

#include <attn/low_rank/detail/nystrom_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// How A is inverted.
enum class pseudo_inverse {
  per_head,     // iteration from A^T / (largest column sum * largest row sum) of the head
  whole_batch,  // the same with the largest sums of the whole batch, as the original: heads depend on each other
  exact         // by singular values, in double
};

template <class S>
struct nystrom_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::lengths | detail::fields::key_mask;

  std::optional<real> scale{};  // factor of q.k; 1 / sqrt(D) unless given
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes. Values of the others
  /// are not convolved either.
  key_mask_view key_mask{};
  idx_t landmarks = 64;  // the number m of landmarks
  pseudo_inverse inverse = pseudo_inverse::per_head;
  idx_t iterations = 6;  // steps of the iterative inverse
  /// Exact inverse: singular values well below this times the largest hardly count (see detail/pseudo_inverse.hpp).
  real cutoff = real(0.03);
  /// Added to the result if given: the values convolved along the sequence, channel by channel, with one kernel per
  /// head, [H, width], width odd. Weight p multiplies the value p - width / 2 tokens after the query's own; values
  /// outside the sequence are 0.
  view_field<const real, 2> convolution{};
};

namespace detail {

template <class S>
void check_nystrom(attention_call<S, nystrom_options<S>>& call) {
  call_views& views = call.views;
  const nystrom_options<S>& given = call.options;
  check_scale(views, given.scale);
  check_key_options(views, call.shape, parameters_of<S>(given));
  views.at_least("landmarks", 1, given.landmarks);
  views.at_least("iterations", 0, given.iterations);
  if (!(given.cutoff >= 0 && given.cutoff < 1)) views.fail("a cutoff from 0 to below 1", given.cutoff);
  views.option("convolution", given.convolution, {{"heads of convolution = query heads", call.shape.heads}});
  if (given.convolution && given.convolution.extent(1) % 2 == 0)
    views.fail("a convolution of odd width", given.convolution.extent(1));
}

/// The driver of a checked call.
template <class S>
nystrom_call<S> nystrom_call_of(const attention_call<S, nystrom_options<S>>& call) {
  const nystrom_options<S>& given = call.options;
  return {.views = call, .convolution = given.convolution,
          .plan = {call.shape, call.lengths, given.landmarks, given.key_mask},
          .terms = terms_of_sums(parameters_of<S>(given), call.shape.dim),
          .inverse = {.exact = given.inverse == pseudo_inverse::exact, .iterations = given.iterations,
                      .cutoff = static_cast<double>(given.cutoff)},
          .whole_batch = given.inverse == pseudo_inverse::whole_batch, .exec = call.exec};
}

}  // namespace detail

template <viewable Q, viewable K, viewable V, viewable O, class Options = nystrom_options<element_of<const Q&>>>
void nystrom(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, execution_ref exec = {}) {
  auto call = detail::checked_call<nystrom_options>("nystrom", q, k, v, out, options, exec);
  detail::check_nystrom(call);
  const detail::seen_lengths lengths(call.options.key_mask, call.shape.batch, call.lengths, call.exec);
  detail::run_nystrom(detail::nystrom_call_of(call));
}

}}  // namespace attn::ATTN_ISA
