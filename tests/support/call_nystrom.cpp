#include "support/call_low_rank.hpp"

namespace testing {

template <class S>
void compiled_nystrom<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                               attn::execution& execution) {
  attn::nystrom(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_nystrom<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out, const gradients& wanted,
                                   const options& chosen, attn::execution& execution) {
  attn::nystrom_backward(q, k, v, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_nystrom);

}  // namespace testing
