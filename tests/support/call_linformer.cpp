#include "support/call_low_rank.hpp"

namespace testing {

template <class S>
void compiled_linformer<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, projection_view<S> e,
                                 projection_view<S> f, const options& chosen, attn::execution& execution) {
  attn::linformer(q, k, v, out, e, f, chosen, execution);
}

template <class S>
void compiled_linformer<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, projection_view<S> e,
                                     projection_view<S> f, in_view<S> d_out, const gradients& wanted,
                                     const options& chosen, attn::execution& execution) {
  attn::linformer_backward(q, k, v, out, e, f, d_out, wanted, chosen, execution);
}

template struct compiled_linformer<float>;
template struct compiled_linformer<Eigen::bfloat16>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_linformer<double>;
#endif
#if defined(ATTN_TEST_HALF)
template struct compiled_linformer<Eigen::half>;
#endif

}  // namespace testing
