// attn: the driver of the backward pass of a recurrence.
//
// One task is one key head. By the rules that read the state, threads share heads that are no multiple of them, in
// waves of chunks as in the forward pass (recurrence_run.hpp):
//
//   1. the states before all chunks of a segment, and what is solved for with them
//   2. from the last chunk on, the gradients of the states after them; with both, all other gradients of the chunks
//
// In 2 the other gradients, of which each column needs all columns of the values, are a step of their own.
#pragma once

#include <attn/kernel/detail/recurrence_head_backward.hpp>
#include <attn/kernel/detail/shared_heads.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The gradient of the state alone, back through a chunk: where threads share a head, this is what goes from chunk to
/// chunk, some value columns at a time; everything else of a chunk follows from the state before it and this one.
template <rule R, class T>
struct recurrence_pass_back : recurrence_backward_kernel<R, T> {
  using base = recurrence_backward_kernel<R, T>;
  using base::columns, base::decays, base::features, base::h, base::low_rank, base::s;

  /// X, or by the rule of low rank X_W.
  const panels<T>& x() const { return low_rank ? s.y : s.x; }

  /// Queries and d_out; the terms of X and R0 that need nothing else of the chunk; and the rows with which it writes.
  void load_queries(idx_t begin, idx_t count, const panels<T>& d_state) const {
    const recurrence_block at{h, begin, 0, count, true};
    base::load_queries(at);
    if (decays()) s.decay.from_start(s.q, count, s.q_start);
    this->load_scores(at, count, s.q);
    triangle_product<triangle::from>(low_rank ? s.p_b : s.p, count, s.d_out, columns(), write_to(x()));
    if (low_rank) triangle_product<triangle::from>(s.p, count, s.d_out, columns(), write_to(s.x));
    product(decays() ? s.q_start : s.q, features(), s.d_out, columns(), count, write_to(d_state));
    if (decays()) (void)this->writes_end_t(count);
  }

  /// R0 by R1, of the first `cols` columns; the terms of X become X.
  [[gnu::noinline]] void pass(idx_t count, const panels<T>& of_queries, const panels<T>& later, const panels<T>& to,
                              idx_t cols) const {
    product(low_rank && !decays() ? s.writes_t : s.k_end_t, count, later, cols, features(), add_to(x()));
    this->solve_back(count, cols);
    product(s.start, features(), s.y, cols, count, [&](idx_t row, idx_t col, const packet<T>& sum) {
      const packet<T> x = fma(load<T>(later.at(row, col)), broadcast<T>(s.decay.whole(row, count)),
                              load<T>(of_queries.at(row, col)));
      store<T>(to.at(row, col), low_rank ? add(x, sum) : sub(x, sum));
    });
  }
};

template <rule R, class T>
struct recurrence_backward_driver : recurrence_head_backward<R, T> {
  using base = recurrence_head_backward<R, T>;
  using base::bonus_lanes, base::bonus_sums, base::call, base::heads_per_key_head, base::in, base::layout,
      base::run_key_head, base::shape;
  static constexpr bool low_rank = R == rule::low_rank;
  using chunk_scratch = recurrence_backward_scratch<R, T>;
  using chunk_kernel = recurrence_pass_back<R, T>;
  static constexpr idx_t segment_chunks = base::segment / kernel_chunk;

  /// Scratch memory of the heads that threads share.
  struct shared_scratch {
    wave_plan forward, backward;
    std::byte* chunks = nullptr;                        // [waves][heads][wave]: memory that is kept of each
    idx_t bytes = 0, own_bytes = 0;                     // of a chunk, forward and backward; of a worker
    panels<T>*of_queries = nullptr, *later = nullptr;   // of each: what queries add to R0, and R1
    panels<T>*states = nullptr, *d_states = nullptr;    // [heads]: after and before the segment
    panels<T>* before = nullptr;                        // [segments - 1][heads], of all but the first one
    panels<T>*seen = nullptr, *solved = nullptr;        // [chunks of a segment][heads]
  };
  shared_scratch layout_shared(arena& memory, idx_t heads, idx_t threads) const {
    const idx_t columns = in.columns(), all = ceil_div(shape.keys, kernel_chunk),
                most = (std::min)(all, segment_chunks);
    const auto state = [&](arena& one) { return panels<T>::layout(one, in.features(), columns); };
    const auto values = [&](arena& one) { return panels<T>::layout(one, kernel_chunk, columns); };
    shared_scratch x;
    if (heads == 0) return x;
    x.backward = x.forward = wave_plan::of<T>(heads, threads, columns);
    x.forward.answers_later = false, x.backward.answers_later = x.backward.long_answers = true;
    for (const int keeps : {kept_for::pass, kept_for::pass_back}) {
      arena own, kept;
      (void)chunk_scratch::layout({own, kept, keeps}, in);
      x.bytes = (std::max)(x.bytes, static_cast<idx_t>(kept.used()));
      x.own_bytes = (std::max)(x.own_bytes, static_cast<idx_t>(own.used()));
    }
    const idx_t slot_count = x.backward.slot_count();
    x.chunks = memory.allocate<std::byte>(slot_count * x.bytes);
    x.of_queries = memory.allocate_list(slot_count, state), x.later = memory.allocate_list(slot_count, state);
    x.states = memory.allocate_list(heads, state), x.d_states = memory.allocate_list(heads, state);
    x.before = memory.allocate_list(heads * (ceil_div(all, segment_chunks) - 1), state);
    x.seen = memory.allocate_list(heads * most, state), x.solved = memory.allocate_list(heads * most, values);
    return x;
  }

  /// Key heads from `whole` on, which have one head of states each, by all threads, with the same bits.
  void run_shared(execution& exec, idx_t whole, const shared_scratch& x) const {
    const idx_t all = ceil_div(shape.keys, kernel_chunk), heads = x.forward.heads, features = in.features();
    const idx_t columns_wide = round_up(in.columns(), panels<T>::wide);
    const idx_t columns = x.forward.columns, parts = ceil_div(in.columns(), columns);
    const auto b = [&](idx_t head) { return (whole + head) / shape.kv_heads; };
    const auto h = [&](idx_t head) { return (whole + head) % shape.kv_heads; };
    const auto chunks_of = [&](idx_t head) { return ceil_div(call.lengths.keys(b(head)), kernel_chunk); };
    const auto keys_of = [&](idx_t head, idx_t chunk) {
      return std::min<idx_t>(kernel_chunk, call.lengths.keys(b(head)) - chunk * kernel_chunk);
    };
    // The columns of a chunk from `col` on, with R or W in `solved`.
    const auto scratch_of = [&](idx_t slot, int keeps, const panels<T>& solved, idx_t col,
                                int worker) __attribute__((noinline)) {
      arena own(exec.scratch(worker, [&](arena& memory) { return memory.allocate<std::byte>(x.own_bytes); }));
      arena kept(x.chunks + slot * x.bytes);
      chunk_scratch s = chunk_scratch::layout({own, kept, keeps}, in);
      (low_rank ? s.w : s.v) = solved;
      for (panels<T>* each : {&s.v, &s.w, &s.x, &s.y, &s.u})
        if (each->data) *each = each->from_col(col);
      if (low_rank) s.u = s.v;
      return s;
    };
    const auto kernel_of = [&](const chunk_scratch& s, idx_t head) {
      const auto to = [&](const stored_gradient<T>& gradient) { return gradient.head(b(head), h(head)); };
      return chunk_kernel{{{{in, s, b(head), h(head)}}, to(in.dq), to(in.dk), to(in.dv), nullptr, true}};
    };
    const auto fetch = [&](const stored_matrix<T>& rows, idx_t chunk) {
      row_prefetcher<> prefetch;
      call.fetch(prefetch, rows, chunk * kernel_chunk, (std::min)((chunk + 1) * kernel_chunk, rows.rows));
      fetch_all(prefetch);
    };
    // Prefetches what a chunk reads first, and where it is kept.
    const auto fetch_chunk = [&](idx_t head, idx_t chunk, idx_t slot, bool values) {
      prefetch_bytes(reinterpret_cast<const char*>(x.chunks + slot * x.bytes), x.bytes);
      if (!values) return fetch(call.k.head(b(head), h(head)), chunk);
      row_prefetcher<> keys = call.prefetch_keys(b(head), h(head), chunk * kernel_chunk);
      fetch_all(keys);
    };
    const auto forward = [&](idx_t begin, idx_t end) {
      const auto load = [&](idx_t head, idx_t n, int worker) {
        const idx_t chunk = begin + n, count = keys_of(head, chunk), at = n * heads + head;
        if (chunk == 0)
          this->load_before(b(head), h(head), x.seen[head]);
        else if (n == 0)
          this->copy(x.before[(begin / segment_chunks - 1) * heads + head], x.seen[head]);
        if (count <= 0) return;
        const idx_t slot = x.forward.slot(head, n);
        fetch_chunk(head, chunk, slot, true);
        const chunk_scratch s = scratch_of(slot, kept_for::pass, x.solved[at], 0, worker);
        s.load(call, b(head), h(head), chunk * kernel_chunk, count);
        s.take_values(count, in.columns());
      };
      const auto pass = [&](idx_t head, idx_t first, idx_t last, idx_t part, int worker) {
        const idx_t col = part * columns, cols = (std::min)(columns, in.columns() - col);
        for (idx_t n = first; n < last && keys_of(head, begin + n) > 0; ++n) {
          const idx_t at = n * heads + head;
          chunk_scratch s = scratch_of(x.forward.slot(head, n), kept_for::pass, x.solved[at], col, worker);
          if (low_rank) s.added = s.added.from_col(col);
          const panels<T>& after = begin + n + 1 < end ? x.seen[at + heads] : x.states[head];
          kernel_of(s, head).advance((begin + n) * kernel_chunk, keys_of(head, begin + n), x.seen[at].from_col(col),
                                     cols, after.from_col(col));
        }
      };
      x.forward.run(exec, end - begin, parts, load, pass, [](idx_t, idx_t, int) {});
    };
    const auto backward = [&](idx_t begin, idx_t end) {  // step n is chunk end - 1 - n
      const auto load = [&](idx_t head, idx_t n, int worker) {
        const idx_t chunk = end - 1 - n, count = keys_of(head, chunk), slot = x.backward.slot(head, n);
        const idx_t chunks = chunks_of(head), last = (std::min)(chunks, end) - 1;
        if (chunks == 0 && chunk == 0) this->load_after(b(head), h(head), x.d_states[head]);
        if (count <= 0) return;
        if (chunk == chunks - 1)
          this->load_after(b(head), h(head), x.later[slot]);
        else if (chunk == last)
          this->copy(x.d_states[head], x.later[slot]);
        fetch_chunk(head, chunk, slot, low_rank);
        fetch(call.q.head(b(head), h(head)), chunk), fetch(in.d_out.head(b(head), h(head)), chunk);
        chunk_scratch s = scratch_of(slot, kept_for::pass_back, {}, 0, worker);
        s.a_t = s.a_k_t = {};
        if (low_rank || s.decay.kind != decay_kind::none) s.start_t = {};
        s.load(call, b(head), h(head), chunk * kernel_chunk, count, s.k_norm);
        kernel_of(s, head).load_queries(chunk * kernel_chunk, count, x.of_queries[slot]);
      };
      const auto pass = [&](idx_t head, idx_t first, idx_t end_of_wave, idx_t part, int worker) {
        const idx_t col = part * columns, cols = (std::min)(columns, in.columns() - col);
        for (idx_t n = first; n < end_of_wave; ++n) {
          const idx_t chunk = end - 1 - n, count = keys_of(head, chunk), slot = x.backward.slot(head, n);
          if (count <= 0) continue;
          const chunk_scratch s = scratch_of(slot, kept_for::pass_back, {}, col, worker);
          const panels<T>& to = chunk == begin ? x.d_states[head] : x.later[x.backward.slot(head, n + 1)];
          kernel_of(s, head).pass(count, x.of_queries[slot].from_col(col), x.later[slot].from_col(col),
                                  to.from_col(col), cols);
        }
      };
      const auto answer = [&](idx_t head, idx_t n, int worker) {
        const idx_t chunk = end - 1 - n, count = keys_of(head, chunk), at = (chunk - begin) * heads + head;
        if (count <= 0) return;
        const idx_t slot = x.backward.slot(head, n);
        for (const stored_gradient<T>* to : {&in.dq, &in.dk, &in.dv, &in.da, &in.db})
          if (*to) fetch(to->head(b(head), h(head)), chunk);
        prefetch_bytes(reinterpret_cast<const char*>(x.seen[at].data), features * columns_wide * idx_t(sizeof(T)));
        const chunk_scratch s = scratch_of(slot, kept_for::pass_back, x.solved[at], 0, worker);
        kernel_of(s, head).back(chunk * kernel_chunk, count, x.seen[at], x.later[slot], &x.solved[at]);
      };
      x.backward.run(exec, end - begin, parts, load, pass, answer);
    };
    const idx_t segments = ceil_div(all, segment_chunks);
    const auto begin_of = [&](idx_t n) { return n * segment_chunks; };
    for (idx_t n = 0; n + 1 < segments; ++n) {
      forward(begin_of(n), begin_of(n + 1));
      for (idx_t head = 0; head < heads; ++head) this->copy(x.states[head], x.before[n * heads + head]);
    }
    for (idx_t n = segments - 1; n >= 0; --n) {
      const idx_t begin = begin_of(n), end = (std::min)(begin_of(n + 1), all);
      forward(begin, end), backward(begin, end);
    }
    for (idx_t head = 0; head < heads; ++head) {
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

template <rule R, class T>
void run_recurrence_backward(const kernel_backward_call<T>& call, execution& exec) {
  if (call.any()) recurrence_backward_driver<R, T>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_recurrence_backward<rule::correct>(const kernel_backward_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_IN(T) void run_recurrence_backward<rule::low_rank>(const kernel_backward_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
