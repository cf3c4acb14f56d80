#include "support/call_aft.hpp"

namespace testing {

template <class S>
void compiled_aft_conv<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w,
                                const options& chosen, attn::execution& execution) {
  attn::aft_conv(q, k, v, out, w, chosen, execution);
}

template <class S>
void compiled_aft_conv<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> w, in_view<S> d_out,
                                    const attn::aft_conv_gradients<S>& gradients, const options& chosen,
                                    attn::execution& execution) {
  attn::aft_conv_backward(q, k, v, w, d_out, gradients, chosen, execution);
}

template <class S>
void compiled_aft_conv<S>::step(attn::aft_conv_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v,
                                out_view<S> out, in_view<S> w, const attn::aft_step_options& chosen,
                                attn::execution& execution) {
  attn::aft_conv_step(state, q, k, v, out, w, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_aft_conv);

}  // namespace testing
