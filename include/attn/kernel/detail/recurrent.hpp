// attn: kernel attention token by token: few tokens for a state, several heads at once, since maps make the features of
// a block of tokens as fast as those of one.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/kernel_state.hpp>
#include <attn/kernel/detail/step.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Tokens to be fed without queries: of those there are 0 heads.
template <class S, class K, class V>
kernel_views<S> without_queries(const K& k, const V& v) {
  static_assert(std::same_as<S, element_of<const K&>> && std::same_as<S, element_of<const V&>>,
                "attn: the state, k and v must have one element type");
  const tensor_view<const S> keys = as_view(k), values = as_view(v);
  return {tensor_view<const S>(nullptr, {keys.extent(0), 0, keys.extent(2), keys.extent(3)}), keys, values,
          tensor_view<S>(nullptr, {keys.extent(0), 0, keys.extent(2), values.extent(3)})};
}

/// The steps of a call that has a state.
template <class T>
struct recurrent_steps {
  const kernel_call<T>& call;

  struct rows {
    T *keys, *queries, *shifts, *normal;
    index stride;
  };

  /// One token of the heads of sums [first, first + count), token t of the call.
  void step(index first, index count, index t, const kernel_scratch<T>& s, const rows& x) const {
    const index heads = call.heads, group = call.group(), m = call.map->features, all = count * group;
    token_rows<T> keys(count, call.k.col_stride);
    for (index n = 0; n < count; ++n)
      keys.at[n] = call.k.head((first + n) / heads, call.kv_head((first + n) % heads)).row(t);
    call.map->keys(keys, first, s.k_own, s.k_shift, s.map);
    columns_to_rows(s.k_own, m, count, x.keys, x.stride);
    for (index begin = 0; begin < all; begin += kernel_chunk) {
      const index some = std::min<index>(kernel_chunk, all - begin);
      token_rows<T> queries(some, call.q.col_stride);
      for (index n = 0; n < some; ++n) {
        const index pair = first + (begin + n) / group;
        queries.at[n] = call.q.head(pair / heads, pair % heads * group + (begin + n) % group).row(t);
      }
      call.map->queries(queries, first, s.q_own, s.q_shift, s.map);
      columns_to_rows(s.q_own, m, some, x.queries + begin * x.stride, x.stride);
      std::copy_n(s.q_shift, call.log_scaled() ? some : 0, x.shifts + begin);
    }
    for (index n = 0; n < count; ++n) step_one((first + n) / heads, (first + n) % heads, n, t, s, x);
  }

  /// Head h of sums of batch item b, the n-th of those whose features were made.
  void step_one(index b, index h, index n, index t, const kernel_scratch<T>& s, const rows& x) const {
    const index group = call.group(), m = call.map->features;
    auto sums = call.state_sums(b, h);
    T *const key = x.keys + n * x.stride, *const queries = x.queries + n * group * x.stride;
    T g = call.gated() ? call.gate_at(b, h, t) : T(1);
    if (call.complement && call.gated())
      for (index r = 0; r < m; ++r) key[r] *= T(1) - g;
    if (call.extra.run) g = prepare_extra(b, h, t, queries, s.row_decay, x.stride);
    if (!call.extra.per_channel()) std::fill_n(s.row_decay, kernel_sums<T>::lanes(m), g);
    if (call.extra.bonus) return step_with_bonus(b, h, t, g, key, queries, s, x);
    const log_scaling<T>* const scaling = call.map->scaling;
    if (scaling) scaling->step_key(key, s.k_shift[n], sums.log_scale, s.row_decay);
    for (index r = 0; r < m; ++r) sums.weights[r] = std::fma(sums.weights[r], s.row_decay[r], key[r]);
    call.v.head(b, call.kv_head(h)).read_row(t, s.values);
    for (index i = 0; i < group; ++i) {
      T* const query = queries + i * x.stride;
      T eps = call.eps;
      if (scaling) eps = scaling->step_query(query, sums.log_scale, x.shifts[n * group + i], eps);
      const T whole = dot_rows(query, sums.weights, m) + eps;
      x.normal[i] = !call.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    }
    step_head(sums, key, s.row_decay, s.values, queries, x.stride, group, [&](index i, index col, T* sum) {
      const auto to = call.out.head(b, h * group + i);
      const index cols = std::min<index>(panel_width<T>, call.shape.dim_v - col);
      for (index d = 0; d < cols; ++d) sum[d] *= x.normal[i];
      to.access->write(sum, to.row(t) + col * to.col_stride * to.access->size, cols, to.col_stride);
    });
    if (call.gated() || call.extra.per_channel()) call.state.decay[b * call.heads + h] *= g;
  }

  /// Scale and log decay; returns the decay of the token, not a number where it is per channel.
  T prepare_extra(index b, index h, index t, T* queries, T* row_decay, index stride) const {
    const linear_extra<T>& extra = call.extra;
    const index m = call.map->features;
    for (index i = 0; i < call.group(); ++i)
      for (index r = 0; r < m; ++r) queries[i * stride + r] *= extra.scale;
    if (!extra.per_channel()) return call.gated() ? call.gate_at(b, h, t) : T(1);
    const index heads = extra.log_decay.extent(1), own = heads == call.heads ? h : h / (call.heads / heads);
    std::fill_n(row_decay, kernel_sums<T>::lanes(m), T(0));
    for (index r = 0; r < m; ++r) row_decay[r] = extra.log_decay(b, own, t, r);
    for (index r = 0; r < m; r += width<T>) store<T>(row_decay + r, exp_weight<T>(load<T>(row_decay + r)));
    return std::numeric_limits<T>::quiet_NaN();
  }

  /// The queries read the sums before the token, and the token through the bonus.
  void step_with_bonus(index b, index h, index t, T g, const T* key, const T* queries, const kernel_scratch<T>& s,
                       const rows& x) const {
    const index group = call.group(), m = call.map->features;
    auto sums = call.state_sums(b, h);
    call.v.head(b, call.kv_head(h)).read_row(t, s.values);
    alignas(64) T row[panel_width<T>];
    for (index i = 0; i < group; ++i) {
      const T* const query = queries + i * x.stride;
      T own = T(0);
      for (index r = 0; r < m; ++r) own += query[r] * call.extra.bonus(h * group + i, r) * key[r];
      const T whole = dot_rows(query, sums.weights, m) + own + call.eps;
      const T normal = !call.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
      const auto to = call.out.head(b, h * group + i);
      for (index col = 0; col < sums.dim_v; col += panel_width<T>) {
        step_panel<T, 1, false>(sums.panel(col), m, key, s.row_decay, nullptr, query, x.stride, row);
        const index cols = std::min<index>(panel_width<T>, sums.dim_v - col);
        for (index d = 0; d < cols; ++d) row[d] = (row[d] + own * s.values[col + d]) * normal;
        to.access->write(row, to.row(t) + col * to.col_stride * to.access->size, cols, to.col_stride);
      }
    }
    for (index r = 0; r < m; ++r) sums.weights[r] = std::fma(sums.weights[r], s.row_decay[r], key[r]);
    step_head(sums, key, s.row_decay, s.values, queries, x.stride, 1, [](index, index, T*) {});
    call.state.decay[b * call.heads + h] *= g;
  }

  void run(execution& exec) const {
    const index pairs = call.shape.batch * call.heads, threads = exec.active_threads(), group = call.group();
    const index fair = std::min(kernel_chunk / std::max<index>(1, group), (pairs + threads - 1) / threads);
    const index most = call.map->shared ? std::max<index>(1, fair) : 1;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, pairs);
      return 0;
    });
    call.map->prepare(exec);
    exec.for_each((pairs + most - 1) / most, [&](index task, int worker) {
      rows x;
      const auto s = exec.scratch(worker, [&](arena& memory) {
        x.stride = kernel_sums<T>::lanes(call.map->features);
        x.keys = memory.allocate<T>(most * x.stride);
        x.queries = memory.allocate<T>((most * group + step_queries) * x.stride);
        x.shifts = memory.allocate<T>(most * group);
        x.normal = memory.allocate<T>(group);
        return call.scratch(memory);
      });
      for (index t = 0; t < call.shape.keys; ++t) step(task * most, std::min(most, pairs - task * most), t, s, x);
    });
  }
};

/// The call for some of its tokens.
template <class T>
kernel_call<T> tokens_of(const kernel_call<T>& call, index begin, index end) {
  kernel_call<T> some = call;
  for (stored_tensor<T>* x : {&some.q, &some.k, &some.v, &some.out}) {
    if (x->data) x->data += begin * x->strides[2];
    x->extents[2] = end - begin;
  }
  some.shape.queries = some.shape.keys = end - begin;
  some.lengths = {end - begin, end - begin, {}, {}};
  if (call.gate.data()) some.gate = call.gate.slice(2, begin, end - begin);
  if (call.extra.log_decay) some.extra.log_decay = call.extra.log_decay.slice(2, begin, end - begin);
  return some;
}

/// Runs a step. What is thrown on the way, by a caller's map or for want of memory, leaves the state reset.
template <class T>
void run_step(const validator& check, kernel_call<T>& call, kernel_state<T>& state, execution& exec) {
  const attention_shape& s = call.shape;
  check.extents(
      {{"query length = key length", s.keys, s.queries}, {"query batch = batch of the state", state.batch(), s.batch}});
  if (state.heads() != call.heads && !(state.heads() == call.query_heads && call.heads == s.kv_heads))
    check.fail({"a state of heads ", call.heads}, state.heads());
  check.extents({{"features of keys = features of the state", state.features(), call.map->features},
                 {"value dim = value dim of the state", state.value_dim(), s.dim_v}});
  check.memory({{"the state", state.memory()}}, {{"q", call.q.layout()}, {"k", call.k.layout()}, {"v", call.v.layout()},
                                                 {"out", call.out.layout()}, {"features", call.projection.layout()},
                                                 {call.complement ? "gate" : "decay", call.gate},
                                                 {"log_decay", call.extra.log_decay}, {"bonus", call.extra.bonus}});
  call.heads = state.heads();
  const index tokens = s.keys, first = state.beyond_kept(tokens);
  try {
    const auto limit = exec.limit_threads(call.work());
    const auto feed = [&](index begin, index end) {
      kernel_call<T> some = tokens_of(call, begin, end);
      some.state = state.step_memory();
      if (end - begin <= few_tokens)
        recurrent_steps<T>{some}.run(exec);
      else if (some.extra.run)
        some.extra.run(some, exec);
      else
        some.run(exec);
      state.advance(end - begin);
    };
    if (first > 0) {
      state.forget_kept();
      feed(0, first);
    }
    for (index t = first; t < tokens; ++t) {
      state.keep_before();
      feed(t, t + 1);
    }
  } catch (...) {
    state.reset();
    throw;
  }
}

template <class T>
state_step<T> step_of(kernel_state<T>& state) {
  return {&state, state.heads(), &run_step<T>};
}

}  // namespace attn::inline ATTN_ISA::detail
