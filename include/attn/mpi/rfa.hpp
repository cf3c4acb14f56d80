// attn: random feature attention over a sequence that several processes hold.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});                   // the same on every process
//   attn::mpi::rfa(q, k, v, out, features, MPI_COMM_WORLD, {.causal = true, .gate = g}, threads);
//
// Each process gets the rows of its own queries: together what rfa (rfa.hpp) gives on the whole. As mpi/linear.hpp says
// of ranges, bits, lengths, shapes, cost, messages and memory, with 2 m features for D; the gate is of this process's
// tokens.
//
// Options  as of rfa, without key_mask, which throws.
#pragma once

#include <attn/kernel/rfa.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class T>
struct rfa_features_backward;
template <class S>
using spread_rfa = spread_features<compute_type<S>, rfa_features, rfa_features_backward>;

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
                     detail::spread_rfa<S>{detail::options_or_default<rfa_options<S>>(options)},
                     detail::plain_execution_of("mpi::rfa", exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
