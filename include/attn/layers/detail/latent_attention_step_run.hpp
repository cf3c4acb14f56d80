// attn: the run of latent_attention_step: the new tokens are put together, appended, and attended in the absorbed form.
#pragma once

#include <attn/layers/detail/latent_attention_run.hpp>
#include <attn/softmax/detail/full_softmax_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether the cache is one of [c; k_rotary], one key head whose values are its first channels.
template <class S, class Inside>
void check_latent_cache(const validator& check, const latent_views<S>& views, const Inside& cache) {
  if (!cache.values_in_keys()) check.fail("a cache with values_in_keys", "one with values of its own");
  check.extents({{"cache heads", 1, cache.heads()},
                 {"cache dim = latent dim + rotary dim", views.latent_dim() + views.rotary_dim(), cache.dim()},
                 {"cache value dim = latent dim", views.latent_dim(), cache.value_dim()}});
}

/// `step` has checks, options and execution of the call.
template <class S, class Options, class Cache>
void run_latent_attention_step(latent_call<S>& call, checked_softmax<S, no_score, Options>& step, Cache& cache) {
  const latent_views<S>& views = call.views;
  execution& exec = step.exec;
  const auto memory = exec.workspace([&](arena& m) {
    return std::pair(absorbed_rows<S>::layout(m, call), memory_of_both(m, views.latent, views.k_rotary));
  });
  step.k = together(views.latent, views.k_rotary, memory->second, exec);
  step.v = step.k.slice(3, 0, views.latent_dim());
  step.shape = call.attend.shape, step.shape.kv_heads = 1;
  auto& tokens = check_step(step, cache);
  const auto& given = step.options.lengths;
  append_and(tokens, step.k, step.v, given, [&] {
    softmax_call<S, no_score>& attend = call.attend;
    attend.lengths = {attend.shape.queries, attend.shape.keys = tokens.tokens(), given, tokens.lengths()};
    attend.causal = true;
    if (attend.shape.heads == 0) return;
    run_full_softmax(absorb_queries(call, memory->first).over(tokens));
    finish_absorbed(call, memory->first);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
