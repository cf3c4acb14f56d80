#include "laws/operators/aft.hpp"

namespace testing::aft_local_law {
namespace {

struct aft_local_entry {
  std::string name;
  idx_t window = 5;
  bool band = false, causal = false, gate = true, masked = false;
};

template <class T>
std::shared_ptr<tensor<T>> local_biases(const aft_local_entry& entry, const law_shape& s, bool zero = false) {
  auto w = std::make_shared<tensor<T>>(aft_biases<T>(s, zero));
  if (entry.band) {
    tensor<T> band(1, s.heads, s.keys, 2 * entry.window - 1);
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t t = 0; t < s.keys; ++t)
        for (idx_t p = 0; p < band.dim(); ++p) {
          const idx_t j = t + p - entry.window + 1;
          band(0, h, t, p) = 0 <= j && j < s.keys ? (*w)(0, h, t, j) : std::numeric_limits<T>::quiet_NaN();
        }
    *w = band;
  }
  return w;
}

// call: of a forward or a backward pass.
template <class T>
attn::aft_local_options<T> options_of(const aft_local_entry& entry, const shared_aft_mask& mask, const auto& call) {
  attn::aft_local_options<T> options;
  options.window = entry.window, options.band = entry.band;
  options.causal = entry.causal, options.gate = entry.gate, options.key_mask = mask->seen.view();
  call.set_lengths(options);
  return options;
}

template <class T>
bound<T> bind_aft_local(const aft_local_entry& entry, const law_shape& s, bool zero = false) {
  return [entry, w = local_biases<T>(entry, s, zero),
          mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
    compiled_aft_local<T>::call(call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                                options_of<T>(entry, mask, call), *call.execution);
  };
}

template <class T>
void add_aft_local(std::vector<law_operator<T>>& all) {
  for (const aft_local_entry& entry : {aft_local_entry{"aft_local", 5},
                                       {"aft_local of a band, ungated", 40, true, false, false},
                                       {"aft_local causal", 40, false, true, false},
                                       {"aft_local of a band, causal", 5, true, true, true},
                                       {"aft_local causal with a key_mask", 40, false, true, true, true}}) {
    auto op = aft_operator<T>(entry.name, entry.causal, entry.gate);
    op.bind = [=](const law_shape& s) { return bind_aft_local<T>(entry, s); };
    op.backward = [=](const law_shape& s) {
      const auto w = local_biases<T>(entry, s), dw = std::make_shared<tensor<T>>(*w);
      return [=, mask = std::make_shared<aft_mask>(entry.masked, s)](const law_backward_call<T>& call) {
        compiled_aft_local<T>::backward(call.q, call.k, call.v, view(std::as_const(*w)), call.d_out,
                                        {.q = call.dq, .k = call.dk, .v = call.dv, .w = view(*dw)},
                                        options_of<T>(entry, mask, call), *call.execution);
        call.give(dw->data);
      };
    };
    op.reference = aft_reference<reference::aft_local_options>(reference::aft_local, [=](const law_shape& s) {
      return reference::aft_local_options{
          {entry.causal, entry.gate, {}, aft_mask(entry.masked, s).of_reference},
          cast<double>(*local_biases<T>(entry, s)),
          entry.window,
          entry.band};
    });
    op.sees = [=](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
      if ((entry.causal && j > i) || (entry.masked && !key_mask_sees(s.first_batch + b, j))) return false;
      return std::abs(i - j) >= entry.window || !std::isinf(aft_bias_value<T>(s.first_head + h, i, j));
    };
    if (entry.gate && !entry.masked)
      op.limits = {{"window of the length",
                    [=](const law_shape& s) {
                      aft_local_entry wide = entry;
                      wide.window = std::max<idx_t>(1, s.keys);
                      return bind_aft_local<T>(wide, s);
                    },
                    [=](const law_shape& s) { return bind_aft_full<T>(s, entry.causal, aft_bias_value<T>); }},
                   {"no biases",
                    [=](const law_shape& s) {
                      aft_local_entry square = entry;
                      square.band = false;
                      return bind_aft_local<T>(square, s, true);
                    },
                    [=](const law_shape&) { return bind_aft_simple<T>(entry.causal, true); }}};
    if (entry.causal)
      op.stream = [=](const law_shape& s) -> bound<T> {
        auto state = std::make_shared<attn::aft_local_state<T>>(
            attn::state_extents{.batch = s.batch, .heads = s.heads, .dim = s.dim},
            attn::aft_local_state_options{.window = entry.window});
        return [=, w = local_biases<T>(entry, s), tokens = std::make_shared<idx_t>(0),
                mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
          compiled_aft_local<T>::step(*state, call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                                      {.lengths = call.lengths, .band = entry.band, .gate = entry.gate,
                                       .key_mask = mask->seen.view(*tokens, call.k.extent(2))},
                                      *call.execution);
          *tokens += call.k.extent(2);
        };
      };
    if (!entry.gate && entry.band)
      op.long_rows = {{"no biases", [=](const law_shape& s) -> bound<T> {
                         return [entry, w = std::make_shared<tensor<T>>(1, s.heads, s.keys, 2 * entry.window - 1),
                                 mask = std::make_shared<aft_mask>(false, s)](const law_call<T>& call) {
                           compiled_aft_local<T>::call(call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                                                       options_of<T>(entry, mask, call), *call.execution);
                         };
                       }}};
    all.push_back(op);
  }
}
const law_entries entries("aft_local", [](auto& all) { add_aft_local(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back(stored_aft<compiled_aft_local, S>(std::string("aft_local") + (causal ? " causal" : ""), causal,
                                                    stored::drawn<S>(12, 1, 1, stored::length, stored::length),
                                                    [](auto& o) { o.window = 20; }));
}
const stored_entries stored_form("aft_local", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::aft_local_law
