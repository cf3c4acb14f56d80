#include "laws/operators/aft.hpp"

namespace testing::aft_full_law {
namespace {

struct aft_full_entry {
  std::string name;
  bool causal = false, gate = true, masked = false;
};

template <class T>
attn::aft_full_options<T> options_of(const aft_full_entry& entry, const shared_aft_mask& mask, const auto& call) {
  return {.causal = entry.causal, .lengths = call.lengths, .gate = entry.gate, .key_mask = mask->seen.view()};
}

template <class T>
void add_aft_full(std::vector<law_operator<T>>& all) {
  for (const aft_full_entry& entry : {aft_full_entry{"aft_full ungated", false, false},
                                      {"aft_full"},
                                      {"aft_full causal ungated", true, false},
                                      {"aft_full causal", true},
                                      {"aft_full causal with a key_mask", true, true, true}}) {
    auto op = aft_operator<T>(entry.name, entry.causal, entry.gate);
    op.bind = [=](const law_shape& s) -> bound<T> {
      return [=, w = std::make_shared<tensor<T>>(aft_biases<T>(s)),
              mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
        compiled_aft_full<T>::call(call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                                   options_of<T>(entry, mask, call), *call.execution);
      };
    };
    op.backward = [=](const law_shape& s) {
      const auto w = std::make_shared<tensor<T>>(aft_biases<T>(s)), dw = std::make_shared<tensor<T>>(*w);
      return [=, mask = std::make_shared<aft_mask>(entry.masked, s)](const law_backward_call<T>& call) {
        compiled_aft_full<T>::backward(call.q, call.k, call.v, view(std::as_const(*w)), call.d_out,
                                       {.q = call.dq, .k = call.dk, .v = call.dv, .w = view(*dw)},
                                       options_of<T>(entry, mask, call), *call.execution);
        call.give(dw->data);
      };
    };
    op.reference = aft_reference<reference::aft_full_options>(reference::aft_full, [=](const law_shape& s) {
      return reference::aft_full_options{{entry.causal, entry.gate, {}, aft_mask(entry.masked, s).of_reference},
                                         cast<double>(aft_biases<T>(s))};
    });
    op.sees = [=](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (!entry.causal || j <= i) && !std::isinf(aft_bias_value<T>(s.first_head + h, i, j)) &&
             !(entry.masked && !key_mask_sees(s.first_batch + b, j));
    };
    if (entry.gate && !entry.masked)
      op.limits = {{"no biases",
                    [=](const law_shape& s) {
                      return bind_aft_full<T>(s, entry.causal, [](idx_t, idx_t, idx_t) { return T(0); });
                    },
                    [=](const law_shape&) { return bind_aft_simple<T>(entry.causal, true); }}};
    if (entry.causal)
      op.stream = [=](const law_shape& s) -> bound<T> {
        auto cache = std::make_shared<attn::kv_cache<T>>(
            attn::state_extents{.batch = s.batch, .heads = s.heads, .dim = s.dim});
        cache->reserve(s.keys);
        return [=, w = std::make_shared<tensor<T>>(aft_biases<T>(s)),
                mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
          const idx_t tokens = cache->tokens() + call.k.extent(2);
          compiled_aft_full<T>::step(*cache, call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                                     {.lengths = call.lengths, .gate = entry.gate,
                                      .key_mask = mask->seen.view(0, tokens)},
                                     *call.execution);
        };
      };
    op.without["long_rows"] = "a bias for every pair of so many tokens";
    all.push_back(op);
  }
}
const law_entries entries("aft_full", [](auto& all) { add_aft_full(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back(stored_aft<compiled_aft_full, S>(std::string("aft_full") + (causal ? " causal" : ""), causal,
                                                   stored::drawn<S>(11, 1, 1, stored::length, stored::length),
                                                   [](auto&) {}));
}
const stored_entries stored_form("aft_full", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::aft_full_law
