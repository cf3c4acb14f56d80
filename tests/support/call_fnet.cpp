#include "support/call_fourier.hpp"

namespace testing {

template <class S>
void compiled_fnet<S>::call(in_view<S> x, out_view<S> out, const options& chosen, attn::execution& execution) {
  attn::fnet(x, out, chosen, execution);
}

template <class S>
void compiled_fnet<S>::backward(in_view<S> d_out, const attn::fnet_gradients<S>& gradients, const options& chosen,
                                attn::execution& execution) {
  attn::fnet_backward(d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_fnet);

}  // namespace testing
