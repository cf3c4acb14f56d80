#include "reference/linear_decay.hpp"

#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_kernel.hpp"

namespace testing::linear_law {
namespace {

struct linear_entry {
  std::string name;
  bool causal = false, gated = false, normalise = true, channels = false;  // channels: log decays per channel, a bonus
  reference::linear_feature feature = reference::linear_feature::elu_plus_one;
  bool others = false;  // a scale, eps, and sums to start from
  bool mask = false;
};

// By batch item and head of the larger batch.
template <class T>
tensor<T> initial(const law_shape& s, idx_t rows, idx_t columns) {
  tensor<T> x(s.batch, s.heads, rows, columns);
  const idx_t size = rows * columns;
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t h = 0; h < s.heads; ++h) {
      random_source random(static_cast<std::uint64_t>(16 * (s.first_batch + b) + s.first_head + h) + 7);
      for (idx_t n = 0; n < size; ++n)
        x.data[static_cast<std::size_t>((b * s.heads + h) * size + n)] = static_cast<T>(random.normal());
    }
  return x;
}

template <class T>
struct parameters {
  linear_entry entry;
  tensor<T> gate, d_gate, log_decay, d_log_decay, bonus, d_bonus, state, weights, d_state, d_weights;
  tensor<double> mask;
  key_mask_bytes seen;

  parameters(const linear_entry& e, const law_shape& s)
      : entry(e), mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(mask) {
    const tensor<T> gates = slow_gates<T>(s.batch, s.heads, s.keys, s.first_batch, s.first_head);
    if (e.gated) gate = d_gate = gates;
    if (e.others) {  // weights above 0, so that denominators are
      state = d_state = initial<T>(s, s.dim, s.value_dim), weights = d_weights = initial<T>(s, 1, s.dim);
      for (T& x : weights.data) x = std::abs(x);
    }
    if (!e.channels) return;
    log_decay = tensor<T>(s.batch, s.heads, s.keys, s.dim);
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t t = 0; t < s.keys; ++t)
          for (idx_t d = 0; d < s.dim; ++d)
            log_decay(b, h, t, d) = std::log(gates(b, h, t, 0)) * static_cast<T>(1 + d % 3);
    bonus = tensor<T>(1, s.heads, 1, s.dim, T(0.5));
    d_log_decay = log_decay, d_bonus = bonus;
  }
  attn::linear_options<T> options(const auto& call) const {
    attn::linear_options<T> o;
    o.causal = entry.causal;
    o.normalise = entry.normalise;
    call.set_lengths(o);
    o.eps = 0;  // a part of what the weights sum up to
    o.key_mask = seen.view();
    if (entry.others) {
      o.eps = T(0.5), o.scale = T(0.3), o.initial_state = view(state);
      o.initial_weights = {weights.data.data(), {weights.batch(), weights.heads(), weights.dim()}};
    }
    o.decay = gate_view(gate);
    if (entry.channels) o.log_decay = view(log_decay), o.bonus = {bonus.data.data(), {bonus.heads(), bonus.dim()}};
    return o;
  }
  tensor<double> reference_of(const law_reference_call& call) const {
    reference::linear_decay_options o;
    o.causal = entry.causal, o.normalise = entry.normalise, o.feature = entry.feature;
    call.set_lengths(o);
    o.key_mask = mask;
    if (entry.others) o.eps = 0.5, o.scale = static_cast<double>(T(0.3));
    if (entry.feature == reference::linear_feature::products) {  // features of both signs
      o.terms = call.terms;
      return reference::linear(call.q, call.k, call.v, o).out;
    }
    const reference::linear_inputs<double> x{call.q,
                                             call.k,
                                             call.v,
                                             call.parameter(gate),
                                             call.parameter(log_decay),
                                             call.parameter(bonus),
                                             call.parameter(state),
                                             call.parameter(weights)};
    return reference::linear(x, o).out;
  }
};

template <class T>
law_operator<T> operator_of(const linear_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = entry.normalise && !entry.others;
  op.cross = !entry.others;  // rows that see no key are not 0
  op.lse = false;
  op.invariant = op.invariant_stream = true;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_linear<T>::call(call.q, call.k, call.v, call.out, p->options(call), p->entry.feature, *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      attn::linear_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.gated) g.decay = row_view(p->d_gate);
      if (p->entry.channels) {
        g.log_decay = view(p->d_log_decay);
        g.bonus = {p->d_bonus.data.data(), {p->d_bonus.heads(), p->d_bonus.dim()}};
      }
      if (p->entry.others) {
        g.initial_state = view(p->d_state);
        g.initial_weights = {p->d_weights.data.data(),
                             {p->d_weights.batch(), p->d_weights.heads(), p->d_weights.dim()}};
      }
      compiled_linear<T>::backward(call.q, call.k, call.v, call.d_out, g, p->options(call), p->entry.feature,
                                   *call.execution);
      call.give(p->d_gate.data, p->d_log_decay.data, p->d_bonus.data, p->d_state.data, p->d_weights.data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      return reference::result{p->reference_of(call), {}};
    };
  };
  if (entry.causal && !entry.others)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      struct fed {
        parameters<T> p;
        attn::linear_state<T> state;
        idx_t tokens = 0;
      };
      const idx_t features = shape.dim * (entry.feature == reference::linear_feature::products ? 2 : 1);
      auto shared = std::make_shared<fed>(fed{
          parameters<T>(entry, shape),
          attn::linear_state<T>({.batch = shape.batch,
                                 .heads = entry.gated || entry.channels ? shape.heads : shape.kv_heads,
                                 .features = features,
                                 .value_dim = shape.value_dim})});
      return [shared](const law_call<T>& call) {
        attn::linear_step_options<T> options;
        call.set_lengths(options);
        options.eps = 0;
        options.normalise = shared->p.entry.normalise;
        options.key_mask = shared->p.seen.view(shared->tokens, call.k.extent(2));
        if (shared->p.entry.gated) options.decay = gate_view(shared->p.gate).slice(2, shared->tokens, call.k.extent(2));
        if (const auto whole = shared->p.options(call); whole.log_decay) {
          options.log_decay = whole.log_decay.slice(2, shared->tokens, call.k.extent(2));
          options.bonus = whole.bonus;
        }
        compiled_linear<T>::step(shared->state, call.q, call.k, call.v, call.out, options, shared->p.entry.feature,
                                 *call.execution);
        shared->tokens += call.k.extent(2);
      };
    };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    return (!entry.causal || j <= i + s.keys - s.queries) && !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  return op;
}

// Causal, every decay 1.
template <class T>
binder<T> bind_decay_of_one() {
  return [](const law_shape& shape) -> bound<T> {
    auto p = std::make_shared<parameters<T>>(linear_entry{.name = "", .causal = true, .gated = true}, shape);
    std::fill(p->gate.data.begin(), p->gate.data.end(), T(1));
    return [p](const law_call<T>& call) {
      compiled_linear<T>::call(call.q, call.k, call.v, call.out, p->options(call), p->entry.feature, *call.execution);
    };
  };
}

template <class T>
void add_linear(std::vector<law_operator<T>>& all) {
  for (const linear_entry& entry :
       {linear_entry{.name = "linear"},
        {.name = "linear causal", .causal = true},
        {.name = "linear causal with decay", .causal = true, .gated = true},
        {.name = "linear causal with decays per channel, bonus", .causal = true, .channels = true},
        {.name = "linear causal, unnormalised", .causal = true, .normalise = false},
        {.name = "linear unnormalised", .normalise = false, .feature = reference::linear_feature::square},
        {.name = "linear of token features, causal", .causal = true, .feature = reference::linear_feature::products},
        {.name = "linear causal with a key_mask", .causal = true, .mask = true},
        {.name = "linear causal, scaled, from sums",
         .causal = true,
         .others = true}})
    all.push_back(operator_of<T>(entry));
  all.back().without = {{"lse", "there is no softmax"}};
  for (std::size_t n : {9u, 8u}) {
    law_operator<T>& op = all[all.size() - n];
    op.long_rows = {{"", op.bind, {}, op.reference}};
  }
  all[all.size() - 8].limits = {{"decays of 1", bind_decay_of_one<T>(), all[all.size() - 8].bind}};
}
const law_entries entries("linear", [](auto& all) { add_linear(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back({std::string("linear") + (causal ? " causal" : ""), causal,
                   [=](const stored_call<S>& c) {
                     using compiled = compiled_linear<S>;
                     const auto options = c.template options<compiled>(causal);
                     constexpr auto feature = reference::linear_feature::elu_plus_one;
                     compiled::call(c.q, c.k, c.v, c.out, options, feature, c.execution);
                     compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, feature,
                                        c.execution);
                   }});
}
const stored_entries stored_form("linear", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::linear_law
