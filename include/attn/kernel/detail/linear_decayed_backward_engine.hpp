// attn: the gradients of linear attention with decays per channel, a bonus or states, over whole heads.
//
// Causal: the sums before each segment of 1024 tokens are computed forward; then, from the last segment to the first,
// those before each of its chunks, and the backward passes of the chunks. Otherwise all keys are summed up, all queries
// read the sums, and all keys read the gradient of the sums. One task is one key head: the gradients by its query heads
// are summed in order.
#pragma once

#include <attn/kernel/detail/linear_decayed_backward.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct decayed_backward_engine {
  const decayed_backward_call<T>& in;
  const kernel_call<T>& call = in.call;
  const attention_shape& shape = call.shape;
  T* bonus_sums = nullptr;  // [batch][query head][bonus_lanes()]

  struct worker_scratch {
    decayed_backward_scratch<T> chunk;
    panels<T> state, d_state;
    panels<T>*before, *seen;  // the sums before segments, and before the chunks of one
    T *dk, *dv;               // over the heads of sums of a key head
  };

  idx_t bonus_lanes() const { return round_up(in.features(), width<T>); }
  idx_t heads_per_key_head() const { return shape.kv_heads > 0 ? call.heads / shape.kv_heads : 1; }

  worker_scratch layout(arena& memory) const {
    const auto state = [&](arena& one) { return panels<T>::layout(one, in.features(), in.columns()); };
    const idx_t keys = call.causal ? shape.keys : 0;
    worker_scratch w;
    w.chunk = decayed_backward_scratch<T>::layout(memory, in);
    w.state = state(memory), w.d_state = state(memory);
    w.before = memory.allocate_list(ceil_div(keys, kernel_segment), state);
    w.seen = memory.allocate_list(ceil_div(std::min(keys, kernel_segment), kernel_chunk), state);
    const bool shared = heads_per_key_head() > 1;
    w.dk = memory.allocate<T>(shared && in.dk ? shape.keys * shape.dim : 0);
    w.dv = memory.allocate<T>(shared && in.dv ? shape.keys * shape.dim_v : 0);
    return w;
  }

  void copy(const panels<T>& from, const panels<T>& to) const {
    std::copy_n(from.data, from.capacity * round_up(in.columns(), panels<T>::wide), to.data);
  }
  /// Sets the sums to the initial ones where given, and to 0 elsewhere.
  void load_sums(const tensor_view<const T>& values, const tensor_view<const T, 3>& weights, idx_t b, idx_t h,
                 const panels<T>& to) const {
    std::fill_n(to.data, to.capacity * round_up(in.columns(), panels<T>::wide), T(0));
    for (idx_t r = 0; r < in.features(); ++r) {
      for (idx_t d = 0; values && d < in.dim_v(); ++d) *to.at(r, d) = values(b, in.at(values, h), r, d);
      if (weights && in.weights()) *to.at(r, in.dim_v()) = weights(b, in.at(weights, h), r);
    }
  }

  /// One head of sums.
  void run_head(idx_t b, idx_t h, const worker_scratch& w, const stored_gradient_head<T>& to_k,
                const stored_gradient_head<T>& to_v) const {
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), group = call.group();
    T* const d_bonus = in.extra().bonus ? bonus_sums + (b * shape.heads + h * group) * bonus_lanes() : nullptr;
    const decayed_backward_head<T> head{in, w.chunk, b, h, to_k, to_v, d_bonus};
    std::fill_n(w.chunk.gates, in.d_decay ? keys : 0, T(0));
    if (in.extra().bonus) std::fill_n(d_bonus, group * bonus_lanes(), T(0));
    load_sums(in.extra().initial_state, in.extra().initial_weights, b, h, w.state);
    load_sums(in.d_final_state, in.d_final_weights, b, h, w.d_state);
    const auto end_of = [&](idx_t begin) { return std::min<idx_t>(begin + kernel_chunk, keys); };
    const auto advance = [&](idx_t begin) {
      head.load_keys(begin, end_of(begin) - begin);
      head.advance(end_of(begin) - begin, w.state);
    };
    if (!call.causal) {
      for (idx_t begin = 0; begin < keys; begin += kernel_chunk) advance(begin);
      attend_rows(head, 0, queries, keys > 0, w);
      for (idx_t begin = 0; begin < keys; begin += kernel_chunk)
        head.back(begin, end_of(begin) - begin, w.state, w.d_state);
    } else {
      run_causal(head, keys, w, advance);
      attend_rows(head, 0, std::max<idx_t>(queries - keys, 0), false, w);
    }
    store_decay(b, h, w);
    for (idx_t r = 0; r < in.features(); ++r) {
      for (idx_t d = 0; in.d_initial_state && d < in.dim_v(); ++d)
        store_gradient(in.d_initial_state(b, in.at(in.d_initial_state, h), r, d), *w.d_state.at(r, d),
                       in.adds(in.d_initial_state, h));
      if (in.d_initial_weights)
        store_gradient(in.d_initial_weights(b, in.at(in.d_initial_weights, h), r),
                       in.weights() ? *w.d_state.at(r, in.dim_v()) : T(0), in.adds(in.d_initial_weights, h));
    }
  }

  /// The backward pass of all keys and of the queries at their positions; at the end the sums are those before the
  /// first key.
  template <class Advance>
  void run_causal(const decayed_backward_head<T>& head, idx_t keys, const worker_scratch& w, Advance&& advance) const {
    const idx_t last = std::max<idx_t>((ceil_div(keys, kernel_segment) - 1) * kernel_segment, 0);
    if (keys > 0) copy(w.state, w.before[0]);
    for (idx_t begin = 0; begin < last; begin += kernel_chunk) {
      if (begin % kernel_segment == 0) copy(w.state, w.before[begin / kernel_segment]);
      advance(begin);
    }
    for (idx_t first = last; first >= 0 && keys > 0; first -= kernel_segment) {
      if (first < last) copy(w.before[first / kernel_segment], w.state);
      const idx_t end = std::min<idx_t>(first + kernel_segment, keys);
      for (idx_t begin = first; begin < end; begin += kernel_chunk) {
        copy(w.state, w.seen[(begin - first) / kernel_chunk]);
        if (begin + kernel_chunk < end) advance(begin);
      }
      for (idx_t n = ceil_div(end - first, kernel_chunk) - 1; n >= 0; --n) {
        const idx_t begin = first + n * kernel_chunk;
        head.back(begin, std::min<idx_t>(kernel_chunk, keys - begin), w.seen[n], w.d_state);
      }
    }
    if (keys > 0) copy(w.before[0], w.state);
  }

  /// Queries that read the sums as they are: those of all keys, or the initial ones.
  void attend_rows(const decayed_backward_head<T>& head, idx_t begin, idx_t end, bool see_keys,
                   const worker_scratch& w) const {
    if (begin >= end) return;
    if (!see_keys && !in.extra().initial_state && !in.extra().initial_weights) {
      for (idx_t g = head.h * call.group(); in.dq && g < (head.h + 1) * call.group(); ++g)
        in.dq.head(head.b, g).clear_rows(begin, end);
      return;
    }
    transpose_panels(w.state, in.features(), in.columns(), w.chunk.state_t);
    for (idx_t i = begin; i < end; i += kernel_chunk)
      for (idx_t g = 0; g < call.group(); ++g)
        head.attend({head.h * call.group() + g, i, 0, std::min<idx_t>(kernel_chunk, end - i), false}, w.state,
                    w.d_state);
  }

  /// Of decay, which is stored late, and zeros for the padding of both.
  void store_decay(idx_t b, idx_t h, const worker_scratch& w) const {
    const idx_t keys = call.lengths.keys(b);
    for (idx_t t = 0; t < shape.keys; ++t) {
      if (in.d_decay)
        store_gradient(in.d_decay(b, in.at(in.d_decay, h), t), t < keys ? w.chunk.gates[t] : T(0),
                       in.adds(in.d_decay, h));
      if (t < keys || in.accumulate || !in.d_log_decay) continue;
      for (idx_t r = 0; r < in.d_log_decay.extent(3); ++r) in.d_log_decay(b, in.at(in.d_log_decay, h), t, r) = T(0);
    }
  }

  /// The heads of sums of one key head.
  void run_key_head(idx_t b, idx_t kv_head, const worker_scratch& w) const {
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), each = heads_per_key_head();
    const auto to_k = in.dk.head(b, kv_head), to_v = in.dv.head(b, kv_head);
    for (idx_t n = 0; n < each; ++n) {
      const auto target = [&](const stored_gradient_head<T>& to, T* sums, idx_t cols) {
        return each > 1 && to ? scratch_gradient(sums, shape.keys, cols, n > 0) : to;
      };
      run_head(b, kv_head * each + n, w, target(to_k, w.dk, shape.dim), target(to_v, w.dv, shape.dim_v));
    }
    if (to_k && each > 1) to_k.store_rows(w.dk, shape.dim, 0, keys);
    if (to_v && each > 1) to_v.store_rows(w.dv, shape.dim_v, 0, keys);
    if (to_k) to_k.clear_rows(keys, shape.keys);
    if (to_v) to_v.clear_rows(keys, shape.keys);
    for (idx_t g = kv_head * shape.group(); g < (kv_head + 1) * shape.group() && in.dq; ++g)
      in.dq.head(b, g).clear_rows(queries, shape.queries);
  }

  void run(execution& exec) {
    auto work = call.work();
    work.operations *= 4, work.bytes *= 3;
    const auto limit = exec.limit_threads(work);
    const idx_t item_heads = shape.batch * call.heads, m = in.features();
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      in.map.layout(memory, item_heads);
      return bonus_sums = memory.allocate<T>(in.extra().bonus ? shape.batch * shape.heads * bonus_lanes() : 0);
    });
    call.map->prepare(exec);
    in.map.prepare(exec);
    exec.for_each(shape.batch * shape.kv_heads, [&](idx_t n, int worker) {
      const auto w = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      run_key_head(n / shape.kv_heads, n % shape.kv_heads, w);
    });
    for (idx_t h = 0; in.d_bonus && h < shape.heads; ++h)
      for (idx_t r = 0; r < m; ++r) {
        T sum = T(0);
        for (idx_t b = 0; b < shape.batch; ++b) sum += bonus_sums[(b * shape.heads + h) * bonus_lanes() + r];
        store_gradient(in.d_bonus(h, r), sum, in.accumulate);
      }
  }
};

}  // namespace attn::inline ATTN_ISA::detail
