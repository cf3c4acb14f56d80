#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_delta_rule.hpp"
#include "support/call_kernel.hpp"

namespace testing::delta_rule_law {
namespace {

struct delta_rule_entry {
  std::string name;
  int decays = 0;  // per token: 0, 1 or dim
  bool beta = true, unit_norm = true;
  bool others = false;  // a scale, and a state to start from
  bool mask = false;
};

// A head's own beta and decays wherever it stands in a larger batch.
template <class T>
struct delta_rule_parameters {
  delta_rule_entry entry;
  tensor<T> beta, log_decay, state, d_beta, d_log_decay, d_state;
  tensor<double> mask;
  key_mask_bytes seen;

  delta_rule_parameters(const delta_rule_entry& e, const law_shape& s)
      : entry(e), mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(mask) {
    const auto draw = [&](idx_t rows, idx_t dim, auto value) {
      tensor<T> x(s.batch, s.heads, rows, dim);
      for (idx_t b = 0; b < s.batch; ++b)
        for (idx_t h = 0; h < s.heads; ++h) {
          random_source random(static_cast<std::uint64_t>(16 * (s.first_batch + b) + s.first_head + h));
          for (idx_t i = 0; i < rows; ++i)
            for (idx_t d = 0; d < dim; ++d) x(b, h, i, d) = static_cast<T>(value(random.uniform()));
        }
      return x;
    };
    // beta |k|^2 stays below 2 for every key the laws draw; unit-normal ones have up to some 30 beyond their dim.
    const double largest = e.unit_norm ? 1 : 1 / static_cast<double>(s.dim + 30);
    if (e.beta) beta = d_beta = draw(s.keys, 1, [&](double u) { return u * largest; });
    if (e.decays) log_decay = d_log_decay = draw(s.keys, e.decays == 1 ? 1 : s.dim, [](double u) { return -0.3 * u; });
    if (e.others) state = d_state = draw(s.dim, s.value_dim, [](double u) { return 2 * u - 1; });
  }
  attn::delta_rule_options<T> options(const auto& call) const {
    attn::delta_rule_options<T> o;
    call.set_lengths(o);
    o.beta = optional_rows(beta), o.log_decay = optional_view(log_decay), o.key_mask = seen.view();
    if (entry.unit_norm) o.unit_norm_eps = T(1e-6);
    if (entry.others) o.scale = T(0.3), o.initial_state = optional_view(state);
    return o;
  }
};

template <class T>
law_operator<T> operator_of(const delta_rule_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = true;
  op.bounded = entry.unit_norm;  // else beta |k|^2 > 2 makes the state grow with every token
  op.averages = op.positive = op.grouped = op.cross = op.lse = false;
  op.invariant = op.invariant_stream = true;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<delta_rule_parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_delta_rule<T>::call(call.q, call.k, call.v, call.out, p->options(call), *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    return [p = std::make_shared<delta_rule_parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      attn::delta_rule_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (given(p->d_beta)) g.beta = row_view(p->d_beta);
      if (given(p->d_log_decay)) g.log_decay = view(p->d_log_decay);
      if (given(p->d_state)) g.initial_state = view(p->d_state);
      compiled_delta_rule<T>::backward(call.q, call.k, call.v, call.d_out, g, p->options(call), *call.execution);
      call.give(p->d_beta.data, p->d_log_decay.data, p->d_state.data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<delta_rule_parameters<T>>(entry, shape)](const law_reference_call& call) {
      reference::delta_rule_options o;
      o.lengths = call.lengths, o.key_mask = p->mask;
      if (p->entry.unit_norm) o.unit_norm_eps = static_cast<double>(T(1e-6));
      if (p->entry.others) o.scale = static_cast<double>(T(0.3));
      return reference::result{
          reference::delta_rule<double>(
              {call.q, call.k, call.v, call.parameter(p->beta), call.parameter(p->log_decay), call.parameter(p->state)},
              o)
              .out,
          {}};
    };
  };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    return j <= i && !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  if (entry.others) return op;
  op.stream = [entry](const law_shape& shape) -> bound<T> {
    struct fed {
      delta_rule_parameters<T> p;
      attn::delta_rule_state<T> state;
      idx_t tokens = 0;
    };
    auto shared = std::make_shared<fed>(
        fed{delta_rule_parameters<T>(entry, shape),
            attn::delta_rule_state<T>(
                {.batch = shape.batch, .heads = shape.heads, .dim = shape.dim, .value_dim = shape.value_dim})});
    return [shared](const law_call<T>& call) {
      const idx_t count = call.k.extent(2);
      attn::delta_rule_step_options<T> options;
      call.set_lengths(options);
      if (const auto all = optional_rows(shared->p.beta)) options.beta = all.slice(2, shared->tokens, count);
      if (const auto all = optional_view(shared->p.log_decay)) options.log_decay = all.slice(2, shared->tokens, count);
      options.key_mask = shared->p.seen.view(shared->tokens, count);
      if (shared->p.entry.unit_norm) options.unit_norm_eps = T(1e-6);
      compiled_delta_rule<T>::step(shared->state, call.q, call.k, call.v, call.out, options, *call.execution);
      shared->tokens += count;
    };
  };
  return op;
}

// What orthonormal keys have is never corrected: the rule is linear attention without a denominator. There are as many
// orthonormal keys as dims; later ones are 0, and so is their beta.
template <class T>
law_limit<T> orthonormal_is_linear() {
  const auto keys = [](const law_shape& s) {
    auto k = std::make_shared<tensor<T>>(s.batch, s.heads, s.keys, s.dim);
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t i = 0; i < std::min(s.keys, s.dim); ++i) (*k)(b, h, i, (i + h) % s.dim) = 1;
    return k;
  };
  return {"orthonormal keys",
          [keys](const law_shape& s) -> bound<T> {
            auto beta = std::make_shared<tensor<T>>(s.batch, s.heads, s.keys, 1);
            for (idx_t b = 0; b < s.batch; ++b)
              for (idx_t h = 0; h < s.heads; ++h)
                for (idx_t i = 0; i < std::min(s.keys, s.dim); ++i) (*beta)(b, h, i, 0) = 1;
            return [beta, k = keys(s)](const law_call<T>& call) {
              attn::delta_rule_options<T> options{.scale = T(1)};
              call.set_lengths(options);
              options.beta = optional_rows(std::as_const(*beta));
              compiled_delta_rule<T>::call(call.q, view(std::as_const(*k)), call.v, call.out, options, *call.execution);
            };
          },
          [keys](const law_shape& s) -> bound<T> {
            return [k = keys(s)](const law_call<T>& call) {
              attn::linear_options<T> options;
              options.causal = true, options.normalise = false;
              call.set_lengths(options);
              compiled_linear<T>::call(call.q, view(std::as_const(*k)), call.v, call.out, options,
                                       reference::linear_feature::identity, *call.execution);
            };
          }};
}

template <class T>
void add_delta_rule(std::vector<law_operator<T>>& all) {
  for (const delta_rule_entry& entry : {delta_rule_entry{.name = "delta_rule", .beta = false},
                                        {.name = "delta_rule with a decay per token, key_mask",
                                         .decays = 1,
                                         .mask = true},
                                        {.name = "delta_rule with decays per channel", .decays = 2},
                                        {.name = "delta_rule scaled, of keys as they are, from a state",
                                         .decays = 1,
                                         .unit_norm = false,
                                         .others = true}})
    all.push_back(operator_of<T>(entry));
  all[all.size() - 4].limits = {orthonormal_is_linear<T>()};
  all.back().without = {{"averages", "there is no denominator"},
                        {"lse", "there is no softmax"},
                        {"grouped", "values may have more heads than queries and keys: kernel/delta_rule.cpp"},
                        {"cross", "every token has a query and a key"},
                        {"long_rows", "a state that is corrected is no sum"}};
}
const law_entries entries("delta_rule", [](auto& all) { add_delta_rule(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back({"delta_rule", true,
                 [](const stored_call<S>& c) {
                   using compiled = compiled_delta_rule<S>;
                   auto options = c.template options<compiled>(true);
                   options.unit_norm_eps = 1e-6f;
                   compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
                   compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
                 },
                 stored::heads});
}
const stored_entries stored_form("delta_rule", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::delta_rule_law
