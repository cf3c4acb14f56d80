// attn: FAVOR+ over a sequence that several processes hold.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});                   // the same on every process
//   attn::mpi::performer(q, k, v, out, features, MPI_COMM_WORLD, {.causal = true}, threads);
//
// Each process gets the rows of its own queries: together what performer (performer.hpp) gives on the whole. As
// mpi/linear.hpp says of ranges, bits, lengths, shapes, cost, messages and memory, with m features for D (2 m for the
// kernels with two features a row) and, but for relu, a log scale beside each.
//
// Options  as of performer, without key_mask, which throws.
// Sent     also, in the way of states and before them, B Hkv D numbers in double for center_keys, the mean key, and
//          B Hkv for feature_eps of positive features, the maximum.
// Memory   for center_keys also D numbers per 1024 tokens.
#pragma once

#include <attn/kernel/performer.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// The map's shared memory: what it takes from the keys, it takes from those of all processes.
template <class T>
void prepare_spread(performer_features<T>& features, const distributed_sequence& sequence, execution& exec) {
  const kernel_call<T>& call = features.call;
  const idx_t item_heads = features.item_heads(), dim = features.dim;
  features.pack_rows();
  if (features.centred) {
    const idx_t most = (call.shape.keys + kernel_segment - 1) / kernel_segment;
    std::vector<double> sums(static_cast<std::size_t>(item_heads * dim));
    std::vector<double> own(static_cast<std::size_t>(most * item_heads * dim));
    exec.for_each(item_heads * most, [&](idx_t task, int worker) {
      T* const row = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(dim); });
      features.sum_segment(task % item_heads, task / item_heads, own.data() + task * dim, row);
    });
    sequence.add_in_order(sums.data(), sums.size() * sizeof(double), [&] {
      for (std::size_t n = 0; n < own.size(); ++n) sums[n % sums.size()] += own[n];
    });
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      features.set_centre(item_head, sums.data() + item_head * dim, sequence.keys(item_head / call.heads));
  }
  if (features.published) {
    features.find_maxima(exec);
    const std::vector<T> own(features.maxima, features.maxima + item_heads);
    if (sequence.key_holders().first()) std::fill_n(features.maxima, item_heads, -std::numeric_limits<T>::infinity());
    sequence.add_in_order(features.maxima, own.size() * sizeof(T), [&] {
      for (std::size_t n = 0; n < own.size(); ++n) features.maxima[n] = (std::max)(features.maxima[n], own[n]);
    });
  }
}

template <class T>
struct performer_features_backward;
template <class S>
using spread_performer = spread_features<compute_type<S>, performer_features, performer_features_backward>;

}  // namespace detail

namespace mpi {

/// FAVOR+ attention; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Features,
          class Options = performer_options<element_of<const Q&>>>
void performer(const Q& q, const K& k, const V& v, O&& out, const Features& features, MPI_Comm communicator,
               Options&& options = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  detail::run_spread("mpi::performer", communicator, detail::with_features(detail::views_of<S>(q, k, v, out), features),
                     detail::spread_performer<S>{detail::options_or_default<performer_options<S>>(options)},
                     detail::plain_execution_of("mpi::performer", exec, options));
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
