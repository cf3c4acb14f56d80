// attn: the driver of the backward pass of a recurrence.
//
// One task is one key head. By the rules that read the state, threads share heads that are no multiple of them, in
// waves of chunks as in the forward pass (recurrence_driver.hpp):
//
//   1. the states before all chunks of a segment, and what is solved for with them
//   2. from the last chunk on, the gradients of the states after them; with both, all other gradients of the chunks
#pragma once

#include <attn/kernel/detail/recurrence_head_backward.hpp>
#include <attn/kernel/detail/recurrence_pass_back.hpp>
#include <attn/kernel/detail/shared_heads.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <rule R, class T>
struct recurrence_backward_driver : recurrence_head_backward<R, T> {
  using base = recurrence_head_backward<R, T>;
  using base::bonus_lanes, base::bonus_sums, base::call, base::heads_per_key_head, base::in, base::layout,
      base::run_key_head, base::shape;
  using chunk_scratch = recurrence_backward_scratch<R, T>;
  static constexpr idx_t segment_chunks = base::segment / kernel_chunk;

  /// Scratch memory of the heads that threads share.
  struct shared_scratch {
    struct chunk {
      recurrence_keys<R, T> keys;
      T* k_norm = nullptr;
      panels<T> x, d_state;  // X or X_W, and the term of the queries of the gradient of the state before it
      panels<T> d_later;     // the gradient of the state after it
    };
    idx_t heads = 0, wave = 1;
    chunk* chunks = nullptr;                               // [3 waves][heads][wave]
    panels<T>*states = nullptr, *d_states = nullptr;       // [heads]
    panels<T>* before = nullptr;                           // [segments - 1][heads], of all but the first one
    panels<T>*seen = nullptr, *solved = nullptr;           // [chunks of a segment][heads]

    chunk& at(idx_t n, idx_t head) const { return chunks[(n / wave % 3 * heads + head) * wave + n % wave]; }
  };
  shared_scratch layout_shared(arena& memory, idx_t heads, idx_t threads) const {
    const idx_t columns = in.columns(), all = ceil_div(shape.keys, kernel_chunk), most = std::min(all, segment_chunks);
    const auto state = [&](arena& one) { return panels<T>::layout(one, in.features(), columns); };
    const auto values = [&](arena& one) { return panels<T>::layout(one, kernel_chunk, columns); };
    shared_scratch x{.heads = heads, .wave = chunks_of_wave(heads, threads)};
    x.chunks = memory.allocate_list(3 * heads * x.wave, [&](arena& one) {
      const auto keys = recurrence_keys<R, T>::layout(one, call, columns, 0);
      return typename shared_scratch::chunk{keys, one.allocate<T>(kernel_chunk), values(one), state(one), state(one)};
    });
    x.states = memory.allocate_list(heads, state), x.d_states = memory.allocate_list(heads, state);
    x.before = memory.allocate_list(heads * (ceil_div(all, segment_chunks) - 1), state);
    x.seen = memory.allocate_list(heads * most, state), x.solved = memory.allocate_list(heads * most, values);
    return x;
  }

  /// Key heads from `whole` on, which have one head of states each, by all threads, with the same bits.
  void run_shared(execution& exec, idx_t whole, const shared_scratch& x) const {
    const idx_t all = ceil_div(shape.keys, kernel_chunk), features = in.features();
    const idx_t panels_wide = panels<T>::wide, all_parts = ceil_div(in.columns(), panels_wide);
    // Backward the other tasks take longer than those that pass, unless threads are many.
    const bool few = exec.active_threads() < 4 * x.heads;
    const idx_t wide_back = few ? in.columns() : panels_wide, parts_back = few ? 1 : all_parts;
    const auto b = [&](idx_t head) { return (whole + head) / shape.kv_heads; };
    const auto h = [&](idx_t head) { return (whole + head) % shape.kv_heads; };
    const auto keys_of = [&](idx_t head, idx_t n) {
      return std::min<idx_t>(kernel_chunk, call.lengths.keys(b(head)) - n * kernel_chunk);
    };
    const auto scratch = [&](int worker) {
      return exec.scratch(worker, [&](arena& memory) { return chunk_scratch::layout(memory, in); });
    };
    // Scratch memory of a worker with the keys of a chunk, its columns from `col` on.
    const auto with_keys = [](chunk_scratch s, const typename shared_scratch::chunk& chunk, idx_t col) {
      static_cast<recurrence_keys<R, T>&>(s) = chunk.keys;
      s.k_norm = chunk.k_norm;
      if (s.decay.kind == decay_kind::none) s.k_end_t = s.k_t;
      s.v = s.v.from_col(col);
      if (R == rule::low_rank) s.w = s.w.from_col(col), s.u = s.v;
      (R == rule::low_rank ? s.y : s.x) = chunk.x.from_col(col);
      return s;
    };
    const auto kernel_of = [&](const chunk_scratch& s, idx_t head) {
      const auto to = [&](const stored_gradient<T>& gradient) { return gradient.head(b(head), h(head)); };
      return recurrence_pass_back<R, T>{{{in, s, b(head), h(head)}, to(in.dq), to(in.dk), to(in.dv), nullptr, true}};
    };
    const auto copy = [](const panels<T>& from, idx_t rows, idx_t cols, const panels<T>& to) {
      each_packet(rows, cols, [](idx_t, idx_t, const auto&, const auto& y) { return y; }, to, to, from);
    };
    const auto forward = [&](idx_t begin, idx_t end) {
      const auto load = [&](idx_t head, idx_t n, int) {
        const idx_t count = keys_of(head, begin + n);
        if (count > 0) x.at(n, head).keys.load(call, b(head), h(head), (begin + n) * kernel_chunk, count);
        if (begin + n == 0) this->load_before(b(head), h(head), x.states[head]);
      };
      const auto pass = [&](idx_t head, idx_t first, idx_t last, idx_t part, int worker) {
        const idx_t col = part * panels_wide, cols = std::min(panels_wide, in.columns() - col);
        const panels<T> state = x.states[head].from_col(col);
        const chunk_scratch own = scratch(worker);
        for (idx_t n = first; n < last && keys_of(head, begin + n) > 0; ++n) {
          const chunk_scratch s = with_keys(own, x.at(n, head), col);
          const idx_t count = keys_of(head, begin + n);
          copy(state, features, cols, x.seen[n * x.heads + head].from_col(col));
          kernel_of(s, head).advance((begin + n) * kernel_chunk, count, state, cols);
          copy(kernel_of(s, head).solved(), count, cols, x.solved[n * x.heads + head].from_col(col));
        }
      };
      run_chunk_waves(exec, x.heads, end - begin, x.wave, all_parts, load, pass, [](idx_t, idx_t, int) {});
    };
    const auto backward = [&](idx_t begin, idx_t end) {  // step n is chunk end - 1 - n
      const auto load = [&](idx_t head, idx_t n, int worker) {
        const auto& to = x.at(n, head);
        const idx_t chunk = end - 1 - n, count = keys_of(head, chunk);
        if (chunk == all - 1) this->load_after(b(head), h(head), x.d_states[head]);
        if (count <= 0) return;
        to.keys.load(call, b(head), h(head), chunk * kernel_chunk, count, to.k_norm);
        const chunk_scratch s = with_keys(scratch(worker), to, 0);
        kernel_of(s, head).load_queries(chunk * kernel_chunk, count, to.d_state);
      };
      const auto pass = [&](idx_t head, idx_t first, idx_t last, idx_t part, int worker) {
        const idx_t col = part * wide_back, cols = std::min(wide_back, in.columns() - col);
        const panels<T> d_state = x.d_states[head].from_col(col);
        const chunk_scratch own = scratch(worker);
        for (idx_t n = first; n < last; ++n) {
          const auto& from = x.at(n, head);
          const idx_t count = keys_of(head, end - 1 - n);
          if (count <= 0) continue;
          const chunk_scratch s = with_keys(own, from, col);
          copy(d_state, features, cols, from.d_later.from_col(col));
          kernel_of(s, head).pass(count, from.d_state.from_col(col), d_state, cols);
        }
      };
      const auto answer = [&](idx_t head, idx_t n, int worker) {
        const idx_t chunk = end - 1 - n, count = keys_of(head, chunk), at = (chunk - begin) * x.heads + head;
        if (count <= 0) return;
        const chunk_scratch s = with_keys(scratch(worker), x.at(n, head), 0);
        kernel_of(s, head).back(chunk * kernel_chunk, count, x.seen[at], x.at(n, head).d_later, &x.solved[at]);
      };
      run_chunk_waves(exec, x.heads, end - begin, x.wave, parts_back, load, pass, answer);
    };
    const idx_t segments = ceil_div(all, segment_chunks);
    const auto copy_states = [&](panels<T>* from, panels<T>* to) {
      for (idx_t head = 0; head < x.heads; ++head) this->copy(from[head], to[head]);
    };
    for (idx_t n = 0; n + 1 < segments; ++n) {
      forward(n * segment_chunks, (n + 1) * segment_chunks);
      copy_states(x.states, x.before + n * x.heads);
    }
    for (idx_t n = segments - 1; n >= 0; --n) {
      const idx_t begin = n * segment_chunks, end = std::min(begin + segment_chunks, all);
      if (n + 1 < segments && n > 0) copy_states(x.before + (n - 1) * x.heads, x.states);
      forward(begin, end), backward(begin, end);
    }
    for (idx_t head = 0; head < x.heads; ++head) {
      this->store_parameters(b(head), h(head), call.lengths.keys(b(head)), x.d_states[head], nullptr);
      this->pad(b(head), h(head));
    }
  }

  work_estimate work() const {
    work_estimate estimate;
    if constexpr (R == rule::add) {
      estimate = call.work();
      estimate.operations *= 4, estimate.bytes *= 3;
    } else {
      const auto tokens = static_cast<double>(shape.batch * shape.heads * shape.keys);
      const auto dim = static_cast<double>(shape.dim), dim_v = static_cast<double>(shape.dim_v);
      const double more = R == rule::low_rank ? 1.6 : 1;
      estimate = {.operations = more * tokens * (18 * dim * dim_v + kernel_chunk * (7 * dim + 6 * dim_v)),
                  .bytes = 32 * more * tokens * (dim + dim_v)};
    }
    return estimate;
  }

  void run(execution& exec) {
    const auto limit = exec.limit_threads(work());
    const idx_t item_heads = shape.batch * call.heads, heads = shape.batch * shape.kv_heads;
    head_split split{heads, 0};
    shared_scratch shared;
    if constexpr (R == rule::add) {
      exec.shared_scratch([&](arena& memory) {
        call.map->layout(memory, item_heads);
        in.map->layout(memory, item_heads);
        return bonus_sums = memory.allocate<T>(in.parameters().bonus ? shape.batch * shape.heads * bonus_lanes() : 0);
      });
      call.map->prepare(exec);
      in.map->prepare(exec);
    } else if (in.reverse() && heads_per_key_head() == 1) {
      const idx_t threads = exec.active_threads();
      split = split_by_waves(heads, shape.keys / kernel_chunk, threads, 1.45);
      shared = exec.shared_scratch([&](arena& memory) { return layout_shared(memory, split.shared, threads); });
    }
    exec.for_each(split.whole, [&](idx_t n, int worker) {
      const auto w = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      run_key_head(n / shape.kv_heads, n % shape.kv_heads, w);
    });
    if constexpr (reads_state<R>)
      if (split.shared > 0) run_shared(exec, split.whole, shared);
    for (idx_t h = 0; in.d_bonus && h < shape.heads; ++h)
      for (idx_t r = 0; r < in.features(); ++r) {
        T sum = T(0);
        for (idx_t b = 0; b < shape.batch; ++b) sum += bonus_sums[(b * shape.heads + h) * bonus_lanes() + r];
        store_gradient(in.d_bonus(h, r), sum, in.accumulate);
      }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
