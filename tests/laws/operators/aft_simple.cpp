#include "laws/operators/aft.hpp"

namespace testing::aft_simple_law {
namespace {

template <class T>
void add_aft_simple(std::vector<law_operator<T>>& all) {
  for (bool causal : {false, true})
    for (bool gate : {false, true}) {
      auto op = aft_operator<T>(std::string("aft_simple") + (causal ? " causal" : "") + (gate ? "" : " ungated"),
                                causal, gate);
      op.bind = [=](const law_shape&) { return bind_aft_simple<T>(causal, gate); };
      op.backward = [=](const law_shape&) {
        return [=](const law_backward_call<T>& call) {
          compiled_aft_simple<T>::backward(call.q, call.k, call.v, call.d_out,
                                           {.q = call.dq, .k = call.dk, .v = call.dv},
                                           {.causal = causal, .lengths = call.lengths, .gate = gate}, *call.execution);
        };
      };
      op.reference = aft_reference<reference::aft_simple_options>(
          reference::aft_simple, [=](const law_shape&) { return reference::aft_simple_options{{causal, gate, {}}}; });
      op.sees = [=](const law_shape&, idx_t, idx_t, idx_t i, idx_t j) { return !causal || j <= i; };
      if (gate)
        op.limits = {{"full without biases", op.bind, [=](const law_shape& s) {
                        return bind_aft_full<T>(s, causal, [](idx_t, idx_t, idx_t) { return T(0); });
                      }}};
      if (causal)
        op.stream = [=](const law_shape& s) -> bound<T> {
          return [=, state = std::make_shared<attn::aft_simple_state<T>>(
                             attn::state_extents{.batch = s.batch, .heads = s.heads, .dim = s.dim})](
                     const law_call<T>& call) {
            compiled_aft_simple<T>::step(*state, call.q, call.k, call.v, call.out,
                                         {.lengths = call.lengths, .gate = gate}, *call.execution);
          };
        };
      if (!gate) op.long_rows = {{"", op.bind}};
      all.push_back(op);
    }
}
const law_entries entries("aft_simple", [](auto& all) { add_aft_simple(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back({std::string("aft_simple") + (causal ? " causal" : ""), causal,
                   [=](const stored_call<S>& c) {
                     using compiled = compiled_aft_simple<S>;
                     const auto options = c.template options<compiled>(causal);
                     compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
                     compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                        c.execution);
                   },
                   stored::heads, true});
}
const stored_entries stored_form("aft_simple", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::aft_simple_law
