// attn: the gradients of softmax attention over a sequence that several processes hold.
//
//   attn::mpi::full_softmax(q, k, v, out, MPI_COMM_WORLD, {.causal = true, .lse = lse}, threads);
//   attn::mpi::full_softmax_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, MPI_COMM_WORLD,
//                                    {.causal = true, .lse = lse}, threads);
//
// Every process gives its own tokens, as to mpi/full_softmax.hpp, and gets their gradients: together what
// full_softmax_backward gives on the whole (its formulas: softmax/full_softmax_backward.hpp). The gradients of keys and
// values are sent around the ring with them: every process adds its part, in the compute type, beginning with their
// owner and then in the order of the ranks. The gradients of alibi_slopes and sinks, which all processes share, are the
// sums over all processes, on each of them.
//
// Shapes   as for full_softmax_backward, with the tokens of this process; out, d_out and options.lse are of its
//          queries. A process may want other gradients than the others do, and lack lse: what any of them wants or
//          lacks is computed by all.
// Cost     The operations of full_softmax_backward, shared. Process p sends the keys and values of all processes but p
//          + 1, as the forward call does (twice, with Dv = 0 the first time, where lse is lacking), and those gradients
//          of the keys and values of all processes that are wanted, in the compute type: at most B Hkv (D + Dv)
//          elements a token. Memory: keys, values and their gradients of two processes, the gradient of q in the
//          compute type, and the scratch of full_softmax_backward.
// Result   To rounding that of full_softmax_backward on the whole; the same bits in every run, and for any number of
//          threads. On one process, bit for bit that of full_softmax_backward.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/mpi/detail/distributed_softmax_backward.hpp>
#include <attn/mpi/full_softmax.hpp>

namespace attn { inline namespace ATTN_ISA { namespace mpi {

/// The gradients attn::mpi::full_softmax_backward computes: q, k, v, alibi_slopes, sinks, d_lse, accumulate; those of
/// slopes and sinks are summed over all processes.
template <class S>
using full_softmax_gradients = softmax_gradients<S>;

/// The gradients of attn::mpi::full_softmax. See the top of the file; options, score functions (with positions in the
/// whole sequence) and an execution may each be left out.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = full_softmax_options<element_of<const Q&>>, class Score = attn::detail::no_score,
          class ScoreBackward = attn::detail::no_score_backward>
void full_softmax_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const full_softmax_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator,
                           Options&& options = {}, Score&& score = {}, ScoreBackward&& score_backward = {},
                           execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  const char* const name = "mpi::full_softmax_backward";
  auto call = detail::unchecked_backward_call<full_softmax_options>(name, q, k, v, out, d_out, gradients, options,
                                                                    score, score_backward, exec);
  const detail::distributed_softmax<S> group(name, communicator, call.q, call.k, call.v, call.options,
                                             detail::wants_of<S>(call.options, gradients, call.forward.exec),
                                             [&] { detail::check_backward_call(call); });
  if (group.processes.size() == 1) return detail::run_full_softmax_backward(call);
  detail::distributed_softmax_backward{group, call}.run();
}

}}}  // namespace attn::ATTN_ISA::mpi
