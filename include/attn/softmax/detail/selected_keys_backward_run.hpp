// attn: the gradients of selected_keys.hpp query by query, for lists of single keys: the formulas of
// blockwise_backward.hpp with the rows of keys and values read where they lie (selected_rows.hpp says why), for all
// query heads of a list:
//   1. P = 2^(q K^T - lse), dS = P (d_out V^T - D), through the terms
//   2. dQ += dS K
//   3. dV += P^T d_out, dK += dS^T Q      row by row, to the sums of a part of the queries
#pragma once

#include <attn/softmax/detail/listed_gradients.hpp>
#include <attn/softmax/detail/selected_plan.hpp>
#include <attn/softmax/detail/selected_rows.hpp>
#include <attn/softmax/detail/sparse_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class ScoreBackward>
struct selected_rows_backward {
  using T = compute_type<S>;
  /// Scores are those of the forward call to the last bit: so are their products (stream_rows.hpp).
  static constexpr bool scaled_before = numbers_of<stream_operand<T, S>> == 1;
  static constexpr idx_t tile = stream_tile_of<S>, store_step = 128;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const selected_lists& lists;
  const attention_shape& shape = in.shape;
  selected_rows<S, Score> rows{{in.forward}, lists};

  idx_t sides = 1;  // tasks of each part: dQ | dK | dV, or dQ and dK | dV, where there are threads for them

  idx_t parts() const { return parts_of(shape.queries, 4); }

  /// Of one key head of one batch item.
  struct item_scratch {
    listed_sums<T> keys, values;
    double* slopes;  // [parts][group]
  };
  item_scratch layout(arena& memory) const {
    const bool errors = many_queries(shape.queries);
    return {.keys = listed_sums<T>::layout(memory, bool(in.dk), shape.keys, shape.dim, parts(), errors),
            .values = listed_sums<T>::layout(memory, bool(in.dv), shape.keys, shape.dim_v, parts(), errors),
            .slopes = memory.allocate<double>(parts() * shape.group())};
  }
  struct thread_scratch {
    typename selected_rows<S, Score>::scratch lists;
    padded_rows<T> query, scaled, d_out, dq, long_dq, long_errors;
    T *weights, *d, *raw;             // [rows][stream_tile]; raw of one row
    T *key_numbers, *value_numbers;   // a tile that cannot be read in place
    T *maximum, *log_sum, *delta;     // [rows]
    bool of_rows = true;              // dQ and slopes are wanted
  };
  thread_scratch scratch(int worker) const {
    return in.forward.exec.scratch(worker, [&](arena& memory) {
      const idx_t count = rows.together();
      const auto padded = [&](idx_t dim) { return padded_rows<T>::layout(memory, count, dim); };
      return thread_scratch{.lists = rows.layout(memory), .query = padded(shape.dim), .scaled = padded(shape.dim),
                            .d_out = padded(shape.dim_v), .dq = padded(shape.dim), .long_dq = padded(shape.dim),
                            .long_errors = padded(shape.dim), .weights = memory.allocate<T>(count * stream_tile),
                            .d = memory.allocate<T>(count * stream_tile), .raw = memory.allocate<T>(stream_tile),
                            .key_numbers = memory.allocate<T>(tile * round_up(shape.dim, width<T>)),
                            .value_numbers = memory.allocate<T>(tile * round_up(shape.dim_v, width<T>)),
                            .maximum = memory.allocate<T>(count), .log_sum = memory.allocate<T>(count),
                            .delta = memory.allocate<T>(count)};
    });
  }

  /// Loads the rows of query i of heads [h, h + count). Returns whether they are finite.
  bool load_rows(idx_t b, idx_t h, idx_t count, idx_t i, const thread_scratch& s) const {
    bool finite = true;
    for (idx_t r = 0; r < count; ++r) {
      const auto o = head_of(in.out, b, h + r), d = head_of(in.d_out, b, h + r);
      finite &= s.query.load(r, head_of(in.q, b, h + r), i);
      finite &= s.d_out.load(r, d, i);
      const packet<T> factor = broadcast<T>(scaled_before ? in.terms().query_factor() : T(1));
      for (idx_t c = 0; c < s.query.stride; c += width<T>)
        store<T>(s.scaled.row(r) + c, mul(load<T>(s.query.row(r) + c), factor));
      const auto lse = in.forward.lse_of(b, h + r, i);
      const bool sees = lse.sees();
      s.maximum[r] = sees ? lse.maximum : T(0), s.log_sum[r] = sees ? lse.log_sum : T(0);
      s.delta[r] = sees ? in.delta(o, d, b, h + r, i) : T(0);
    }
    std::fill_n(s.dq.data, count * s.dq.stride, T(0));
    return finite;
  }

  /// Steps 1 to 3 for `count` <= tile keys of a list.
  template <class Keys, class Values>
  void differentiate_tile(idx_t b, idx_t h, idx_t heads, idx_t i, const idx_t* list, idx_t count, const Keys& keys,
                          const Values& values, idx_t part, bool finite, const item_scratch& p,
                          const thread_scratch& s) const {
    const T factor = scaled_before ? T(1) : in.terms().query_factor(), limit = in.forward.skip_limit(b);
    const idx_t padded = round_up(count, width<T>);
    by_rows<T>(heads, [&](idx_t r, auto R) {
      const prefetch_nothing nothing;
      row_scores<T, R.value>(s.scaled.row(r), s.scaled.stride, factor, keys, s.weights + r * stream_tile, nothing);
      row_scores<T, R.value>(s.d_out.row(r), s.d_out.stride, T(1), values, s.d + r * stream_tile, nothing);
    });
    for (idx_t r = 0; r < heads; ++r) {
      T *const weights = s.weights + r * stream_tile, *const d = s.d + r * stream_tile;
      const auto terms = for_query(in.terms().for_head(b, h + r, i + in.forward.shift(b)), i);
      auto back = in.back(terms);
      if (back.need_raw()) std::copy_n(weights, padded, s.raw);
      if (terms.any()) terms.apply(weights, count, 0, {0, 1, list}, 0);
      std::fill(weights + count, weights + padded, -std::numeric_limits<T>::infinity());
      if (terms.dropout) terms.drop(d, count, 0, {0, 1, list}, 0);
      if (limit >= T(0) && !any_reaches(weights, padded, T(1), s.maximum[r] - limit)) {
        for (T* x : {weights, d}) std::fill_n(x, padded, T(0));
        continue;
      }
      row_gradients<T>(weights, d, padded, s.maximum[r], s.log_sum[r], s.delta[r]);
      if (terms.dropout) terms.drop(weights, count, 0, {0, 1, list}, 0);
      std::fill(d + count, d + padded, T(0));
      if (back.any()) back(s.raw, d, padded, 0, {0, 1, list}, 0);
      if (s.of_rows) p.slopes[part * shape.group() + (h + r) % shape.group()] += back.slope_sum;
    }
    T ones[4] = {1, 1, 1, 1};
    by_rows<T>(heads, [&](idx_t r, auto R) {
      if (in.dq && s.of_rows)
        row_output<T, R.value>(s.d + r * stream_tile, true, ones, keys, s.dq.row(r), s.dq.stride, prefetch_nothing());
      p.keys.template add<R.value>(part, list, count, s.d + r * stream_tile, s.query, r, finite);
      p.values.template add<R.value>(part, list, count, s.weights + r * stream_tile, s.d_out, r, finite);
    });
  }

  void differentiate_query(idx_t b, idx_t h, idx_t heads, idx_t i, idx_t part, const item_scratch& p,
                           const thread_scratch& s) const {
    const std::span<const idx_t> list = rows.list_of(b, h, i, s.lists);
    const idx_t count = std::ssize(list), kv = h / shape.group();
    const auto keys = s.lists.keys.of(in.forward.key_rows(b, kv), list);
    const auto values = s.lists.values.of(cache_rows<const S>(head_of(in.v, b, kv)), list);
    const bool finite = load_rows(b, h, heads, i, s);
    const idx_t numbers = heads * s.dq.stride;
    for (idx_t from = 0, some; from < count; from += some) {
      if (count > stream_chunk && from % stream_chunk == 0) {
        if (from == 0)
          for (T* x : {s.long_dq.data, s.long_errors.data}) std::fill_n(x, numbers, T(0));
        move_compensated(s.dq.data, numbers, T(1), s.long_dq.data, s.long_errors.data);
      }
      some = (std::min)(tile, count - from);
      with_whole_packets<T>(rows_from(keys, from), some, s.key_numbers, true, [&](const auto& k) {
        with_whole_packets<T>(rows_from(values, from), some, s.value_numbers, false, [&](const auto& v) {
          differentiate_tile(b, h, heads, i, list.data() + from, some, k, v, part, finite, p, s);
        });
      });
    }
    if (count > stream_chunk) {
      move_compensated(s.dq.data, numbers, T(1), s.long_dq.data, s.long_errors.data);
      settle_compensated(s.long_dq.data, s.long_errors.data, numbers, s.dq.data);
    }
    for (idx_t r = 0; in.dq && s.of_rows && r < heads; ++r)
      store_gradient_row(s.dq.row(r), in.terms().scale, head_of(in.dq, b, h + r), i, in.accumulate);
  }

  /// A part of the queries of a key head, or one side of it.
  void differentiate_part(idx_t key_head, idx_t part, idx_t side, item_scratch p, int worker) const {
    const bool of_rows = side == 0, of_values = side == sides - 1, of_keys = sides < 3 ? of_rows : side == 1;
    if (!of_keys) p.keys.data = p.keys.errors = nullptr;
    if (!of_values) p.values.data = p.values.errors = nullptr;
    const idx_t b = key_head / shape.kv_heads, group = shape.group(), first = key_head % shape.kv_heads * group;
    const idx_t queries = in.lengths().queries(b), own = parts_of(queries, 4), heads = rows.together();
    p.keys.clear(part), p.values.clear(part);
    if (of_rows) std::fill_n(p.slopes + part * group, group, 0.0);
    if (part >= own) return;
    thread_scratch s = scratch(worker);
    s.of_rows = of_rows;
    rows.begin_task(s.lists);
    for (idx_t i = queries * part / own; i < queries * (part + 1) / own; ++i)
      for (idx_t h = 0; h < group; h += heads)
        differentiate_query(b, first + h, (std::min)(heads, group - h), i, part, p, s);
  }

  void run() {
    if (!in.dq && !in.dk && !in.dv && !in.d_slopes) return;
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads, group = shape.group(),
                steps = ceil_div(shape.keys, store_step),
                bytes = 3 * shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    if (in.dq && in.dk && in.dv)
      sides = std::clamp<idx_t>(exec.active_threads() / std::max<idx_t>(1, key_heads * parts()), 1, 3);
    for (const auto& items :
         waves_of(exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); })) {
      items.for_each(sides * parts(), [&](idx_t x, const item_scratch& p, idx_t step, int worker) {
        differentiate_part(x, step % parts(), step / parts(), p, worker);
      });
      items.for_each(steps, [&](idx_t x, const item_scratch& p, idx_t step, int) {
        const idx_t b = x / shape.kv_heads, kv = x % shape.kv_heads, begin = step * store_step,
                    end = (std::min)(begin + store_step, shape.keys), real = in.lengths().keys(b),
                    own = parts_of(in.lengths().queries(b), 4);
        if (in.dk) p.keys.store_rows(head_of(in.dk, b, kv), begin, end, real, own, in.terms().scale, in.accumulate);
        if (in.dv) p.values.store_rows(head_of(in.dv, b, kv), begin, end, real, own, T(1), in.accumulate);
      });
      for (idx_t n = 0; in.d_slopes && n < items.count; ++n)
        for (idx_t x = 0; x < parts() * group; ++x)
          in.slope_sums[(items.first + n) * group + x % group] += static_cast<T>(items.scratch[n].slopes[x]);
    }
    for (idx_t b = 0; in.dq && !in.accumulate && b < shape.batch; ++b)
      for (idx_t h = 0; h < shape.heads; ++h) clear_rows(head_of(in.dq, b, h), in.lengths().queries(b), shape.queries);
  }
};

template <class S, class Score, class ScoreBackward>
void run_selected_keys_backward(softmax_backward_call<S, Score, ScoreBackward>& call, const selected_lists& lists) {
  if (lists.block >= listed_names::least_block)
    return run_plan_backward(call, selected_plan_of(call.forward, lists));
  const double keys = static_cast<double>((std::min)(lists.longest() * lists.block, call.shape.keys));
  softmax_backward_work work(
      call, keys * static_cast<double>(call.shape.queries) * 2.5 * call.shape.operations_per_score());
  if (work.needs_lse()) run_selected_keys_step(call.forward, lists);
  selected_rows_backward<S, Score, ScoreBackward>{call, lists}.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_selected_keys_backward(softmax_backward_call<S, no_score, no_score_backward>&,            \
  const selected_lists&)
#include <attn/core/detail/compiled.hpp>
