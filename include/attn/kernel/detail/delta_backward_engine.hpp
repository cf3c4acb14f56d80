// attn: the gradients of the delta rule over whole heads.
//
// The states before each segment of 16384 tokens are computed forward; then, from the last segment to the first, those
// before each of its chunks, and the backward passes of the chunks. A state for each 64 tokens takes as much memory as
// v does for dims of 64; with segments of 1024 tokens, so that all states are computed twice, a call took 1.13 times as
// long.
//
// Heads are independent. Those that share a key head are one task, whose gradients of q and k are summed in order.
#pragma once

#include <attn/kernel/detail/delta_backward.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct delta_backward_engine {
  const delta_backward_call<T>& call;

  static constexpr idx_t segment_chunks = 256, segment = segment_chunks * kernel_chunk;

  /// Scratch memory of a worker.
  struct worker_scratch {
    delta_backward_scratch<T> chunk;
    panels<T> state, d_state;
    panels<T>*before, *seen;  // the states before segments, and before the chunks of one
    T *dq, *dk;               // sums over the heads that share a key head
  };

  worker_scratch layout(arena& memory) const {
    const auto state = [&](arena& one) { return panels<T>::layout(one, call.shape.dim, call.shape.dim_v); };
    worker_scratch w;
    w.chunk = delta_backward_scratch<T>::layout(memory, call.shape.dim, call.shape.dim_v, call.decay());
    w.state = state(memory), w.d_state = state(memory);
    w.before = memory.allocate_list(ceil_div(call.shape.length, segment), state);
    w.seen = memory.allocate_list(std::min(segment_chunks, ceil_div(call.shape.length, kernel_chunk)), state);
    const bool shared = call.group() > 1;
    w.dq = memory.allocate<T>(shared && call.dq ? call.shape.length * call.shape.dim : 0);
    w.dk = memory.allocate<T>(shared && call.dk ? call.shape.length * call.shape.dim : 0);
    return w;
  }

  idx_t state_size(const panels<T>& x) const { return x.capacity * round_up(call.shape.dim_v, panels<T>::wide); }
  void copy(const panels<T>& from, const panels<T>& to) const { std::copy_n(from.data, state_size(from), to.data); }
  void load_state(const tensor_view<const T>& from, idx_t b, idx_t h, const panels<T>& to) const {
    std::fill_n(to.data, state_size(to), T(0));
    for (idx_t d = 0; from && d < call.shape.dim; ++d)
      for (idx_t e = 0; e < call.shape.dim_v; ++e) *to.at(d, e) = from(b, h, d, e);
  }

  static idx_t chunk_end(idx_t begin, idx_t tokens) { return std::min<idx_t>(begin + kernel_chunk, tokens); }

  void run_head(idx_t b, idx_t h, const worker_scratch& w, const stored_gradient_head<T>& to_q,
                const stored_gradient_head<T>& to_k) const {
    const idx_t tokens = call.lengths.keys(b);
    const delta_backward_head<T> head{
        .call = call, .s = w.chunk, .b = b, .h = h, .key_head = h / call.group(), .to_q = to_q, .to_k = to_k,
        .to_v = call.dv.head(b, h)};
    load_state(call.initial_state, b, h, w.state);
    load_state(call.d_final_state, b, h, w.d_state);
    const auto advance = [&](idx_t begin) {
      head.load_keys(begin, chunk_end(begin, tokens) - begin, w.state);
      head.advance(chunk_end(begin, tokens) - begin, w.state);
    };
    const idx_t last = (ceil_div(tokens, segment) - 1) * segment;
    for (idx_t begin = 0; begin < last; begin += kernel_chunk) {
      if (begin % segment == 0) copy(w.state, w.before[begin / segment]);
      advance(begin);
    }
    for (idx_t first = last; first >= 0; first -= segment) {
      if (first < last) copy(w.before[first / segment], w.state);
      const idx_t end = std::min(first + segment, tokens);
      for (idx_t begin = first; begin < end; begin += kernel_chunk) {
        copy(w.state, w.seen[(begin - first) / kernel_chunk]);
        if (begin + kernel_chunk < end) advance(begin);
      }
      for (idx_t n = ceil_div(end - first, kernel_chunk) - 1; n >= 0; --n) {
        const idx_t begin = first + n * kernel_chunk;
        head.back(begin, chunk_end(begin, tokens) - begin, w.seen[n], w.d_state);
      }
    }
    pad(b, h, tokens);
    for (idx_t d = 0; call.d_initial_state && d < call.shape.dim; ++d)
      for (idx_t e = 0; e < call.shape.dim_v; ++e)
        store_gradient(call.d_initial_state(b, h, d, e), *w.d_state.at(d, e), call.accumulate);
  }

  /// Zeros for the padding of a value head.
  void pad(idx_t b, idx_t h, idx_t tokens) const {
    if (call.dv) call.dv.head(b, h).clear_rows(tokens, call.shape.length);
    if (call.accumulate) return;
    for (idx_t t = tokens; t < call.shape.length; ++t) {
      if (call.d_beta) call.d_beta(b, h, t) = T(0);
      for (idx_t d = 0; d < call.d_log_decay.extent(3); ++d) call.d_log_decay(b, h, t, d) = T(0);
    }
  }

  /// The value heads of one key head.
  void run_group(idx_t b, idx_t key_head, const worker_scratch& w) const {
    const idx_t tokens = call.lengths.keys(b), group = call.group();
    const auto to_q = call.dq.head(b, key_head), to_k = call.dk.head(b, key_head);
    for (idx_t n = 0; n < group; ++n) {
      const auto target = [&](const stored_gradient_head<T>& to, T* sums) {
        return group > 1 && to ? scratch_gradient(sums, call.shape.length, call.shape.dim, n > 0) : to;
      };
      run_head(b, key_head * group + n, w, target(to_q, w.dq), target(to_k, w.dk));
    }
    for (const auto& [to, sums] : {std::pair{&to_q, w.dq}, std::pair{&to_k, w.dk}})
      if (*to) {
        if (group > 1) to->store_rows(sums, call.shape.dim, 0, tokens);
        to->clear_rows(group > 0 ? tokens : 0, call.shape.length);
      }
  }

  void run(execution& exec) const {
    const double dim = static_cast<double>(call.shape.dim), dim_v = static_cast<double>(call.shape.dim_v);
    const auto tokens = static_cast<double>(call.shape.batch * call.shape.heads * call.shape.length);
    const double operations = tokens * (18 * dim * dim_v + kernel_chunk * (7 * dim + 6 * dim_v));
    const auto limit = exec.limit_threads({.operations = operations, .bytes = 32 * tokens * (dim + dim_v)});
    exec.for_each(call.shape.batch * call.shape.key_heads, [&](idx_t n, int worker) {
      const auto w = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      run_group(n / call.shape.key_heads, n % call.shape.key_heads, w);
    });
  }
};

}  // namespace attn::inline ATTN_ISA::detail
