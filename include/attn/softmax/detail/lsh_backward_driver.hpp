// attn: the backward pass of lsh.hpp, in waves of key heads, query head by query head:
//   1. tokens are hashed and sorted (lsh_order.hpp)
//   2. round by round, with the final lse: dQ, dK of the keys k = q / |q| and dV are added up token by token.
//      Neighbouring tasks of sorted tokens see common keys and must not run at the same time: first the even tasks run,
//      then the odd ones
//   3. rows that saw no other key attended themselves; dQ and dK become the gradient of q
#pragma once

#include <attn/softmax/detail/lsh_driver.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class S, class Options, class Score, class ScoreBackward>
struct lsh_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const Options& options;
  const attention_shape& shape = in.shape;
  lsh_order<S, Options> tokens{options, in.shape};

  idx_t stride_k() const { return backward_keys<P>::stride(shape.dim); }
  idx_t stride_v() const { return backward_keys<P>::stride(shape.dim_v); }

  /// Memory that the threads share for one key head of one batch item.
  struct head_scratch {
    lsh_tables<T> tables;  // of the query head in progress
    T *d_query, *d_key;    // [L][stride_k]: sums of that head, before the scale; null: not wanted
    T* d_value;            // [L][stride_v]
    T* slopes;             // [segments]: sums of the gradient of the slope
  };
  head_scratch layout(arena& memory) const {
    head_scratch p{.tables = tokens.layout(memory), .d_query = nullptr, .d_key = nullptr, .d_value = nullptr,
                   .slopes = memory.allocate<T>(tokens.segments())};
    if (in.dq) {
      p.d_query = memory.allocate<T>(shape.keys * stride_k());
      p.d_key = memory.allocate<T>(shape.keys * stride_k());
    }
    if (in.dv) p.d_value = memory.allocate<T>(shape.keys * stride_v());
    return p;
  }

  /// Scratch of one thread: a block of rows, and the keys they see with their sums.
  struct thread_scratch {
    backward_rows<P> rows;
    backward_scratch<P> kernel;
    backward_keys<P> packed;
    idx_t* token;       // of every slot
    key_range* ranges;  // [max_rows]
    T* dq;              // [max_rows][stride_k]
    typename lsh_order<S, Options>::thread_scratch tokens;
  };
  thread_scratch scratch(int worker) const {
    const idx_t slots = lsh_chunks(shape.keys, options).slots_per_task();
    return in.forward.exec.scratch(worker, [&](arena& memory) {
      thread_scratch s{.rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v),
                       .kernel = in.layout_scratch(memory),
                       .packed = {.keys = packed_keys<P>::layout(memory, slots, shape.dim, shape.dim),
                                  .values = packed_keys<P>::layout(memory, slots, shape.dim_v, 0)},
                       .token = memory.allocate<idx_t>(slots),
                       .ranges = memory.allocate<key_range>(max_rows),
                       .dq = nullptr,
                       .tokens = tokens.layout_scratch(memory)};
      const idx_t capacity = s.packed.keys.capacity;
      if (in.dq) s.packed.d_keys = memory.allocate<T>(capacity * stride_k());
      if (in.dv) s.packed.d_values = memory.allocate<T>(capacity * stride_v());
      if (in.dq) s.dq = memory.allocate<T>(max_rows * stride_k());
      return s;
    });
  }

  /// Query head `in_group` of the group of a key head.
  lsh_head<S> head(idx_t key_head, idx_t in_group, const head_scratch& p) const {
    const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads * shape.group() + in_group;
    return {b, h, in.lengths().keys(b), head_of(in.q, b, h), head_of(in.v, b, h / shape.group()), p.tables};
  }

  /// The slots that the sorted tokens [begin, end) of a round see.
  static key_range slots_of(const lsh_chunks& chunks, idx_t begin, idx_t end) {
    return {chunks.slots_of(begin).begin, chunks.slots_of(end - 1).end};
  }

  backward_keys<P> pack(const lsh_head<S>& h, const lsh_chunks& chunks, idx_t round, key_range slots,
                        const thread_scratch& s) const {
    backward_keys<P> packed = s.packed;
    packed.keys.positions = {0, 1, s.token};
    tokens.for_each_key_panel(h, chunks, round, slots, s.token, s.tokens, [&](idx_t slot, idx_t some, const auto& key) {
      packed.keys.pack_keys(key, 1, slot, slot + some);
      packed.keys.pack_value_rows([&](idx_t n) { return key(n - slot); }, 1, slot, slot + some);
      packed.values.pack_keys([&](idx_t n) { return h.value.row(s.token[slot + n]); }, h.value.col_stride, slot,
                              slot + some);
    });
    packed.clear(0, slots.end - slots.begin);
    return packed;
  }

  /// Adds `count` rows of sums to those of their tokens.
  static void add_rows(const T* sums, idx_t stride, const idx_t* token, idx_t count, T* to) {
    for (idx_t n = 0; sums && n < count; ++n) {
      T* const row = to + token[n] * stride;
      for (idx_t d = 0; d < stride; d += width<T>)
        store<T>(row + d, add(load<T>(row + d), load<T>(sums + n * stride + d)));
    }
  }

  /// Sorted tokens [begin, end) of one round, whole chunks. Returns their part of the gradient of the slope.
  T differentiate_chunks(const lsh_head<S>& h, const head_scratch& p, idx_t round, idx_t begin, idx_t end,
                         const thread_scratch& s) const {
    const lsh_chunks chunks(h.length, options);
    const key_range slots = slots_of(chunks, begin, end);
    const backward_keys<P> keys = pack(h, chunks, round, slots, s);
    const idx_t* const order = h.tables.order + round * shape.keys;
    const idx_t own = chunks.before() - slots.begin;  // the slot of this round's first token
    auto head_terms = in.terms().for_head(h.batch, h.head, 0);
    head_terms.excluded = {.what = options.causal ? excluded_keys::kind::own_and_later : excluded_keys::kind::own,
                           .offset = h.tables.rank + round * shape.keys,
                           .known = {own, own + chunks.n}};
    auto back = in.back(head_terms);
    const idx_t unit = chunks.rows_per_unit(max_rows), step = chunks.rows_per_block(max_rows);
    for (idx_t first = begin, last; first < end; first = last) {
      last = std::min({first + step, first + unit - (first - begin) % unit, end});
      const idx_t count = last - first;
      const index_map which{0, 1, order + first};
      in.pack_rows(s.rows, h.batch, h.head, h.query, which, count);
      for (idx_t t = first; t < last; ++t) {
        const key_range seen = chunks.slots_of(t);
        s.ranges[t - first] = {seen.begin - slots.begin, seen.end - slots.begin};
      }
      if (s.dq) std::fill_n(s.dq, round_up(count, tile_rows) * stride_k(), T(0));
      differentiate(s.rows, count, s.ranges, which, keys, head_terms, s.kernel, s.dq, stride_k(), back);
      add_rows(s.dq, stride_k(), order + first, count, p.d_query);
    }
    add_rows(keys.d_keys, stride_k(), s.token, slots.end - slots.begin, p.d_key);
    add_rows(keys.d_values, stride_v(), s.token, slots.end - slots.begin, p.d_value);
    return back.d_slope();
  }

  /// Whether token i has seen another one, in any round.
  bool sees_other(const lsh_head<S>& h, idx_t i) const {
    const lsh_chunks chunks(h.length, options);
    const auto head_terms = in.terms().for_head(h.batch, h.head, 0);
    for (idx_t round = 0; round < options.rounds; ++round) {
      const key_range seen = chunks.slots_of(h.tables.rank[round * shape.keys + i]);
      for (idx_t slot = seen.begin; slot < seen.end; ++slot) {
        const auto [from, at] = chunks.source(round, slot);
        const idx_t j = h.tables.order[from * shape.keys + at];
        if (j == i || (options.causal && j > i)) continue;
        if (!head_terms.change_scores()) return true;
        T score = tokens.plain_score(h, i, j, head_terms.query_factor());
        head_terms.apply(&score, 1, i, {j, 1, nullptr}, 0);
        if (score != -std::numeric_limits<T>::infinity()) return true;
      }
    }
    return false;
  }

  /// Token i, which has attended itself. Returns its part of the gradient of the slope.
  [[gnu::noinline]] T differentiate_self(const lsh_head<S>& h, const head_scratch& p, idx_t i) const {
    const auto lse = in.lse_of(h.batch, h.head, i);
    if (!lse.sees()) return T(0);
    const auto o = head_of(in.out, h.batch, h.head), d_o = head_of(in.d_out, h.batch, h.head);
    const auto head_terms = in.terms().for_head(h.batch, h.head, 0);
    auto back = in.back(head_terms);
    alignas(64) T raw[width<T>] = {}, d_score[width<T>] = {};
    T score = raw[0] = tokens.plain_score(h, i, i, head_terms.query_factor());
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    const T weight = std::exp2(score - lse.maximum - lse.log_sum);
    const T d_weight = row_dot<T>(d_o.row(i), d_o.col_stride, h.value.row(i), h.value.col_stride, shape.dim_v);
    d_score[0] = weight * (d_weight - in.delta(o, d_o, h.batch, h.head, i));
    if (back.any()) back(raw, d_score, width<T>, i, {i, 1, nullptr}, 0);
    const S* const x = h.query.row(i);
    for (idx_t d = 0; p.d_query && d < shape.dim; ++d) {
      const T q = static_cast<T>(x[d * h.query.col_stride]);
      p.d_query[i * stride_k() + d] += d_score[0] * (q * h.tables.factor[i]);
      p.d_key[i * stride_k() + d] += d_score[0] * q;
    }
    for (idx_t d = 0; p.d_value && d < shape.dim_v; ++d)
      p.d_value[i * stride_v() + d] += weight * static_cast<T>(d_o.row(i)[d * d_o.col_stride]);
    return back.d_slope();
  }

  /// The gradient of token i as a query, and through its key k = f q: scale (dq + f (dk - k (k . dk))).
  void join_key(const lsh_head<S>& h, const head_scratch& p, idx_t i) const {
    T *const d_query = p.d_query + i * stride_k(), *const d_key = p.d_key + i * stride_k();
    const T factor = h.tables.factor[i];
    if (factor == T(0)) return;
    const S* const x = h.query.row(i);
    const auto key = [&](idx_t d) { return static_cast<T>(x[d * h.query.col_stride]) * factor; };
    T along = 0;
    for (idx_t d = 0; d < shape.dim; ++d) along += key(d) * d_key[d];
    for (idx_t d = 0; d < shape.dim; ++d) d_query[d] += factor * (d_key[d] - key(d) * along);
  }

  /// The last step, for tokens [begin, end) of a head, after all rounds. Returns their part of the gradient of the
  /// slope.
  T finish_tokens(const lsh_head<S>& h, const head_scratch& p, idx_t begin, idx_t end) const {
    T slope = 0;
    for (idx_t i = begin; i < std::min(end, h.length); ++i) {
      if (!sees_other(h, i)) slope += differentiate_self(h, p, i);
      if (in.dq) join_key(h, p, i);
    }
    if (in.dq)
      store_gradient_rows(p.d_query, stride_k(), in.terms().scale, head_of(in.dq, h.batch, h.head), begin, end,
                          h.length, in.accumulate);
    return slope;
  }

  /// The tasks of one round of one head: sorted tokens from `begin` on.
  struct task_range {
    idx_t tokens, step;  // tokens of the head, and of a task
    idx_t count() const { return ceil_div(tokens, step); }
    idx_t begin(idx_t n) const { return n * step; }
    idx_t end(idx_t n) const { return std::min((n + 1) * step, tokens); }
  };
  /// Whether a task sees chunks of other rounds, whose tokens may be any.
  bool wraps(const lsh_chunks& chunks, const task_range& tasks, idx_t n) const {
    const key_range slots = slots_of(chunks, tasks.begin(n), tasks.end(n));
    return slots.begin < chunks.before() || slots.end > chunks.before() + chunks.n;
  }

  void differentiate_round(const wave<head_scratch>& key_heads, idx_t in_group, idx_t round) const {
    const auto run = [&](idx_t key_head, const head_scratch& p, int worker, const auto& chosen) {
      const lsh_head<S> h = head(key_head, in_group, p);
      const lsh_chunks chunks(h.length, options);
      const task_range tasks{h.length, chunks.tokens_per_task()};
      chosen(tasks.count(), [&](idx_t n, bool wrapping) {
        if (wraps(chunks, tasks, n) == wrapping)
          p.slopes[n] += differentiate_chunks(h, p, round, tasks.begin(n), tasks.end(n), scratch(worker));
      });
    };
    const idx_t steps = ceil_div(tokens.segments(), 2);
    for (idx_t odd = 0; odd < 2; ++odd)
      key_heads.for_each(steps, [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
        run(key_head, p, worker, [&](idx_t count, const auto& task) {
          if (2 * step + odd < count) task(2 * step + odd, false);
        });
      });
    if (options.wrap)
      key_heads.for_each(1, [&](idx_t key_head, const head_scratch& p, idx_t, int worker) {
        run(key_head, p, worker, [&](idx_t count, const auto& task) {
          for (idx_t n = 0; n < count; ++n) task(n, true);
        });
      });
  }

  void differentiate_wave(const wave<head_scratch>& key_heads, const tensor_view<const T>& rotations) const {
    for (idx_t in_group = 0; in_group < shape.group(); ++in_group) {
      tokens.sort_tokens(rotations, [&](idx_t steps, const auto& body) {
        key_heads.for_each(steps, [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
          body(head(key_head, in_group, p), step, scratch(worker).tokens);
        });
      });
      key_heads.for_each(tokens.segments(), [&](idx_t, const head_scratch& p, idx_t part, int) {
        const idx_t begin = part * lsh_segment, count = std::min(lsh_segment, shape.keys - begin);
        for (T* sums : {p.d_query, p.d_key})
          if (sums) std::fill_n(sums + begin * stride_k(), count * stride_k(), T(0));
        if (p.d_value && in_group == 0) std::fill_n(p.d_value + begin * stride_v(), count * stride_v(), T(0));
        p.slopes[part] = T(0);
      });
      for (idx_t round = 0; round < options.rounds; ++round) differentiate_round(key_heads, in_group, round);
      key_heads.for_each(tokens.segments(), [&](idx_t key_head, const head_scratch& p, idx_t part, int) {
        const idx_t begin = part * lsh_segment, end = std::min(begin + lsh_segment, shape.keys);
        p.slopes[part] += finish_tokens(head(key_head, in_group, p), p, begin, end);
      });
      for (idx_t n = 0; in.d_slopes && n < key_heads.count; ++n)
        for (idx_t part = 0; part < tokens.segments(); ++part)
          in.slope_sums[(key_heads.first + n) * shape.group() + in_group] += key_heads.scratch[n].slopes[part];
    }
    if (in.dv)
      key_heads.for_each(tokens.segments(), [&](idx_t key_head, const head_scratch& p, idx_t part, int) {
        const idx_t b = key_head / shape.kv_heads, begin = part * lsh_segment;
        store_gradient_rows(p.d_value, stride_v(), T(1), head_of(in.dv, b, key_head % shape.kv_heads), begin,
                            std::min(begin + lsh_segment, shape.keys), in.lengths().keys(b), in.accumulate);
      });
  }

  double operations() const { return tokens.operations(6 * shape.dim + 4 * shape.dim_v); }

  void run() const {
    if (!in.dq && !in.dv && !in.d_slopes) return;
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = shape.keys * (4 * options.rounds + 3 * shape.dim + 2 * shape.dim_v) * idx_t(sizeof(T));
    tokens.with_rotations(exec, [&](const tensor_view<const T>& rotations) {
      for_each_wave(
          exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); },
          [&](const wave<head_scratch>& w) { differentiate_wave(w, rotations); });
    });
  }
};
template <class S, class Score, class ScoreBackward, class Options>
lsh_backward_driver(const softmax_backward_call<S, Score, ScoreBackward>&, const Options&)
    -> lsh_backward_driver<S, Options, Score, ScoreBackward>;

}  // namespace attn::inline ATTN_ISA::detail
