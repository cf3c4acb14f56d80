// attn: the gradients of random feature attention over a sequence that several processes hold.
//
//   attn::mpi::rfa_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .v = dv, .features = dw}, MPI_COMM_WORLD,
//                           {.causal = true, .gate = g}, threads);
//
// Every process gives its own tokens, as to mpi/rfa.hpp, and gets their gradients: together what rfa_backward
// (rfa_backward.hpp) gives on the whole; and the gradient of the features, which is the same on all processes, but not
// to the last bit that of one process. All else is as mpi/linear_backward.hpp says.
//
// Sent     also m D numbers for each head of sums, to the next process and to all by a tree, if the gradient of the
//          features is wanted.
#pragma once

#include <attn/kernel/rfa_backward.hpp>
#include <attn/mpi/detail/kernel_scan_backward.hpp>
#include <attn/mpi/rfa.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace mpi {

/// The gradients of rfa; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Features,
          class Options = rfa_options<element_of<const Q&>>>
void rfa_backward(const Q& q, const K& k, const V& v, const Features& features, const D& d_out,
                  const rfa_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator, Options&& options = {},
                  execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread_backward(
      "mpi::rfa_backward", communicator,
      detail::with_features(detail::backward_views_of<S>(q, k, v, d_out), features), gradients,
      detail::spread_rfa<S>{detail::options_or_default<rfa_options<S>>(options)},
      detail::plain_execution_of("mpi::rfa_backward", exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
