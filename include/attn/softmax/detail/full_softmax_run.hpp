// attn: the driver of full_softmax, and of its steps: items with few queries by few_queries.hpp, the others by the
// blockwise kernel, a wave of key heads at a time: keys are packed once, then attended by blocks of rows.
#pragma once

#include <attn/softmax/detail/few_queries.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether keys and values of a head are so few that those of the next head are fetched while it is attended: without
/// that, short sequences wait for memory (12 heads of 64, Zen 4: sequences of 32 take 0.7, of 128 0.86, of 512 0.97 of
/// the time).
template <class C>
bool is_short(const attention_shape& s) {
  return s.keys * (s.dim + s.dim_v) * static_cast<idx_t>(sizeof(C)) <= idx_t(1) << 18;
}

template <class S, class Score, class C = S, class P = product_type<S>>
struct full_softmax_driver {
  using T = compute_type<S>;
  using few = few_queries_driver<S, Score, C, P>;
  static constexpr idx_t pack_step = 512;

  const softmax_call<S, Score, C>& in;
  const attention_shape& shape = in.shape;
  const sequence_lengths& lengths = in.lengths;

  /// Queries [begin, end) of a head.
  struct query_rows {
    idx_t b, h, begin, end;
  };
  query_rows rows_of_step(idx_t key_head, idx_t step) const {
    const idx_t group = shape.group(), b = key_head / shape.kv_heads,
                begin = (ceil_div(shape.queries, max_rows) - 1 - step / group) * max_rows;
    return {b, key_head % shape.kv_heads * group + step % group, begin,
            (std::min)(begin + max_rows, lengths.queries(b))};
  }

  void prefetch_queries(const query_rows& some, line_prefetcher& to) const {
    to.add(in.query(some.b, some.h), some.begin, some.end);
  }
  /// Of a short key head, if there is one, a step out of `steps` fetches its part of keys and values, the last one its
  /// first queries as well.
  void prefetch_short(idx_t key_head, idx_t step, idx_t steps, line_prefetcher& to) const {
    const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads;
    if (b >= shape.batch || !is_short<C>(shape)) return;
    const idx_t keys = in.visible_keys(b), begin = keys * step / steps, end = keys * (step + 1) / steps;
    to.add(in.key_rows(b, h), begin, end);
    to.add(in.value_rows(b, h), begin, end);
    if (step + 1 == steps) prefetch_queries(rows_of_step(key_head, 0), to);
  }

  /// Items with few queries by few_queries.hpp, the others by the blockwise kernel, a wave of key heads at a time: keys
  /// are packed, then attended.
  void run() const {
    const auto limit = in.limit_threads(shape.keys, static_cast<double>(shape.keys));
    idx_t few_items = 0;
    bool padded = false;
    for (idx_t b = 0; b < shape.batch; ++b)
      few_items += few::takes(in, b), padded |= lengths.queries(b) < shape.queries;
    if (few_items > 0) few{in}.run();
    if constexpr (!few::in_codes)
      if (few_items < shape.batch) {
        const idx_t key_heads = shape.batch * shape.kv_heads;
        const idx_t bytes = shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
        const auto layout_item = [&](arena& memory) {
          return row_keys<P>::layout(memory, shape.keys, shape.dim, shape.dim_v);
        };
        for (const auto& some : waves_of(in.exec, key_heads, wave_size(in.exec, key_heads, bytes), layout_item)) {
          in.exec.for_each(some.count * ceil_div(shape.keys, pack_step), [&](idx_t task, int) {
            const auto [key_head, keys, step] = some.at(task);
            const idx_t b = key_head / shape.kv_heads, begin = step * pack_step,
                        end = (std::min)(begin + pack_step, in.visible_keys(b));
            if (begin >= end || few::takes(in, b)) return;
            const idx_t h = key_head % shape.kv_heads;
            keys.pack(in.key_rows(b, h), in.value_rows(b, h), begin, end);
          });
          // The last row blocks of a causal call are the longest: they go first.
          const idx_t steps = ceil_div(shape.queries, max_rows) * shape.group();
          in.exec.for_each(some.count * steps, [&](idx_t task, int worker) {
            const auto [key_head, packed, step] = some.at(task);
            const auto [b, h, i0, i1] = rows_of_step(key_head, step);
            if (i0 >= i1 || few::takes(in, b)) return;
            auto block = in.exec.scratch(worker, [&](arena& memory) {
              return row_block<P>::layout(memory, shape.dim, shape.dim_v, bool(in.terms.by_distance));
            });
            in.begin(block, b, h, in.query(b, h), {i0, 1, nullptr}, i1 - i0);
            line_prefetcher next;
            if (some.count == 1 && step + 1 < steps) prefetch_queries(rows_of_step(key_head, step + 1), next);
            prefetch_short(key_head + some.count, step, steps, next);
            row_keys<P> keys = packed;
            if (next) keys.next = &next;
            const idx_t all = lengths.keys(b), shift = in.shift(b);
            for (idx_t i = i0; i < i1; ++i)
              block.ranges[i - i0] = {0, in.limit().end(i + shift, all)};
            attend(block, keys, in.terms_for(b, h));
            in.finish(block, b, h);
          });
        }
      }
    if (padded)
      in.exec.for_each(shape.batch * shape.heads,
                       [&](idx_t x, int) { in.clear_padding(x / shape.heads, x % shape.heads); });
  }
};

template <class S, class Score, class C>
void run_full_softmax(const softmax_call<S, Score, C>& call) {
  using Elements = std::conditional_t<std::same_as<C, Eigen::bfloat16>, C, S>;  // that are multiplied
  using standard = product_type<Elements>;
  using fast = fast_product_type<Elements>;
  if (call.terms.need_memory()) {
    using few = few_queries_driver<S, Score, C, product_type<S>>;
    softmax_call<S, Score, C> prepared = call;
    std::optional<distance_range> range;  // where an item is attended by the blockwise kernel
    for (idx_t b = 0; b < call.shape.batch; ++b)
      if (!few::takes(call, b) || !few::streamed(call, b)) range = {call.furthest()};
    const auto terms = call.exec.workspace([&](arena& memory) { return call.layout_terms(memory, range); });
    prepared.prepare_terms(*terms);
    return run_full_softmax(prepared);
  }
  if constexpr (!std::same_as<fast, standard>)
    if (uses_fast_products<Elements>(call.exec)) return full_softmax_driver<S, Score, C, fast>{call}.run();
  full_softmax_driver<S, Score, C, standard>{call}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_full_softmax(const softmax_call<S, no_score>&)
#include <attn/core/detail/compiled.hpp>
