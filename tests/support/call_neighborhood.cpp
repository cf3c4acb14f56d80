#include "support/call_neighborhood.hpp"

namespace testing {

template <class S>
void compiled_neighborhood<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                    const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::neighborhood(q, k, v, out, chosen, score, execution);
  else
    attn::neighborhood(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_neighborhood<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                        const gradients& wanted, const options& chosen, const score_of<S>& score,
                                        const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::neighborhood_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::neighborhood_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_neighborhood);

}  // namespace testing
