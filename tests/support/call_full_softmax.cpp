#include "support/call.hpp"

namespace testing {

template <class S>
void compiled_full_softmax<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                    const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::full_softmax(q, k, v, out, chosen, score, execution);
  else
    attn::full_softmax(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_full_softmax<S>::step(attn::kv_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                                    const options& given, const score_of<S>& score, attn::execution& execution) {
  attn::full_softmax_step_options<S> chosen{.scale = given.scale, .lengths = given.lengths,  .bias = given.bias,
                                            .relative_keys = given.relative_keys,
                                            .position_queries = given.position_queries,
                                            .relative_bias = given.relative_bias, .softcap = given.softcap,
                                            .alibi_slopes = given.alibi_slopes, .sinks = given.sinks,
                                            .dropout = given.dropout, .lse = given.lse, .skip_below = given.skip_below,
                                            .skip_share = given.skip_share, .skipped = given.skipped};
  if (given.log_decay) chosen.log_decay = given.log_decay.slice(2, 0, cache.tokens() + k.extent(2));
  if (score)
    attn::full_softmax_step(cache, q, k, v, out, chosen, score, execution);
  else
    attn::full_softmax_step(cache, q, k, v, out, chosen, execution);
}

template <class S>
void compiled_full_softmax<S>::cached(const attn::kv_cache<S>& cache, in_view<S> q, out_view<S> out,
                                      const cached_options& given, attn::execution& execution) {
  attn::full_softmax_cached(cache, q, out, given, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_full_softmax);

}  // namespace testing
