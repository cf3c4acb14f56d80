// attn: the gradients of aft_simple over a sequence spread over processes.
#pragma once

#include <attn/aft/detail/aft_simple_backward_run.hpp>
#include <attn/mpi/detail/aft_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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

}}}  // namespace attn::ATTN_ISA::detail
