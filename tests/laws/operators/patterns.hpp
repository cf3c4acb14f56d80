#pragma once
// What the entries of the operators that attend by a pattern have in common: the options are the reference's.
#include "laws/law.hpp"
#include "support/run_pattern.hpp"

namespace testing {

// Options for the heads of a shape.
template <class Options>
using options_for = std::function<Options(const law_shape&)>;

template <class T, class Options>
bound<T> bind_pattern(const options_for<Options>& options, const law_shape& shape) {
  struct parameters {
    Options given;
    std::vector<T> sinks;
  };
  const Options given = options(shape);
  return [p = std::make_shared<parameters>(parameters{given, cast<T>(given.sinks)})](const law_call<T>& call) {
    using form = library_form<T, Options>;
    typename form::options o;
    form::set(p->given, o);
    o.causal = p->given.causal;
    if (p->given.softcap) o.softcap = static_cast<T>(*p->given.softcap);
    o.sinks = p->sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    form::call(call.q, call.k, call.v, call.out, o, {}, *call.execution);
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
