// attn: the driver of the backward pass of kernel attention by sums of features.
//
// One task is one key head; heads that are no multiple of the threads are shared by segments (shared_heads.hpp).
// Causal:
//
//   1. the keys of segments are summed up, keeping the sums before each chunk
//   2. from the last segments on, as many as a wave has: their queries are attended to; what they give the keys of
//      their chunk, and the sums of those after it, are kept in place of the sums of keys
//   3. chunks add what later queries give their keys
//
// All tasks together take 1.2 times as long as one thread with 64 features, 1.1 times with 256.
#pragma once

#include <attn/kernel/detail/sums_head_backward.hpp>
#include <attn/kernel/detail/shared_heads.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Chunks whose keys are finished by one task.
inline constexpr idx_t part_chunks = 4;

/// Whether threads gain by sharing so many causal heads, in segments that are attended to in two halves.
[[gnu::noinline]] inline bool sharing_gains(idx_t heads, idx_t segments, idx_t threads) {
  constexpr double of_sums = 0.15, of_queries = 0.85, of_keys = 0.3;  // of the time of attending to a segment
  const auto rounds = [threads](idx_t tasks) { return static_cast<double>(ceil_div(tasks, threads)); };
  const double shared = of_sums * rounds(heads * (segments - 1)) + of_queries * rounds(heads * segments) +
                        of_keys * static_cast<double>(heads * segments) / static_cast<double>(threads);
  return heads > 0 && shared < 0.95 * (1 + of_sums) * static_cast<double>(segments);
}

template <class T>
struct sums_backward_driver : sums_head_backward<T> {
  using base = sums_head_backward<T>;
  using base::attend_keys, base::attend_keys_of, base::attend_queries_of, base::attend_rows, base::call, base::in,
      base::keep_dk, base::keep_dv, base::key_rows, base::run_both, base::run_causal, base::shape, base::store_before,
      base::sum_up_chunks, base::sums_per_key_head;
  using typename base::item_head_target, typename base::kept_chunk, typename base::sums_type,
      typename base::worker_scratch;

  sums_type* feature_sums = nullptr;  // [batch * heads]: of each head, the gradient of its features
  shared_sums<T> shared_keys{}, shared_queries{};  // causal keys of all segments, queries of a wave from the last on
  sums_type* queries_t = nullptr;                  // [shared heads]: of all queries, R^T
  kept_chunk* kept_chunks = nullptr;               // [shared causal heads][segments of a wave][chunks]

  worker_scratch scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return this->layout(memory); });
  }

  idx_t chunks_of_segment() const { return segment_tokens(shape.keys) / kernel_chunk; }
  void layout_shared(arena& memory, idx_t heads, idx_t threads) {
    const idx_t all = most_segments(shape.keys), wave = segments_of_wave(heads, threads);
    shared_keys = shared_sums<T>::layout(memory, call, heads, call.causal ? all : wave);
    const idx_t kept = call.causal && heads > 0 ? (std::min)(all, ceil_div(2 * threads, heads)) : 0;
    shared_queries = shared_sums<T>::layout(memory, call, heads, call.causal ? kept : wave);
    kept_chunks = memory.allocate_list(heads * kept * chunks_of_segment(),
                                       [&](arena& one) { return this->layout_chunk(one); });
    queries_t = memory.allocate_list(key_rows() ? heads : 0, [&](arena& one) {
      return sums_type::layout(one, shape.dim_v, call.map->features, sum_parts::weights);
    });
  }

  /// Heads from `whole` on by all threads, after run_whole(n, worker) for those before.
  template <class RunWhole>
  void share_both(execution& exec, idx_t whole, const RunWhole& run_whole) const {
    const idx_t heads = shared_keys.heads, chunks = ceil_div(shape.keys, kernel_chunk);
    const auto b = [&](idx_t n) { return batch_of(whole + n); };
    const auto h = [&](idx_t n) { return head_in_item(whole + n); };
    const auto forward = [&](int worker) { return scratch(exec, worker).x.forward; };
    const auto rows = [&](idx_t n) { return has_no_scores(whole + n) ? 0 : call.lengths.queries(b(n)); };
    shared_keys.sum_up(
        exec, whole, heads > 0 ? most_segments(shape.keys) : 0, run_whole,
        [&](idx_t n) { return has_no_scores(whole + n) ? 0 : call.segments(b(n)); },
        [&](idx_t n, idx_t segment, sums_type& sums, int worker) {
          return in.kernel.sum_up_segment(b(n), h(n), segment, forward(worker), sums);
        },
        forward);
    shared_queries.sum_up(
        exec, 0, heads > 0 ? most_segments(shape.queries) : 0, run_whole,
        [&](idx_t n) { return ceil_div(rows(n), segment_tokens(rows(n))); },
        [&](idx_t n, idx_t segment, sums_type& sums, int worker) {
          const idx_t step = segment_tokens(rows(n)), begin = segment * step, end = (std::min)(begin + step, rows(n));
          attend_rows(b(n), h(n), begin, end, *shared_keys.of(n), sums, scratch(exec, worker).x, nullptr);
          return T(1);
        },
        forward);
    if (!in.reverse()) return;
    const auto later = [&](idx_t n) -> const sums_type& { return *shared_queries.of(n); };
    if (key_rows())
      exec.for_each(heads, [&](idx_t n, int) {
        if (!has_no_scores(whole + n)) transpose_sums(later(n), queries_t[n]);
      });
    exec.for_each(heads * chunks, [&](idx_t task, int worker) {
      const idx_t n = task / chunks, begin = task % chunks * kernel_chunk;
      if (!has_no_scores(whole + n) && begin < call.lengths.keys(b(n)))
        attend_keys(b(n), h(n), begin, later(n), key_rows() ? queries_t[n] : sums_type{}, scratch(exec, worker),
                    target(whole + n));
    });
  }
  /// As share_both, in waves of the last segments that are left.
  template <class RunWhole>
  void share_causal(execution& exec, idx_t whole, const RunWhole& run_whole) const {
    const shared_sums<T>&before = shared_keys, &after = shared_queries;
    const idx_t heads = before.heads, all = before.most, chunks = chunks_of_segment();
    const auto b = [&](idx_t n) { return batch_of(whole + n); };
    const auto h = [&](idx_t n) { return head_in_item(whole + n); };
    const auto forward = [&](int worker) { return scratch(exec, worker).x.forward; };
    const auto segments = [&](idx_t n) { return has_no_scores(whole + n) ? 0 : call.segments(b(n)); };
    const auto kept = [&](idx_t n, idx_t at) { return kept_chunks + (n * after.most + at) * chunks; };
    before.run_parts(
        exec, whole, all, run_whole,
        [&](idx_t n, idx_t at, int worker) {
          const idx_t segment = segments(n) - 1 - at;
          if (segment < 0) return;
          sums_type& sums = before.of(n)[segment + 1];
          T& decay = before.decays_of(n)[segment];
          decay = at < after.most
                      ? sum_up_chunks(b(n), h(n), segment, at == 0, sums, forward(worker), kept(n, at))
                      : in.kernel.sum_up_segment(b(n), h(n), segment, forward(worker), sums);
        },
        [&](idx_t n, int worker) { before.add_up(n, 0, segments(n) - 1, forward(worker)); });
    for (idx_t first = 0; heads > 0 && first < all; first += after.most) {
      const idx_t wave = (std::min)(after.most, all - first);
      const auto segment = [&](idx_t n, idx_t at) { return segments(n) - 1 - first - at; };
      after.run_parts(
          exec, 0, wave, run_whole,
          [&](idx_t n, idx_t at, int worker) {
            if (segment(n, at) < 0) return;
            worker_scratch w = scratch(exec, worker);
            after.decays_of(n)[at] =
                attend_queries_of(b(n), h(n), segment(n, at), before.of(n)[segment(n, at)], first == 0, w,
                                  target(whole + n), after.of(n)[at + 1], kept(n, at));
          },
          [&](idx_t n, int worker) {
            after.add_up(n, 0, std::clamp<idx_t>(segments(n) - first, 0, wave), forward(worker));
          });
      const idx_t parts = in.reverse() ? ceil_div(chunks, part_chunks) : 0;
      exec.for_each(heads * wave * parts, [&](idx_t task, int worker) {
        const idx_t n = task % heads, at = task / heads % wave, part = task / heads / wave;
        if (segment(n, at) < 0) return;
        worker_scratch w = scratch(exec, worker);
        w.after = after.of(n)[at];
        for (idx_t c = (std::min)((part + 1) * part_chunks, chunks) - 1; c >= part * part_chunks; --c)
          attend_keys_of(b(n), h(n), segment(n, at), c, w, target(whole + n), kept(n, at)[c]);
      });
      for (idx_t n = 0; n < heads; ++n) after.advance(n, wave);
    }
  }

  /// One key head of a batch item, unless `empty`: run_item_head(h, target) for each head of its sums.
  template <class RunItemHead>
  void run_head(idx_t b, idx_t kv_head, bool empty, worker_scratch& w, const RunItemHead& run_item_head) const {
    const idx_t keys = call.lengths.keys(b), each = sums_per_key_head();
    const auto to_k = in.dk.head(b, kv_head), to_v = in.dv.head(b, kv_head);
    if (in.of_gates()) std::fill_n(w.gates, shape.keys, T(0));
    for (idx_t n = 0; n < each; ++n) {
      const idx_t h = kv_head * each + n, item_head = b * call.heads + h;
      const item_head_target to{keep_dk() ? scratch_gradient(w.dk, shape.keys, shape.dim, n > 0) : to_k,
                                keep_dv() ? scratch_gradient(w.dv, shape.keys, shape.dim_v, n > 0) : to_v,
                                in.d_features ? feature_sums + item_head : nullptr};
      if (!empty) run_item_head(h, to);
      if (!empty && in.map->finishes_keys && in.of_keys())
        in.map->finish_head(item_head, in.dk ? w.dk : nullptr, to.features, w.x.forward.map);
      if (in.of_gates() && in.d_gate.extent(1) == call.heads) {
        store_gates(b, h, w.gates);
        std::fill_n(w.gates, shape.keys, T(0));
      }
    }
    if (in.of_gates() && in.d_gate.extent(1) != call.heads) store_gates(b, kv_head, w.gates);
    if (keep_dk() && !empty) {
      if (in.map->finishes_keys) in.map->finish_keys(w.dk, b);
      to_k.store_rows(w.dk, shape.dim, 0, keys);
    }
    if (keep_dv() && !empty) to_v.store_rows(w.dv, shape.dim_v, 0, keys);
  }

  /// Zeros for padding, for the first queries, which see no key, and for keys that no query sees, all if `empty`.
  void pad(idx_t b, idx_t kv_head, bool empty, idx_t queries_without_keys) const {
    const idx_t group = shape.group(), seen = empty ? 0 : call.lengths.keys(b);
    if (in.dk) in.dk.head(b, kv_head).clear_rows(seen, shape.keys);
    if (in.dv) in.dv.head(b, kv_head).clear_rows(seen, shape.keys);
    for (idx_t g = kv_head * group; g < (kv_head + 1) * group && in.dq; ++g) {
      in.dq.head(b, g).clear_rows(0, queries_without_keys);
      in.dq.head(b, g).clear_rows(call.lengths.queries(b), shape.queries);
    }
  }
  void store_gates(idx_t b, idx_t h, const T* sums) const {
    for (idx_t t = 0; t < shape.keys; ++t) store_gradient(in.d_gate(b, h, t), sums[t], in.accumulate);
  }

  void layout_features(arena& memory, idx_t rows) {
    feature_sums = memory.allocate_list(in.d_features ? shape.batch * call.heads : 0, [&](arena& one) {
      return sums_type::layout(one, rows, shape.dim, sum_parts::weights);
    });
  }
  void clear_features() {
    for (idx_t n = 0; in.d_features && n < shape.batch * call.heads; ++n) feature_sums[n].clear();
  }

  // A key head is a task; where it is shared, it has one head of sums.
  idx_t batch_of(idx_t n) const { return n / shape.kv_heads; }
  idx_t head_in_item(idx_t n) const { return n % shape.kv_heads; }
  bool has_no_scores(idx_t n) const {
    return call.lengths.keys(batch_of(n)) == 0 || call.lengths.queries(batch_of(n)) == 0;
  }
  item_head_target target(idx_t n) const {
    return {in.dk.head(batch_of(n), head_in_item(n)), in.dv.head(batch_of(n), head_in_item(n)), nullptr};
  }
  head_split split_of(idx_t heads, idx_t threads) const {
    const head_split none{heads, 0}, split = head_split::of(heads, threads);
    // Heads can only be shared where S and R are the only sums over all of their tokens.
    if (in.d_features || in.map->finishes_keys || in.of_gates() || sums_per_key_head() > 1) return none;
    return !call.causal || sharing_gains(split.shared, most_segments(shape.keys), threads) ? split : none;
  }

  /// Afterwards feature_sums has the sums of the gradients of the features of every head of sums.
  void run(execution& exec) {
    auto work = call.work();
    work.operations *= 3, work.bytes *= 3;
    const auto limit = exec.limit_threads(work);
    const idx_t item_heads = shape.batch * call.heads, heads = shape.batch * shape.kv_heads;
    const idx_t threads = exec.active_threads();
    const head_split split = split_of(heads, threads);
    store_before = split.whole > 0;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      in.map->layout(memory, item_heads);
      layout_shared(memory, split.shared, threads);
      layout_features(memory, call.projection.extents[2]);
      return 0;
    });
    call.map->prepare(exec);
    in.map->prepare(exec);
    clear_features();
    shared_keys.clear(), shared_queries.clear();
    const auto pad_head = [&](idx_t n) {
      pad(batch_of(n), head_in_item(n), has_no_scores(n), call.queries_without_keys(batch_of(n)));
    };
    const auto run_whole = [&](idx_t n, int worker) {
      auto w = scratch(exec, worker);
      run_head(batch_of(n), head_in_item(n), has_no_scores(n), w, [&](idx_t h, const item_head_target& to) {
        call.causal ? run_causal(batch_of(n), h, w, to) : run_both(batch_of(n), h, w, to);
      });
      pad_head(n);
    };
    call.causal ? share_causal(exec, split.whole, run_whole) : share_both(exec, split.whole, run_whole);
    for (idx_t n = split.whole; n < heads; ++n) pad_head(n);
  }
};

/// The gradient of the features, where wanted: the sum over all heads of sums that share a matrix, in order.
template <class T>
void store_feature_gradients(const kernel_backward_call<T>& in, const kernel_sums<T>* sums, execution& exec) {
  const stored_gradient<T>& to = in.d_features;
  if (!to || to.extents[1] == 0) return;
  const idx_t each = in.forward.heads / to.extents[1];
  T* const row = exec.scratch(0, [&](arena& memory) { return memory.allocate<T>(to.extents[3]); });
  for (idx_t h = 0; h < to.extents[1]; ++h)
    for (idx_t r = 0; r < to.extents[2]; ++r) {
      std::fill_n(row, to.extents[3], T(0));
      for (idx_t b = 0; b < in.forward.shape.batch; ++b)
        for (idx_t n = 0; n < each; ++n)
          for (idx_t d = 0; d < to.extents[3]; ++d) row[d] += sums[b * in.forward.heads + h * each + n].value(r, d);
      to.head(0, h).store_rows(row, 0, r, 1);
    }
}

template <class T>
void run_sums_backward(const kernel_backward_call<T>& call, execution& exec) {
  if (!call.any()) return;
  const sums_kernel_backward<T> kernel{call};
  sums_backward_driver<T> driver{{kernel}};
  driver.run(exec);
  store_feature_gradients(call, driver.feature_sums, exec);
}
/// Needs recurrence_backward_run.hpp.
template <class T>
void run_linear_backward(const kernel_backward_call<T>& call, execution& exec) {
  if (call.forward.driver == kernel_driver::sums) return run_sums_backward(call, exec);
  if (call.any()) recurrence_backward_driver<rule::add, T>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_sums_backward(const kernel_backward_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
