// attn: the gradients of aft_simple over a sequence that several processes hold.
//
//   attn::mpi::aft_simple_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, MPI_COMM_WORLD, {.causal = true});
//
// Every process gives its own tokens, as to mpi/aft_simple.hpp, and gets their gradients: together what
// aft_simple_backward (aft_simple_backward.hpp) gives on the whole. Two scans of states: sums over keys, and from the
// other end sums over rows.
//
// Bits     Those of aft_simple_backward in one process, on any number of processes, where every range begins at a
//          multiple of 256 tokens and there are up to 16384 in all; elsewhere the same to rounding.
// Shapes   as for aft_simple_backward, with the tokens of this process; ranges and options as for mpi/aft_simple.hpp.
//          Processes may want different gradients.
// Cost     The operations of aft_simple_backward, shared.
// Sent     Causal, what mpi/aft_simple.hpp sends, and as much again from each process to the one before it; else five
//          thirds of what that sends.
// Memory   As aft_simple_backward, and two states.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/aft/aft_simple_backward.hpp>
#include <attn/mpi/detail/aft_scan_backward.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace mpi {

template <viewable Q, viewable K, viewable V, viewable D, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple_backward(const Q& q, const K& k, const V& v, const D& d_out,
                         const aft_simple_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator,
                         Options&& options = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  const char* const name = "mpi::aft_simple_backward";
  auto call = detail::unchecked_aft_backward<aft_simple_options<S>>(
      name, q, k, v, tensor_view<const S>(), d_out, {gradients.q, gradients.k, gradients.v, gradients.accumulate},
      options, exec);
  auto sequence = detail::sequence_of(name, communicator, call.x);
  detail::agree_on_aft<S>(sequence, call);
  detail::run_spread_backward(detail::aft_simple_backward_driver<S>{call.x}, sequence, call.exec);
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
