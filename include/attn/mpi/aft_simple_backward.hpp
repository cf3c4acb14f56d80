// attn: the gradients of aft_simple over a sequence that several processes hold.
//
//   attn::mpi::aft_simple_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, MPI_COMM_WORLD, {.causal = true});
//
// Every process gives its own tokens, as to mpi/aft_simple.hpp, and gets their gradients: together what
// aft_simple_backward (aft_simple_backward.hpp) gives on the whole. Two scans of states: sums over keys, and from the
// other end sums over rows.
//
// Bits     Those of aft_simple_backward in one process, on any number of processes, where every range begins at a
//          multiple of 256 tokens and there are up to 16384 in all; elsewhere the same to rounding.
// Shapes   as for aft_simple_backward, with the tokens of this process; ranges and options as for mpi/aft_simple.hpp.
//          Processes may want different gradients.
// Cost     The operations of aft_simple_backward, shared.
// Sent     Causal, what mpi/aft_simple.hpp sends, and as much again from each process to the one before it; else five
//          thirds of what that sends.
// Memory   As aft_simple_backward, and two states.
// Rules    of ranges, threads, options that differ and exceptions: README.md of this folder.
#pragma once

#include <attn/aft/aft_simple_backward.hpp>
#include <attn/mpi/detail/aft_scan.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class S, class T = compute_type<S>>
void run_spread_backward(aft_simple_backward_driver<S> call, const distributed_sequence& sequence, execution& exec) {
  const aft_tensors<T>& x = call.x;
  const auto limit = call.limit_threads(exec);
  const idx_t heads = call.heads(), parts = call.parts, chunks = call.chunks;
  sums_array<T> before, after;  // two states
  packet<T>* total = nullptr;   // of dy, for every head: sums, then what they lost
  exec.shared_scratch([&](arena& memory) {
    call.allocate(memory);
    before = sums_array<T>::layout(memory, heads, parts), after = sums_array<T>::layout(memory, heads, parts);
    return total = memory.allocate<packet<T>>(2 * heads * parts);
  });
  exec.for_each(heads * chunks, [&](idx_t task, int) { call.sum(task); });
  scan_key_sums(x, sequence, call.keys, chunks, before);
  const holder_list& holders = sequence.key_holders();
  if (x.causal) {
    exec.for_each(heads * chunks, [&](idx_t task, int worker) { call.write(task, true, false, exec, worker); });
    // From what lies after the last chunk to what does after each, as hand_on() of one process has it.
    const auto add_rows = [&] {
      for (idx_t head = 0; head < heads; ++head)
        for (idx_t n = (head + 1) * chunks - 1; n >= head * chunks; --n) {
          if (holders.last() && n == (head + 1) * chunks - 1) after.clear(head);
          std::copy_n(after.at(head), parts, call.later.at(n));
          after.clear(head);
          after.merge(head, call.later.at(n));
          after.merge(head, call.rows.at(n));
        }
    };
    if (holders.holds())
      pass_on(holders.chain(sequence.group(), true), after.data,
              static_cast<std::size_t>(heads * parts) * sizeof(key_sums<T>), add_rows);
  } else {
    packet<T>* const lost = total + heads * parts;
    sequence.add_in_order(total, static_cast<std::size_t>(2 * heads * parts) * sizeof(packet<T>), [&] {
      if (holders.first()) std::fill_n(total, 2 * heads * parts, zero<T>());
      for (idx_t n = 0; n < heads * chunks; ++n)
        for (idx_t p = 0; p < parts; ++p)
          add_compensated(total[n / chunks * parts + p], lost[n / chunks * parts + p], call.gated[n * parts + p]);
    });
    for (idx_t n = 0; n < (chunks > 0 ? heads * parts : 0); ++n) total[n] = compensated_sum<T>(total[n], lost[n]);
    for (idx_t head = 0; head < heads && chunks > 0; ++head) {
      std::copy_n(before.at(head), parts, call.keys.at(head * chunks));
      std::copy_n(total + head * parts, parts, call.gated + head * chunks * parts);
    }
  }
  exec.for_each(heads * chunks, [&](idx_t task, int worker) { call.write(task, false, true, exec, worker); });
}

}  // namespace detail

namespace mpi {

template <viewable Q, viewable K, viewable V, viewable D, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple_backward(const Q& q, const K& k, const V& v, const D& d_out,
                         const aft_simple_gradients<element_of<const Q&>>& gradients, MPI_Comm communicator,
                         Options&& options = {}, execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  const char* const name = "mpi::aft_simple_backward";
  auto call = detail::unchecked_aft_backward<aft_simple_options<S>>(
      name, q, k, v, tensor_view<const S>(), d_out, {gradients.q, gradients.k, gradients.v, gradients.accumulate},
      options, exec);
  auto sequence = detail::sequence_of(name, communicator, call.x);
  detail::agree_on_aft<S>(sequence, call);
  detail::run_spread_backward(detail::aft_simple_backward_driver<S>{call.x}, sequence, call.exec);
}

}  // namespace mpi
}}  // namespace attn::ATTN_ISA
