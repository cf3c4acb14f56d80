#include "support/call_delta_rule.hpp"

namespace testing {

template <class S>
void compiled_delta_rule<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                                  attn::execution& execution) {
  attn::delta_rule(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_delta_rule<S>::step(attn::delta_rule_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v,
                                  out_view<S> out, const attn::delta_rule_step_options<S>& chosen,
                                  attn::execution& execution) {
  attn::delta_rule_step(state, q, k, v, out, chosen, execution);
}

template <class S>
void compiled_delta_rule<S>::append(attn::delta_rule_state<S>& state, in_view<S> k, in_view<S> v,
                                    const attn::delta_rule_step_options<S>& chosen, attn::execution& execution) {
  state.append(k, v, chosen, execution);
}

template <class S>
void compiled_delta_rule<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out,
                                      const attn::delta_rule_gradients<S>& gradients, const options& chosen,
                                      attn::execution& execution) {
  attn::delta_rule_backward(q, k, v, d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_delta_rule);

}  // namespace testing
