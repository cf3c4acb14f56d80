// attn: softmax attention over the sequences of several processes: who sees what, and how keys travel.
//
// Keys and values travel round a ring (Liu et al. 2023, "Ring attention with blockwise transformers"): in step n process p
// attends to those of process p - n, while they go on to p + 1. Every block of queries and keys is one call of the
// operator. The gradients of keys and values follow them, piece by piece, each sent on as soon as a process has added its
// part, and are back with their owner after as many steps as there are processes.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/tensor.hpp>
#include <attn/mpi/detail/ranges.hpp>

#include <cmath>

namespace attn::inline ATTN_ISA::detail {

/// One call of an operator on some of the queries of a process and some of the keys that are there.
struct block_call {
  index query = 0, queries = 0;  // the first row, and how many
  index key = 0, keys = 0;       // among the keys that are there
  index first_position = 0;      // of the queries, among these keys
  index shift = 0;               // position in the whole sequence = position in this call + shift
  bool causal = false;
};

/// body(block_call) for what the queries `q` see of the keys `k`; row i of the whole sequence is at position i + shift.
template <class Body>
void for_each_block(const sequence_range& q, const sequence_range& k, index shift, bool causal, const Body& body) {
  const index position = q.begin + shift - k.begin;  // of the first query among these keys
  const index hidden = causal ? std::clamp(-position, index(0), q.length) : 0;  // queries before all of them
  const index rows = q.length - hidden, first = position + hidden;
  if (rows > 0 && k.length > 0)
    body(block_call{q.local + hidden, rows, k.local, k.length, first, k.begin, causal && first < k.length - 1});
}

/// Key heads taken at a time, between two looks at the messages: about a millisecond of work, at least one. The same on
/// all processes, and without influence on results.
inline index heads_of_piece(index kv_heads, double operations) {
  const double pieces = std::clamp(operations / 5e7, 1.0, static_cast<double>(std::max<index>(1, kv_heads)));
  return std::max<index>(1, static_cast<index>(std::ceil(static_cast<double>(kv_heads) / pieces)));
}

/// Memory for the keys and values, or their gradients, of any one process: head after head, so that heads travel alone.
template <class E>
class key_buffer {
 public:
  /// k and v have the extents of any process; `most` are the keys of the one that has most.
  key_buffer(const std::array<index, 4>& k, const std::array<index, 4>& v, index most)
      : batch_(k[0]), heads_(k[1]), dim_(k[3]), dim_v_(v[3]),
        keys_(static_cast<std::size_t>(heads_ * head_size(most, dim_))),
        values_(static_cast<std::size_t>(heads_ * head_size(most, dim_v_))) {}

  tensor_view<E> keys(index n) { return view(keys_.data(), n, dim_); }
  tensor_view<E> values(index n) { return view(values_.data(), n, dim_v_); }

  void clear() {
    std::fill(keys_.begin(), keys_.end(), E(0));
    std::fill(values_.begin(), values_.end(), E(0));
  }
  void send(message_list& messages, index n, index head, index count, int to, int tag, MPI_Comm comm) const {
    messages.send(keys_.data() + head * head_size(n, dim_), bytes(n, dim_, count), to, tag, comm);
    messages.send(values_.data() + head * head_size(n, dim_v_), bytes(n, dim_v_, count), to, tag, comm);
  }
  void receive(message_list& messages, index n, index head, index count, int from, int tag, MPI_Comm comm) {
    messages.receive(keys_.data() + head * head_size(n, dim_), bytes(n, dim_, count), from, tag, comm);
    messages.receive(values_.data() + head * head_size(n, dim_v_), bytes(n, dim_v_, count), from, tag, comm);
  }

 private:
  index head_size(index n, index dim) const { return batch_ * n * dim; }
  std::size_t bytes(index n, index dim, index count) const {
    return static_cast<std::size_t>(count * head_size(n, dim)) * sizeof(E);
  }
  tensor_view<E> view(E* data, index n, index dim) const {
    return {data, {batch_, heads_, n, dim}, {n * dim, head_size(n, dim), dim, 1}};
  }

  index batch_, heads_, dim_, dim_v_;
  std::vector<E> keys_, values_;
};

/// body(b, h, i) for every row of a view of four axes.
template <class T, class Body>
void for_each_row(const tensor_view<T>& x, const Body& body) {
  for (index b = 0; b < x.extent(0); ++b)
    for (index h = 0; h < x.extent(1); ++h)
      for (index i = 0; i < x.extent(2); ++i) body(b, h, i);
}

template <class S, class E>
void copy_elements(const tensor_view<S>& from, const tensor_view<E>& to) {
  for_each_row(to, [&](index b, index h, index i) {
    for (index d = 0; d < to.extent(3); ++d) to(b, h, i, d) = static_cast<E>(from(b, h, i, d));
  });
}

/// Where the keys of a process are after `step` steps of the ring, and the messages of a step.
template <class S>
class travelling_keys {
 public:
  struct views {
    tensor_view<S> k, v;
  };

  travelling_keys(const process_group& group, const sequence_split& split, const tensor_view<const S>& k,
                  const tensor_view<const S>& v)
      : group_(group), split_(split), heads_(k.extent(1)), buffers_{key_buffer<S>(k.extents(), v.extents(), split.most()),
        key_buffer<S>(k.extents(), v.extents(), group.size() > 1 ? split.most() : 0)} {
    const views own = here();
    copy_elements(k, own.k);
    copy_elements(v, own.v);
  }

  /// Whose keys are here.
  int source() const { return source_of(step_); }
  int source_of(int step) const { return (group_.rank() - step % group_.size() + group_.size()) % group_.size(); }
  int step() const { return step_; }
  bool last() const { return step_ + 1 == group_.size(); }
  views here() {
    const index n = split_.length(source());
    return {current().keys(n), current().values(n)};
  }

  /// Begins to send them on and to receive the next.
  void begin_step() {
    if (last()) return;
    buffers_[(step_ + 1) % 2].receive(messages_, split_.length(source_of(step_ + 1)), 0, heads_, group_.before(), 0,
                                      group_.get());
    current().send(messages_, split_.length(source()), 0, heads_, group_.next(), 0, group_.get());
  }
  void progress() { messages_.progress(); }
  void end_step() {
    messages_.wait();
    ++step_;
  }

 private:
  key_buffer<S>& current() { return buffers_[step_ % 2]; }

  const process_group& group_;
  const sequence_split& split_;
  index heads_;
  key_buffer<S> buffers_[2];
  int step_ = 0;
  message_list messages_;
};

/// The gradients of keys and values on their way: in step n those of the keys of process p - n are here, in pieces of
/// heads that arrive and leave one by one.
template <class T>
class travelling_gradients {
 public:
  struct views {
    tensor_view<T> k, v;
  };

  /// An extent of dims of 0 in k or v: that gradient is not wanted.
  travelling_gradients(const process_group& group, const sequence_split& split, const std::array<index, 4>& k,
                       const std::array<index, 4>& v, index piece)
      : group_(group), split_(split), heads_(k[1]), piece_(piece),
        buffers_{key_buffer<T>(k, v, split.most()), key_buffer<T>(k, v, group.size() > 1 ? split.most() : 0)},
        pieces_(static_cast<std::size_t>(ceil_div(k[1], piece))), arriving_{lists(pieces_), lists(pieces_)} {
    buffers_[0].clear();
  }

  /// Step `step` begins: what was sent in the last one has arrived, and there is room for what the next one takes.
  void begin_step(int step) {
    leaving_.wait();
    if (group_.size() == 1) return;
    const index n = length(step + 1);
    for (std::size_t piece = 0; piece < pieces_; ++piece)
      buffers_[(step + 1) % 2].receive(arriving_[(step + 1) % 2][piece], n, first(piece), count(piece), group_.before(),
                                       1, group_.get());
  }
  /// The heads of a piece, with what all processes before have added.
  views take(int step, std::size_t piece) {
    arriving_[step % 2][piece].wait();
    return all(step);
  }
  /// Sends a piece on.
  void give(int step, std::size_t piece) {
    if (group_.size() > 1)
      buffers_[step % 2].send(leaving_, length(step), first(piece), count(piece), group_.next(), 1, group_.get());
    leaving_.progress();
  }
  /// All of a process's own, when every process has added its part.
  views finish() {
    const int step = group_.size() > 1 ? group_.size() : 0;
    for (std::size_t piece = 0; piece < pieces_; ++piece) arriving_[step % 2][piece].wait();
    leaving_.wait();
    return all(step);
  }

  std::size_t pieces() const { return pieces_; }
  index first(std::size_t piece) const { return static_cast<index>(piece) * piece_; }
  index count(std::size_t piece) const { return std::min(piece_, heads_ - first(piece)); }

 private:
  using lists = std::vector<message_list>;

  index length(int step) const {
    return split_.length((group_.rank() - step % group_.size() + group_.size()) % group_.size());
  }
  views all(int step) {
    const index n = length(step);
    return {buffers_[step % 2].keys(n), buffers_[step % 2].values(n)};
  }

  const process_group& group_;
  const sequence_split& split_;
  index heads_, piece_;
  key_buffer<T> buffers_[2];
  std::size_t pieces_;
  lists arriving_[2];
  message_list leaving_;
};

}  // namespace attn::inline ATTN_ISA::detail
