#include "support/call.hpp"

namespace testing {

template <class S>
void compiled_full_softmax_backward<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out,
                                                 in_view<S> d_out, const gradients& wanted,
                                                 const attn::full_softmax_options<S>& chosen, const score_of<S>& score,
                                                 const score_backward_of<S>& score_backward,
                                                 attn::execution& execution) {
  if (score)
    attn::full_softmax_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::full_softmax_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_full_softmax_backward);

}  // namespace testing
