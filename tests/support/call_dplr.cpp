#include "support/call_dplr.hpp"

namespace testing {

template <class S>
void compiled_dplr<S>::call(const dplr_views<S>& x, out_view<S> out, const options& chosen,
                            attn::execution& execution) {
  attn::dplr(x.q, x.k, x.v, x.a, x.b, out, chosen, execution);
}

template <class S>
void compiled_dplr<S>::step(attn::dplr_state<S>& state, const dplr_views<S>& x, out_view<S> out,
                            const attn::dplr_step_options<S>& chosen, attn::execution& execution) {
  attn::dplr_step(state, x.q, x.k, x.v, x.a, x.b, out, chosen, execution);
}

template <class S>
void compiled_dplr<S>::append(attn::dplr_state<S>& state, const dplr_views<S>& x,
                              const attn::dplr_step_options<S>& chosen, attn::execution& execution) {
  state.append(x.k, x.v, x.a, x.b, chosen, execution);
}

template <class S>
void compiled_dplr<S>::backward(const dplr_views<S>& x, in_view<S> d_out, const attn::dplr_gradients<S>& gradients,
                                const options& chosen, attn::execution& execution) {
  attn::dplr_backward(x.q, x.k, x.v, x.a, x.b, d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_dplr);

}  // namespace testing
