// attn: heads that threads share, and the sums of their segments.
//
// Heads are independent. As many as are a multiple of the threads are one task each. The segments of all others belong
// to one wave, or to several where memory for them is bounded:
//
//   1. segments are summed up; the thread that ends the last one of a head adds up what is before each of them
//   2. segments are attended to, in parts where they are few: 1 leaves the sums within a segment before each part
//
// Causal, attending to a segment gives its sums, too. So the first few segments of each head, the sums before which
// are known, are attended to in 1, one after another, and not summed up twice. Sums are added in the order in which one
// thread adds them, so bits do not depend on the split. Threads wait for each other only where 1 and 2 end: 8 heads of
// 4096 tokens are 9 to 15 times as fast on 16 threads, 17 to 35 times on 64 (in a simulation).
#pragma once

#include <attn/kernel/detail/kernel_call.hpp>

#include <atomic>
#include <new>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether the last segment of each head is attended to in parts, too, for which it must be summed up: where threads
/// would wait for it.
inline bool parts_last_segment(idx_t heads, idx_t segments, idx_t threads, idx_t parts) {
  return parts > 1 && heads * segments < threads;
}

/// How many of the first segments of each of `heads` heads are attended to in 1: all where threads gain nothing by
/// sharing heads. To sum up a segment takes the part `summing` of the time of attending to it, in so many parts.
[[gnu::noinline]] inline idx_t leading_segments(idx_t heads, idx_t segments, idx_t threads, double summing,
                                                idx_t parts = 1) {
  idx_t lead = segments;
  double least = 0.95 * static_cast<double>(segments);  // what is gained is worth waiting twice
  for (idx_t n = 0; n < segments; ++n) {
    const idx_t rest = segments - n, summed = parts_last_segment(heads, rest, threads, parts) ? rest : rest - 1;
    const auto first = static_cast<double>(n), all_first = static_cast<double>(heads * n);
    const double average = (all_first + summing * static_cast<double>(heads * summed)) / static_cast<double>(threads);
    const double alone = summing * static_cast<double>(ceil_div(heads * summed, threads));
    const double attend = static_cast<double>(ceil_div(heads * rest * parts, threads)) / static_cast<double>(parts);
    const double time = (n > 0 ? (std::max)(first, average) : alone) + attend;
    if (time < least) least = time, lead = n;
  }
  return lead;
}

/// Segments of a head in a wave, 8 for each thread: memory does not depend on the length.
inline idx_t segments_of_wave(idx_t heads, idx_t threads) {
  return ceil_div(8 * threads, std::max<idx_t>(1, heads));
}
/// Parts of a segment, where a wave of at most `most` segments of a head has `count`: their sums find room in it.
inline idx_t parts_of_segment(idx_t most, idx_t count) {
  return count > 1 ? std::clamp<idx_t>(most / count, 1, 4) : 1;
}

/// The heads of a call: the first ones are one task each, the others are shared.
struct head_split {
  idx_t whole, shared;

  static head_split of(idx_t heads, idx_t threads) {
    const idx_t shared = threads > 1 ? heads % threads : 0;
    return {heads - shared, shared};
  }
  /// The same where heads are only shared if that is faster than a task each.
  static head_split causal(idx_t heads, idx_t segments, idx_t threads, double summing, idx_t parts = 1) {
    const head_split split = of(heads, threads);
    return leading_segments(split.shared, segments, threads, summing, parts) < segments ? split : head_split{heads, 0};
  }
};

/// Chunks of heads that threads share, in waves of `wave` chunks of each: 2 for each thread, so that the last tasks of
/// a wave are short beside it, but no more than 8, for caches: what one thread keeps of a chunk others read.
///
/// States pass in whole panels of columns while these are as many as the threads, else in packets, which read keys
/// twice as often. Where a state passes queries are answered at once, from the caches, unless a fifth of the threads
/// would have nothing to do: a pass with answers takes 0.8 of all time, one without them 0.5. 8 heads of 64
/// columns (AVX-512, simulated threads): 16 threads take 16 passes with answers, 40 threads 32 half as wide, 64 threads
/// 32 without.
struct wave_plan {
  idx_t heads = 0, wave = 1;
  idx_t columns = 0;           // of the values: in so many at a time a state passes through the chunks
  bool answers_later = false;  // else they are given where the state passes
  bool long_answers = false;   // longer than loading: they begin before

  template <class T>
  static wave_plan of(idx_t heads, idx_t threads, idx_t dim_v) {
    wave_plan x;
    x.heads = heads, x.wave = std::min<idx_t>(8, ceil_div(2 * threads, heads));
    const auto passing = [&](idx_t some) { return heads * ceil_div(dim_v, some); };
    x.columns = threads > passing(panel_width<T>) ? width<T> : panel_width<T>;
    x.answers_later = 4 * threads > 5 * passing(x.columns);
    return x;
  }
  idx_t waves() const { return answers_later ? 3 : 2; }
  idx_t slot_count() const { return heads * wave * waves(); }
  /// Where the memory of a chunk is.
  idx_t slot(idx_t head, idx_t n) const { return (n / wave % waves() * heads + head) * wave + n % wave; }

  /// load(head, chunk, worker) for chunks [0, all) of every head; then pass(head, begin, end, part, worker), wave by
  /// wave, in independent parts of the columns; then, with `answers_later`, answer(head, chunk, worker). At the same
  /// time as a wave passes, the one before it is answered and the next one is loaded.
  template <class Load, class Pass, class Answer>
  void run(execution& exec, idx_t all, idx_t parts, const Load& load, const Pass& pass, const Answer& answer) const {
    const auto chunks = [&](idx_t begin) { return begin < 0 ? 0 : std::clamp<idx_t>(all - begin, 0, wave); };
    for (idx_t first = -wave; first < all + (answers_later ? wave : 0); first += wave) {
      const idx_t passes = chunks(first) > 0 ? parts : 0;
      const idx_t answers = answers_later ? chunks(first - wave) : 0, loads = chunks(first + wave);
      exec.for_each(heads * (passes + answers + loads), [&](idx_t task, int worker) {
        const idx_t head = task % heads, n = task / heads;
        const idx_t load_at = n - passes - (long_answers ? answers : 0);
        if (n < passes)
          pass(head, first, first + chunks(first), n, worker);
        else if (load_at >= 0 && load_at < loads)
          load(head, first + wave + load_at, worker);
        else
          answer(head, first - wave + n - passes - (long_answers ? 0 : loads), worker);
      });
    }
  }
};

/// Heads that pass through their chunks in such waves, which takes `longer` times as long in all.
inline head_split split_by_waves(idx_t heads, idx_t chunks, idx_t threads, double longer) {
  const head_split split = head_split::of(heads, threads);
  const bool worth = chunks >= 4 && longer * static_cast<double>(split.shared) <= static_cast<double>(threads);
  return worth ? split : head_split{heads, 0};
}

/// A segment of a shared head, which parts of it may be attended to separately.
template <class T>
struct segment_in_parts {
  idx_t parts;
  kernel_sums<T>*before, *sums, *part_sums;  // before the segment; its own; its own before each part but the first
  T *decay, *part_decays;                    // of `sums` and of each of `part_sums`
};

/// The sums of shared heads, segment by segment.
template <class T>
struct shared_sums {
  idx_t heads = 0, most = 0;           // segments of each head in a wave
  kernel_sums<T>* sums = nullptr;      // [heads][most + 1]: before the segments of the wave, then of each
  T* decays = nullptr;                 // [heads][most]
  std::atomic<idx_t>* left = nullptr;  // [heads]: segments that are not yet summed up

  static shared_sums layout(arena& memory, const kernel_call<T>& call, idx_t heads, idx_t most) {
    shared_sums x;
    x.heads = heads, x.most = most;
    x.sums = memory.allocate_list(heads * (most + 1), [&](arena& one) { return call.allocate_sums(one); });
    x.decays = memory.allocate<T>(heads * most);
    x.left = memory.allocate<std::atomic<idx_t>>(heads);
    return x;
  }
  kernel_sums<T>* of(idx_t head) const { return sums + head * (most + 1); }
  T* decays_of(idx_t head) const { return decays + head * most; }
  /// Of a wave of `count` segments, where parts * count <= most.
  segment_in_parts<T> segment_at(idx_t head, idx_t n, idx_t count, idx_t parts) const {
    const idx_t first = count + n * (parts - 1);
    return {parts, of(head) + n, of(head) + n + 1, of(head) + first + 1, decays_of(head) + n, decays_of(head) + first};
  }
  void clear() const {
    for (idx_t n = 0; n < heads; ++n) of(n)->empty = true;
  }
  /// The sums after a wave of `count` segments of a head are those before the next one.
  void advance(idx_t head, idx_t count) const { std::swap(of(head)[0], of(head)[count]); }

  /// Segments [begin, end) of a wave: their sums become those of all before the next segment, where [begin] is that.
  void add_up(idx_t head, idx_t begin, idx_t end, const kernel_scratch<T>& s) const {
    kernel_sums<T>* const x = of(head);
    for (idx_t n = begin; n < end; ++n) {
      const T decay = decays_of(head)[n];
      if (x[n + 1].empty) {  // no query is in it
        copy_sums(x[n], x[n + 1]);
        scale(x[n + 1], decay);
      } else if (!x[n].empty) {
        combine(x[n], decay, x[n + 1], x[n + 1], s.factors);
      }
    }
  }

  /// 1., after `alone` tasks of other heads: `parts` tasks of every head, the first parts of all of them first. Then
  /// after(head, worker), once for each head.
  template <class Alone, class Part, class After>
  void run_parts(execution& exec, idx_t alone, idx_t parts, Alone&& task_alone, Part&& part, After&& after) const {
    for (idx_t n = 0; n < heads; ++n) new (left + n) std::atomic<idx_t>(parts);
    exec.for_each(alone + heads * parts, [&](idx_t task, int worker) {
      if (task < alone) return task_alone(task, worker);
      const idx_t head = (task - alone) % heads;
      part(head, (task - alone) / heads, worker);
      if (left[head].fetch_sub(1, std::memory_order_acq_rel) == 1) after(head, worker);
    });
  }
  /// The sums of all segments of each head, up to `all`, become those before. segments(head) is their number,
  /// sum(head, segment, sums, worker) sums one up and returns its decay, scratch(worker) is for adding.
  template <class Alone, class Segments, class Sum, class Scratch>
  void sum_up(execution& exec, idx_t alone, idx_t all, Alone&& task_alone, Segments&& segments, Sum&& sum,
              Scratch&& scratch) const {
    for (idx_t first = 0; first < all || alone > 0; first += most, alone = 0) {
      const idx_t count = (std::min)(most, all - first);
      const auto here = [&](idx_t head) { return std::clamp<idx_t>(segments(head) - first, 0, count); };
      run_parts(
          exec, alone, count, task_alone,
          [&](idx_t head, idx_t n, int worker) {
            if (n < here(head)) decays_of(head)[n] = sum(head, first + n, of(head)[n + 1], worker);
          },
          [&](idx_t head, int worker) {
            add_up(head, 0, here(head), scratch(worker));
            std::swap(of(head)[0], of(head)[here(head)]);
          });
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
