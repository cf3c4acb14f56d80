// attn: the plan of the gradients of lsh.hpp. dQ, dK of the keys k = q / |q| and dV are added up token by token, round
// by round. Neighbouring tasks of sorted tokens see common keys and must not run at the same time: first the even tasks
// run, then the odd ones, then one after the other those that see chunks of other rounds, whose tokens may be any.
// Last, rows that saw no other key attended themselves, and dQ and dK become the gradient of q.
#pragma once

#include <attn/softmax/detail/lsh_run.hpp>
#include <attn/softmax/detail/sparse_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct lsh_backward_plan : lsh_plan<S> {
  using base = lsh_plan<S>;
  using typename base::T, typename base::thread_scratch;
  using base::options;

  static idx_t parts() { return 1; }
  idx_t phases() const { return options.wrap ? 3 : 2; }
  idx_t part_tasks(idx_t phase) const { return phase < 2 ? ceil_div(base::segments(), 2) : 1; }
  idx_t listed_capacity() const { return round_up(base::capacity(), panel_width<T>); }
  template <class Visit>
  void part_sets(const lsh_head<S>& h, idx_t round, idx_t phase, idx_t task, const thread_scratch& s,
                 const Visit& visit) const {
    const lsh_chunks chunks(h.length, options);
    const idx_t count = ceil_div(h.length, chunks.tokens_per_task());
    const auto wraps = [&](idx_t n) {
      const idx_t begin = n * chunks.tokens_per_task(), end = (std::min)(begin + chunks.tokens_per_task(), h.length);
      const key_range slot_range = base::slots_of(chunks, begin, end);
      return slot_range.begin < chunks.before() || slot_range.end > chunks.before() + chunks.n;
    };
    const idx_t first = phase < 2 ? 2 * task + phase : 0, last = phase < 2 ? first + 1 : count;
    for (idx_t n = first; n < (std::min)(last, count); ++n)
      if (wraps(n) == (phase == 2)) base::sets(h, round, n, s, visit);
  }

  /// The last step for tokens [begin, end) of a head, after all rounds. Returns their part of the slope's gradient.
  template <class Call, class P>
  T finish(const Call& in, const lsh_head<S>& h, const backward_keys<P>& sums, T* dq, idx_t begin, idx_t end) const {
    const idx_t stride = sums.stride(in.shape.dim), stride_v = sums.stride(in.shape.dim_v);
    T slope = 0;
    for (idx_t i = begin; i < (std::min)(end, h.length); ++i) {
      T *const d_query = dq ? dq + i * stride : nullptr, *const d_key = dq ? sums.d_keys + i * stride : nullptr;
      if (!sees_other(in, h, i))
        slope += differentiate_self(in, h, i, d_query, d_key, sums.d_values ? sums.d_values + i * stride_v : nullptr);
      if (dq) join_key(h, i, d_query, d_key);
    }
    if (dq)
      store_gradient_rows(dq, stride, in.terms().scale, head_of(in.dq, h.batch, h.head), begin, end, h.length,
                          in.accumulate);
    return slope;
  }

 private:
  /// Whether token i has seen another one, in any round.
  template <class Call>
  bool sees_other(const Call& in, const lsh_head<S>& h, idx_t i) const {
    const lsh_chunks chunks(h.length, options);
    const auto head_terms = in.terms().for_head(h.batch, h.head, 0);
    for (idx_t round = 0; round < options.rounds; ++round) {
      const key_range seen = chunks.slots_of(h.tables.rank[round * base::shape.keys + i]);
      for (idx_t slot = seen.begin; slot < seen.end; ++slot) {
        const auto [from, at] = chunks.source(round, slot);
        const idx_t j = base::order_of(h, from)[at];
        if (j == i || (options.causal && j > i)) continue;
        if (!head_terms.change_scores()) return true;
        T score = base::plain_score(h, i, j, head_terms.query_factor());
        head_terms.apply(&score, 1, i, {j, 1, nullptr}, 0);
        if (score != -std::numeric_limits<T>::infinity()) return true;
      }
    }
    return false;
  }

  /// Token i, which has attended itself. Returns its part of the gradient of the slope.
  template <class Call>
  [[gnu::noinline]] T differentiate_self(const Call& in, const lsh_head<S>& h, idx_t i, T* d_query, T* d_key,
                                         T* d_value) const {
    const auto lse = in.forward.lse_of(h.batch, h.head, i);
    if (!lse.sees()) return T(0);
    const auto o = head_of(in.out, h.batch, h.head), d_o = head_of(in.d_out, h.batch, h.head),
               value = head_of(in.v, h.batch, h.head / in.shape.group());
    const auto head_terms = in.terms().for_head(h.batch, h.head, 0);
    auto back = in.back(head_terms);
    alignas(64) T raw[width<T>] = {}, d_score[width<T>] = {};
    T score = raw[0] = base::plain_score(h, i, i, head_terms.query_factor());
    if (head_terms.any()) head_terms.apply(&score, 1, i, {i, 1, nullptr}, 0);
    const T weight = std::exp2(score - lse.maximum - lse.log_sum);
    const T d_weight = row_dot<T>(d_o.row(i), d_o.col_stride, value.row(i), value.col_stride, value.cols);
    d_score[0] = weight * (d_weight - in.delta(o, d_o, h.batch, h.head, i));
    if (back.any()) back(raw, d_score, width<T>, i, {i, 1, nullptr}, 0);
    const S* const x = h.query.row(i);
    for (idx_t d = 0; d_query && d < h.query.cols; ++d) {
      const T number = static_cast<T>(x[d * h.query.col_stride]);
      d_query[d] += d_score[0] * (number * h.tables.factor[i]);
      d_key[d] += d_score[0] * number;
    }
    for (idx_t d = 0; d_value && d < value.cols; ++d)
      d_value[d] += weight * static_cast<T>(d_o.row(i)[d * d_o.col_stride]);
    return back.d_slope();
  }

  /// The gradient of token i as a query, and through its key k = f q: scale (dq + f (dk - k (k . dk))).
  void join_key(const lsh_head<S>& h, idx_t i, T* d_query, const T* d_key) const {
    const T factor = h.tables.factor[i];
    if (factor == T(0)) return;
    const S* const x = h.query.row(i);
    const auto key = [&](idx_t d) { return static_cast<T>(x[d * h.query.col_stride]) * factor; };
    T along = 0;
    for (idx_t d = 0; d < h.query.cols; ++d) along += key(d) * d_key[d];
    for (idx_t d = 0; d < h.query.cols; ++d) d_query[d] += factor * (d_key[d] - key(d) * along);
  }
};

template <class S, class Score, class ScoreBackward>
void run_lsh_backward(softmax_backward_call<S, Score, ScoreBackward>& call, const lsh_options<S>& options) {
  with_lsh_plan(call.forward, options,
                [&](const lsh_plan<S>& plan) { run_plan_backward(call, lsh_backward_plan<S>{plan}); });
}

}}}  // namespace attn::ATTN_ISA::detail
