#include "support/call_aft.hpp"

namespace testing {

template <class S>
void compiled_aft_full<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w,
                                const options& chosen, attn::execution& execution) {
  attn::aft_full(q, k, v, out, w, chosen, execution);
}

template <class S>
void compiled_aft_full<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> w, in_view<S> d_out,
                                    const attn::aft_full_gradients<S>& gradients, const options& chosen,
                                    attn::execution& execution) {
  attn::aft_full_backward(q, k, v, w, d_out, gradients, chosen, execution);
}

template <class S>
void compiled_aft_full<S>::step(attn::kv_cache<S>& state, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                                in_view<S> w, const attn::aft_step_options& chosen, attn::execution& execution) {
  attn::aft_full_step(state, q, k, v, out, w, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_aft_full);

}  // namespace testing
