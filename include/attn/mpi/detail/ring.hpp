// attn: softmax attention over the sequences of several processes: who sees what, and how keys travel.
//
// Keys and values travel round a ring (Liu et al. 2023, "Ring attention with blockwise transformers"): in step n process p
// attends to those of process p - n, while they go on to p + 1. Every block of queries and keys is one call of the
// operator, whose results are merged by their lse, or two where a causal edge runs through it.
#pragma once

#include <attn/core/tensor.hpp>
#include <attn/mpi/detail/ranges.hpp>

namespace attn::inline ATTN_ISA::detail {

/// One call of an operator on some of the queries of a process and some of the keys that are there.
struct block_call {
  index query = 0, queries = 0;   // the first row, and how many
  index key = 0, keys = 0;        // among the keys that are there
  index query_shift = 0;          // position in the whole sequence = position in this call + shift
  index key_shift = 0;
  bool causal = false;
};

/// body(block_call) for what the queries `q` see of the keys `k`; row i of the whole sequence is at position i + shift.
template <class Body>
void for_each_block(const sequence_range& q, const sequence_range& k, index shift, bool causal, const Body& body) {
  if (q.length == 0 || k.length == 0) return;
  const index position = q.begin + shift;  // of the first query
  const auto call = [&](index row, index rows, index keys, bool edge) {
    // In the call the last query is at the last key.
    body(block_call{q.local + row, rows, k.local, keys, position + row - (keys - rows), k.begin, edge});
  };
  if (!causal) return call(0, q.length, k.length, false);
  const index first = std::clamp(k.begin - position, index(0), q.length);               // sees a key
  const index all = std::clamp(k.begin + k.length - 1 - position, first, q.length);     // sees all keys
  if (first < all) call(first, all - first, position + all - k.begin, true);
  if (all < q.length) call(all, q.length - all, k.length, false);
}

/// Keys and values of every process, one after another: those of step n are there while those of step n + 1 arrive.
template <class S>
class travelling_keys {
 public:
  struct views {
    tensor_view<S> k, v;
  };

  travelling_keys(const process_group& group, const sequence_split& split, const tensor_view<const S>& k,
                  const tensor_view<const S>& v)
      : group_(group), split_(split), k_(k.extents()), v_(v.extents()) {
    index most = 0;
    for (int p = 0; p < group.size(); ++p) most = std::max(most, split.length(p));
    for (auto& memory : memory_) memory.resize(count(most));
    const views own = at(0, group.rank());
    copy(k, own.k);
    copy(v, own.v);
  }

  /// Whose keys are here.
  int source() const { return (group_.rank() - step_ + group_.size()) % group_.size(); }
  bool last() const { return step_ + 1 == group_.size(); }
  views here() { return at(step_ % 2, source()); }

  /// Begins to send them on and to receive the next.
  void begin_step() {
    if (last()) return;
    const int size = group_.size(), next = (group_.rank() + 1) % size, before = (group_.rank() + size - 1) % size;
    const int arriving = (source() + size - 1) % size;
    messages_.receive(memory_[(step_ + 1) % 2].data(), count(split_.length(arriving)) * sizeof(S), before, 0, group_.get());
    messages_.send(memory_[step_ % 2].data(), count(split_.length(source())) * sizeof(S), next, 0, group_.get());
  }
  void progress() { messages_.progress(); }
  void end_step() {
    messages_.wait();
    ++step_;
  }
  std::size_t sent_bytes() const { return messages_.sent_bytes(); }

 private:
  std::size_t count(index keys) const {
    return static_cast<std::size_t>(k_[0] * k_[1] * keys * (k_[3] + v_[3]));
  }
  views at(int buffer, int process) {
    const index keys = split_.length(process);
    S* const memory = memory_[buffer].data();
    return {tensor_view<S>(memory, std::array<index, 4>{k_[0], k_[1], keys, k_[3]}),
            tensor_view<S>(memory + k_[0] * k_[1] * keys * k_[3], std::array<index, 4>{k_[0], k_[1], keys, v_[3]})};
  }
  static void copy(const tensor_view<const S>& from, const tensor_view<S>& to) {
    for (index b = 0; b < to.extent(0); ++b)
      for (index h = 0; h < to.extent(1); ++h)
        for (index j = 0; j < to.extent(2); ++j)
          for (index d = 0; d < to.extent(3); ++d) to(b, h, j, d) = from(b, h, j, d);
  }

  const process_group& group_;
  const sequence_split& split_;
  std::array<index, 4> k_, v_;
  std::vector<S> memory_[2];
  int step_ = 0;
  message_list messages_;
};

}  // namespace attn::inline ATTN_ISA::detail
