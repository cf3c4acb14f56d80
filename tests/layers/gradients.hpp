#pragma once
// What the tests of the layers' backward passes share: a case of one layer, checked against the reverse pass of its
// reference, and what holds of any: each gradient alone, added to what is there, for any number of threads.
#include "layers/layers.hpp"
#include "support/run_backward.hpp"

namespace testing {

template <class S>
struct layer_backward_case {
  gradient_case reference;  // its one result is out
  // Writes the gradients that are not null, in the order of the inputs.
  std::function<void(const std::vector<tensor<S>>& inputs, const tensor<S>& d_out,
                     const std::vector<tensor<S>*>& gradients, bool accumulate, attn::execution&)>
      run;
};

// The null view for a gradient that is not wanted.
template <class S>
out_sequence<S> sequence_or_none(tensor<S>* x) {
  return x ? sequence(*x) : out_sequence<S>();
}
template <class S>
attn::tensor_view<S, 2> matrix_or_none(tensor<S>* x) {
  return x ? attn::tensor_view<S, 2>(x->data.data(), {x->length(), x->dim()}) : attn::tensor_view<S, 2>();
}
template <class S>
attn::tensor_view<S, 1> vector_or_none(tensor<S>* x) {
  return x ? attn::tensor_view<S, 1>(x->data.data(), {x->dim()}) : attn::tensor_view<S, 1>();
}

inline void add(gradient_case& c, const char* name, const tensor<double>& x) {
  c.names.push_back(name), c.inputs.push_back(x);
}

// Takes what a layer was given one by one, in the order in which it was added; what was not given is skipped.
template <class T>
class next_of {
 public:
  explicit next_of(const std::vector<T>& all) : all_(all) {}
  T operator()(bool given = true) { return given ? all_[at_++] : T{}; }

 private:
  const std::vector<T>& all_;
  std::size_t at_ = 0;
};

template <class S>
std::vector<tensor<S>> all_gradients(const layer_backward_case<S>& c, const std::vector<tensor<S>>& inputs,
                                     const tensor<S>& d_out, attn::execution& exec) {
  std::vector<tensor<S>> gradients = inputs;
  std::vector<tensor<S>*> to;
  for (auto& g : gradients) std::fill(g.data.begin(), g.data.end(), S(7)), to.push_back(&g);
  c.run(inputs, d_out, to, false, exec);
  return gradients;
}

// `factor` times the tolerance of the type. Inputs are rounded to it here.
template <class S>
void check_layer_backward(layer_backward_case<S> c, double factor = 1) {
  INFO(c.reference.name);
  for (auto& x : c.reference.inputs) x = rounded<S>(x);
  attn::execution serial;
  std::vector<tensor<S>> inputs;
  for (const auto& x : c.reference.inputs) inputs.push_back(cast<S>(x));
  tensor<S> d_out;
  std::vector<tensor<S>> gradients;
  check_gradients(
      c.reference, factor * product_gradient_tolerance<S>,
      [&](const tensors&, const tensors& d_results) {
        d_out = cast<S>(d_results[0]);
        gradients = all_gradients(c, inputs, d_out, serial);
        tensors all;
        for (const auto& g : gradients) all.push_back(cast<double>(g));
        return all;
      },
      [](tensors& d) {
        for (auto& x : d) x = rounded<S>(x);
      });

  for (std::size_t n = 0; n < inputs.size(); ++n) {
    INFO("the gradient of " << c.reference.names[n] << " alone, written and added");
    std::vector<tensor<S>*> to(inputs.size(), nullptr);
    tensor<S> alone = inputs[n];
    to[n] = &alone;
    c.run(inputs, d_out, to, false, serial);
    CHECK(alone == gradients[n]);
    alone = inputs[n];
    c.run(inputs, d_out, to, true, serial);
    tensor<double> sum = cast<double>(inputs[n]);
    for (std::size_t e = 0; e < sum.data.size(); ++e) sum.data[e] += static_cast<double>(gradients[n].data[e]);
    CHECK(relative_error(alone, sum) <= 2 * gradient_tolerance<S>::value);  // the gradient alone is rounded too
    if constexpr (sizeof(S) > 2) {  // where the sum itself is not rounded before
      tensor<S> exact = inputs[n];
      for (std::size_t e = 0; e < exact.data.size(); ++e) exact.data[e] += gradients[n].data[e];
      CHECK(alone == exact);
    }
  }
  for (int threads : {2, 5}) {
    INFO(threads << " threads");
    attn::execution several(threads, 0);
    CHECK(all_gradients(c, inputs, d_out, several) == gradients);
  }
}

// Full softmax as the operator within, its lse shared with its backward pass, and kept only between the two. With
// sinks, for without them a key bias has no gradient: it moves all scores of a query.
template <class S>
struct attention_pair {
  idx_t heads = 1;
  bool causal = false;
  std::vector<idx_t> lengths{};
  std::vector<real<S>> sinks = std::vector<real<S>>(static_cast<std::size_t>(heads), real<S>(1));
  std::shared_ptr<tensor<real<S>>> lse = std::make_shared<tensor<real<S>>>();

  attn::full_softmax_options<S> options() const {
    attn::full_softmax_options<S> all{.causal = causal, .lse = row_view(*lse)};
    all.lengths = lengths;
    all.sinks = sinks;
    return all;
  }
  attention_of<S> forward() const {
    return [*this](in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, attn::execution& exec) {
      const std::array<idx_t, 4> extents = {q.extent(0), q.extent(1), q.extent(2), 1};
      if (lse->extents != extents) *lse = tensor<real<S>>(extents[0], extents[1], extents[2], 1);
      compiled_full_softmax<S>::call(q, k, v, out, options(), {}, exec);
    };
  }
  attention_backward_of<S> backward() const {
    return [*this](in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, out_view<S> dq,
                   out_view<S> dk, out_view<S> dv, attn::execution& exec) {
      compiled_full_softmax<S>::backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, options(), {}, {}, exec);
    };
  }
  template <class N>
  tensor<N> reference(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v) const {
    reference::basic_full_softmax_options<N> o;
    o.causal = causal;
    o.lengths = lengths;
    o.sinks.assign(static_cast<std::size_t>(heads), N(1));
    return reference::full_softmax(q, k, v, o).out;
  }
};

// The activation functions over any number type.
template <class N>
N activated(attn::activation f, const N& x) {
  using std::erf, std::tanh;
  if (f == attn::activation::relu) return x < N(0) ? N(0) : x;
  if (f == attn::activation::gelu) return 0.5 * x * (1 + erf(x / std::sqrt(2.0)));
  if (f == attn::activation::silu) return reference::silu_of(x);
  if (f == attn::activation::tanh) return tanh(x);
  if (f == attn::activation::sigmoid) return reference::sigmoid_of(x);
  if (f == attn::activation::identity) return x;
  return reference::gelu_tanh_of(x);
}

}  // namespace testing
