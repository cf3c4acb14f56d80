#include "support/call_selected_keys.hpp"

namespace testing {

template <class S>
void compiled_selected_keys<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                     const score_of<S>& score, attn::execution& execution) {
  const attn::selected_keys_options<S>& given = chosen;
  if (score)
    attn::selected_keys(q, k, v, out, chosen.indices, given, score, execution);
  else
    attn::selected_keys(q, k, v, out, chosen.indices, given, execution);
}

template <class S>
void compiled_selected_keys<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                         const gradients& wanted, const options& chosen, const score_of<S>& score,
                                         const score_backward_of<S>& score_backward, attn::execution& execution) {
  const attn::selected_keys_options<S>& given = chosen;
  if (score)
    attn::selected_keys_backward(q, k, v, out, chosen.indices, d_out, wanted, given, score, score_backward, execution);
  else
    attn::selected_keys_backward(q, k, v, out, chosen.indices, d_out, wanted, given, execution);
}

template <class S>
void compiled_selected_keys<S>::step(attn::kv_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v,
                                     out_view<S> out, const step_options& chosen, const score_of<S>& score,
                                     attn::execution& execution) {
  const attn::selected_keys_step_options<S>& given = chosen;
  if (score)
    attn::selected_keys_step(cache, q, k, v, out, chosen.indices, given, score, execution);
  else
    attn::selected_keys_step(cache, q, k, v, out, chosen.indices, given, execution);
}

template <class S>
void compiled_selected_keys<S>::cached(const attn::kv_cache<S>& cache, in_view<S> q, out_view<S> out,
                                       const cached_options& chosen, attn::execution& execution) {
  const attn::selected_keys_cached_options<S>& given = chosen;
  attn::selected_keys_cached(cache, q, out, chosen.indices, given, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_selected_keys);

}  // namespace testing
