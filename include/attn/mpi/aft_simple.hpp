// attn: the attention-free transformer without biases over a sequence that several processes hold.
//
//   attn::mpi::aft_simple(q, k, v, out, MPI_COMM_WORLD, {.causal = true}, threads);  // every process: its tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what aft_simple (aft_simple.hpp) gives on the whole. No key or value is sent, only sums over them: a scan of states.
//
// Bits     Those of aft_simple in one process, on any number of processes, where every range begins at a multiple of
//          256 tokens and there are up to 16384 in all; elsewhere the same to rounding.
// Options  as of aft_simple, without key_mask, which throws. Lengths are those of the whole sequence, the same list on
//          every process.
// Shapes   as for aft_simple, with the tokens of this process. All else is the same on every process.
// Cost     The operations of aft_simple, shared.
// Sent     A state, which is 3 B H D numbers of the compute type, D rounded up to vectors, to the next process; if not
//          causal, then one by a tree to all, P - 1 in all and up to log2 P by one process. Before that some hundred
//          bytes, in which shapes and options are compared.
// Memory   As aft_simple, and a state.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/aft/aft_simple.hpp>
#include <attn/mpi/detail/aft_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class S>
void run_spread(const aft_simple_driver<S>& call, const distributed_sequence& sequence, execution& exec) {
  using T = compute_type<S>;
  const aft_tensors<T>& x = call.x;
  sums_array<T> before;
  call.run(
      exec, [&](arena& memory) { before = sums_array<T>::layout(memory, x.batch * x.heads, x.parts()); },
      [&](const sums_array<T>& sums, idx_t chunks) {
        scan_key_sums(x, sequence, sums, chunks, before);
        if (!x.causal)
          for (idx_t n = 0; n < x.batch * x.heads * chunks; ++n)
            std::copy_n(before.at(n / chunks), x.parts(), sums.at(n));
      });
}

}  // namespace detail

namespace mpi {

template <viewable Q, viewable K, viewable V, viewable O, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {},
                execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  const char* const name = "mpi::aft_simple";
  auto call = detail::unchecked_aft<aft_simple_options<S>>(name, q, k, v, out, tensor_view<const S>(), options, exec);
  auto sequence = detail::sequence_of(name, communicator, call.x);
  detail::agree_on_aft<S>(sequence, call);
  detail::run_spread(detail::aft_simple_driver<S>{call.x}, sequence, call.exec);
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
