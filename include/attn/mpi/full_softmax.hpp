// attn: exact softmax attention over a sequence that several processes hold.
//
//   attn::mpi::full_softmax(q, k, v, out, MPI_COMM_WORLD, {.causal = true}, threads);      // every process: its tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what full_softmax gives on the whole, to rounding. Ranges may differ in length and be empty, those of queries and of
// keys separately. With .zigzag process p of P has the parts p and 2 P - 1 - p of 2 P equal ones, one after the other:
// causal work is then the same for all; zigzag.hpp scatters and gathers in this order.
//                   Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context"
//
// Shapes   as for full_softmax, with the tokens of this process. All else is the same on every process.
// Cost     The operations of full_softmax, shared: in zigzag order evenly, also when causal. Process p sends the keys
//          and values of all processes but p + 1, B Hkv (D + Dv) elements a token, once each, while it attends to those
//          it has; and (P - 1) descriptions of the call of some 500 bytes. Memory: the keys and values of two processes
//          (those that have most), the scratch of full_softmax on them, the results of one bundle of key heads, and
//          with 16-bit elements a copy of out in float.
// Result   To rounding that of full_softmax on the whole; the same bits in every run, for any number of threads and
//          whatever the batch. On one process, bit for bit that of full_softmax.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
//
// The batch has one length: where items differ, what lies beyond their end is hidden by a score function.
#pragma once

#include <attn/mpi/detail/distributed_softmax.hpp>

namespace attn { inline namespace ATTN_ISA { namespace mpi {

/// Options of attn::mpi::full_softmax for elements of type S: as of attn::full_softmax. Lists and views are of all
/// heads.
template <class S>
struct full_softmax_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = attn::detail::fields::causal | attn::detail::fields::of_softmax;

  std::optional<real> scale{};
  bool causal = false;
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{};
  list_view<real> sinks{};
  view_field<real, 3> lse{};  // written if given, for the queries of this process: [B, H, Lq]
  bool zigzag = false;  // whether tokens are in zigzag order
};

/// See the top of the file. Options, a score function score(s, batch, head, i, j), i and j positions in the whole
/// sequence, and an execution may each be left out.
template <viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = attn::detail::no_score>
void full_softmax(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {},
                  Score&& score = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  auto call = detail::unchecked_call<full_softmax_options>("mpi::full_softmax", q, k, v, out, options, score, exec);
  const detail::distributed_softmax<S> group("mpi::full_softmax", communicator, call.q, call.k, call.v, call.options, 0,
                                             [&] { detail::check_call(call); });
  if (group.processes.size() == 1) return detail::run_full_softmax(call);
  group.attend(call.v, call.out, call.lse, call.terms.score, call.exec);
}

}}}  // namespace attn::ATTN_ISA::mpi
