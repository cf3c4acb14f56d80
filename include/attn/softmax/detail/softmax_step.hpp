// attn: what the steps with a cache share: tokens are checked against the cache, rotated, appended and attended.
#pragma once

#include <attn/core/detail/cached_sequences.hpp>
#include <attn/core/detail/rotary_step.hpp>
#include <attn/softmax/detail/scattered_stream.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/softmax_step_options.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows in codes and rings are read by kernels whose sums depend on where the rows lie.
template <class Inside>
void check_invariant_cache(const validator& check, const execution& exec) {
  if (!exec.invariant()) return;
  if (coded<typename Inside::value_type>) check.fail("a cache of numbers, since the execution is invariant", "codes");
  if constexpr (requires(const Inside& x) { x.window(); })
    check.fail("a cache of all tokens, since the execution is invariant", "one of a window");
}

/// Checks the tokens of a checked call against the cache that they go to, which overlaps no view of the call, and the
/// options with an entry for every token of the cache, the new ones included. Returns its inside.
template <class Call, class Cache>
auto& check_step(Call& call, Cache& cache) {
  auto& inside = step_access::of(cache);
  check_stores<typename std::remove_reference_t<decltype(inside)>::value_type, typename decltype(call.q)::value_type>();
  check_invariant_cache<std::remove_reference_t<decltype(inside)>>(call.check, call.exec);
  inside.check_tokens(call.check, call.k, call.v, call.options.lengths);
  call.check.equal("query length = key length", call.shape.keys, call.shape.queries);
  inside.list_memory(call.views);
  attention_shape stream = call.shape;
  stream.keys = inside.tokens_after(call.shape.queries, call.options.lengths);
  check_key_options(call.views, stream, call.given);
  struct {
    std::span<const idx_t> before, given;
    idx_t chunk;
    idx_t keys(idx_t b) const {
      const auto n = static_cast<std::size_t>(b);
      return before[n] + (given.empty() ? chunk : given[n]);
    }
  } const lengths{inside.lengths(), call.options.lengths, call.shape.queries};
  check_decays(call.check, *call.given.log_decay, lengths, call.exec);
  return inside;
}

/// While it lives, q and k of the call are rotated, in scratch memory, where the options say so.
template <class E>
struct rotated_tokens {
  execution::persistent_workspace<rotary_step<E>> memory;

  template <class Call, class Inside>
  rotated_tokens(Call& call, const Inside& cache)
      : memory(call.exec.workspace([&](arena& all) {
          return rotary_step<E>::layout(all, call.options.rotary.has_value(), call.q, call.k);
        })) {
    const auto& given = call.options;
    if (given.rotary && cache.values_in_keys())
      call.check.fail("no rotary where values are dims of the keys: those are rotated before the step", "one");
    memory->rotate(call.check, given.rotary, cache.lengths(), given.lengths, call.q, call.k, call.exec);
    if (given.rotary) cache.check_tokens(call.check, call.k, call.v, given.lengths);  // rotated they may be larger
  }
};
template <class Call, class Inside>
rotated_tokens(Call& call, const Inside&) -> rotated_tokens<typename decltype(call.q)::value_type>;

/// A step over a cache that keeps all tokens: rotates and appends those of the call, and attends its queries causally.
/// Exceptions, of a score function or for want of memory, leave the cache as it was.
template <class Call, class Inside, class Attend>
void cache_step(Call& call, Inside& cache, Attend&& attend) {
  const auto& given = call.options.lengths;
  const rotated_tokens rotated(call, cache);
  appended_tokens appended(cache, call.k, call.v, given);
  call.lengths = {call.shape.queries, call.shape.keys = cache.tokens(), given, cache.lengths()};
  attend();
  appended.keep();
}

/// A checked call of queries over the tokens that a cache has, with the options that have an entry for each of them.
template <template <class> class Options, invariant_form Form = invariant_form::none, class Inside, class Q, class O,
          class Given, class Score>
auto checked_cached_call(const char* name, const Inside& cache, const Q& q, O& out, Given& options, Score& score,
                         execution_ref& exec) {
  using S = element_of<const Q&>;
  check_stores<typename Inside::value_type, S>();
  const tensor_view<const S> k(nullptr, {cache.batch(), cache.heads(), 0, cache.dim()}),
      v(nullptr, {cache.batch(), cache.heads(), 0, cache.value_dim()});
  auto call = checked_call<Options, Form>(name, q, k, v, out, options, score, exec);
  check_invariant_cache<Inside>(call.check, call.exec);
  if (call.given.rotary) call.check.fail("no rotary, since nothing is appended", "one");
  check_length_list(call.check, "lengths", call.options.lengths, call.shape.batch, call.shape.queries);
  cache.list_memory(call.views);
  call.shape.keys = cache.tokens();
  call.lengths = {call.shape.queries, call.shape.keys, call.options.lengths, cache.lengths()};
  check_key_options(call.views, call.shape, call.given);
  check_decays(call.check, *call.given.log_decay, call.lengths, call.exec);
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
