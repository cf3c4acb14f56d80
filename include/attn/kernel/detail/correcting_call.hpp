// attn: a call of the delta rule or of dplr, forward or backward, and its checks.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/item_state.hpp>
#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/recurrence_driver.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The extents of a call; q has as many heads as k.
struct correcting_shape {
  idx_t batch = 0, key_heads = 0, heads = 0, length = 0, dim = 0, dim_v = 0;
};

/// The views of a call. Tokens that are appended to a state have neither q nor out.
template <class S>
struct correcting_views {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  bool queries = true;
  tensor_view<const S> a{}, b{};  // of dplr
};

/// The state of a call before it, and that after it or its gradient.
template <class T>
struct correcting_states {
  tensor_view<const T> before;
  const char* name;
  memory_layout after;
};

/// A call of these extents, after its checks.
template <rule R, class S, class Options, class T = compute_type<S>>
kernel_call<T> correcting_call(const correcting_views<S>& x, const correcting_shape& s, const sequence_lengths& lengths,
                          const Options& options) {
  kernel_call<T> call{.q = x.q, .k = x.k, .v = x.v, .out = x.out,
                      .shape = {s.batch, x.queries ? s.heads : 0, s.key_heads, s.length, s.length, s.dim, s.dim_v},
                      .lengths = lengths, .heads = s.heads, .query_heads = s.heads, .causal = true, .normalise = false,
                      .driver = kernel_driver::recurrence};
  call.recurrence.log_decay = options.log_decay;
  if constexpr (R == rule::correct)
    call.recurrence.beta = options.beta;
  else
    call.recurrence.a = x.a, call.recurrence.b = x.b;
  return call;
}

/// Checks the views of a call, without memory that is written.
[[gnu::noinline]] inline correcting_shape check_correcting_extents(const validator& check, const memory_layout& k,
                                                         const memory_layout& v) {
  const correcting_shape s{k.extents[0], k.extents[1], v.extents[1], k.extents[2], k.extents[3], v.extents[3]};
  if (s.heads > 0 && (s.key_heads == 0 || s.heads % s.key_heads != 0))
    check.fail(text({"key heads that divide the value heads ", s.heads}), s.key_heads);
  check.extents({{"value batch = key batch", s.batch, v.extents[0]},
                 {"value length = key length", s.length, v.extents[2]}});
  return s;
}

/// Checks q, and out or its gradient.
[[gnu::noinline]] inline void check_correcting_queries(const validator& check, const correcting_shape& s,
                                                  const memory_layout& q, const memory_layout& out,
                                                  bool gradient = false) {
  check.extents({{"query batch = key batch", s.batch, q.extents[0]},
                 {"query heads = key heads", s.key_heads, q.extents[1]},
                 {"query length = key length", s.length, q.extents[2]},
                 {"query dim = key dim", s.dim, q.extents[3]},
                 {gradient ? "d_out batch = key batch" : "out batch = key batch", s.batch, out.extents[0]},
                 {gradient ? "d_out heads = value heads" : "out heads = value heads", s.heads, out.extents[1]},
                 {gradient ? "d_out length = key length" : "out length = key length", s.length, out.extents[2]},
                 {gradient ? "d_out dim = value dim" : "out dim = value dim", s.dim_v, out.extents[3]}});
}

/// Checks beta, log decays and views of the shape of the state, of a call or of its gradients.
template <class T>
void check_correcting_parameters(const validator& check, const correcting_shape& s, const sequence_lengths& lengths,
                            const tensor_view<const T, 3>& beta, const tensor_view<const T>& log_decay) {
  if (beta)
    check.extents({{"beta batch = key batch", s.batch, beta.extent(0)},
                   {"beta heads = value heads", s.heads, beta.extent(1)},
                   {"beta length = key length", s.length, beta.extent(2)}});
  if (log_decay) {
    check.extents({{"log_decay batch = key batch", s.batch, log_decay.extent(0)},
                   {"log_decay heads = value heads", s.heads, log_decay.extent(1)},
                   {"log_decay length = key length", s.length, log_decay.extent(2)}});
    check.broadcasts("log_decay channels =", s.dim, log_decay.extent(3));
  }
  for (idx_t b = 0; beta && b < s.batch; ++b)
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t t = 0; t < lengths.keys(b); ++t)
        if (!std::isfinite(beta(b, h, t))) check.fail("a finite beta", static_cast<double>(beta(b, h, t)));
  if (log_decay) check_log_decays(check, log_decay, lengths);
}

[[gnu::noinline]] inline void check_correcting_state(const validator& check, const char* name,
                                                     const correcting_shape& s, const memory_layout& state) {
  if (!state.given()) return;
  const idx_t wanted[4] = {s.batch, s.heads, s.dim, s.dim_v};
  if (!std::equal(wanted, wanted + 4, state.extents))
    check.fail(text({name, " of shape [batch, value heads, key dim, value dim] = ", list_text(wanted, 4)}),
               list_text(state.extents, 4));
}

/// Checks a number that must be finite, and with `positive` greater than 0.
template <class T>
T check_correcting_number(const validator& check, const char* name, const std::optional<T>& given, T otherwise,
                     bool positive = false) {
  if (!given) return otherwise;
  if (!std::isfinite(*given) || (positive && *given <= T(0)))
    check.fail(text({"a finite ", name, positive ? " > 0" : ""}), static_cast<double>(*given));
  return *given;
}

/// 1 / sqrt(D).
template <class T>
T correcting_scale(idx_t dim) {
  return T(1) / std::sqrt(static_cast<T>(std::max<idx_t>(1, dim)));
}

/// Checks a or b of dplr, whose heads are those of the state.
[[gnu::noinline]] inline void check_correcting_rows(const validator& check, const char* name, const correcting_shape& s,
                                               const memory_layout& x) {
  const idx_t wanted[4] = {s.batch, s.heads, s.length, s.dim};
  if (!std::equal(wanted, wanted + 4, x.extents))
    check.fail(text({name, " of the shape of k = ", list_text(wanted, 4)}), list_text(x.extents, 4));
}

/// The inputs of a call.
template <rule R, class S, class Options, class T>
void read_correcting_inputs(call_views& check, const correcting_views<S>& x, const Options& options,
                       const tensor_view<const T>& initial_state) {
  check.read("q", x.q), check.read("k", x.k), check.read("v", x.v);
  if constexpr (R == rule::correct)
    check.read("beta", options.beta);
  else
    check.read("a", x.a), check.read("b", x.b);
  check.read("log_decay", options.log_decay);
  check.read("initial_state", initial_state);
}

/// The checks of a forward or backward call, whose views `check` knows: `out` is that or its gradient.
template <rule R, class S, class Options, class T = compute_type<S>>
kernel_call<T> check_correcting_call(call_views& check, const correcting_views<S>& x, const memory_layout& out,
                                     const Options& options, std::span<const idx_t> lengths,
                                     const correcting_states<T>& states, bool gradient = false) {
  const correcting_shape s = check_correcting_extents(check, x.k, x.v);
  if constexpr (R == rule::low_rank) {
    check.extents({{"key heads = value heads", s.heads, s.key_heads}});
    check_correcting_rows(check, "a", s, x.a);
    check_correcting_rows(check, "b", s, x.b);
  }
  if (x.queries) check_correcting_queries(check, s, x.q, out, gradient);
  check_length_list(check, "lengths", lengths, s.batch, s.length);
  kernel_call<T> call = correcting_call<R>(x, s, {s.length, s.length, lengths, lengths}, options);
  check_correcting_parameters<T>(check, s, call.lengths, call.recurrence.beta, options.log_decay);
  check_key_mask(check, call, options.key_mask);
  check_correcting_state(check, "initial_state", s, states.before);
  check_correcting_state(check, states.name, s, states.after);
  call.recurrence.initial_state = states.before;
  call.recurrence.scale = check_correcting_number(check, "scale", options.scale, correcting_scale<T>(s.dim));
  if constexpr (R == rule::correct)
    call.recurrence.unit_norm_eps = check_correcting_number(check, "unit_norm_eps", options.unit_norm_eps, T(-1), true);
  return call;
}

/// The checks of a forward call and of a step, whose options these are.
template <rule R, class S, class Options, class T = compute_type<S>>
kernel_call<T> check_correcting_forward(call_views& check, const correcting_views<S>& x, const Options& options,
                                   std::span<const idx_t> lengths, const tensor_view<const T>& initial_state,
                                   const tensor_view<T>& final_state) {
  read_correcting_inputs<R>(check, x, options, initial_state);
  check.write("out", x.out), check.write("final_state", final_state);
  kernel_call<T> call = check_correcting_call<R>(check, x, x.out, options, lengths,
                                            {initial_state, "final_state", final_state});
  call.recurrence.final_state = final_state;
  return call;
}

/// Those of a backward call with the gradients g.
template <rule R, class S, class Gradients, class Options, class T = compute_type<S>>
kernel_call<T> check_correcting_backward(call_views& check, const correcting_views<S>& x,
                                         const tensor_view<const S>& d_out, const Gradients& g,
                                         const Options& options) {
  read_correcting_inputs<R>(check, x, options, tensor_view<const T>(options.initial_state));
  check.read("d_out", d_out), check.read("d_final_state", g.d_final_state);
  check.gradient("q", g.q, x.q);
  check.gradient("k", g.k, x.k);
  check.gradient("v", g.v, x.v);
  if constexpr (R == rule::correct) {
    check.gradient("beta", g.beta, options.beta);
  } else {
    check.gradient("a", g.a, x.a);
    check.gradient("b", g.b, x.b);
  }
  check.gradient("log_decay", g.log_decay, options.log_decay);
  check.gradient("initial_state", g.initial_state, options.initial_state);
  return check_correcting_call<R>(check, x, d_out, options, options.lengths,
                             {options.initial_state, "d_final_state", g.d_final_state}, true);
}

}}}  // namespace attn::ATTN_ISA::detail
