// attn: softmax attention over the sequences of several processes: which keys each process sees, and how keys are sent.
//
// Keys and values are sent around a ring (Liu et al. 2023, "Ring attention with blockwise transformers"): in step n
// process p attends to those of process p - n, while they go on to p + 1. Every block of queries and keys is one call
// of the operator. The gradients of keys and values follow them, bundle by bundle, each sent on as soon as a process
// has added its part, and are back with their owner after as many steps as there are processes.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>
#include <attn/core/tensor.hpp>
#include <attn/mpi/detail/communicator.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One call of an operator on some of the queries of a process and some of the keys that are there.
struct block_call {
  idx_t query = 0, queries = 0;  // the first row, and how many
  idx_t key = 0, keys = 0;       // among the keys that are there
  idx_t first_position = 0;      // of the queries, among these keys
  idx_t shift = 0;               // position in the whole sequence = position in this call + shift
  bool causal = false;
  std::size_t range = 0;    // of the queries' process: its first or second
  bool whole_range = true;  // whether these are all queries of the range
};

/// body(block_call) for what the queries of range `q` see of the keys `k`; row i of the whole sequence is at position
/// i + shift.
template <class Body>
void for_each_block(const sequence_range& q, std::size_t range, const sequence_range& k, idx_t shift, bool causal,
                    const Body& body) {
  const idx_t position = q.begin + shift - k.begin;  // of the first query among these keys
  const idx_t hidden = causal ? std::clamp(-position, idx_t(0), q.length) : 0;  // queries before all of them
  const idx_t rows = q.length - hidden, first = position + hidden;
  if (rows > 0 && k.length > 0)
    body(block_call{.query = q.local + hidden, .queries = rows, .key = k.local, .keys = k.length,
                    .first_position = first, .shift = k.begin, .causal = causal && first < k.length - 1,
                    .range = range, .whole_range = hidden == 0});
}

/// Number of key heads that are computed between two calls of MPI: about a millisecond of work, at least one. The same
/// on all processes; it does not affect results.
inline idx_t heads_together(idx_t kv_heads, double operations) {
  const double bundles = std::clamp(operations / 5e7, 1.0, static_cast<double>(std::max<idx_t>(1, kv_heads)));
  return std::max<idx_t>(1, static_cast<idx_t>(std::ceil(static_cast<double>(kv_heads) / bundles)));
}

/// The tokens of all processes, of queries or of keys.
inline sequence_split split_of(const std::vector<process_shape>& all, idx_t process_shape::*tokens,
                               bool zigzag = false) {
  std::vector<idx_t> lengths;
  for (const process_shape& one : all) lengths.push_back(one.*tokens);
  return {lengths, zigzag};
}

/// The process whose keys are here in a step of the ring.
inline int source_of(const process_communicator& group, int step) {
  return (group.rank() - step % group.size() + group.size()) % group.size();
}

/// Keys and values, or their gradients.
template <class E>
struct key_views {
  tensor_view<E> k, v;
};

/// Memory for the keys and values, or their gradients, of any one process: head after head, so that heads travel alone.
template <class E>
struct key_buffer {
  idx_t batch = 0, heads = 0, dim = 0, dim_v = 0, most = 0;
  E *k = nullptr, *v = nullptr;

  /// k and v have the extents of any process; `most` are the keys of the one that has most.
  static key_buffer layout(arena& memory, const std::array<idx_t, 4>& k, const std::array<idx_t, 4>& v, idx_t most) {
    E* const keys = memory.allocate<E>(k[0] * k[1] * most * k[3]);
    return {k[0], k[1], k[3], v[3], most, keys, memory.allocate<E>(k[0] * k[1] * most * v[3])};
  }

  key_views<E> views(idx_t n) const { return {view(k, n, dim), view(v, n, dim_v)}; }

  void clear() const {
    std::fill_n(k, heads * head_size(most, dim), E(0));
    std::fill_n(v, heads * head_size(most, dim_v), E(0));
  }
  void send(message_list& messages, idx_t n, idx_t head, idx_t count, int to, int tag, MPI_Comm comm) const {
    messages.send(k + head * head_size(n, dim), bytes(n, dim, count), to, tag, comm);
    messages.send(v + head * head_size(n, dim_v), bytes(n, dim_v, count), to, tag, comm);
  }
  void receive(message_list& messages, idx_t n, idx_t head, idx_t count, int from, int tag, MPI_Comm comm) const {
    messages.receive(k + head * head_size(n, dim), bytes(n, dim, count), from, tag, comm);
    messages.receive(v + head * head_size(n, dim_v), bytes(n, dim_v, count), from, tag, comm);
  }

 private:
  idx_t head_size(idx_t n, idx_t width) const { return batch * n * width; }
  std::size_t bytes(idx_t n, idx_t width, idx_t count) const {
    return static_cast<std::size_t>(count * head_size(n, width)) * sizeof(E);
  }
  tensor_view<E> view(E* data, idx_t n, idx_t width) const {
    return {data, {batch, heads, n, width}, {n * width, head_size(n, width), width, 1}};
  }
};

/// Two of them: one that is here, one that arrives; on one process none does.
template <class E>
std::array<key_buffer<E>, 2> layout_key_buffers(arena& memory, const std::array<idx_t, 4>& k,
                                                const std::array<idx_t, 4>& v, const sequence_split& split) {
  const auto here = key_buffer<E>::layout(memory, k, v, split.most());
  return {here, key_buffer<E>::layout(memory, k, v, split.processes() > 1 ? split.most() : 0)};
}

/// body(b, h, i) for every row of a view of four axes.
template <class T, class Body>
void for_each_row(const tensor_view<T>& x, const Body& body) {
  for (idx_t b = 0; b < x.extent(0); ++b)
    for (idx_t h = 0; h < x.extent(1); ++h)
      for (idx_t i = 0; i < x.extent(2); ++i) body(b, h, i);
}

template <class S, class E>
void copy_elements(const tensor_view<S>& from, const tensor_view<E>& to) {
  const idx_t count = to.extent(3), stride = from.stride(3), to_stride = to.stride(3);
  for_each_row(to, [&](idx_t b, idx_t h, idx_t i) {
    const S* const x = head_of(from, b, h).row(i);
    E* const y = head_of(to, b, h).row(i);
    if (stride == 1 && to_stride == 1)
      for (idx_t d = 0; d < count; ++d) y[d] = static_cast<E>(x[d]);
    else
      for (idx_t d = 0; d < count; ++d) y[d * to_stride] = static_cast<E>(x[d * stride]);
  });
}

/// Where the keys of a process are after `step` steps of the ring, and the messages of a step.
template <class S>
class travelling_keys {
 public:
  travelling_keys(const process_communicator& group, const sequence_split& split, const tensor_view<const S>& k,
                  const tensor_view<const S>& v, const std::array<key_buffer<S>, 2>& buffers)
      : group_(group), split_(split), heads_(k.extent(1)), buffers_(buffers) {
    const key_views<S> own = here();
    copy_elements(k, own.k);
    copy_elements(v, own.v);
  }

  /// The process whose keys are here.
  int source() const { return source_of(group_, step_); }
  int step() const { return step_; }
  bool last() const { return step_ + 1 == group_.size(); }
  key_views<S> here() const { return buffer(step_).views(split_.length(source())); }

  /// Begins to send them on and to receive the next.
  void begin_step() {
    if (last()) return;
    buffer(step_ + 1).receive(messages_, split_.length(source_of(group_, step_ + 1)), 0, heads_, group_.before(), 0,
                              group_.get());
    buffer(step_).send(messages_, split_.length(source()), 0, heads_, group_.next(), 0, group_.get());
  }
  void progress() { messages_.progress(); }
  void end_step() {
    messages_.wait();
    ++step_;
  }

 private:
  const key_buffer<S>& buffer(int step) const { return buffers_[static_cast<std::size_t>(step % 2)]; }

  const process_communicator& group_;
  const sequence_split& split_;
  idx_t heads_;
  std::array<key_buffer<S>, 2> buffers_;
  int step_ = 0;
  message_list messages_;
};

/// The gradients of keys and values on their way: in step n those of the keys of process p - n are here, in
/// bundles of heads that arrive and leave one by one.
template <class T>
class travelling_gradients {
 public:
  travelling_gradients(const process_communicator& group, const sequence_split& split,
                       const std::array<key_buffer<T>, 2>& buffers, idx_t heads_of_bundle)
      : group_(group), split_(split), heads_(buffers[0].heads), heads_of_bundle_(heads_of_bundle), buffers_(buffers),
        bundles_(static_cast<std::size_t>(ceil_div(heads_, heads_of_bundle))),
        arriving_{lists(bundles_), lists(bundles_)} {
    buffers_[0].clear();
  }

  /// Step `step` begins: what was sent in the last one has arrived, and there is room for what the next one takes.
  void begin_step(int step) {
    leaving_.wait();
    if (group_.size() == 1) return;
    const idx_t n = length(step + 1);
    for (std::size_t bundle = 0; bundle < bundles_; ++bundle)
      buffer(step + 1).receive(arriving_[(step + 1) % 2][bundle], n, first(bundle), count(bundle), group_.before(), 1,
                               group_.get());
  }
  /// The heads of a bundle, with what all processes before have added.
  key_views<T> receive(int step, std::size_t bundle) {
    arriving_[step % 2][bundle].wait();
    return all(step);
  }
  /// Sends a bundle on.
  void send(int step, std::size_t bundle) {
    if (group_.size() > 1)
      buffer(step).send(leaving_, length(step), first(bundle), count(bundle), group_.next(), 1, group_.get());
    leaving_.progress();
  }
  /// All of a process's own, when every process has added its part.
  key_views<T> finish() {
    const int step = group_.size() > 1 ? group_.size() : 0;
    for (std::size_t bundle = 0; bundle < bundles_; ++bundle) arriving_[step % 2][bundle].wait();
    leaving_.wait();
    return all(step);
  }

  std::size_t bundles() const { return bundles_; }
  idx_t first(std::size_t bundle) const { return static_cast<idx_t>(bundle) * heads_of_bundle_; }
  idx_t count(std::size_t bundle) const { return (std::min)(heads_of_bundle_, heads_ - first(bundle)); }

 private:
  using lists = std::vector<message_list>;

  const key_buffer<T>& buffer(int step) const { return buffers_[static_cast<std::size_t>(step % 2)]; }
  idx_t length(int step) const { return split_.length(source_of(group_, step)); }
  key_views<T> all(int step) const { return buffer(step).views(length(step)); }

  const process_communicator& group_;
  const sequence_split& split_;
  idx_t heads_, heads_of_bundle_;
  std::array<key_buffer<T>, 2> buffers_;
  std::size_t bundles_;
  lists arriving_[2];
  message_list leaving_;
};

}}}  // namespace attn::ATTN_ISA::detail
