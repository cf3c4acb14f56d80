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

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class S, class F, class B, class T = compute_type<S>>
void run_spread_linear_backward(MPI_Comm communicator, const kernel_backward_views<S>& views,
                                const linear_gradients<S>& gradients, const linear_options<S>& options, const F& map,
                                const B& map_backward, execution& exec) {
  if constexpr (require_feature_map<F, T>() && require_map_backward<F, B, T>()) {
    spread_kernel_call<S> spread("mpi::linear_backward", communicator, views.x);
    idx_t count = 0;
    kernel_call<T> call = spread.check(
        options, options.decay,
        [&](call_views& check, const linear_options<S>& own, common_settings& settings) {
          check_spread_linear(check, own);
          if (gradients.log_decay || gradients.bonus || gradients.initial_state || gradients.initial_weights ||
              gradients.d_final_state || gradients.d_final_weights)
            check.fail("gradients of q, k, v and decay over processes", "another");
          kernel_call<T> checked = check_kernel_backward<false>(check, views, own);
          checked.normalise = options.normalise;
          count = features_of(map, checked.shape.dim);
          check_feature_count(check, count, checked.shape);
          settings.add(options.normalise), settings.add(static_cast<double>(count));
          add_wanted(settings, views);
          return checked;
        });
    mapped_features<S, F> features(map, call.shape.dim, count);
    mapped_features_backward<S, F, B> back(map_backward, call.shape.dim, count);
    run_spread_backward(spread.sequence(), views, call, features, back, exec, [&] { features.prepare(exec); });
  }
}

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
  const auto& given = detail::options_or_default<linear_options<S>>(options);
  auto views = detail::backward_views_of<S>(q, k, v, d_out, gradients);
  views.gate_name = "decay";
  views.gate = given.decay, views.d_gate = gradients.decay;
  detail::run_spread_linear_backward<S>(communicator, views, gradients, given,
                                        detail::callable_or_default<feature_maps::elu_plus_one>(map),
                                        detail::callable_or_default<detail::own_derivative>(map_backward),
                                        detail::execution_of(exec, options, map, map_backward));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
