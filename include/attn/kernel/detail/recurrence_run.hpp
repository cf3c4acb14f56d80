// attn: recurrences over whole heads: their states, chunks and threads.
//
// Heads are independent: a task each. By the rules that read the state, threads share heads that are no multiple of
// them (shared_heads.hpp), in waves of some chunks of each head:
//
//   1. what does not need the state, chunk by chunk: keys and queries are loaded, and their scores computed
//   2. some value columns at a time, which are independent of one another, pass through the chunks
//   3. queries read the states: at once where these pass, or, where threads are many, chunk by chunk from copies
//
// of which 2 of a wave, 3 of the one before and 1 of the next are done at the same time. Only what 2 and 3 read of a
// chunk is kept; the rest is in the scratch memory of the worker. By the rule that adds, a call that could be shared
// would need the scores of all query heads of a group at once; calls without any of the options are shared by segments
// (sums_run.hpp).
#pragma once

#include <attn/kernel/detail/recurrence.hpp>
#include <attn/kernel/detail/shared_heads.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <rule R, class T>
struct recurrence_driver {
  using scratch = recurrence_scratch<R, T>;
  using kernel = recurrence_kernel<R, T>;
  using state = recurrence_state<T>;

  const kernel_call<T>& call;
  const recurrence_parameters<T>& parameters = call.recurrence;

  idx_t features() const { return call.features(); }
  idx_t dim_v() const { return call.shape.dim_v; }
  idx_t at(idx_t heads, idx_t h) const { return call.parameter_head(heads, h); }

  // States ------------------------------------------------------------------------------------------------------------

  state layout_state(arena& memory) const {
    state x{.values = panels<T>::layout(memory, features(), dim_v())};
    if (call.normalise || parameters.final_weights)
      x.weights = memory.allocate<T>(round_up(features(), panels<T>::wide));
    return x;
  }
  /// The state of a head before the call: `own`, or where the call has states, that of the item.
  [[gnu::noinline]] state begin(idx_t b, idx_t h, state own) const {
    if (call.state) {
      const kernel_sums<T> sums = call.state_sums(b, h);
      return {{sums.values, sums.rows()}, sums.weights, sums.empty};
    }
    own.empty = !parameters.initial_state && !parameters.initial_weights;
    if (!own.empty || own.weights)
      load_state(call, parameters.initial_state, parameters.initial_weights, b, h, own.empty ? 0 : dim_v(), own.values,
                 own.weights, 1);
    return own;
  }
  /// Stores the state after the call, or of the values those columns.
  [[gnu::noinline]] void end(idx_t b, idx_t h, const state& x, idx_t col, idx_t cols) const {
    const tensor_view<T>& values = parameters.final_state;
    const tensor_view<T, 3>& weights = parameters.final_weights;
    for (idx_t r = 0; r < features(); ++r) {
      for (idx_t d = col; values && d < col + cols; ++d)
        values(b, at(values.extent(1), h), r, d) = x.empty ? T(0) : *x.values.at(r, d);
      if (weights) weights(b, at(weights.extent(1), h), r) = x.weights[r];
    }
  }

  // Heads -------------------------------------------------------------------------------------------------------------

  void run_head(idx_t b, idx_t h, const scratch& s, const state& own) const {
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), offset = keys - queries;
    const idx_t group = call.group();
    const kernel one{call, s, b, h};
    state x = begin(b, h, own);
    const idx_t alone = call.causal ? (std::min)(queries, -offset) : keys == 0 ? queries : 0;  // see no key
    if (!x.empty) attend_rows(one, alone, x);
    for (idx_t g = h * group; alone > 0 && x.empty && g < (h + 1) * group; ++g)
      call.out.head(b, g).clear_rows(0, alone);
    for (idx_t c = 0; c < keys; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, keys - c), first = std::max<idx_t>(offset - c, 0);
      s.load(call, b, h, c, count);
      s.take_values(count, dim_v());
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + count);
      one.solve(count, x);
      if (call.causal && first < count && group > 0) {
        if (R == rule::add) s.transpose_keys(count);
        attend(one, c - offset, first, count, true, x);
      }
      one.update(count, x, x.values, prefetch);
    }
    if (!call.causal && keys > 0) attend_rows(one, queries, x);
    finish(b, h, x);
  }

  /// Rows origin + [first, count) of all query heads of a head of states.
  [[gnu::noinline]] void attend(const kernel& one, idx_t origin, idx_t first, idx_t count, bool own_keys,
                                const state& x) const {
    for (idx_t g = one.h * call.group(); g < (one.h + 1) * call.group(); ++g) {
      const recurrence_block at{g, origin, first, count, own_keys};
      one.load_queries(at);
      const idx_t next = origin + kernel_chunk, after = (std::min)(next + kernel_chunk, call.lengths.queries(one.b));
      row_prefetcher<> prefetch;
      call.fetch(prefetch, call.q.head(one.b, call.query_head(g)), next, after);
      call.fetch(prefetch, call.out.head(one.b, g), next, after);
      one.answer(at, x, prefetch);
    }
  }
  /// Queries [0, end) that read the state as it is.
  void attend_rows(const kernel& one, idx_t end, const state& x) const {
    for (idx_t i = 0; i < end; i += kernel_chunk) attend(one, i, 0, std::min<idx_t>(kernel_chunk, end - i), false, x);
  }

  /// Stores the state, and zeros for the rows of padding.
  void finish(idx_t b, idx_t h, const state& x) const {
    if (!call.state) {
      end(b, h, x, 0, dim_v());
      pad(b, h);
    } else if constexpr (R == rule::add) {
      call.decay_at(call.state.at(b), h) *= whole_decay(b, h, call.lengths.keys(b));
    }
  }
  [[gnu::noinline]] void pad(idx_t b, idx_t h) const {
    for (idx_t g = h * call.group(); g < (h + 1) * call.group(); ++g)
      call.out.head(b, g).clear_rows(call.lengths.queries(b), call.shape.queries);
  }
  /// The product of the decays of all tokens; NaN where decays are per channel.
  T whole_decay(idx_t b, idx_t h, idx_t keys) const {
    if (call.decays() == decay_kind::none) return T(1);
    if (call.decays() == decay_kind::channel) return std::numeric_limits<T>::quiet_NaN();
    T whole = T(1);
    for (idx_t t = 0; t < keys; ++t) whole *= call.gate_at(b, h, t);
    return whole;
  }

  // Heads that threads share ------------------------------------------------------------------------------------------

  struct shared_scratch {
    wave_plan plan;
    state* states = nullptr;         // [heads]
    std::byte* chunks = nullptr;     // [waves][heads][wave]: what is kept of each
    state* before = nullptr;         // the states before each, where they are not answered at once
    idx_t bytes = 0, own_bytes = 0;  // of a chunk; of a worker
  };
  shared_scratch layout_shared(arena& memory, idx_t heads, idx_t threads) const {
    shared_scratch x;
    if (heads == 0) return x;
    x.plan = wave_plan::of<T>(heads, threads, dim_v());
    const idx_t chunks = x.plan.slot_count();
    arena count, kept;
    (void)scratch::layout({count, kept, kept_for::pass}, call);
    x.bytes = static_cast<idx_t>(kept.used()), x.own_bytes = static_cast<idx_t>(count.used());
    x.chunks = memory.allocate<std::byte>(chunks * x.bytes);
    const auto one_state = [&](arena& one) { return layout_state(one); };
    x.states = memory.allocate_list(heads, one_state);
    x.before = memory.allocate_list(x.plan.answers_later ? chunks : 0, one_state);
    return x;
  }

  /// Heads from `whole` on by all threads, with the same bits, after run_whole(n, worker) for those before.
  template <class RunWhole>
  void run_heads(execution& exec, idx_t whole, const shared_scratch& x, const RunWhole& run_whole) const {
    const wave_plan& plan = x.plan;
    const auto b = [&](idx_t head) { return (whole + head) / call.heads; };
    const auto h = [&](idx_t head) { return (whole + head) % call.heads; };
    const auto block = [&](idx_t head, idx_t n) {
      const idx_t begin = n * kernel_chunk, keys = call.lengths.keys(b(head));
      return recurrence_block{h(head), begin, 0, std::min<idx_t>(kernel_chunk, keys - begin), true};
    };
    const auto scratch_of = [&](idx_t head, idx_t n, int worker) __attribute__((noinline)) {
      arena own(exec.scratch(worker, [&](arena& memory) { return memory.allocate<std::byte>(x.own_bytes); }));
      arena kept(x.chunks + plan.slot(head, n) * x.bytes);
      return scratch::layout({own, kept, kept_for::pass}, call);
    };
    // Prefetching all memory of the chunk at once takes a quarter off the time of loading.
    const auto load = [&](idx_t head, idx_t n, int worker) {
      const recurrence_block at = block(head, n);
      if (n == 0) {
        state& first = x.states[head];
        first = begin(b(head), h(head), first);
        if (plan.answers_later && !first.empty)
          each_packet(
              features(), dim_v(), [](idx_t, idx_t, const auto& y) { return y; },
              x.before[plan.slot(head, 0)].values, first.values);
        pad(b(head), h(head));
      }
      if (at.count <= 0) return;
      const scratch s = scratch_of(head, n, worker);
      row_prefetcher<> keys = call.prefetch_keys(b(head), h(head), at.origin), queries;
      call.fetch(queries, call.q.head(b(head), call.query_head(h(head))), at.origin, at.origin + at.count);
      fetch_all(keys), fetch_all(queries);
      prefetch_bytes(reinterpret_cast<const char*>(x.chunks + plan.slot(head, n) * x.bytes), x.bytes);
      s.load(call, b(head), h(head), at.origin, at.count);
      s.take_values(at.count, dim_v());
      if (call.group() > 0) kernel{call, s, b(head), h(head)}.load_queries(at);
    };
    const auto answer = [&](const kernel& one, const recurrence_block& at, const state& before, idx_t rows) {
      if (call.group() == 0) return;
      row_prefetcher<> prefetch;
      const idx_t end = (std::min)(rows + kernel_chunk, call.lengths.keys(one.b));
      call.fetch(prefetch, call.out.head(one.b, at.head), rows, end);
      one.answer(at, before, prefetch);
    };
    const auto pass = [&](idx_t head, idx_t first, idx_t end, idx_t part, int worker) {
      const idx_t col = part * plan.columns, cols = (std::min)(plan.columns, dim_v() - col);
      const panels<T> own = x.states[head].values.from_col(col);
      const auto before = [&](idx_t n) {
        return plan.answers_later ? x.before[plan.slot(head, n)].values.from_col(col) : own;
      };
      const idx_t keys = call.lengths.keys(b(head));
      state columns{before(first), nullptr, x.states[head].empty && first == 0};
      for (idx_t n = first; n < end && n * kernel_chunk < keys; ++n) {
        const recurrence_block at = block(head, n);
        const scratch s = scratch_of(head, n, worker);
        const kernel one{call, s, b(head), h(head), col, cols};
        row_prefetcher<> prefetch;
        one.solve(at.count, columns);
        if (!plan.answers_later) answer(one, at, columns, at.origin + kernel_chunk);
        one.update(at.count, columns, at.origin + at.count < keys ? before(n + 1) : own, prefetch);
      }
      const bool last = keys <= end * kernel_chunk && (keys > first * kernel_chunk || first == 0);
      if (last && !call.state)
        this->end(b(head), h(head), {x.states[head].values, nullptr, columns.empty}, col, cols);
    };
    const auto answer_later = [&](idx_t head, idx_t n, int worker) {
      const recurrence_block at = block(head, n);
      if (at.count <= 0) return;
      state before = x.before[plan.slot(head, n)];
      before.empty = n == 0 && x.states[head].empty;
      const scratch s = scratch_of(head, n, worker);
      answer({call, s, b(head), h(head)}, at, before, at.origin);
    };
    exec.for_each(whole, [&](idx_t n, int worker) { run_whole(n, worker); });
    if (plan.heads > 0) {
      const idx_t all = ceil_div(call.shape.keys, kernel_chunk), parts = ceil_div(dim_v(), plan.columns);
      plan.run(exec, all, parts, load, pass, answer_later);
    }
  }

  work_estimate work() const {
    work_estimate estimate;
    if constexpr (R == rule::add) {
      estimate = call.work();
      estimate.operations *= 1.5;
    } else {
      const auto tokens = static_cast<double>(call.shape.batch * call.heads * call.shape.keys);
      const auto d = static_cast<double>(call.shape.dim), e = static_cast<double>(dim_v());
      const double rows = R == rule::low_rank ? 4 : 2;
      estimate = {.operations = tokens * ((4 + rows) * d * e + rows * kernel_chunk * (2 * d + e)),
                  .bytes = tokens * (rows * d + 2 * e) * static_cast<double>(call.k.access->size)};
    }
    return estimate;
  }

  void run(execution& exec) const {
    const auto limit = exec.limit_threads(work());
    const idx_t item_heads = call.shape.batch * call.heads, threads = exec.active_threads();
    const idx_t chunks = reads_state<R> ? call.shape.keys / kernel_chunk : 0;
    const head_split split = split_by_waves(item_heads, chunks, threads, 1.3);
    shared_scratch shared;
    exec.shared_scratch([&](arena& memory) {
      if constexpr (!reads_state<R>) call.map->layout(memory, item_heads);
      if constexpr (reads_state<R>) shared = layout_shared(memory, split.shared, threads);
      return 0;
    });
    if constexpr (!reads_state<R>) call.map->prepare(exec);
    auto run_whole = [&](idx_t n, int worker) {
      state own;
      const auto s = exec.scratch(worker, [&](arena& memory) {
        if (!call.state) own = layout_state(memory);
        return scratch::layout({memory, memory, kept_for::nothing}, call);
      });
      run_head(n / call.heads, n % call.heads, s, own);
    };
    if constexpr (reads_state<R>)
      run_heads(exec, split.whole, shared, run_whole);
    else
      exec.for_each(item_heads, run_whole);
  }
};

template <class T>
void run_delta_rule_by_tokens(const kernel_call<T>& call, execution& exec);
/// Needs correcting_step_run.hpp.
template <class T>
void run_delta_rule(const kernel_call<T>& call, execution& exec) {
  if (call.by_tokens(exec)) return run_delta_rule_by_tokens(call, exec);
  recurrence_driver<rule::correct, T>{call}.run(exec);
}
template <class T>
void run_dplr(const kernel_call<T>& call, execution& exec) {
  recurrence_driver<rule::low_rank, T>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_delta_rule(const kernel_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_IN(T) void run_dplr(const kernel_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
