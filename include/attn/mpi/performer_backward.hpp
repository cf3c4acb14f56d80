// attn: the gradients of FAVOR+ attention over a sequence that several processes hold.
//
//   attn::mpi::performer_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .features = dw}, MPI_COMM_WORLD,
//                                 {.causal = true}, threads);
//
// Every process gives its own tokens, as to mpi/performer.hpp, and gets their gradients: together what
// performer_backward (performer_backward.hpp) gives on the whole; and the gradient of the features, which is the same
// on all processes, but not to the last bit that of one process. All else is as mpi/linear_backward.hpp says.
//
// Sent     also m D numbers for each head of sums, to the next process and to all by a tree, if the gradient of the
//          features is wanted.
// Throws   also for center_keys, and for feature_eps of positive features: the mean and the maximum have gradients that
//          are sums over the keys of all processes, which are not taken here.
#pragma once

#include <attn/kernel/performer_backward.hpp>
#include <attn/mpi/detail/kernel_scan_backward.hpp>
#include <attn/mpi/performer.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class S, class T = compute_type<S>>
struct spread_performer_backward : spread_performer<S> {
  void validate(const validator& check, kernel_call<T>& o) const {
    if (o.center_keys) check.fail("no center_keys, a mean over the keys of all processes", "center_keys");
    if (o.kernel == performer_kernel::positive && o.feature_eps.value_or(0) > 0)
      check.fail("no feature_eps of positive features, with a maximum over the keys of all processes", "one");
  }
};

}  // namespace detail

namespace mpi {

/// The gradients of performer; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Features,
          class Options = performer_options<element_of<const Q&>>>
void performer_backward(const Q& q, const K& k, const V& v, const Features& features, const D& d_out,
                        const performer_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator,
                        Options&& options = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread_backward(
      "mpi::performer_backward", communicator,
      detail::with_features(detail::backward_views_of<S>(q, k, v, d_out), features), gradients,
      detail::spread_performer_backward<S>{{detail::options_or_default<performer_options<S>>(options)}},
      detail::plain_execution_of("mpi::performer_backward", exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
