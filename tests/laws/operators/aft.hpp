#pragma once
// What the entries of the attention-free family share: biases that are a function of head and positions, so that a
// head alone or a shorter sequence gets those it has in a larger one.
#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_aft.hpp"

namespace testing {

template <class T>
T aft_bias_value(idx_t h, idx_t i, idx_t j) {
  const idx_t mixed = 3 * h + 7 * i + 11 * j;
  if (mixed % 13 == 0 && i != j) return -std::numeric_limits<T>::infinity();
  return static_cast<T>(mixed % 17) / 8 - 1;
}

// [1, H, L, L]
template <class T>
tensor<T> aft_biases(const law_shape& s, bool zero = false) {
  tensor<T> w(1, s.heads, s.keys, s.keys);
  for (idx_t h = 0; h < s.heads && !zero; ++h)
    for (idx_t i = 0; i < s.keys; ++i)
      for (idx_t j = 0; j < s.keys; ++j) w(0, h, i, j) = aft_bias_value<T>(s.first_head + h, i, j);
  return w;
}

// A mask of keys, for the reference and as bytes; none unless `masked`.
struct aft_mask {
  tensor<double> of_reference;
  key_mask_bytes seen;

  aft_mask(bool masked, const law_shape& s)
      : of_reference(masked ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(of_reference) {}
};
using shared_aft_mask = std::shared_ptr<aft_mask>;

// What all operators of the family are.
template <class T>
law_operator<T> aft_operator(const std::string& name, bool causal, bool gate) {
  law_operator<T> op;
  op.name = name;
  op.causal = causal;
  op.averages = !gate;
  op.grouped = op.cross = op.lse = false;
  op.square = true;
  op.reads_queries = gate;
  op.without = {{"lse", "every channel has a softmax of its own"},
                {"grouped", "a query gates its own token's channels"},
                {"cross", "a query gates its own token's channels"}};
  return op;
}

// The reference `of` (reference::aft_full, ...) with the options of a shape.
template <class Options>
reference_binder aft_reference(tensor<double> (*of)(const tensor<double>&, const tensor<double>&, const tensor<double>&,
                                                    const Options&),
                               std::function<Options(const law_shape&)> of_shape) {
  return [=](const law_shape& s) {
    return [of, options = of_shape(s)](const law_reference_call& call) {
      Options o = options;
      call.set_lengths(o);
      if constexpr (requires { o.w; }) o.w = call.parameter(o.w);
      return reference::result{of(call.q, call.k, call.v, o), {}};
    };
  };
}

// aft_full with the biases bias(s, h, i, j), for law 8.
template <class T, class Bias>
bound<T> bind_aft_full(const law_shape& s, bool causal, Bias bias) {
  auto w = std::make_shared<tensor<T>>(1, s.heads, s.keys, s.keys);
  for (idx_t h = 0; h < s.heads; ++h)
    for (idx_t i = 0; i < s.keys; ++i)
      for (idx_t j = 0; j < s.keys; ++j) (*w)(0, h, i, j) = bias(s.first_head + h, i, j);
  return [w, causal](const law_call<T>& call) {
    compiled_aft_full<T>::call(call.q, call.k, call.v, call.out, view(std::as_const(*w)),
                               {.causal = causal, .lengths = call.lengths}, *call.execution);
  };
}

template <class T>
bound<T> bind_aft_simple(bool causal, bool gate) {
  return [=](const law_call<T>& call) {
    compiled_aft_simple<T>::call(call.q, call.k, call.v, call.out,
                                 {.causal = causal, .lengths = call.lengths, .gate = gate}, *call.execution);
  };
}

// Of an operator with biases or kernels w, the same for all heads; set(options) sets what is its own.
template <template <class> class Compiled, class S>
stored_operator<S> stored_aft(std::string name, bool causal, tensor<S> w, auto set) {
  return {std::move(name), causal,
          [=, w = std::make_shared<tensor<S>>(std::move(w))](const stored_call<S>& c) {
            using compiled = Compiled<S>;
            auto options = c.template options<compiled>(causal);
            set(options);
            const in_view<S> shared(w->data.data(), w->extents);
            compiled::call(c.q, c.k, c.v, c.out, shared, options, c.execution);
            compiled::backward(c.q, c.k, c.v, shared, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                               c.execution);
          },
          stored::heads, true};
}

}  // namespace testing
