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

template struct compiled_sliding_window<float>;
template struct compiled_sliding_window<Eigen::bfloat16>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_sliding_window<double>;
#endif
#if defined(ATTN_TEST_HALF)
template struct compiled_sliding_window<Eigen::half>;
#endif

}  // namespace testing
