// attn: kernel attention token by token: few tokens for a state, several heads at once, since maps make the features of
// a block of tokens as fast as those of one.
#pragma once

#include <attn/kernel/detail/features.hpp>
#include <attn/kernel/detail/kernel_scratch.hpp>
#include <attn/kernel/detail/kernel_state.hpp>
#include <attn/kernel/detail/step.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The steps of a kernel_call (engine.hpp) that has a state.
template <class Call>
struct recurrent_steps {
  using T = typename Call::T;
  using S = typename Call::element_type;

  const Call& call;

  struct rows {
    T *keys, *queries, *shifts, *normal;
    index stride;
  };

  /// One token of the heads of sums [first, first + count), token t of the call.
  void step(index first, index count, index t, const kernel_scratch<T>& s, const rows& x) const {
    const index heads = call.heads, group = call.group(), m = call.map.features(), all = count * group;
    token_rows<S> keys(count, call.k.stride(3));
    for (index n = 0; n < count; ++n)
      keys.at[n] = head_of(call.k, (first + n) / heads, call.kv_head((first + n) % heads)).row(t);
    call.map.keys(keys, first, s.k_own, s.k_shift, s.work);
    columns_to_rows(s.k_own, m, count, x.keys, x.stride);
    for (index begin = 0; begin < all; begin += kernel_chunk) {
      const index some = std::min<index>(kernel_chunk, all - begin);
      token_rows<S> asked(some, call.q.stride(3));
      for (index n = 0; n < some; ++n) {
        const index pair = first + (begin + n) / group;
        asked.at[n] = head_of(call.q, pair / heads, pair % heads * group + (begin + n) % group).row(t);
      }
      call.map.queries(asked, first, s.q_own, s.q_shift, s.work);
      columns_to_rows(s.q_own, m, some, x.queries + begin * x.stride, x.stride);
      std::copy_n(s.q_shift, call.map.leveled() ? some : 0, x.shifts + begin);
    }
    for (index n = 0; n < count; ++n) step_one((first + n) / heads, (first + n) % heads, n, t, s, x);
  }

  /// Head h of sums of batch item b, the n-th of those whose features were made.
  void step_one(index b, index h, index n, index t, const kernel_scratch<T>& s, const rows& x) const {
    const index group = call.group(), m = call.map.features();
    auto sums = call.state->sums(b, h);
    T *const key = x.keys + n * x.stride, *const queries = x.queries + n * group * x.stride;
    const T g = call.gated() ? call.gate_at(b, h, t) : T(1);
    if (call.complement && call.gated())
      for (index r = 0; r < m; ++r) key[r] *= T(1) - g;
    std::fill_n(s.keep, kernel_sums<T>::lanes(m), g);
    if (call.map.leveled()) call.map.step_key(key, s.k_shift[n], sums.level, s.keep);
    for (index r = 0; r < m; ++r) sums.weights[r] = std::fma(sums.weights[r], s.keep[r], key[r]);
    const auto value = head_of(call.v, b, call.kv_head(h));
    for (index d = 0; d < call.shape.dim_v; ++d) s.values[d] = static_cast<T>(value.row(t)[d * value.col_stride]);
    for (index i = 0; i < group; ++i) {
      T offset = call.eps;
      if (call.map.leveled())
        offset = call.map.step_query(queries + i * x.stride, sums.level, x.shifts[n * group + i], call.eps);
      const T whole = dot_rows(queries + i * x.stride, sums.weights, m) + offset;
      x.normal[i] = !call.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    }
    step_head(sums, key, s.keep, s.values, queries, x.stride, group, [&](index i, index col, const T* sum) {
      const auto to = head_of(call.out, b, h * group + i);
      for (index d = col; d < std::min(call.shape.dim_v, col + panel_width<T>); ++d)
        to.row(t)[d * to.col_stride] = static_cast<S>(sum[d - col] * x.normal[i]);
    });
    if (call.gated()) call.state->gates(b, h) *= g;
  }

  void run(execution& exec) const {
    const index pairs = call.shape.batch * call.heads, threads = exec.threads(), group = call.group();
    const index fair = std::min(kernel_chunk / std::max<index>(1, group), (pairs + threads - 1) / threads);
    const index most = call.map.shared() ? std::max<index>(1, fair) : 1;
    exec.for_each((pairs + most - 1) / most, [&](index task, int worker) {
      rows x;
      const auto s = exec.scratch(worker, [&](arena& memory) {
        x.stride = kernel_sums<T>::lanes(call.map.features());
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

}  // namespace attn::detail
