// attn: the checks of the options that only linear has.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Log decays [B, H or Hkv, L, 1 or features], <= 0 for every real token.
template <class T>
void check_log_decay(const validator& check, const tensor_view<const T>& g, const attention_shape& s,
                     const sequence_lengths& lengths, idx_t features) {
  check.equal("log_decay batch = query batch", s.batch, g.extent(0));
  check_heads(check, "log_decay", g.extent(1), s);
  check.equal("log_decay length = key length", s.keys, g.extent(2));
  check.broadcasts("log_decay channels", features, g.extent(3));
  check_log_decays(check, g, lengths);
}

/// A state [B, heads of sums, features(, value dim)].
[[gnu::noinline]] inline void check_linear_state(const validator& check, const char* name, const memory_layout& x,
                                                 const attention_shape& s, idx_t features) {
  if (!x.given()) return;
  const auto same = [&](const char* what, idx_t wanted, idx_t value) {
    if (value != wanted) check.fail({name, what, wanted}, value);
  };
  same(" batch = query batch ", s.batch, x.extents[0]);
  check_heads(check, name, x.extents[1], s);
  same(" features = ", features, x.extents[2]);
  if (x.rank == 4) same(" value dim = ", s.dim_v, x.extents[3]);
}

/// The checks that only linear has, of a call with so many features. Fills in call.driver, and call.heads where a
/// parameter is per query head.
template <class T>
void check_linear(const validator& check, kernel_call<T>& call, idx_t features) {
  const recurrence_parameters<T>& o = call.recurrence;
  check_feature_count(check, features, call.shape);
  const bool states = o.initial_state || o.initial_weights || o.final_state || o.final_weights;
  if (!std::isfinite(o.scale)) check.fail("a finite scale", static_cast<double>(o.scale));
  if (!o.log_decay && !o.bonus && !states && !call.key_mask && o.scale == T(1)) return;
  if (o.log_decay && call.gate) check.fail("either decay or log_decay", "both");
  if (o.log_decay && !call.causal) check.fail("causal with log_decay", "no causal");
  if (o.bonus && !call.causal) check.fail("causal with a bonus", "no causal");
  attention_shape s = call.shape;
  s.heads = call.query_heads;
  if (o.log_decay) check_log_decay(check, o.log_decay, s, call.lengths, features);
  if (o.bonus)  // append has no query heads to compare them with
    check.extents({{"bonus heads = query heads", call.shape.heads > 0 ? s.heads : o.bonus.extent(0), o.bonus.extent(0)},
                   {"bonus columns = features", features, o.bonus.extent(1)}});
  check_linear_state(check, "initial_state", o.initial_state, s, features);
  check_linear_state(check, "initial_weights", o.initial_weights, s, features);
  check_linear_state(check, "final_state", o.final_state, s, features);
  check_linear_state(check, "final_weights", o.final_weights, s, features);
  for (const idx_t heads : {o.log_decay.extent(1), o.initial_state.extent(1), o.initial_weights.extent(1),
                            o.final_state.extent(1), o.final_weights.extent(1)})
    call.take_heads_of(heads);
  for (const idx_t heads : {o.final_state ? o.final_state.extent(1) : call.heads,
                            o.final_weights ? o.final_weights.extent(1) : call.heads})
    check.equal("heads of the final state = heads of sums", call.heads, heads);
  // Decays per token alone are factors of scores.
  const bool per_token = o.per_token() && !o.bonus && !states && !call.key_mask && o.scale == T(1);
  if (!per_token) call.driver = kernel_driver::recurrence;
}

/// Token by token, a query is that of a key.
template <class T>
void check_invariant_tokens(const validator& check, const kernel_call<T>& call, const execution& exec) {
  for (idx_t b = 0; exec.invariant() && call.causal && b < call.shape.batch; ++b)
    if (call.lengths.queries(b) != call.lengths.keys(b))
      check.fail({"as many queries as keys, since the execution is invariant: ", call.lengths.keys(b)},
                 call.lengths.queries(b));
}

}}}  // namespace attn::ATTN_ISA::detail
