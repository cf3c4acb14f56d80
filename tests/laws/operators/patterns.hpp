#pragma once
// What the entries of the operators that attend by a pattern have in common: the options are the reference's.
#include "laws/operators/mask.hpp"
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
  law_mask mask{};
  score_of<T> score{};
  std::vector<T> slopes = cast<T>(given.alibi_slopes), sinks = cast<T>(given.sinks), d_slopes = slopes,
                 d_sinks = sinks;

  typename form::options options(const auto& call) const {
    typename form::options o;
    form::set(given, o);
    o.causal = given.causal;
    if (given.softcap) o.softcap = static_cast<T>(*given.softcap);
    if (given.scale) o.scale = static_cast<T>(*given.scale);
    if constexpr (requires { o.mask; })
      if (score) o.mask = mask.view();
    o.alibi_slopes = slopes, o.sinks = sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
};

// masked: with a mask and a score function.
template <class T, class Options>
std::shared_ptr<pattern_parameters<T, Options>> parameters_for(const options_for<Options>& options,
                                                               const law_shape& shape, bool masked) {
  auto p = std::make_shared<pattern_parameters<T, Options>>(pattern_parameters<T, Options>{options(shape)});
  if (masked) p->mask = law_mask(shape), p->score = own_score_of<T>(shape);
  return p;
}

template <class T, class Options>
bound<T> bind_pattern(const options_for<Options>& options, const law_shape& shape, bool masked = false) {
  using form = library_form<T, Options>;
  return [p = parameters_for<T>(options, shape, masked)](const law_call<T>& call) {
    form::call(call.q, call.k, call.v, call.out, p->options(call), p->score, *call.execution);
  };
}

template <class T, class Options>
backward_binder<T> pattern_backward(const options_for<Options>& options, bool masked) {
  using form = library_form<T, Options>;
  return [=](const law_shape& shape) {
    return [p = parameters_for<T>(options, shape, masked)](const law_backward_call<T>& call) {
      typename form::gradients g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (!p->slopes.empty()) g.alibi_slopes = p->d_slopes;
      if (!p->sinks.empty()) g.sinks = p->d_sinks;
      form::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call), p->score,
                     own_score_backward<T>, *call.execution);
      call.give(p->d_slopes, p->d_sinks);
    };
  };
}

template <class T, class Options>
law_operator<T> pattern_operator(std::string name, const options_for<Options>& options, bool masked = false) {
  law_operator<T> op;
  op.name = std::move(name);
  const Options some = options({});
  op.causal = some.causal;
  op.averages = some.sinks.empty();
  op.bind = [=](const law_shape& shape) { return bind_pattern<T>(options, shape, masked); };
  op.backward = pattern_backward<T>(options, masked);
  op.reference = [=](const law_shape& shape) {
    return [=, given = options(shape)](const law_reference_call& call) {
      Options o = given;
      if (o.scale) o.scale = static_cast<double>(static_cast<T>(*o.scale));
      o.alibi_slopes = call.parameter(o.alibi_slopes), o.sinks = call.parameter(o.sinks);
      o.score = mask_for_reference(shape, call, masked, masked);
      call.set_lengths(o);
      return reference::by_pattern(call.q, call.k, call.v, o);
    };
  };
  struct known {
    law_shape shape{.queries = -1};
    Options options;
  };
  op.sees = [=, last = std::make_shared<known>()](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
    if (masked && !mask_sees(s.first_batch + b, s.first_head + h, i, j)) return false;
    const law_shape& same = last->shape;  // asked pair by pair: the options are made once
    if (s.queries != same.queries || s.keys != same.keys || s.heads != same.heads || s.first_head != same.first_head)
      *last = {s, options(s)};
    const Options& o = last->options;
    const idx_t position = i + s.keys - s.queries;
    return !(o.causal && j > position) && sees(o, h, position, j, s.keys);
  };
  return op;
}

// Whatever changes scores.
inline void set_scores(const law_shape& s, reference::softmax_options& o) {
  o.softcap = 2, o.scale = 0.3;
  o.alibi_slopes = law_slopes<double>(s), o.sinks = law_sinks<double>(s);
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
// Law 12, by options with which every query sees every key.
template <class T, class Options>
law_long_rows<T> long_form(std::string name, const options_for<Options>& options) {
  return {std::move(name), [options](const law_shape& s) { return bind_pattern<T>(options, s); },
          pattern_backward<T>(options, false)};
}

template <class T, class Options>
law_limit<T> full_limit(std::string name, const options_for<Options>& options) {
  return {std::move(name), [options](const law_shape& s) { return bind_pattern<T>(options, s); },
          full_binder<T>(options({}).causal)};
}

}  // namespace testing
