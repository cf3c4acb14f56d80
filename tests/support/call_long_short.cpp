#include "support/call_long_short.hpp"

namespace testing {

template <class S>
void compiled_long_short<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> logits,
                                  const options& chosen, attn::execution& execution) {
  attn::long_short(q, k, v, out, logits, chosen, execution);
}

template <class S>
void compiled_long_short<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> logits,
                                      in_view<S> d_out, const gradients& wanted, const options& chosen,
                                      attn::execution& execution) {
  attn::long_short_backward(q, k, v, out, logits, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_long_short);

}  // namespace testing
