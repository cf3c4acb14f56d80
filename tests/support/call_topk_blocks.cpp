#include "support/call_topk_blocks.hpp"

namespace testing {

template <class S>
void compiled_topk_blocks<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                   const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::topk_blocks(q, k, v, out, chosen, score, execution);
  else
    attn::topk_blocks(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_topk_blocks<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                       const gradients& wanted, const options& chosen, const score_of<S>& score,
                                       const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::topk_blocks_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::topk_blocks_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

template <class S>
void compiled_topk_blocks<S>::step(attn::topk_blocks_cache<S>& cache, in_view<S> q, in_view<S> k, in_view<S> v,
                                   out_view<S> out, const step_options& chosen, const score_of<S>& score,
                                   attn::execution& execution) {
  if (score)
    attn::topk_blocks_step(cache, q, k, v, out, chosen, score, execution);
  else
    attn::topk_blocks_step(cache, q, k, v, out, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_topk_blocks);

}  // namespace testing
