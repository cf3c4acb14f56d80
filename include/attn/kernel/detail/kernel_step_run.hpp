// attn: kernel attention token by token: few tokens for a state. Several heads are computed at once, since maps compute
// the features of a block of tokens as fast as those of one.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/by_tokens_run.hpp>
#include <attn/kernel/detail/sums_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Queries whose results one pass over the sums computes.
inline constexpr int step_queries = 4;

/// rows[t][r] = columns[r][t] for t < count: features of a block, token by token. Rows are `stride` apart.
template <class T>
void columns_to_rows(const T* columns, idx_t features, idx_t count, T* rows, idx_t stride) {
  constexpr int w = width<T>;
  for (idx_t t = 0; t < count; t += w)
    for (idx_t r = 0; r < features; r += w) {
      packet<T> square[array_size<w>];
      for (int i = 0; i < w; ++i) square[i] = load<T>(columns + (std::min)(r + i, features - 1) * kernel_chunk + t);
      transpose<T>(square);
      for (int i = 0; i < w && t + i < count; ++i) store<T>(rows + (t + i) * stride + r, square[i]);
    }
}

/// One panel of S: S = decay from + key v^T, stored in `to`, or without a key S = from; `from` and `to` may be the
/// same. out[g] = sum over r of queries[g][r] S[r] or, with `Before`, of `from`.
template <class T, int G, bool Update, bool Before>
void step_panel(const T* from, T* to, idx_t features, const T* key, const T* decay, const T* value, const T* queries,
                idx_t stride, T* out) {
  packet<T> sum[array_size<G>][2], v[2];
  unroll<2>([&](auto half) {
    unroll<G>([&](auto g) { sum[g][half] = zero<T>(); });
    v[half] = Update ? load<T>(value + half * width<T>) : zero<T>();
  });
  for (idx_t r = 0; r < features; ++r) {
    packet<T> x[2];
    unroll<2>([&](auto half) {
      const idx_t at = r * panel_width<T> + half * width<T>;
      x[half] = load<T>(from + at);
      if constexpr (Update) {
        const packet<T> next = fma(broadcast<T>(key[r]), v[half], mul(broadcast<T>(decay[r]), x[half]));
        store<T>(to + at, next);
        if constexpr (!Before) x[half] = next;
      }
    });
    unroll<G>([&](auto g) {
      const packet<T> q = broadcast<T>(queries[g * stride + r]);
      unroll<2>([&](auto half) { sum[g][half] = fma(q, x[half], sum[g][half]); });
    });
  }
  unroll<G>([&](auto g) {
    unroll<2>([&](auto half) { store<T>(out + g * panel_width<T> + half * width<T>, sum[g][half]); });
  });
}

/// The same for all panels and any number of queries; done(g, col, sum) takes the results, col the first column of the
/// panel.
template <bool Before, class T, class Done>
void step_head(const kernel_sums<T>& before, kernel_sums<T>& sums, const T* key, const T* decay, const T* value,
               const T* queries, idx_t stride, idx_t count, Done&& done) {
  alignas(64) T out[step_queries * panel_width<T>];
  for (idx_t col = 0; col < sums.dim_v; col += panel_width<T>)
    for (idx_t g = 0; g == 0 || g < count; g += step_queries) {
      const idx_t some = std::min<idx_t>(step_queries, count - g);
      const T* const q = queries + g * stride;
      const auto pass = [&](auto G) {
        if (Before ? g + step_queries >= count : g == 0)
          step_panel<T, G.value, true, Before>(before.panel(col), sums.panel(col), sums.features, key, decay,
                                               value + col, q, stride, out);
        else
          step_panel<T, G.value, false, Before>((Before ? before : sums).panel(col), nullptr, sums.features, key,
                                                decay, nullptr, q, stride, out);
      };
      if (some == 1)
        pass(std::integral_constant<int, 1>{});
      else  // rows beyond the last query have arbitrary values: the block is padded
        pass(std::integral_constant<int, step_queries>{});
      for (idx_t n = 0; n < some; ++n) done(g + n, col, out + n * panel_width<T>);
    }
}

/// The steps of a call that has a state: the tokens of each batch item from first.keys(b) on.
template <bool may_recur, class T>
struct kernel_steps {
  const kernel_call<T>& call;
  sequence_lengths first;

  struct rows {
    T *keys, *queries, *shifts, *normal, *own;
    idx_t stride;
  };

  /// One token of each of `count` heads of sums: several where they share a map, else one.
  void step(const step_token* tokens, idx_t count, const kernel_scratch<T>& s, const rows& x) const {
    const idx_t group = call.group(), m = call.map->features, all = count * group;
    const idx_t item_head = tokens[0].b * call.heads + tokens[0].h;
    token_rows<T> keys(count, call.k.col_stride);
    for (idx_t n = 0; n < count; ++n)
      keys.at[n] = call.k.head(tokens[n].b, call.kv_head(tokens[n].h)).row(tokens[n].t);
    call.map->keys(keys, item_head, s.k_own, s.k_shift, s.map);
    columns_to_rows(s.k_own, m, count, x.keys, x.stride);
    for (idx_t begin = 0; begin < all; begin += kernel_chunk) {
      const idx_t some = std::min<idx_t>(kernel_chunk, all - begin);
      token_rows<T> queries(some, call.q.col_stride);
      for (idx_t n = 0; n < some; ++n) {
        const step_token& at = tokens[(begin + n) / group];
        queries.at[n] = call.q.head(at.b, at.h * group + (begin + n) % group).row(at.t);
      }
      call.map->queries(queries, item_head, s.q_own, s.q_shift, s.map);
      columns_to_rows(s.q_own, m, some, x.queries + begin * x.stride, x.stride);
      std::copy_n(s.q_shift, call.log_scaled() ? some : 0, x.shifts + begin);
    }
    for (idx_t n = 0; n < count; ++n) step_one(tokens[n], n, s, x);
  }

  /// The n-th token of those whose features were computed.
  void step_one(const step_token& at, idx_t n, const kernel_scratch<T>& s, const rows& x) const {
    const idx_t b = at.b, h = at.h, t = at.t, length = call.lengths.keys(b);
    const idx_t group = call.group(), m = call.map->features;
    T *const last = call.state.at(b, t, length), *const next = call.state.at(b, t + 1, length);
    const auto before = call.sums_at(last, h);
    auto sums = call.sums_at(next, h);
    T& whole_decay = call.decay_at(next, h) = call.decay_at(last, h);
    if (last != next) std::copy(before.weights, before.values + call.sums_size(), sums.weights);
    T *const key = x.keys + n * x.stride, *const queries = x.queries + n * group * x.stride;
    const bool hidden = call.hides(b, t);
    if (hidden) std::fill_n(key, m, T(0)), s.k_shift[n] = -std::numeric_limits<T>::infinity();
    const T g = load_decays(at, s.row_decay);
    if (call.complement && call.gated())
      for (idx_t r = 0; r < m; ++r) key[r] *= T(1) - g;
    whole_decay *= g;
    const log_scaling<T>* const scaling = call.map->scaling;
    if (scaling) scaling->step_key(key, s.k_shift[n], sums.log_scale, s.row_decay);
    const bool bonus = may_recur && call.recurrence.bonus;
    const auto add_weights = [&] {
      for (idx_t r = 0; r < m; ++r) sums.weights[r] = std::fma(sums.weights[r], s.row_decay[r], key[r]);
    };
    if (!bonus) add_weights();
    for (idx_t i = 0; i < group; ++i) {
      T* const query = queries + i * x.stride;
      T eps = call.eps;
      if (scaling) eps = scaling->step_query(query, sums.log_scale, x.shifts[n * group + i], eps);
      x.own[i] = T(0);
      if constexpr (may_recur)
        for (idx_t r = 0; bonus && r < m; ++r) x.own[i] += query[r] * call.recurrence.bonus(h * group + i, r) * key[r];
      const T scale = call.recurrence.scale, whole = scale * (dot_rows(query, sums.weights, m) + x.own[i]) + eps;
      x.normal[i] = !call.normalise ? scale : std::abs(whole) < least_denominator<T> ? T(0) : scale / whole;
    }
    if (bonus) add_weights();
    call.v.head(b, call.kv_head(h)).read_row(t, s.values);
    if (hidden) std::fill_n(s.values, call.shape.dim_v, T(0));
    const auto write = [&](idx_t i, idx_t col, T* sum) {
      const auto to = call.out.head(b, h * group + i);
      const idx_t cols = std::min<idx_t>(panel_width<T>, call.shape.dim_v - col);
      for (idx_t d = 0; d < cols; ++d) sum[d] *= x.normal[i];
      if constexpr (may_recur)
        for (idx_t d = 0; bonus && d < cols; ++d) sum[d] += x.own[i] * x.normal[i] * s.values[col + d];
      to.write_part(sum, t, col, cols);
    };
    if constexpr (may_recur)
      if (bonus) return step_head<true>(before, sums, key, s.row_decay, s.values, queries, x.stride, group, write);
    step_head<false>(before, sums, key, s.row_decay, s.values, queries, x.stride, group, write);
  }

  /// The decays of the features of a token; returns that of the token, NaN where they are per channel.
  T load_decays(const step_token& at, T* row_decay) const {
    const idx_t m = call.map->features, lanes = kernel_sums<T>::lanes(m);
    if constexpr (may_recur)
      if (const auto& log_decay = call.recurrence.log_decay; call.recurrence.per_channel()) {
        const idx_t h = call.parameter_head(log_decay.extent(1), at.h);
        std::fill_n(row_decay, lanes, T(0));
        for (idx_t r = 0; r < m; ++r) row_decay[r] = log_decay(at.b, h, at.t, r);
        map_packets(row_decay, row_decay, m, [](const auto& x) { return exp_weight<T>(x); });
        return std::numeric_limits<T>::quiet_NaN();
      }
    const T g = call.gated() ? call.gate_at(at.b, at.h, at.t) : T(1);
    std::fill_n(row_decay, lanes, g);
    return g;
  }

  void run(execution& exec) const {
    const idx_t item_heads = call.shape.batch * call.heads, threads = exec.active_threads(), group = call.group();
    const idx_t fair = (std::min)(kernel_chunk / std::max<idx_t>(1, group), (item_heads + threads - 1) / threads);
    const idx_t most = call.map->shared ? std::max<idx_t>(1, fair) : 1;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      return 0;
    });
    call.map->prepare(exec);
    const auto layout = [&](arena& memory) {
      rows x;
      x.stride = kernel_sums<T>::lanes(call.map->features);
      x.keys = memory.allocate<T>(most * x.stride);
      x.queries = memory.allocate<T>((most * group + step_queries) * x.stride);
      x.shifts = memory.allocate<T>(most * group);
      for (T** each : {&x.normal, &x.own}) *each = memory.allocate<T>(group);
      return std::pair{x, sums_kernel<T>{call}.scratch(memory)};
    };
    each_step(call, first, most, exec, layout,
              [&](const step_token* tokens, idx_t count, const auto& s) { step(tokens, count, s.second, s.first); });
  }
};

/// Checks that a call of an operator of feature sums can be a step of `state`.
template <class T>
void check_kernel_step(call_views& check, kernel_call<T>& call, const kernel_items<T>& state) {
  const attention_shape& s = call.shape;
  const idx_t heads = state.heads();
  check.extents({{"query length = key length", s.keys, s.queries},
                 {"query batch = batch of the state", state.batch(), s.batch}});
  if (heads != call.heads && !(heads == call.query_heads && call.heads == s.kv_heads))
    check.fail({"a state of heads ", call.heads}, heads);
  check.extents({{"features of keys = features of the state", state.features(), call.map->features},
                 {"value dim = value dim of the state", state.value_dim(), s.dim_v}});
  call.heads = heads;
  check.update("the state", state.memory());
}

/// A checked step. An exception, of a caller's map or because memory runs out, leaves the state reset.
template <class T>
void run_sums_step(kernel_call<T>& call, kernel_items<T>& state, execution& exec) {
  feed_state(
      call, state, call.work(), exec, [&](const kernel_call<T>& some) { run_sums(some, exec); },
      [&](const sequence_lengths& first) { kernel_steps<false, T>{call, first}.run(exec); });
}

/// A step or append with random features: of performer, whose kernel is the state's, or rfa.
template <class Features, class S>
void step_random_features(const char* name, kernel_items<compute_type<S>>& state, const kernel_views<S>& x,
                          kernel_parameters<compute_type<S>> given, execution& exec) {
  given.kernel = static_cast<performer_kernel>(state.kind().variant);
  call_views check{name};
  auto call = check_kernel(check, x, given, state.heads());
  Features map(call);
  call.map = &map;
  check_kernel_step(check, call, state);
  run_sums_step(call, state, exec);
}

template <class T>
void run_linear_by_tokens(const kernel_call<T>& call, execution& exec) {
  const auto limit = exec.limit_threads(call.work());
  run_by_tokens<rule::add>(call, exec, [&](const kernel_call<T>& with_state, const sequence_lengths& first) {
    kernel_steps<true, T>{with_state, first}.run(exec);
  });
}
template <class T>
void run_linear_step(kernel_call<T>& call, kernel_items<T>& state, execution& exec) {
  feed_state(
      call, state, call.work(), exec, [&](const kernel_call<T>& some) { run_linear(some, exec); },
      [&](const sequence_lengths& first) { kernel_steps<true, T>{call, first}.run(exec); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_sums_step(kernel_call<T>&, kernel_items<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
