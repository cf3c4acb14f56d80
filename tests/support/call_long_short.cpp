#include "support/call_long_short.hpp"

namespace testing {

template <class S>
void compiled_long_short<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> logits,
                                  const options& chosen, attn::execution& execution) {
  attn::long_short(q, k, v, out, logits, chosen, execution);
}

template <class S>
void compiled_long_short<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> logits,
                                      in_view<S> d_out, const gradients& wanted, const options& chosen,
                                      attn::execution& execution) {
  attn::long_short_backward(q, k, v, out, logits, d_out, wanted, chosen, execution);
}

template struct compiled_long_short<float>;
template struct compiled_long_short<Eigen::bfloat16>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_long_short<double>;
#endif
#if defined(ATTN_TEST_HALF)
template struct compiled_long_short<Eigen::half>;
#endif

}  // namespace testing
