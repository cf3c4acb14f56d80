// attn: linear attention over a sequence that several processes hold.
//
//   attn::mpi::linear(q, k, v, out, MPI_COMM_WORLD, {.causal = true}, threads);      // every process: its tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what linear (linear.hpp) gives on the whole. No key or value is sent, only sums S, z of features: a scan of states.
//
// Bits     Those of linear in one process, on any number of processes, where every range of keys begins at a multiple
//          of 1024 tokens and there are up to 16384 in all; elsewhere the same to rounding.
// Options  as of linear, without log_decay, bonus, key_mask, states and a scale other than 1, which throw. Lengths are
//          those of the whole sequence, the same list on every process; decay is of this process's tokens.
// Shapes   as for linear, with the tokens of this process. All else is the same on every process.
// Cost     The operations of linear, shared; causal, P - 1 of the B Hkv heads are summed up twice.
// Sent     A state, which is B Hkv (D + 1) Dv numbers of the compute type, D and Dv rounded up to vectors (H for Hkv
//          where decay is per query head), to the next process; if not causal, then one by a tree to all, P - 1 in all
//          and up to log2 P by one process. Before that some hundred bytes, in which shapes and options are compared.
// Memory   A state, and the states of all segments of 1024 tokens of one head, causal of P - 1 heads, one per thread.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/kernel/linear.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// The checks and the map of linear over processes, which share out only some of its options.
template <class S, class F, class T = compute_type<S>>
struct spread_linear {
  kernel_parameters<T> given;
  const F& feature;
  idx_t count = 0;  // of features

  static constexpr bool usable() { return require_feature_map<F, T>(); }
  void check_options(const validator& check) const {
    const recurrence_parameters<T>& o = given.recurrence;
    if (o.scale != 1) check.fail("scale 1 over processes", static_cast<double>(o.scale));
    if (o.log_decay) check.fail("decay in place of log_decay over processes", "log_decay");
    if (o.bonus) check.fail("no bonus over processes", "one");
    if (o.initial_state || o.initial_weights || o.final_state || o.final_weights)
      check.fail("no initial or final state over processes", "one");
  }
  void validate(const validator& check, kernel_call<T>& call) {
    count = features_of(feature, call.shape.dim);
    check_linear(check, call, count);
  }
  void settings(common_settings& settings) const { settings.add(static_cast<double>(count)); }
  mapped_features<S, F> map(const kernel_call<T>& call) const { return {feature, call.shape.dim, count}; }
};
template <class S, class F>
spread_linear(const linear_options<S>&, const F&) -> spread_linear<S, F>;

}  // namespace detail

namespace mpi {

/// Linear attention; options, feature map and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = linear_options<element_of<const Q&>>,
          class Map = feature_maps::elu_plus_one>
void linear(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {}, Map&& map = {},
            execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread("mpi::linear", communicator, detail::views_of<S>(q, k, v, out),
                     detail::spread_linear{detail::options_or_default<linear_options<S>>(options),
                                           detail::callable_or_default<feature_maps::elu_plus_one>(map)},
                     detail::plain_execution_of("mpi::linear", exec, options, map));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
