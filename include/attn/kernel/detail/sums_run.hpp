// attn: the driver of sums of features, bidirectional or causal.
//
// Bidirectional: segments of keys are summed up chunk by chunk and merged in order, then blocks of queries read the
// total. Causal: segments are attended to with the sums of the keys before them. Threads share heads that are no
// multiple of them (shared_heads.hpp).
#pragma once

#include <attn/kernel/detail/shared_heads.hpp>
#include <attn/kernel/detail/sums_kernel.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct sums_driver {
  using segment_sums = typename sums_kernel<T>::segment_sums;

  const kernel_call<T>& call;
  const sums_kernel<T> kernel{call};

  /// Causal segments [begin, end) of a head, one after another; `before` becomes the sums after them.
  void attend_segments(idx_t b, idx_t h, idx_t begin, idx_t end, const kernel_scratch<T>& s, kernel_sums<T>& before,
                       segment_sums& x) const {
    for (idx_t n = begin; n < end; ++n) {
      const bool last = n == call.segments(b) - 1 && !call.state;
      const T decay = kernel.attend_segment(b, h, n * call.segment(b), call.end_of_segment(b, n), last, s, before,
                                            x.own, x.total);
      if (!last) add(b, h, before, decay, x.own, s);
    }
  }
  /// Adds the next segment to the sums, which may be those of a state.
  void add(idx_t b, idx_t h, kernel_sums<T>& sums, T decay, kernel_sums<T>& own, const kernel_scratch<T>& s) const {
    if (!call.state) return kernel.add_segment(sums, decay, own, s);
    combine(sums, decay, own, sums, s.factors);
    call.decay_at(call.state.at(b), h) *= decay;
  }

  /// Tokens of each part of a segment, whole chunks.
  idx_t part_tokens(idx_t b, idx_t parts) const { return round_up(ceil_div(call.segment(b), parts), kernel_chunk); }
  /// Sums up a segment up to its last part, which is only added where the segment is added to others.
  void sum_up_parts(idx_t b, idx_t h, idx_t n, bool added, const kernel_scratch<T>& s,
                    const segment_in_parts<T>& x) const {
    const idx_t end = call.end_of_segment(b, n), tokens = part_tokens(b, x.parts);
    idx_t from = n * call.segment(b), part = 1;
    x.sums->clear();
    *x.decay = T(1);
    for (idx_t to = from + tokens; to < end; from = to, to += tokens, ++part) {
      *x.decay = kernel.add_keys_to(*x.sums, *x.decay, b, h, from, to, s);
      copy_sums(*x.sums, x.part_sums[part - 1]);
      x.part_decays[part - 1] = *x.decay;
    }
    if (added) *x.decay = kernel.add_keys_to(*x.sums, *x.decay, b, h, from, end, s);
  }
  /// Attends to one of `parts` parts of a causal segment, from the sums of those before.
  void attend_part(idx_t b, idx_t h, idx_t n, idx_t part, idx_t parts, const kernel_scratch<T>& s,
                   const segment_in_parts<T>& x, segment_sums& one) const {
    const idx_t begin = n * call.segment(b), end = call.end_of_segment(b, n), tokens = part_tokens(b, parts);
    const idx_t from = begin + part * tokens, to = (std::min)(from + tokens, end);
    if (from >= end) return;
    if (part == 0)
      kernel.attend_segment(b, h, begin, to, true, s, *x.before, one.own, one.total);
    else
      kernel.attend_segment(b, h, from, to, true, s, *x.before, x.part_sums[part - 1], one.total,
                            x.part_decays[part - 1], true);
  }

  /// One head from first to last, by one worker.
  void run_head(idx_t b, idx_t h, const kernel_scratch<T>& s, segment_sums& x) const {
    kernel_sums<T> kept = call.state ? call.state_sums(b, h) : kernel_sums<T>{};
    kernel_sums<T>& sums = call.state ? kept : x.before;
    if (!call.state) sums.empty = true;
    if (call.causal) {
      attend_segments(b, h, 0, call.segments(b), s, sums, x);
    } else {
      for (idx_t n = 0; n < call.segments(b); ++n)
        add(b, h, sums, kernel.sum_up_segment(b, h, n, s, x.own), x.own, s);
      for (idx_t block = 0; block < call.blocks(b) && !sums.empty; ++block) kernel.attend_queries(b, h, block, s, sums);
    }
    if (!call.state) call.pad(b, h);
  }

  /// All heads, of which `x` has those that are shared, after run_whole(n, worker) for the others; `own` is of the
  /// workers.
  template <class RunWhole>
  void run_heads(execution& exec, const head_split& split, const shared_sums<T>& x, segment_sums* own,
                 const RunWhole& run_whole) const {
    const auto b = [&](idx_t n) { return (split.whole + n) / call.heads; };
    const auto h = [&](idx_t n) { return (split.whole + n) % call.heads; };
    const idx_t all = most_segments(call.shape.keys);
    x.clear();
    for (idx_t first = 0, alone = split.whole; first < all || alone > 0; first += x.most, alone = 0) {
      const idx_t threads = exec.active_threads(), count = (std::min)(x.most, all - first);
      const idx_t parts = call.causal ? parts_of_segment(x.most, count) : 1;
      const idx_t lead = call.causal ? leading_segments(x.heads, count, threads, summing, parts) : 0;
      const idx_t rest = count - lead;
      const auto here = [&](idx_t n) { return std::clamp<idx_t>(call.segments(b(n)) - first, 0, count); };
      // Causal, the last segment of a head is not summed up, unless threads would wait for those that attend to it.
      const idx_t last = call.causal ? 1 : 0;
      const auto added = [&](idx_t n) { return std::clamp<idx_t>(call.segments(b(n)) - last - first, 0, count); };
      const bool part_last = parts_last_segment(x.heads, rest, threads, parts);
      const auto parts_of = [&](idx_t n, idx_t at) { return part_last || at < added(n) ? parts : 1; };
      x.run_parts(
          exec, alone, 1 + rest, run_whole,
          [&](idx_t n, idx_t task, int worker) {
            const auto s = kernel.scratch(exec, worker);
            const idx_t at = lead + task - 1;
            if (task > 0 && at < here(n) && (at < added(n) || parts_of(n, at) > 1))
              sum_up_parts(b(n), h(n), first + at, at < added(n), s, x.segment_at(n, at, count, parts));
            if (task > 0 || lead == 0) return;
            segment_sums& one = own[worker];
            copy_sums(*x.of(n), one.before);
            attend_segments(b(n), h(n), first, first + (std::min)(lead, here(n)), s, one.before, one);
            std::swap(one.before, x.of(n)[lead]);
          },
          [&](idx_t n, int worker) { x.add_up(n, lead, added(n), kernel.scratch(exec, worker)); });
      // Last segments first: they may be whole.
      exec.for_each(call.causal ? x.heads * rest * parts : 0, [&](idx_t task, int worker) {
        const idx_t n = task % x.heads, part = task / x.heads % parts, at = count - 1 - task / x.heads / parts;
        if (at < here(n) && part < parts_of(n, at))
          attend_part(b(n), h(n), first + at, part, parts_of(n, at), kernel.scratch(exec, worker),
                      x.segment_at(n, at, count, parts), own[worker]);
      });
      for (idx_t n = 0; n < x.heads; ++n) x.advance(n, here(n));
    }
    const idx_t blocks = call.causal ? 0 : ceil_div(call.shape.queries, kernel_chunk);
    exec.for_each(x.heads * blocks, [&](idx_t task, int worker) {
      const idx_t n = task / blocks, block = task % blocks;
      if (block < call.blocks(b(n)) && !x.of(n)->empty)
        kernel.attend_queries(b(n), h(n), block, kernel.scratch(exec, worker), *x.of(n));
    });
    for (idx_t n = 0; n < x.heads; ++n) call.pad(b(n), h(n));
  }

  static constexpr double summing = 0.4;  // of the time of attending to a causal segment

  void run(execution& exec) const {
    const auto limit = exec.limit_threads(call.work());
    const idx_t item_heads = call.shape.batch * call.heads, threads = exec.active_threads();
    const idx_t all = most_segments(call.shape.keys);
    const head_split rest = head_split::of(item_heads, threads);
    const idx_t parts = parts_of_segment(segments_of_wave(rest.shared, threads), all);
    const head_split split = call.state    ? head_split{item_heads, 0}
                             : call.causal ? head_split::causal(item_heads, all, threads, summing, parts)
                                           : rest;
    shared_sums<T> shared;
    auto* const own = exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      shared = shared_sums<T>::layout(memory, call, split.shared, segments_of_wave(split.shared, threads));
      return memory.allocate_list(threads, [&](arena& one) { return kernel.layout_sums(one); });
    });
    call.map->prepare(exec);
    auto run_whole = [&](idx_t n, int worker) {
      run_head(n / call.heads, n % call.heads, kernel.scratch(exec, worker), own[worker]);
    };
    if (split.shared == 0) return exec.for_each(item_heads, run_whole);
    run_heads(exec, split, shared, own, run_whole);
  }
};

template <class T>
void run_sums(const kernel_call<T>& call, execution& exec) {
  sums_driver<T>{call}.run(exec);
}
template <class T>
void run_linear_by_tokens(const kernel_call<T>& call, execution& exec);
/// Needs recurrence_run.hpp and kernel_step_run.hpp.
template <class T>
void run_linear(const kernel_call<T>& call, execution& exec) {
  if (call.by_tokens(exec)) return run_linear_by_tokens(call, exec);
  if (call.driver == kernel_driver::recurrence) return recurrence_driver<rule::add, T>{call}.run(exec);
  run_sums(call, exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_sums(const kernel_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
