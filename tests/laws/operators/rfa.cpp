#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_kernel.hpp"

namespace testing::rfa_law {
namespace {

struct rfa_entry {
  std::string name;
  bool causal = false, gated = false, eps = false;  // eps: of denominators and of norms
  bool mask = false;
};

template <class T>
struct parameters {
  rfa_entry entry;
  attn::tensor<T, 3> features;
  std::vector<T> d_features;
  tensor<T> gate, d_gate;
  tensor<double> mask;
  key_mask_bytes seen;

  parameters(const rfa_entry& e, const law_shape& s)
      : entry(e),
        features(attn::draw_features<T>(64, s.dim, {.seed = 11})),
        d_features(static_cast<std::size_t>(64 * s.dim)),
        mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}),
        seen(mask) {
    if (e.gated) gate = d_gate = slow_gates<T>(s.batch, s.heads, s.keys, s.first_batch, s.first_head);
  }
  attn::rfa_options<T> options(const auto& call) const {
    attn::rfa_options<T> o;
    o.causal = entry.causal;
    call.set_lengths(o);
    if (entry.eps) o.eps = T(0.01), o.norm_eps = T(0.001);
    o.gate = gate_view(gate);
    o.key_mask = seen.view();
    return o;
  }
};

template <class T>
law_operator<T> operator_of(const rfa_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = !entry.eps;
  op.lse = op.positive = false;
  // Sines and cosines of both signs cancel. The condition number of a row, sum |phi(q)|.|phi(k)| over
  // |sum phi(q).phi(k)|, is 1 for a softmax. Here, measured in double on unit-normal input (64 rows of W, dims 1 to 64,
  // lengths 7 to 257), it is 2 in the median row, 3 to 18 in the worst row of a shape, and 76 in one row of dim 1.
  // Rounding errors add up to less than that bound: 30 holds for the worst row, too.
  op.error_factor = 30;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_rfa<T>::call(call.q, call.k, call.v, call.out, p->features.view(), p->options(call), *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      attn::rfa_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      g.features = {p->d_features.data(), p->features.view().extents()};
      if (p->entry.gated) g.gate = row_view(p->d_gate);
      compiled_rfa<T>::backward(call.q, call.k, call.v, p->features.view(), call.d_out, g, p->options(call),
                                *call.execution);
      call.give(p->d_features, p->d_gate.data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      reference::rfa_options o;
      o.causal = p->entry.causal;
      o.features = call.parameter(features_in_double<T>(p->features.view()));
      o.gate = call.parameter(p->gate), o.key_mask = p->mask;
      if (p->entry.eps) o.eps = static_cast<double>(T(0.01)), o.norm_eps = static_cast<double>(T(0.001));
      o.terms = call.terms;
      call.set_lengths(o);
      return reference::rfa(call.q, call.k, call.v, o);
    };
  };
  if (entry.causal)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      struct fed {
        parameters<T> p;
        attn::rfa_state<T> state;
        idx_t tokens = 0;
      };
      auto shared = std::make_shared<fed>(
          fed{parameters<T>(entry, shape),
              attn::rfa_state<T>({.batch = shape.batch,
                                  .heads = entry.gated ? shape.heads : shape.kv_heads,
                                  .features = 64,
                                  .value_dim = shape.value_dim})});
      return [shared](const law_call<T>& call) {
        attn::rfa_step_options<T> options;
        call.set_lengths(options);
        options.key_mask = shared->p.seen.view(shared->tokens, call.k.extent(2));
        if (shared->p.entry.gated) options.gate = gate_view(shared->p.gate).slice(2, shared->tokens, call.k.extent(2));
        compiled_rfa<T>::step(shared->state, call.q, call.k, call.v, call.out, shared->p.features.view(), options,
                              *call.execution);
        shared->tokens += call.k.extent(2);
      };
    };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    return (!entry.causal || j <= i + s.keys - s.queries) && !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  return op;
}

// A gate of 0 keeps nothing: every token gets its own value.
template <class T>
law_limit<T> gate_of_zero_is_own_value() {
  return {"gates of 0",
          [](const law_shape& shape) -> bound<T> {
            auto p = std::make_shared<parameters<T>>(rfa_entry{"", true, true}, shape);
            std::fill(p->gate.data.begin(), p->gate.data.end(), T(0));
            return [p](const law_call<T>& call) {
              compiled_rfa<T>::call(call.q, call.k, call.v, call.out, p->features.view(), p->options(call),
                                    *call.execution);
            };
          },
          [](const law_shape& s) -> bound<T> {
            return [s](const law_call<T>& call) {
              for (idx_t b = 0; b < s.batch; ++b)
                for (idx_t h = 0; h < s.heads; ++h)
                  for (idx_t i = 0; i < s.queries; ++i)
                    for (idx_t d = 0; d < s.value_dim; ++d)
                      call.out(b, h, i, d) = call.v(b, h / (s.heads / s.kv_heads), i, d);
            };
          }};
}

template <class T>
void add_rfa(std::vector<law_operator<T>>& all) {
  for (const rfa_entry& entry : {rfa_entry{"rfa"},
                                 {"rfa causal", true},
                                 {"rfa causal with gate, a key_mask", true, true, false, true},
                                 {"rfa causal with gate", true, true},
                                 {"rfa with eps", false, false, true}})
    all.push_back(operator_of<T>(entry));
  all[all.size() - 2].limits = {gate_of_zero_is_own_value<T>()};
  all.back().without = {{"lse", "there is no softmax"},
                        {"long_rows", "its sums are those of linear: kernel_sums.hpp"}};
}
const law_entries entries("rfa", [](auto& all) { add_rfa(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_random_features<compiled_rfa, S>("rfa", false));
  all.push_back(stored_random_features<compiled_rfa, S>("rfa causal", true));
}
const stored_entries stored_form("rfa", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::rfa_law
