#include "support/call_pointwise.hpp"

namespace testing {

template <class S>
void compiled_pointwise<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                 const function_of<S>& f, attn::execution& execution) {
  if (f)
    attn::pointwise(q, k, v, out, chosen, f, execution);
  else
    attn::pointwise(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_pointwise<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S>, in_view<S> d_out,
                                     const gradients& wanted, const options& chosen, const function_of<S>& f,
                                     const function_of<S>& derivative, attn::execution& execution) {
  if (f)
    attn::pointwise_backward(q, k, v, d_out, wanted, chosen, f, derivative, execution);
  else
    attn::pointwise_backward(q, k, v, d_out, wanted, chosen, execution);
}

template <class S>
void compiled_pointwise<S>::step(attn::kv_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                                 const attn::pointwise_step_options<S>& chosen, attn::execution& execution) {
  attn::pointwise_step(cache, q, k, v, out, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_pointwise);

}  // namespace testing
