#pragma once
// What the entries of the operators that attend by a pattern have in common: the options are the reference's.
#include "laws/law.hpp"
#include "support/run_pattern.hpp"

namespace testing {

// Options for the heads of a shape.
template <class Options>
using options_for = std::function<Options(const law_shape&)>;

// The library's, of a forward or a backward call, and the memory they refer to.
template <class T, class Options>
struct pattern_parameters {
  using form = library_form<T, Options>;
  Options given;
  std::vector<T> sinks = cast<T>(given.sinks), d_sinks = sinks;

  typename form::options options(const auto& call) const {
    typename form::options o;
    form::set(given, o);
    o.causal = given.causal;
    if (given.softcap) o.softcap = static_cast<T>(*given.softcap);
    o.sinks = sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
};

template <class T, class Options>
bound<T> bind_pattern(const options_for<Options>& options, const law_shape& shape) {
  using parameters = pattern_parameters<T, Options>;
  return [p = std::make_shared<parameters>(parameters{options(shape)})](const law_call<T>& call) {
    parameters::form::call(call.q, call.k, call.v, call.out, p->options(call), {}, *call.execution);
  };
}

template <class T, class Options>
backward_binder<T> pattern_backward(const options_for<Options>& options) {
  using parameters = pattern_parameters<T, Options>;
  return [options](const law_shape& shape) {
    return [p = std::make_shared<parameters>(parameters{options(shape)})](const law_backward_call<T>& call) {
      typename parameters::form::gradients g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (!p->sinks.empty()) g.sinks = p->d_sinks;
      parameters::form::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call), {}, {},
                                 *call.execution);
      call.give(p->d_sinks);
    };
  };
}

template <class T, class Options>
law_operator<T> pattern_operator(std::string name, const options_for<Options>& options) {
  law_operator<T> op;
  op.name = std::move(name);
  const Options some = options({});
  op.causal = some.causal;
  op.averages = some.sinks.empty();
  op.bind = [options](const law_shape& shape) { return bind_pattern<T>(options, shape); };
  op.backward = pattern_backward<T>(options);
  op.reference = [options](const law_shape& shape) {
    return [given = options(shape)](const law_reference_call& call) {
      Options o = given;
      call.set_lengths(o);
      return reference::by_pattern(call.q, call.k, call.v, o);
    };
  };
  struct known {
    law_shape shape{.queries = -1};
    Options options;
  };
  op.sees = [options, last = std::make_shared<known>()](const law_shape& s, index, index h, index i, index j) {
    const law_shape& same = last->shape;  // asked pair by pair: the options are made once
    if (s.queries != same.queries || s.keys != same.keys || s.heads != same.heads || s.first_head != same.first_head)
      *last = {s, options(s)};
    const Options& o = last->options;
    const index position = i + s.keys - s.queries;
    return !(o.causal && j > position) && reference::sees(o, h, position, j, s.keys);
  };
  return op;
}

inline void softcap_and_sinks(const law_shape& s, reference::softmax_options& o) {
  o.softcap = 2;
  for (index h = 0; h < s.heads; ++h) o.sinks.push_back(static_cast<double>(s.first_head + h) - 1);
}

template <class T>
binder<T> full_binder(bool causal) {
  return [causal](const law_shape&) {
    return [causal](const law_call<T>& call) {
      attn::full_softmax_options<T> options;
      options.causal = causal;
      call.set_lengths(options);
      options.lse = call.lse;
      compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out, options, {}, *call.execution);
    };
  };
}

// The operator with these options equals full softmax.
template <class T, class Options>
law_limit<T> full_limit(std::string name, const options_for<Options>& options) {
  return {std::move(name), [options](const law_shape& s) { return bind_pattern<T>(options, s); },
          full_binder<T>(options({}).causal)};
}

}  // namespace testing
