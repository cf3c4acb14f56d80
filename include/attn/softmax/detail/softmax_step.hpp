// attn: what the steps with a cache share: their tokens are checked against the cache, and rotated.
#pragma once

#include <attn/core/detail/rotary_step.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks the tokens of a checked call against the cache that they go to, which overlaps no view of the call.
template <class Call, class Cache>
void check_step(Call& call, const Cache& cache) {
  cache.check_tokens(call.check, call.k, call.v, call.options.lengths);
  call.check.equal("query length = key length", call.shape.keys, call.shape.queries);
  cache.list_memory(call.views);
}

/// Memory for rotated tokens.
template <class Call>
auto rotary_workspace(const Call& call) {
  using element = typename decltype(call.q)::value_type;
  return call.exec.workspace([&](arena& memory) {
    return rotary_step<element>::layout(memory, call.options.rotary.has_value(), call.q, call.k);
  });
}

/// Rotates the tokens, where the options say so: q and k become views of the workspace.
template <class Call, class Cache, class Workspace>
void rotate_tokens(Call& call, const Cache& cache, const Workspace& workspace) {
  const auto& given = call.options;
  if constexpr (requires { cache.values_in_keys(); })
    if (given.rotary && cache.values_in_keys())
      call.check.fail("no rotary where values are dims of the keys: those are rotated before the step", "one");
  workspace->rotate(call.check, given.rotary, cache.lengths(), given.lengths, call.q, call.k, call.exec);
  if (given.rotary) cache.check_tokens(call.check, call.k, call.v, given.lengths);  // rotated they may be larger
}

}}}  // namespace attn::ATTN_ISA::detail
