// attn: sliding-window attention over a sequence that several processes hold.
//
//   attn::mpi::sliding_window(q, k, v, out, MPI_COMM_WORLD, {.left = 4096, .right = 0}, threads);   // its own tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what sliding_window gives on the whole (softmax/sliding_window.hpp). Ranges may differ in length and be empty, those
// of queries and of keys separately; a window may reach over several of them.
//
// Shapes   as for sliding_window, with the tokens of this process; global_positions are those of the whole sequence,
//          the rows of q_global, k_global and v_global the own tokens'. All else is the same on every process.
// Cost     The operations of sliding_window, shared by queries; those of global queries by keys. A process gets the
//          keys and values that its queries' windows reach beyond its own, B Hkv (D + Dv) elements each, from the
//          processes that have them, and no others but the global ones. A global query, B H D elements, goes to every
//          process with keys, which sends back B H (Dv + 1) numbers of the compute type; and each process sends (P - 1)
//          descriptions of the call of some 500 bytes. Memory: the keys and values that queries see whose windows reach
//          beyond its own, and up to 1920 queries more on each side (with global positions: all queries); those of its
//          own that others want; the scratch of sliding_window; with global keys beyond the windows two copies of out
//          in the compute type; B H (D + P Dv) numbers for every global query.
// Result   To rounding that of sliding_window on the whole, the same bits in every run and for any number of threads.
//          The very bits of sliding_window on one process, and on any number without dilation and global positions
//          where Lq = Lk and every range begins at a multiple of 96 ceil(clamp(left + right, 384, 1920) / 96) tokens
//          (right counts as 0 where causal).
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/mpi/detail/distributed_window.hpp>

namespace attn { inline namespace ATTN_ISA { namespace mpi {

/// Options of attn::mpi::sliding_window for elements of type S: as of attn::sliding_window, but for lengths, which are
/// those of the processes' ranges. Lists and views are of all heads.
template <class S>
struct sliding_window_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = attn::detail::fields::causal | attn::detail::fields::of_softmax;

  std::optional<real> scale{};
  bool causal = false;
  idx_t left = 128, right = 128;
  list_view<idx_t> dilation{};
  list_view<idx_t> global_positions{};  // of the whole sequence
  view_field<const S> q_global{}, k_global{}, v_global{};  // all three, or none, on every process
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};  // written if given, for the queries of this process: [B, H, Lq]
};

/// See the top of the file. Options, a score function score(s, batch, head, i, j), i and j positions in the whole
/// sequence, and an execution may each be left out.
template <viewable Q, viewable K, viewable V, viewable O, class Options = sliding_window_options<element_of<const Q&>>,
          class Score = attn::detail::no_score>
void sliding_window(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {},
                    Score&& score = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  auto call = detail::unchecked_call<sliding_window_options>("mpi::sliding_window", q, k, v, out, options, score, exec);
  const auto& given = call.options;
  const detail::process_communicator group("mpi::sliding_window", communicator);
  const attn::sliding_window_options<S> of_whole{
      .scale = given.scale, .causal = given.causal, .left = given.left, .right = given.right,
      .dilation = given.dilation, .global_positions = given.global_positions, .q_global = given.q_global,
      .k_global = given.k_global, .v_global = given.v_global, .softcap = given.softcap,
      .alibi_slopes = given.alibi_slopes, .sinks = given.sinks, .lse = given.lse};
  const auto own = detail::shape_of_process<S>(
      call.q, call.k, call.v, given,
      {double(given.left), double(given.right), double(bool(given.q_global)), detail::checksum<idx_t>(given.dilation),
       detail::checksum<idx_t>(given.global_positions)});
  const auto all = detail::agree(group, own, [&] {
    detail::check_call(call);
    detail::check_window_options(call.views, call.shape, of_whole, call.out);
  });
  if (group.size() == 1) return detail::run_sliding_window(call, of_whole);
  detail::distributed_window(group, all, call, of_whole).attend();
}

}}}  // namespace attn::ATTN_ISA::mpi
