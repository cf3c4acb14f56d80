// attn: the gradients of nystrom.
//
//   attn::nystrom(q, k, v, out, {.landmarks = 64}, threads);
//   attn::nystrom_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.landmarks = 64}, threads);
//
// With F = softmax(scale Q K'^T), W = softmax(scale Q' K^T) V, U = A^+ W (nystrom.hpp), dU = F^T d_out:
//   Q, K' and U have the gradients of softmax attention, and so have Q', K and V, from dW = (A^+)^T dU; that of A comes
//   from dU W^T through the inverse, and continues to Q' and K'; that of a landmark is shared among the tokens whose
//   mean it is.
// Of the iteration every step is differentiated, and its start: the largest column sum has its gradient at the first
// column where it occurs; row sums are 1, and have no gradient. With pseudo_inverse::whole_batch this gradient goes to
// the head with the largest sum. The exact inverse is differentiated as a function of A, cutoff included; where A is
// singular and the cutoff 0, at constant rank.
//
// Keys that key_mask hides have gradient 0, and so have their values.
//
// Shapes   as the forward call's, d_out as out; nothing but the inputs is needed. Gradients have the shapes of what
//          they are of; dk and dv are summed over the query heads of a group, that of the convolution over the batch.
// Cost     2 m Lq (3 D + 2 Dv) + 2 m Lk (4 D + 3 Dv) operations per head, and 15 iterations 2 m^3 for the inverse; the
//          exact one as forward and 12 m^3. Scratch, per key head in progress: in all its query heads Lq D numbers if
//          dq is asked for, (12 + iterations) m^2, and up to 16 partial results of 2 m (D + Dv).
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/low_rank/detail/nystrom_backward_run.hpp>
#include <attn/low_rank/nystrom.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct nystrom_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<real, 2> convolution{};  // [H, width]
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable D, class Options = nystrom_options<element_of<const Q&>>>
void nystrom_backward(const Q& q, const K& k, const V& v, const D& d_out,
                      const nystrom_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                      execution_ref exec = {}) {
  auto call =
      detail::checked_backward_call<nystrom_options>("nystrom_backward", q, k, v, d_out, gradients, options, exec);
  detail::check_nystrom(call);
  call.views.gradient("convolution", gradients.convolution, call.options.convolution);
  const detail::seen_lengths lengths(call.options.key_mask, call.shape.batch, call.lengths, call.exec);
  const detail::nystrom_backward_call<element_of<const Q&>> checked{
      .forward = {detail::nystrom_call_of(call)}, .d_out = as_view(d_out), .dq = gradients.q, .dk = gradients.k,
      .dv = gradients.v, .d_convolution = gradients.convolution, .accumulate = gradients.accumulate};
  detail::run_nystrom_backward(checked);
}

}}  // namespace attn::ATTN_ISA
