#include "support/call_multipole.hpp"

namespace testing {

template <class S>
void compiled_multipole<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                 attn::execution& execution) {
  attn::multipole(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_multipole<S>::step(attn::multipole_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v,
                                 out_view<S> out, const step_options& chosen, attn::execution& execution) {
  attn::multipole_step(cache, q, k, v, out, chosen, execution);
}

template <class S>
void compiled_multipole<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                     const gradients& wanted, const options& chosen, attn::execution& execution) {
  attn::multipole_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_multipole);

}  // namespace testing
