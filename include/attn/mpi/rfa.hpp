// attn: random feature attention over a sequence that several processes hold.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});                   // the same on every process
//   attn::mpi::rfa(q, k, v, out, features, MPI_COMM_WORLD, {.causal = true, .gate = g}, threads);
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what rfa (rfa.hpp) gives on the whole. No key or value is sent, only sums S, z of features: a scan of states.
//
// Bits     Those of rfa in one process, on any number of processes, where every range of keys begins at a multiple of
//          1024 tokens and there are up to 16384 in all; elsewhere the same to rounding.
// Options  as of rfa, without key_mask, which throws. Lengths are those of the whole sequence, the same list on every
//          process; the gate is of this process's tokens.
// Shapes   as for rfa, with the tokens of this process. All else is the same on every process.
// Cost     The operations of rfa, shared; causal, P - 1 of the B Hkv heads are summed up twice.
// Sent     A state, which is B Hkv 2 m (Dv + 1) numbers of the compute type, 2 m and Dv rounded up to vectors (H for
//          Hkv where features or gates differ between query heads), to the next process; if not causal, then one by a
//          tree to all, P - 1 in all and up to log2 P by one process. Before that some hundred bytes, in which shapes
//          and options are compared.
// Memory   A state, and the states of all segments of 1024 tokens of one head, causal of P - 1 heads, one per thread.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/kernel/rfa.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// rfa_operator or rfa_backward_operator over processes.
template <class Base>
struct spread_rfa : Base {
  void settings(common_settings& settings) const { settings.add(static_cast<double>(this->options.norm_eps)); }
};

}  // namespace detail

namespace mpi {

/// Random feature attention; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Features,
          class Options = rfa_options<element_of<const Q&>>>
void rfa(const Q& q, const K& k, const V& v, O&& out, const Features& features, MPI_Comm communicator,
         Options&& options = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread("mpi::rfa", communicator, detail::with_features(detail::views_of<S>(q, k, v, out), features),
                     detail::spread_rfa<detail::rfa_operator<S>>{
                         {detail::options_or_default<rfa_options<S>>(options)}},
                     detail::execution_of(exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
