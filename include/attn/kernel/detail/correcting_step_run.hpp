// attn: the states of the delta rule and of dplr, and their steps. One token for a state: each panel of it is read
// twice while it lies in the first-level cache, so that memory is read and written once.
#pragma once

#include <attn/kernel/detail/correcting_checks.hpp>
#include <attn/kernel/detail/by_tokens_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Scratch memory of one worker, the numbers of one token; a and b of the rule of low rank.
template <class T>
struct correcting_step_scratch {
  T *q, *k, *a, *b, *decay, *value, *out;

  static correcting_step_scratch layout(arena& memory, idx_t dim, idx_t dim_v) {
    const idx_t d = round_up(dim, panel_width<T>), e = round_up(dim_v, panel_width<T>);
    correcting_step_scratch s;
    for (T** each : {&s.q, &s.k, &s.a, &s.b, &s.decay}) *each = memory.allocate<T>(d);
    s.value = memory.allocate<T>(e), s.out = memory.allocate<T>(panel_width<T>);
    return s;
  }
};

/// One panel of S [dim][panel_width]: to = diag(decay) from, to which the rule that corrects adds
/// beta k (v - to^T k)^T, and that of low rank k v^T + b (from^T a)^T; out = to^T q. `from` and `to` may be the same.
/// Where the state comes from memory, a step takes 1.2 times as long if its first pass only reads.
template <rule R, bool Queries, class T>
void correcting_panel(const T* from, T* to, idx_t dim, const correcting_step_scratch<T>& x, T beta, const T* value) {
  constexpr int w = width<T>;
  const T* const reads = R == rule::correct ? x.k : x.a;
  packet<T> read[2] = {zero<T>(), zero<T>()}, written[2], out[2] = {zero<T>(), zero<T>()};
  for (idx_t d = 0; d < dim; ++d)
    unroll<2>([&](auto half) {
      const idx_t at = d * panel_width<T> + half * w;
      const packet<T> before = load<T>(from + at), decayed = mul(before, broadcast<T>(x.decay[d]));
      store<T>(to + at, decayed);
      read[half] = fma(broadcast<T>(reads[d]), R == rule::correct ? decayed : before, read[half]);
    });
  unroll<2>([&](auto half) {
    written[half] = load<T>(value + half * w);
    if constexpr (R == rule::correct) written[half] = mul(sub(written[half], read[half]), broadcast<T>(beta));
  });
  for (idx_t d = 0; d < dim; ++d)
    unroll<2>([&](auto half) {
      const idx_t at = d * panel_width<T> + half * w;
      packet<T> sum = fma(broadcast<T>(x.k[d]), written[half], load<T>(to + at));
      if constexpr (R == rule::low_rank) sum = fma(broadcast<T>(x.b[d]), read[half], sum);
      store<T>(to + at, sum);
      if constexpr (Queries) out[half] = fma(broadcast<T>(x.q[d]), sum, out[half]);
    });
  if constexpr (Queries) unroll<2>([&](auto half) { store<T>(x.out + half * w, out[half]); });
}

/// The tokens of each batch item from first.keys(b) on, one by one.
template <rule R, class T>
void correcting_steps(const kernel_call<T>& call, const sequence_lengths& first, execution& exec) {
  const idx_t dim = call.shape.dim, dim_v = call.shape.dim_v;
  const recurrence_parameters<T>& given = call.recurrence;
  const bool queries = call.group() > 0;
  const auto load_row = [&](const stored_matrix<T>& from, idx_t t, T factor, T* to) {
    from.read_row(t, to);
    if (given.unit_norm_eps >= T(0)) {
      T squares = T(0);
      for (idx_t d = 0; d < dim; ++d) squares += to[d] * to[d];
      factor /= std::sqrt(squares + given.unit_norm_eps);
    }
    for (idx_t d = 0; d < dim; ++d) to[d] *= factor;
  };
  const auto layout = [&](arena& memory) { return correcting_step_scratch<T>::layout(memory, dim, dim_v); };
  each_step(call, first, 1, exec, layout, [&](const step_token* at, idx_t, const correcting_step_scratch<T>& s) {
    const auto [b, h, t] = *at;
    load_row(call.k.head(b, call.kv_head(h)), t, T(1), s.k);
    if (queries) load_row(call.q.head(b, call.query_head(h)), t, given.scale, s.q);
    call.v.head(b, h).read_row(t, s.value);
    std::fill(s.value + dim_v, s.value + round_up(dim_v, panel_width<T>), T(0));
    const idx_t channels = given.log_decay ? given.log_decay.extent(3) : 0;
    for (idx_t d = 0; d < channels; ++d) s.decay[d] = given.log_decay(b, h, t, d);
    for (idx_t d = 0; d < channels; d += width<T>) store<T>(s.decay + d, exp<T>(load<T>(s.decay + d)));
    if (channels != dim) std::fill_n(s.decay, dim, channels ? s.decay[0] : T(1));
    if constexpr (R == rule::low_rank) {
      given.a.head(b, h).read_row(t, s.a);
      given.b.head(b, h).read_row(t, s.b);
    }
    if (call.hides(b, t))
      for (T* const x : {s.k, s.a, s.b, s.value})
        std::fill_n(x, x == s.value ? round_up(dim_v, panel_width<T>) : dim, T(0));
    const T beta = given.beta ? given.beta(b, h, t) : T(1);
    const idx_t length = call.lengths.keys(b);
    const kernel_sums<T> before = call.sums_at(call.state.at(b, t, length), h),
                         after = call.sums_at(call.state.at(b, t + 1, length), h);
    const stored_matrix<T> out = queries ? call.out.head(b, h) : stored_matrix<T>{};
    for (idx_t col = 0; col < dim_v; col += panel_width<T>) {
      if (!queries) {
        correcting_panel<R, false>(before.panel(col), after.panel(col), dim, s, beta, s.value + col);
        continue;
      }
      correcting_panel<R, true>(before.panel(col), after.panel(col), dim, s, beta, s.value + col);
      out.write_part(s.out, t, col, std::min<idx_t>(panel_width<T>, dim_v - col));
    }
  });
}

template <rule R, class T>
void run_correcting_step(kernel_call<T>& call, kernel_items<T>& state, execution& exec) {
  feed_state(
      call, state, recurrence_driver<R, T>{call}.work(), exec,
      [&](const kernel_call<T>& some) { recurrence_driver<R, T>{some}.run(exec); },
      [&](const sequence_lengths& first) { correcting_steps<R>(call, first, exec); });
}
template <class T>
void run_delta_rule_by_tokens(const kernel_call<T>& call, execution& exec) {
  const auto limit = exec.limit_threads(recurrence_driver<rule::correct, T>{call}.work());
  run_by_tokens<rule::correct>(call, exec, [&](const kernel_call<T>& with_state, const sequence_lengths& first) {
    correcting_steps<rule::correct>(with_state, first, exec);
  });
}

/// What delta_rule_state and dplr_state have in common, for elements of type S.
template <rule R, class S>
class correcting_state : public state_sequences<compute_type<S>> {
  using T = compute_type<S>;

 public:
  idx_t dim() const { return this->features(); }
  /// Element (d, e) of the state of one head.
  T value(idx_t b, idx_t h, idx_t d, idx_t e) const { return this->sums(b, h).value(d, e); }

 protected:
  correcting_state(const char* name, const delta_rule_state_extents& e)
      : state_sequences<T>(name, {.kind = R == rule::correct ? 4 : 5, .parts = sum_parts::values},
                           {e.batch, e.heads, e.dim, e.value_dim, e.keep}, 1) {}
};

/// A step or append of delta_rule or dplr.
template <rule R, class S, class Options>
void step_correcting(const char* name, kernel_items<compute_type<S>>& state, const kernel_views<S>& x,
                     const Options& given, execution& exec) {
  call_views check{name};
  auto call = check_correcting<R>(check, x, given, exec);
  check.extents({{"batch = batch of the state", state.batch(), call.shape.batch},
                 {"value heads = heads of the state", state.heads(), call.heads},
                 {"key dim = dim of the state", state.features(), call.shape.dim},
                 {"value dim = value dim of the state", state.value_dim(), call.shape.dim_v}});
  check.update("the state", state.memory());
  run_correcting_step<R>(call, state, exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_correcting_step<rule::correct>(kernel_call<T>&, kernel_items<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_IN(T) void run_correcting_step<rule::low_rank>(kernel_call<T>&, kernel_items<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
