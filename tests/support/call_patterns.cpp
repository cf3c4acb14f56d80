// The operators that attend by a pattern, in one file: they share the kernel, which is most of what there is to
// compile.
#include "support/call_patterns.hpp"

namespace testing {

template <class S>
void compiled_block<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                             const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::block(q, k, v, out, chosen, score, execution);
  else
    attn::block(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_block<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                 const gradients& wanted, const options& chosen, const score_of<S>& score,
                                 const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::block_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::block_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_block);

template <class S>
void compiled_strided<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                               const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::strided(q, k, v, out, chosen, score, execution);
  else
    attn::strided(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_strided<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                   const gradients& wanted, const options& chosen, const score_of<S>& score,
                                   const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::strided_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::strided_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_strided);

template <class S>
void compiled_bigbird<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                               const score_of<S>& score, attn::execution& execution) {
  if (score)
    attn::bigbird(q, k, v, out, chosen, score, execution);
  else
    attn::bigbird(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_bigbird<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out,
                                   const gradients& wanted, const options& chosen, const score_of<S>& score,
                                   const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::bigbird_backward(q, k, v, out, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::bigbird_backward(q, k, v, out, d_out, wanted, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_bigbird);

namespace {

template <class S, class Pattern>
void attend(const in_view<S>& q, const in_view<S>& k, const in_view<S>& v, const out_view<S>& out,
            const Pattern& pattern, const attn::pattern_softmax_options<S>& chosen, const score_of<S>& score,
            attn::execution& execution) {
  if (score)
    attn::pattern_softmax(q, k, v, out, pattern, chosen, score, execution);
  else
    attn::pattern_softmax(q, k, v, out, pattern, chosen, execution);
}

template <class S, class Pattern>
void differentiate(const in_view<S>& q, const in_view<S>& k, const in_view<S>& v, const in_view<S>& out,
                   const Pattern& pattern, const in_view<S>& d_out, const attn::pattern_softmax_gradients<S>& wanted,
                   const attn::pattern_softmax_options<S>& chosen, const score_of<S>& score,
                   const score_backward_of<S>& score_backward, attn::execution& execution) {
  if (score)
    attn::pattern_softmax_backward(q, k, v, out, pattern, d_out, wanted, chosen, score, score_backward, execution);
  else
    attn::pattern_softmax_backward(q, k, v, out, pattern, d_out, wanted, chosen, execution);
}

}  // namespace

template <class S>
void compiled_pattern_softmax<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                                       const listed_pattern& pattern, const options& chosen, const score_of<S>& score,
                                       attn::execution& execution) {
  attend<S>(q, k, v, out, pattern, chosen, score, execution);
}

template <class S>
void compiled_pattern_softmax<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                                       const joined_listed_pattern& pattern, const options& chosen,
                                       const score_of<S>& score, attn::execution& execution) {
  attend<S>(q, k, v, out, pattern, chosen, score, execution);
}

template <class S>
void compiled_pattern_softmax<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out,
                                           const listed_pattern& pattern, in_view<S> d_out, const gradients& wanted,
                                           const options& chosen, const score_of<S>& score,
                                           const score_backward_of<S>& score_backward, attn::execution& execution) {
  differentiate<S>(q, k, v, out, pattern, d_out, wanted, chosen, score, score_backward, execution);
}

template <class S>
void compiled_pattern_softmax<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out,
                                           const joined_listed_pattern& pattern, in_view<S> d_out,
                                           const gradients& wanted, const options& chosen, const score_of<S>& score,
                                           const score_backward_of<S>& score_backward, attn::execution& execution) {
  differentiate<S>(q, k, v, out, pattern, d_out, wanted, chosen, score, score_backward, execution);
}

template struct compiled_pattern_softmax<float>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_pattern_softmax<double>;
#endif

}  // namespace testing
