// attn: the gradients of random feature attention over a sequence that several processes hold.
//
//   attn::mpi::rfa_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .v = dv, .features = dw}, MPI_COMM_WORLD,
//                           {.causal = true, .gate = g}, threads);
//
// Every process gives its own tokens, as to mpi/rfa.hpp, and gets their gradients: together what rfa_backward
// (rfa_backward.hpp) gives on the whole; and the gradient of the features, which is the same on all processes. Two
// scans of states: the sums of keys S, z, and from the other end those of queries.
//
// Bits     Those of rfa_backward in one process, on any number of processes, where every range of keys, and not causal
//          every range of queries, begins at a multiple of 1024 tokens and there are up to 16384 in all; elsewhere, and
//          of features, the same to rounding.
// Shapes   as for rfa_backward, with the tokens of this process; ranges and options as for mpi/rfa.hpp. All processes
//          want the same gradients.
// Cost     The operations of rfa_backward, shared; causal, P - 1 of the B Hkv heads once more by half.
// Sent     What mpi/rfa.hpp sends, and as much again for the queries, from each process to the one before it; if not
//          causal, to the next one, and to all by a tree. Then m D numbers for each head of sums, to the next process
//          and to all by a tree, if the gradient of the features is wanted.
// Memory   Scratch of rfa_backward per thread; two states; those of all segments of 1024 tokens, not causal twice,
//          causal of P - 1 heads twice, one head per thread.
// Threads  Each head is done by one thread.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
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
      detail::spread_rfa<detail::rfa_backward_operator<S>>{{{detail::options_or_default<rfa_options<S>>(options)}}},
      detail::execution_of(exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
