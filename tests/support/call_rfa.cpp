#include "support/call_kernel.hpp"

namespace testing {

template <class S>
void compiled_rfa<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, feature_view<S> features,
                           const options& chosen, attn::execution& execution) {
  attn::rfa(q, k, v, out, features, chosen, execution);
}

template <class S>
void compiled_rfa<S>::step(attn::rfa_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                           feature_view<S> features, const attn::rfa_step_options<S>& chosen,
                           attn::execution& execution) {
  attn::rfa_step(state, q, k, v, out, features, chosen, execution);
}

template <class S>
void compiled_rfa<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, feature_view<S> features, in_view<S> d_out,
                                     const attn::rfa_gradients<S>& gradients, const options& chosen,
                                     attn::execution& execution) {
  attn::rfa_backward(q, k, v, features, d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_rfa);

}  // namespace testing
