#include "support/call.hpp"

namespace testing {

template <class S>
void compiled_sliding_window<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                      const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::sliding_window(q, k, v, out, chosen, score, execution);
  else
    attn::sliding_window(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_sliding_window<S>::step(attn::sliding_window_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v,
                                      out_view<S> out, const attn::sliding_window_step_options<S>& chosen,
                                      const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::sliding_window_step(cache, q, k, v, out, chosen, score, execution);
  else
    attn::sliding_window_step(cache, q, k, v, out, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_sliding_window);

}  // namespace testing
