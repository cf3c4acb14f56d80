#include "support/call_kernel.hpp"

namespace testing {

template <class S>
void compiled_performer<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, feature_view<S> features,
                                 const options& chosen, attn::execution& execution) {
  attn::performer(q, k, v, out, features, chosen, execution);
}

template <class S>
void compiled_performer<S>::step(attn::performer_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v,
                                 out_view<S> out, feature_view<S> features,
                                 const attn::performer_step_options<S>& chosen, attn::execution& execution) {
  attn::performer_step(state, q, k, v, out, features, chosen, execution);
}

template <class S>
void compiled_performer<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, feature_view<S> features,
                                     in_view<S> d_out, const attn::performer_gradients<S>& gradients,
                                     const options& chosen, attn::execution& execution) {
  attn::performer_backward(q, k, v, features, d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_performer);

}  // namespace testing
