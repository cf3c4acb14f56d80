// attn: the checks of a call of the delta rule or of dplr, forward, backward or a step. Its shape has the value heads
// for query heads; q has as many heads as k.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

[[gnu::noinline]] inline attention_shape check_correcting_extents(const validator& check, const memory_layout& k,
                                                                  const memory_layout& v) {
  const attention_shape s{k.extents[0], v.extents[1], k.extents[1], k.extents[2],
                          k.extents[2], k.extents[3], v.extents[3]};
  if (s.heads > 0 && (s.kv_heads == 0 || s.heads % s.kv_heads != 0))
    check.fail({"key heads that divide the value heads ", s.heads}, s.kv_heads);
  check.extents({{"value batch = key batch", s.batch, v.extents[0]},
                 {"value length = key length", s.keys, v.extents[2]}});
  return s;
}

/// Checks q, and out or its gradient.
[[gnu::noinline]] inline void check_correcting_queries(const validator& check, const attention_shape& s,
                                                       const memory_layout& q, const memory_layout& out,
                                                       bool gradient) {
  check.extents({{"query batch = key batch", s.batch, q.extents[0]},
                 {"query heads = key heads", s.kv_heads, q.extents[1]},
                 {"query length = key length", s.keys, q.extents[2]}, {"query dim = key dim", s.dim, q.extents[3]},
                 {gradient ? "d_out batch = key batch" : "out batch = key batch", s.batch, out.extents[0]},
                 {gradient ? "d_out heads = value heads" : "out heads = value heads", s.heads, out.extents[1]},
                 {gradient ? "d_out length = key length" : "out length = key length", s.keys, out.extents[2]},
                 {gradient ? "d_out dim = value dim" : "out dim = value dim", s.dim_v, out.extents[3]}});
}

/// Checks beta and log decays.
template <class T>
void check_correcting_parameters(const validator& check, const kernel_call<T>& call, const attention_shape& s,
                                 execution& exec) {
  const tensor_view<const T, 3>& beta = call.recurrence.beta;
  const tensor_view<const T>& log_decay = call.recurrence.log_decay;
  if (beta)
    check.extents({{"beta batch = key batch", s.batch, beta.extent(0)},
                   {"beta heads = value heads", s.heads, beta.extent(1)},
                   {"beta length = key length", s.keys, beta.extent(2)}});
  if (log_decay) {
    check.extents({{"log_decay batch = key batch", s.batch, log_decay.extent(0)},
                   {"log_decay heads = value heads", s.heads, log_decay.extent(1)},
                   {"log_decay length = key length", s.keys, log_decay.extent(2)}});
    check.broadcasts("log_decay channels =", s.dim, log_decay.extent(3));
  }
  for (idx_t b = 0; beta && b < s.batch; ++b)
    for (idx_t h = 0; h < s.heads; ++h) {
      const idx_t keys = call.lengths.keys(b), stride = beta.strides()[2];
      const T* const row = beta.data() + b * beta.strides()[0] + h * beta.strides()[1];
      packet<T> trace = zero<T>();  // 0 * x is NaN for an x that is not finite, and stays
      for (idx_t t = 0; t < keys; t += width<T>)
        trace = fma(load_part<T>(row + t * stride, stride, keys - t), zero<T>(), trace);
      for (idx_t t = 0; sum_lanes(trace) != T(0) && t < keys; ++t)
        if (!std::isfinite(row[t * stride])) check.fail("a finite beta", static_cast<double>(row[t * stride]));
    }
  if (log_decay) check_log_decays(check, log_decay, call.lengths, &exec);
}

/// Checks a view of the shape of the state, if it is given, or a or b of dplr, whose heads are those of the state.
[[gnu::noinline]] inline void check_correcting_state(const validator& check, const char* name,
                                                     const attention_shape& s, const memory_layout& state) {
  if (!state.given()) return;
  const idx_t wanted[4] = {s.batch, s.heads, s.dim, s.dim_v};
  if (!std::equal(wanted, wanted + 4, state.extents))
    check.fail({name, " of shape [batch, value heads, key dim, value dim] = ", error_text::list(wanted, 4)},
               error_text::list(state.extents, 4));
}
[[gnu::noinline]] inline void check_correcting_rows(const validator& check, const char* name, const attention_shape& s,
                                                    const memory_layout& x) {
  const idx_t wanted[4] = {s.batch, s.heads, s.keys, s.dim};
  if (!std::equal(wanted, wanted + 4, x.extents))
    check.fail({name, " of the shape of k = ", error_text::list(wanted, 4)}, error_text::list(x.extents, 4));
}

/// Checks a number that must be finite, and with `positive` greater than 0.
template <class T>
T check_correcting_number(const validator& check, const char* name, const std::optional<T>& given, T otherwise,
                          bool positive = false) {
  if (!given) return otherwise;
  if (!std::isfinite(*given) || (positive && *given <= T(0)))
    check.fail({"a finite ", name, positive ? " > 0" : ""}, static_cast<double>(*given));
  return *given;
}

template <class S>
struct kernel_gradients;

/// The checks of a call whose views are named: forward, a step, or backward, where d_out stands for out.
template <rule R, class S, class T>
void check_correcting_call(call_views& check, kernel_call<T>& call, const kernel_views<S>& x, execution& exec,
                           bool backward) {
  const attention_shape s = call.shape = check_correcting_extents(check, x.k, x.v);
  if constexpr (R == rule::low_rank) {
    check.extents({{"key heads = value heads", s.heads, s.kv_heads}});
    check_correcting_rows(check, "a", s, x.a);
    check_correcting_rows(check, "b", s, x.b);
    call.recurrence.a = x.a, call.recurrence.b = x.b;
  }
  if (x.queries)
    check_correcting_queries(check, s, x.q, backward ? memory_layout(x.d_out) : memory_layout(x.out), backward);
  check_length_list(check, "lengths", call.both_lengths, s.batch, s.keys);
  call.lengths = {s.keys, s.keys, call.both_lengths, call.both_lengths};
  call.heads = call.query_heads = s.heads;
  call.causal = true, call.normalise = false, call.driver = kernel_driver::recurrence;
  if (!x.queries) call.shape.heads = 0;
  check_correcting_parameters(check, call, s, exec);
  call.key_mask.validate(check, s.batch, s.keys);
  recurrence_parameters<T>& given = call.recurrence;
  check_correcting_state(check, "initial_state", s, given.initial_state);
  check_correcting_state(check, "final_state", s, given.final_state);
  given.scale = check_correcting_number(check, "scale", call.given_scale,
                                        T(1) / std::sqrt(static_cast<T>(std::max<idx_t>(1, s.dim))));
  if constexpr (R == rule::correct)
    given.unit_norm_eps = check_correcting_number(check, "unit_norm_eps", call.given_unit_norm_eps, T(-1), true);
}

/// A checked call, forward or a step.
template <rule R, class S, class Options>
auto check_correcting(call_views& check, const kernel_views<S>& x, const Options& given, execution& exec) {
  kernel_call<compute_type<S>> call{given, x.q, x.k, x.v, x.out};
  name_views(check, x, call);
  check_correcting_call<R>(check, call, x, exec, false);
  return call;
}
/// A checked backward call with the gradients g (kernel_backward_call.hpp).
template <rule R, class S, class Options>
auto check_correcting_backward(call_views& check, const kernel_views<S>& x,
                               const std::type_identity_t<kernel_gradients<S>>& g, const Options& given,
                               execution& exec) {
  auto one = name_gradients(check, x, g, given);
  check_correcting_call<R>(check, one.forward, x, exec, true);
  check_correcting_state(check, "d_final_state", one.forward.shape, one.d_final_state);
  return one;
}

}}}  // namespace attn::ATTN_ISA::detail
