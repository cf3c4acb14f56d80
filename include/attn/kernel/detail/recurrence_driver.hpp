// attn: recurrences over whole heads: their states, chunks and threads.
//
// Heads are independent. By the rules that read the state, threads share a head where there are too few: a wave is as
// many chunks as threads; first what does not need the state is computed for each of them, then each panel of value
// columns, which are independent of one another, passes through the chunks. By the rule that adds, a call that could be
// shared would need the scores of all query heads of a group at once; calls without any of the options are shared by
// segments (driver.hpp).
#pragma once

#include <attn/kernel/detail/recurrence.hpp>

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
  state begin(idx_t b, idx_t h, state own) const {
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
  [[gnu::noinline]] void end(idx_t b, idx_t h, const state& x) const {
    const tensor_view<T>& values = parameters.final_state;
    const tensor_view<T, 3>& weights = parameters.final_weights;
    for (idx_t r = 0; r < features(); ++r) {
      for (idx_t d = 0; values && d < dim_v(); ++d)
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
    const idx_t alone = call.causal ? std::min(queries, -offset) : keys == 0 ? queries : 0;  // see no key
    if (!x.empty) attend_rows(one, alone, x);
    for (idx_t g = h * group; alone > 0 && x.empty && g < (h + 1) * group; ++g)
      call.out.head(b, g).clear_rows(0, alone);
    for (idx_t c = 0; c < keys; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, keys - c), first = std::max<idx_t>(offset - c, 0);
      s.load(call, b, h, c, count);
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + count);
      one.solve(count, x);
      if (call.causal && first < count && group > 0) {
        if (R == rule::add) s.transpose_keys(count);
        attend(one, c - offset, first, count, true, x);
      }
      one.update(count, x, prefetch);
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
      one.answer(at, x);
    }
  }
  /// Queries [0, end) that read the state as it is.
  void attend_rows(const kernel& one, idx_t end, const state& x) const {
    for (idx_t i = 0; i < end; i += kernel_chunk) attend(one, i, 0, std::min<idx_t>(kernel_chunk, end - i), false, x);
  }

  /// Stores the state, and zeros for the rows of padding.
  void finish(idx_t b, idx_t h, const state& x) const {
    if (!call.state) {
      end(b, h, x);
      for (idx_t g = h * call.group(); g < (h + 1) * call.group(); ++g)
        call.out.head(b, g).clear_rows(call.lengths.queries(b), call.shape.queries);
    } else if constexpr (R == rule::add) {
      call.decay_at(call.state.at(b), h) *= whole_decay(b, h, call.lengths.keys(b));
    }
  }
  /// The product of the decays of all tokens; NaN where decays are per channel.
  T whole_decay(idx_t b, idx_t h, idx_t keys) const {
    if (call.decays() == decay_kind::none) return T(1);
    if (call.decays() == decay_kind::channel) return std::numeric_limits<T>::quiet_NaN();
    T whole = T(1);
    for (idx_t t = 0; t < keys; ++t) whole *= call.gate_at(b, h, t);
    return whole;
  }

  /// One head by all threads, with the same bits; `chunks` has scratch memory for a wave.
  void share_head(idx_t b, idx_t h, execution& exec, const scratch* chunks, idx_t wave, const state& own) const {
    const idx_t length = call.lengths.keys(b), all = ceil_div(length, kernel_chunk), wide = panel_width<T>;
    const bool queries = call.group() > 0;
    state x = begin(b, h, own);
    const auto count_of = [&](idx_t n) { return std::min<idx_t>(kernel_chunk, length - n * kernel_chunk); };
    const auto block = [&](idx_t n) { return recurrence_block{h, n * kernel_chunk, 0, count_of(n), true}; };
    for (idx_t first = 0; first < all; first += wave) {
      const idx_t some = std::min(wave, all - first);
      exec.for_each(some, [&](idx_t n, int) {
        chunks[n].load(call, b, h, (first + n) * kernel_chunk, count_of(first + n));
        if (queries) kernel{call, chunks[n], b, h}.load_queries(block(first + n));
      });
      exec.for_each(ceil_div(dim_v(), wide), [&](idx_t panel, int) {
        state columns{{x.values.panel(panel * wide), x.values.capacity}, nullptr, x.empty};
        for (idx_t n = 0; n < some; ++n) {
          const kernel one{call, chunks[n], b, h, panel * wide, std::min(wide, dim_v() - panel * wide)};
          row_prefetcher<> prefetch;
          one.solve(count_of(first + n), columns);
          if (queries) one.answer(block(first + n), columns);
          one.update(count_of(first + n), columns, prefetch);
        }
      });
      x.empty = false;
    }
    finish(b, h, x);
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
    if constexpr (reads_state<R>) {
      if (threads > 1 && item_heads < 2 * threads && item_heads % threads != 0 && call.shape.keys >= 4 * kernel_chunk) {
        state own;
        const auto* const chunks = exec.shared_scratch([&](arena& memory) {
          own = layout_state(memory);
          return memory.allocate_list(threads, [&](arena& one) { return scratch::layout(one, call); });
        });
        for (idx_t n = 0; n < item_heads; ++n) share_head(n / call.heads, n % call.heads, exec, chunks, threads, own);
        return;
      }
    } else {
      exec.shared_scratch([&](arena& memory) {
        call.map->layout(memory, item_heads);
        return 0;
      });
      call.map->prepare(exec);
    }
    exec.for_each(item_heads, [&](idx_t item_head, int worker) {
      state own;
      const auto s = exec.scratch(worker, [&](arena& memory) {
        if (!call.state) own = layout_state(memory);
        return scratch::layout(memory, call);
      });
      run_head(item_head / call.heads, item_head % call.heads, s, own);
    });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
