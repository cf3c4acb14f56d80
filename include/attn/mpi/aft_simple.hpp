// attn: the attention-free transformer without biases over a sequence that several processes hold.
//
//   attn::mpi::aft_simple(q, k, v, out, MPI_COMM_WORLD, {.causal = true}, threads);  // every process: its tokens
//
// Each process has a range of the sequence, in the order of their ranks, and gets the rows of its own queries: together
// what aft_simple (aft_simple.hpp) gives on the whole. No key or value travels, only sums over them: a scan of states.
//
// Bits     Those of aft_simple in one process, on any number of processes, where every range begins at a multiple of
//          512 tokens; elsewhere the same to rounding.
// Ranges   may differ in length and be empty.
// Options  as of aft_simple. Lengths are those of the whole sequence, the same list on every process.
// Shapes   as for aft_simple, with the tokens of this process. All else is the same on every process.
// Cost     The operations of aft_simple, shared.
// Sent     A state, which is 3 B H D numbers of the compute type, D rounded up to vectors, to the next process; if not
//          causal, then one by a tree to all, P - 1 in all and up to log2 P by one process. Before that some hundred
//          bytes, in which shapes and options are compared.
// Memory   As aft_simple, and a state.
// Threads  The calling thread alone talks to MPI: MPI_THREAD_FUNNELED is enough.
// Throws   std::invalid_argument on every process alike, before anything is sent or written, where shapes or options do
//          not fit or differ between processes. Whatever else is thrown on one process (for want of memory) must end
//          the job: MPI_Abort, or an exception that leaves main under mpiexec.
#pragma once

#include <attn/aft/aft_simple.hpp>
#include <attn/mpi/detail/state_scan.hpp>

namespace attn::inline ATTN_ISA {
namespace detail {

template <class T>
void run_spread(const aft_simple_call<T>& call, const spread_sequence& sequence, execution& exec) {
  const aft_tensors<T>& x = call.x;
  const auto bytes = static_cast<std::size_t>(x.batch * x.heads * x.parts()) * sizeof(key_sums<T>);
  sums_array<T> before;  // of every head: what came before; not causal, of all there is
  call.run(
      exec, [&](arena& memory) { before = sums_array<T>::layout(memory, x.batch * x.heads, x.parts()); },
      [&](const sums_array<T>& sums, index chunks) {
        // As in one process: the sums of the first chunk of all are where sums begin.
        const auto add_chunks = [&] {
          for (index head = 0; head < x.batch * x.heads; ++head)
            for (index n = head * chunks; n < (head + 1) * chunks; ++n) {
              if (!sequence.key_holders().first() || n > head * chunks) {
                if (x.causal) {
                  sums.merge(n, before.at(head));
                  std::swap_ranges(sums.at(n), sums.at(n) + x.parts(), before.at(head));
                } else {
                  before.merge(head, sums.at(n));
                }
              } else {
                std::copy_n(sums.at(n), x.parts(), before.at(head));
                sums.clear(n);
              }
            }
        };
        if (!x.causal) {
          sequence.add_in_order(before.data, bytes, add_chunks);
          for (index n = 0; n < x.batch * x.heads * chunks; ++n)
            std::copy_n(before.at(n / chunks), x.parts(), sums.at(n));
        } else if (sequence.key_holders().holds()) {
          auto messages = sequence.key_holders().chain(sequence.group());
          messages.expect(before.data, bytes);
          messages.receive(0);
          add_chunks();
          messages.send(before.data, bytes);
          messages.finish();
        }
      });
}

}  // namespace detail

namespace mpi {

/// Attention-free mixing without biases. See the top of the file. Options and an execution may be left out.
template <viewable Q, viewable K, viewable V, viewable O, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple(const Q& q, const K& k, const V& v, O&& out, MPI_Comm communicator, Options&& options = {},
                execution_ref exec = {}) {
  namespace detail = attn::detail;
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  const auto& given = detail::options_or_default<aft_simple_options<S>>(options);
  auto x = detail::tensors_of(given, q, k, v, out);
  detail::spread_sequence sequence("mpi::aft_simple", communicator, x.q.extents[2], x.k.extents[2]);
  const index batch = std::max<index>(x.q.extents[0], 0);
  const detail::process_shape own{.batch = x.q.extents[0], .heads = x.q.extents[1], .kv_heads = x.k.extents[1],
                                  .dim = x.q.extents[3], .dim_v = x.v.extents[3],
                                  .element_bytes = detail::element_code<S>, .queries = x.q.extents[2],
                                  .keys = x.k.extents[2]};
  detail::agree_on(sequence.group(), own, [&](detail::common_settings& settings) {
    const detail::validator check(sequence.group().name());
    const index whole = sequence.whole_keys();
    detail::check_length_list(check, "lengths", given.lengths, batch, whole);
    sequence.set_lengths(batch, {whole, whole, given.lengths, given.lengths});
    x.lengths = sequence.own_keys();
    detail::check_aft(check, x);
    settings.add(detail::checksum<index>(given.lengths));
    settings.add(given.causal), settings.add(given.gate);
    settings.add(detail::width<T>);  // of the memory that is sent
  });
  detail::run_spread(
      detail::aft_simple_call<T>{x, detail::add_rows<T, S>,
                                 given.causal ? detail::simple_rows<T, S, true> : detail::simple_rows<T, S, false>},
      sequence, detail::execution_of(exec, options));
}

}  // namespace mpi
}  // namespace attn::inline ATTN_ISA
