#include "support/call_lsh.hpp"

namespace testing {

template <class S>
void compiled_lsh<S>::call(in_view<S> q, in_view<S> v, out_view<S> out, const options& chosen, const score_of<S>& score,
                           attn::execution& execution) {
  if (score)
    attn::lsh(q, v, out, chosen, score, execution);
  else
    attn::lsh(q, v, out, chosen, execution);
}

template struct compiled_lsh<float>;
template struct compiled_lsh<Eigen::bfloat16>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_lsh<double>;
template struct compiled_lsh<Eigen::half>;
#endif

}  // namespace testing
