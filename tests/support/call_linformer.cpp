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

ATTN_TEST_FOR_ALL_TYPES(compiled_linformer);

}  // namespace testing
