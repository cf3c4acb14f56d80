#include "support/call_aft.hpp"

namespace testing {

template <class S>
void compiled_aft_simple<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                  attn::execution& execution) {
  attn::aft_simple(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_aft_simple<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out,
                                      const attn::aft_simple_gradients<S>& gradients, const options& chosen,
                                      attn::execution& execution) {
  attn::aft_simple_backward(q, k, v, d_out, gradients, chosen, execution);
}

template <class S>
void compiled_aft_simple<S>::step(attn::aft_simple_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v,
                                  out_view<S> out, const attn::aft_step_options& chosen, attn::execution& execution) {
  attn::aft_simple_step(state, q, k, v, out, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_aft_simple);

}  // namespace testing
