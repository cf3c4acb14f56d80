// attn: the gradients of linear attention over a sequence that several processes hold.
//
//   attn::mpi::linear_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, MPI_COMM_WORLD, {.causal = true}, threads);
//
// Every process gives its own tokens, as to mpi/linear.hpp, and gets their gradients: together what linear_backward
// (linear_backward.hpp) gives on the whole. Two scans of states: the sums of keys S, z, and from the other end those of
// queries R, y.
//
// Bits     Those of linear_backward in one process, on any number of processes, where every range of keys, and not
//          causal every range of queries, begins at a multiple of 1024 tokens and there are up to 16384 in all;
//          elsewhere the same to rounding.
// Shapes   as for linear_backward, with the tokens of this process; ranges and options as for mpi/linear.hpp. All
//          processes want the same gradients.
// Cost     The operations of linear_backward, shared; causal, P - 1 of the B Hkv heads once more by half.
// Sent     What mpi/linear.hpp sends, and as much again for the queries, from each process to the one before it; if not
//          causal, to the next one, and to all by a tree.
// Memory   Scratch of linear_backward per thread; two states; those of all segments of 1024 tokens, not causal twice,
//          causal of P - 1 heads twice, one head per thread.
// Threads  Each head is done by one thread.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
// Throws   also for gradients other than those of q, k, v and decay.
#pragma once

#include <attn/kernel/linear_backward.hpp>
#include <attn/mpi/detail/kernel_scan_backward.hpp>
#include <attn/mpi/linear.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class S, class F, class B, class T = compute_type<S>>
struct spread_linear_backward : spread_linear<S, F> {
  const B& map_backward;
  const linear_gradients<S>& gradients;

  static constexpr bool usable() { return require_map_backward<F, B, T>(); }
  void check_options(const validator& check) const {
    spread_linear<S, F>::check_options(check);
    const auto& g = gradients;
    if (g.log_decay || g.bonus || g.initial_state || g.initial_weights || g.d_final_state || g.d_final_weights)
      check.fail("gradients of q, k, v and decay over processes", "another");
  }
  auto back(const mapped_features<S, F>& map) const { return map_features_backward(map, map_backward); }
};
template <class S, class F, class B>
spread_linear_backward(spread_linear<S, F>, const B&, const linear_gradients<S>&) -> spread_linear_backward<S, F, B>;

}  // namespace detail

namespace mpi {

/// The gradients of linear; options, feature map, its derivative and execution may each be left out. See the top of the
/// file.
template <viewable Q, viewable K, viewable V, viewable D, class Options = linear_options<element_of<const Q&>>,
          class Map = feature_maps::elu_plus_one, class MapBackward = attn::detail::own_derivative>
void linear_backward(const Q& q, const K& k, const V& v, const D& d_out,
                     const linear_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator,
                     Options&& options = {}, Map&& map = {}, MapBackward&& map_backward = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread_backward(
      "mpi::linear_backward", communicator, detail::backward_views_of<S>(q, k, v, d_out), gradients,
      detail::spread_linear_backward{
          detail::spread_linear{detail::options_or_default<linear_options<S>>(options),
                                detail::callable_or_default<feature_maps::elu_plus_one>(map)},
          detail::callable_or_default<detail::own_derivative>(map_backward), gradients},
      detail::plain_execution_of("mpi::linear_backward", exec, options, map, map_backward));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
