// attn: exact softmax attention over a sequence that several processes hold.
//
//   attn::mpi::full_softmax(q, k, v, out, MPI_COMM_WORLD, {.causal = true}, threads);       // every process: its tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what full_softmax gives on the whole, to rounding. Ranges may differ in length and be empty, those of queries and of
// keys separately. With .zigzag process p of P has the parts p and 2 P - 1 - p of 2 P equal ones, one after the other:
// causal work is then the same for all; zigzag.hpp scatters and gathers in this order.
//                          Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers for near-infinite context"
//
// Shapes   as for full_softmax, with the tokens of this process. All else is the same on every process.
// Cost     The operations of full_softmax, shared; keys and values of all processes are received once, (P - 1) / P of
//          them, Hkv heads of them, while others are computed on. Memory: keys and values of two processes, the
//          gradient's aside, and the scratch of full_softmax on a part.
// Threads  The calling thread alone talks to MPI: MPI_THREAD_FUNNELED is enough.
// Throws   std::invalid_argument on every process alike, before anything is sent or written, where shapes or options do
//          not fit or differ between processes. Whatever else is thrown on one process (by a score function, for want of
//          memory) must end the job: MPI_Abort, or an exception that leaves main under mpiexec.
#pragma once

#include <attn/mpi/detail/softmax_group.hpp>

namespace attn::inline ATTN_ISA::mpi {

/// Options of attn::mpi::full_softmax for elements of type S: as of attn::full_softmax. Lists and views are of all heads.
template <class S>
struct full_softmax_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  bool causal = false;
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{};
  list_view<real> sinks{};
  /// Written if given, for the queries of this process: [B, H, Lq].
  tensor_view<real, 3> lse{};
  /// Are tokens in zigzag order?
  bool zigzag = false;
};

/// See the top of the file. Options, a score function score(s, batch, head, i, j), i and j positions in the whole sequence,
/// and an execution may each be left out.
template <viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = attn::detail::no_score>
void full_softmax(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {},
                  Score&& score = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  const auto& given = detail::options_or_default<full_softmax_options<S>>(options);
  auto&& function = detail::callable_or_default<detail::no_score>(score);
  detail::require_score<std::remove_reference_t<decltype(function)>, compute_type<S>>();
  detail::softmax_group<S> group("mpi::full_softmax", communicator, as_view(q), as_view(k), as_view(v), given,
                                 [&](const detail::validator& check) {
                                   const auto shape = detail::check_attention(check, as_view(q), as_view(k), as_view(v),
                                                                              as_view(out));
                                   detail::check_softmax_options(check, shape, given, as_view(q), as_view(k), as_view(v),
                                                                 as_view(out));
                                 });
  group.attend(as_view(out), given.lse, function, detail::execution_of(exec, options, score));
}

}  // namespace attn::inline ATTN_ISA::mpi
