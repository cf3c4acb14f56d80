// attn: aft_simple over a sequence spread over processes: what the forward and the backward pass share.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/mpi/detail/state_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The tokens of this process, before anything is checked.
template <class T>
distributed_sequence sequence_of(const char* name, MPI_Comm communicator, const aft_tensors<T>& x) {
  return {name, communicator, x.q.extents[2], x.k.extents[2]};
}

/// Checks a call, and compares it with those of the other processes. It gets the lengths of this process's tokens,
/// which lie in `sequence`.
template <class S, class T>
void agree_on_aft(distributed_sequence& sequence, aft_call<T>& call) {
  aft_tensors<T>& x = call.x;
  const std::span<const idx_t> lengths = x.lengths;
  const idx_t batch = std::max<idx_t>(x.q.extents[0], 0);
  const process_shape own{.batch = x.q.extents[0], .heads = x.q.extents[1], .kv_heads = x.k.extents[1],
                          .dim = x.q.extents[3], .dim_v = x.v.extents[3], .element_bytes = element_code<S>,
                          .queries = x.q.extents[2], .keys = x.k.extents[2]};
  agree_on(sequence.group(), own, [&](common_settings& settings) {
    const validator check{sequence.group().name()};
    const idx_t whole = sequence.whole_keys();
    if (x.key_mask) check.fail("no key_mask over processes", "one");
    check_length_list(check, "lengths", lengths, batch, whole);
    sequence.set_lengths(batch, {whole, whole, lengths, lengths});
    x.lengths = sequence.own_keys();
    check_aft(call.views, x);
    settings.add(checksum<idx_t>(lengths));
    settings.add(x.causal), settings.add(x.gate);
    settings.add(width<T>);  // of the memory that is sent
  });
}

/// From the sums of every chunk to what lies before each; not causal, `before` becomes the sum of all keys, for every
/// head. `before` is a state.
template <class T>
void scan_key_sums(const aft_tensors<T>& x, const distributed_sequence& sequence, const sums_array<T>& sums,
                   idx_t chunks, const sums_array<T>& before) {
  const holder_list& holders = sequence.key_holders();
  const auto bytes = static_cast<std::size_t>(x.batch * x.heads * x.parts()) * sizeof(key_sums<T>);
  // As in one process, the sums of the first chunk of all are where sums begin.
  const auto add_chunks = [&] {
    for (idx_t n = 0; n < x.batch * x.heads * chunks; ++n) {
      const idx_t head = n / chunks;
      if (holders.first() && n % chunks == 0) {
        std::copy_n(sums.at(n), x.parts(), before.at(head));
        sums.clear(n);
      } else if (x.causal) {
        sums.merge(n, before.at(head));
        std::swap_ranges(sums.at(n), sums.at(n) + x.parts(), before.at(head));
      } else {
        before.merge(head, sums.at(n));
      }
    }
  };
  if (!x.causal)
    sequence.add_in_order(before.data, bytes, add_chunks);
  else if (holders.holds())
    pass_on(holders.chain(sequence.group()), before.data, bytes, add_chunks);
}

}}}  // namespace attn::ATTN_ISA::detail
