#include "laws/operators/aft.hpp"

namespace testing::aft_simple_law {
namespace {

struct aft_simple_entry {
  std::string name;
  bool causal = false, gate = true, masked = false;
};

template <class T>
attn::aft_simple_options<T> options_of(const aft_simple_entry& entry, const shared_aft_mask& mask, const auto& call) {
  return {.causal = entry.causal, .lengths = call.lengths, .gate = entry.gate, .key_mask = mask->seen.view()};
}

template <class T>
void add_aft_simple(std::vector<law_operator<T>>& all) {
  for (const aft_simple_entry& entry : {aft_simple_entry{"aft_simple ungated", false, false},
                                        {"aft_simple"},
                                        {"aft_simple causal ungated", true, false},
                                        {"aft_simple causal", true},
                                        {"aft_simple with a key_mask", false, true, true},
                                        {"aft_simple causal ungated, with a key_mask", true, false, true}}) {
    auto op = aft_operator<T>(entry.name, entry.causal, entry.gate);
    op.bind = [=](const law_shape& s) -> bound<T> {
      return [=, mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
        compiled_aft_simple<T>::call(call.q, call.k, call.v, call.out, options_of<T>(entry, mask, call),
                                     *call.execution);
      };
    };
    op.backward = [=](const law_shape& s) {
      return [=, mask = std::make_shared<aft_mask>(entry.masked, s)](const law_backward_call<T>& call) {
        compiled_aft_simple<T>::backward(call.q, call.k, call.v, call.d_out,
                                         {.q = call.dq, .k = call.dk, .v = call.dv}, options_of<T>(entry, mask, call),
                                         *call.execution);
      };
    };
    op.reference = aft_reference<reference::aft_simple_options>(reference::aft_simple, [=](const law_shape& s) {
      return reference::aft_simple_options{{entry.causal, entry.gate, {}, aft_mask(entry.masked, s).of_reference}};
    });
    op.sees = [=](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
      return (!entry.causal || j <= i) && !(entry.masked && !key_mask_sees(s.first_batch + b, j));
    };
    if (entry.gate && !entry.masked)
      op.limits = {{"full without biases", op.bind, [=](const law_shape& s) {
                      return bind_aft_full<T>(s, entry.causal, [](idx_t, idx_t, idx_t) { return T(0); });
                    }}};
    if (entry.causal)
      op.stream = [=](const law_shape& s) -> bound<T> {
        return [=, mask = std::make_shared<aft_mask>(entry.masked, s), tokens = std::make_shared<idx_t>(0),
                state = std::make_shared<attn::aft_simple_state<T>>(
                    attn::state_extents{.batch = s.batch, .heads = s.heads, .dim = s.dim})](const law_call<T>& call) {
          compiled_aft_simple<T>::step(*state, call.q, call.k, call.v, call.out,
                                       {.lengths = call.lengths, .gate = entry.gate,
                                        .key_mask = mask->seen.view(*tokens, call.k.extent(2))},
                                       *call.execution);
          *tokens += call.k.extent(2);
        };
      };
    if (!entry.gate && !entry.masked) op.long_rows = {{"", op.bind}};
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
