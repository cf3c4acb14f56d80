// attn: the backward pass of a recurrence: one head of states by one worker.
//
// Causal: the states before each segment are computed forward; then, from the last segment to the first, those before
// each of its chunks, and the backward passes of the chunks. Otherwise all keys are summed up, all queries read the
// sums, and all keys read the gradient of the sums. Heads that share a key head come one after another, and their
// gradients are summed in order.
#pragma once

#include <attn/kernel/detail/recurrence_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <rule R, class T>
struct recurrence_head_backward {
  using kernel = recurrence_backward_kernel<R, T>;

  const kernel_backward_call<T>& in;
  const kernel_call<T>& call = in.forward;
  const attention_shape& shape = call.shape;
  T* bonus_sums = nullptr;  // [batch][query head][bonus_lanes()]

  /// The rules that read the state solve for what each token writes whenever they compute one: there segments are long,
  /// so that few are computed twice. With segments of 1024 tokens a call took 1.13 times as long; a state for each 64
  /// tokens of a longer one takes as much memory as v does for dims of 64.
  static constexpr idx_t segment = reads_state<R> ? 256 * kernel_chunk : kernel_segment;

  struct worker_scratch {
    recurrence_backward_scratch<R, T> chunk;
    panels<T> state, d_state;
    panels<T>*before, *seen;  // the states before segments, and before the chunks of one
    panels<T>* solved;        // by the rules that read the state, R or W of the chunks of one
    T *dq, *dk, *dv;          // sums over the heads of a key head
  };

  idx_t bonus_lanes() const { return round_up(in.features(), width<T>); }
  /// Heads of states of a key head. Those of the rules that read the state have values of their own, and share queries.
  idx_t heads_per_key_head() const { return shape.kv_heads > 0 ? call.heads / shape.kv_heads : 1; }

  worker_scratch layout(arena& memory) const {
    const auto state = [&](arena& one) { return panels<T>::layout(one, in.features(), in.columns()); };
    const idx_t keys = call.causal ? shape.keys : 0;
    worker_scratch w;
    w.chunk = recurrence_backward_scratch<R, T>::layout({memory, memory, kept_for::nothing}, in);
    w.state = state(memory), w.d_state = state(memory);
    w.before = memory.allocate_list(ceil_div(keys, segment), state);
    const idx_t chunks = ceil_div((std::min)(keys, segment), kernel_chunk);
    w.seen = memory.allocate_list(chunks, state);
    w.solved = memory.allocate_list(reads_state<R> ? chunks : 0,
                                  [&](arena& one) { return panels<T>::layout(one, kernel_chunk, in.columns()); });
    const auto sums = [&](bool wanted, idx_t cols) {
      return memory.allocate<T>(wanted && heads_per_key_head() > 1 ? shape.keys * cols : 0);
    };
    w.dq = sums(reads_state<R> && in.dq, shape.dim);
    w.dk = sums(bool(in.dk), shape.dim);
    w.dv = sums(R == rule::add && in.dv, shape.dim_v);
    return w;
  }

  void copy(const panels<T>& from, const panels<T>& to) const {
    std::copy_n(from.data, from.capacity * round_up(in.columns(), panels<T>::wide), to.data);
  }
  /// The state before the first token, and the gradient of that after the last one.
  void load_before(idx_t b, idx_t h, const panels<T>& to) const {
    load(in.parameters().initial_state, in.parameters().initial_weights, b, h, to);
  }
  void load_after(idx_t b, idx_t h, const panels<T>& to) const {
    load(in.d_final_state, in.d_final_weights, b, h, to);
  }
  void load(const tensor_view<const T>& values, const tensor_view<const T, 3>& weights, idx_t b, idx_t h,
            const panels<T>& to) const {
    load_state<T>(call, values, weights, b, h, in.columns(), to, in.weights() ? to.at(0, in.dim_v()) : nullptr,
                  panels<T>::wide);
  }
  /// One head of states.
  void run_head(idx_t b, idx_t h, const worker_scratch& w, const stored_gradient_head<T>& to_q,
                const stored_gradient_head<T>& to_k, const stored_gradient_head<T>& to_v) const {
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), group = call.group();
    const bool with_bonus(in.parameters().bonus);
    T* const d_bonus = with_bonus ? bonus_sums + (b * shape.heads + h * group) * bonus_lanes() : nullptr;
    const kernel head{{{in, w.chunk, b, h}}, to_q, to_k, to_v, d_bonus};
    if (in.d_gate) std::fill_n(w.chunk.gates, keys, T(0));
    if (with_bonus) std::fill_n(d_bonus, group * bonus_lanes(), T(0));
    load_before(b, h, w.state), load_after(b, h, w.d_state);
    if (call.causal) {
      run_causal(head, keys, w);
      attend_rows(head, std::max<idx_t>(queries - keys, 0), false, w);
    } else {
      for (idx_t begin = 0; begin < keys; begin += kernel_chunk) advance(head, begin, keys, w.state);
      attend_rows(head, queries, keys > 0, w);
      for (idx_t begin = 0; begin < keys; begin += kernel_chunk) {
        const idx_t count = std::min<idx_t>(kernel_chunk, keys - begin);
        head.load_keys(begin, count);
        head.back(begin, count, w.state, w.d_state);
      }
    }
    store_parameters(b, h, keys, w.d_state, w.chunk.gates);
  }

  static void advance(const kernel& head, idx_t begin, idx_t keys, const panels<T>& state) {
    const idx_t count = std::min<idx_t>(kernel_chunk, keys - begin);
    head.load_keys(begin, count);
    head.s.take_values(count, head.columns());
    head.advance(begin, count, state, head.columns(), state);
  }

  /// The backward pass of all keys and of the queries at their positions; at the end the state is that before the first
  /// key.
  void run_causal(const kernel& head, idx_t keys, const worker_scratch& w) const {
    if (keys == 0) return;
    const idx_t last = (ceil_div(keys, segment) - 1) * segment;
    copy(w.state, w.before[0]);
    for (idx_t begin = 0; begin < last; begin += kernel_chunk) {
      if (begin % segment == 0) copy(w.state, w.before[begin / segment]);
      advance(head, begin, keys, w.state);
    }
    for (idx_t first = last; first >= 0; first -= segment) {
      if (first < last) copy(w.before[first / segment], w.state);
      const idx_t end = std::min<idx_t>(first + segment, keys);
      for (idx_t begin = first; begin < end; begin += kernel_chunk) {
        const idx_t n = (begin - first) / kernel_chunk;
        copy(w.state, w.seen[n]);
        if (begin + kernel_chunk >= end) break;
        advance(head, begin, keys, w.state);
        if (reads_state<R>) copy(head.solved(), w.solved[n]);
      }
      const idx_t last_chunk = ceil_div(end - first, kernel_chunk) - 1;
      for (idx_t n = last_chunk; n >= 0; --n) {
        const idx_t begin = first + n * kernel_chunk, count = std::min<idx_t>(kernel_chunk, keys - begin);
        head.load_keys(begin, count);
        head.back(begin, count, w.seen[n], w.d_state, reads_state<R> && n < last_chunk ? &w.solved[n] : nullptr);
      }
    }
    copy(w.before[0], w.state);
  }

  /// Queries [0, end) that read the sums as they are: those of all keys, or the initial ones.
  void attend_rows(const kernel& head, idx_t end, bool see_keys, const worker_scratch& w) const {
    if constexpr (R == rule::add) {
      if (end == 0) return;
      const idx_t first = head.h * call.group(), last = first + call.group();
      if (!see_keys && !in.parameters().initial_state && !in.parameters().initial_weights) {
        for (idx_t g = first; in.dq && g < last; ++g) in.dq.head(head.b, g).clear_rows(0, end);
        return;
      }
      transpose_panels(w.state, in.features(), in.columns(), w.chunk.state_t);
      for (idx_t i = 0; i < end; i += kernel_chunk)
        for (idx_t g = first; g < last; ++g)
          head.attend({g, i, 0, std::min<idx_t>(kernel_chunk, end - i), false}, w.state, w.d_state);
    }
  }

  /// The gradients of the initial state and of decay, and zeros for the padding of parameters per token.
  void store_parameters(idx_t b, idx_t h, idx_t keys, const panels<T>& d_state, const T* gates) const {
    for (idx_t r = 0; r < in.features(); ++r) {
      for (idx_t d = 0; in.d_initial_state && d < in.dim_v(); ++d)
        store_gradient(in.d_initial_state(b, in.at(in.d_initial_state, h), r, d), *d_state.at(r, d),
                       in.adds(in.d_initial_state, h));
      if (in.d_initial_weights)
        store_gradient(in.d_initial_weights(b, in.at(in.d_initial_weights, h), r),
                       in.weights() ? *d_state.at(r, in.dim_v()) : T(0), in.adds(in.d_initial_weights, h));
    }
    for (idx_t t = 0; t < keys && in.d_gate; ++t)
      store_gradient(in.d_gate(b, in.at(in.d_gate, h), t), gates[t], in.adds(in.d_gate, h));
    for (idx_t t = keys; t < shape.keys && !in.accumulate; ++t) {
      if (in.d_gate) in.d_gate(b, in.at(in.d_gate, h), t) = T(0);
      if (in.d_beta) in.d_beta(b, h, t) = T(0);
    }
    if (in.d_log_decay && !in.accumulate)
      detail::clear_rows(head_of(in.d_log_decay, b, in.at(in.d_log_decay, h)), keys, shape.keys);
  }

  /// The heads of states of one key head.
  void run_key_head(idx_t b, idx_t kv_head, const worker_scratch& w) const {
    constexpr bool reads = reads_state<R>;
    const idx_t keys = call.lengths.keys(b), each = heads_per_key_head();
    const auto to_k = in.dk.head(b, kv_head);
    const auto to_q = reads ? in.dq.head(b, kv_head) : stored_gradient_head<T>{};
    const auto to_v = reads ? stored_gradient_head<T>{} : in.dv.head(b, kv_head);
    for (idx_t n = 0; n < each; ++n) {
      const idx_t h = kv_head * each + n;
      const auto target = [&](const stored_gradient_head<T>& to, T* sums) {
        return each > 1 && to ? scratch_gradient(sums, shape.keys, to.cols, n > 0) : to;
      };
      const auto own_v = reads ? in.dv.head(b, h) : target(to_v, w.dv);
      run_head(b, h, w, target(to_q, w.dq), target(to_k, w.dk), own_v);
    }
    for (const auto& [to, sums] : {std::pair{&to_q, w.dq}, std::pair{&to_k, w.dk}, std::pair{&to_v, w.dv}})
      if (*to && each > 1) to->store_rows(sums, to->cols, 0, keys);
    pad(b, kv_head);
  }
  /// Zeros for the padding of the heads of one key head.
  void pad(idx_t b, idx_t kv_head) const {
    constexpr bool reads = reads_state<R>;
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), each = heads_per_key_head();
    const idx_t seen = each > 0 ? keys : 0;
    if (in.dk) in.dk.head(b, kv_head).clear_rows(seen, shape.keys);
    if (reads && in.dq) in.dq.head(b, kv_head).clear_rows(seen, shape.keys);
    if (!reads && in.dv) in.dv.head(b, kv_head).clear_rows(seen, shape.keys);
    for (idx_t h = kv_head * each; reads && in.dv && h < (kv_head + 1) * each; ++h)
      in.dv.head(b, h).clear_rows(keys, shape.keys);
    for (const stored_gradient<T>* to : {&in.da, &in.db})
      if (*to) to->head(b, kv_head).clear_rows(keys, shape.keys);
    for (idx_t g = kv_head * shape.group(); !reads && g < (kv_head + 1) * shape.group() && in.dq; ++g)
      in.dq.head(b, g).clear_rows(queries, shape.queries);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
