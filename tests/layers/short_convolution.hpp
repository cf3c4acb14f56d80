#pragma once
// A problem of short_convolution: by its reference and through the library.
#include "layers/gradients.hpp"
#include "reference/short_convolution.hpp"

namespace testing {

struct short_convolution_problem {
  tensor<double> x, weight, bias{}, initial_state{};  // the last two may be empty
  std::optional<attn::activation> activation{};
  std::vector<idx_t> lengths{};

  template <class N>
  reference::short_convolution_result<N> by_reference(const tensor<N>& of_x, const tensor<N>& w, const tensor<N>& b,
                                                      const tensor<N>& state) const {
    const auto f = [this](const N& z) { return activation ? activated(*activation, z) : z; };
    return reference::short_convolution(of_x, w, b, state, f, lengths);
  }
  auto by_reference() const { return by_reference(x, weight, bias, initial_state); }
};

inline short_convolution_problem random_short_convolution(idx_t batch, idx_t length, idx_t channels, idx_t width) {
  return {random_sequence(1, batch, length, channels), random_weight(2, channels, width), random_vector(3, channels),
          random_sequence(4, batch, width - 1, channels)};
}
template <class S>
short_convolution_problem rounded(short_convolution_problem p) {
  for (tensor<double>* x : {&p.x, &p.weight, &p.bias, &p.initial_state}) *x = rounded<S>(*x);
  return p;
}

template <class S>
struct short_convolution_memory {
  tensor<S> x, weight, bias, initial_state, out, final_state;
  std::optional<attn::activation> activation;
  std::vector<idx_t> lengths;

  explicit short_convolution_memory(const short_convolution_problem& p)
      : x(cast<S>(p.x)),
        weight(cast<S>(p.weight)),
        bias(cast<S>(p.bias)),
        initial_state(cast<S>(p.initial_state)),
        out(x.batch(), 1, x.length(), x.dim(), S(7)),
        final_state(x.batch(), 1, weight.dim() - 1, x.dim(), S(7)),
        activation(p.activation),
        lengths(p.lengths) {}

  attn::short_convolution_weights<S> weights() const { return {.weight = matrix(weight), .bias = vector(bias)}; }
  attn::short_convolution_options<S> options() const {
    attn::short_convolution_options<S> all{.activation = activation};
    all.lengths = lengths;
    if (initial_state.extents != tensor<S>().extents) all.initial_state = sequence(initial_state);
    return all;
  }
  void run(attn::execution& exec) {
    auto all = options();
    all.final_state = sequence(final_state);
    compiled_layers<S>::short_convolution(sequence(std::as_const(x)), sequence(out), weights(), all, exec);
  }
};

// The gradients of out and of the final state, as one sequence: its last tokens are the state's.
inline gradient_case case_of(const short_convolution_problem& p) {
  gradient_case c;
  c.name = "batch " + std::to_string(p.x.batch()) + ", length " + std::to_string(p.x.length()) + ", channels " +
           std::to_string(p.x.dim()) + ", width " + std::to_string(p.weight.dim());
  add(c, "x", p.x), add(c, "weight", p.weight);
  const bool bias = !p.bias.empty(), state = !p.initial_state.empty();
  if (bias) add(c, "bias", p.bias);
  if (state) add(c, "initial_state", p.initial_state);
  c.forward = [=](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next(), w = next(), b = next(bias), s = next(state);
    const auto r = p.by_reference(x, w, b, s);
    tensor<variable> both(x.batch(), 1, x.length() + w.dim() - 1, x.dim());
    for (idx_t n = 0; n < x.batch(); ++n)
      for (idx_t i = 0; i < both.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d)
          both(n, 0, i, d) = i < x.length() ? r.out(n, 0, i, d) : r.final_state(n, 0, i - x.length(), d);
    return std::vector{both};
  };
  return c;
}

// The library's, to those that are not null, in the order of the case's inputs.
template <class S>
void short_convolution_gradients_of(const short_convolution_problem& p, const std::vector<tensor<S>>& in,
                                    const tensor<S>& d_both, const std::vector<tensor<S>*>& to, bool accumulate,
                                    attn::execution& exec) {
  const bool bias = !p.bias.empty(), state = !p.initial_state.empty();
  const idx_t length = p.x.length(), entries = p.weight.dim() - 1;
  attn::short_convolution_weights<S> w{.weight = matrix(in[1])};
  attn::short_convolution_options<S> options{.activation = p.activation};
  options.lengths = p.lengths;
  attn::short_convolution_gradients<S> g{.x = sequence_or_none(to[0]),
                                         .weight = matrix_or_none(to[1]),
                                         .d_final_state = sequence(d_both).slice(1, length, entries),
                                         .accumulate = accumulate};
  if (bias) w.bias = vector(in[2]), g.bias = vector_or_none(to[2]);
  if (state) options.initial_state = sequence(in.back()), g.initial_state = sequence_or_none(to.back());
  compiled_layers<S>::short_convolution_backward(sequence(in[0]), w, sequence(d_both).slice(1, 0, length), g, options,
                                                 exec);
}

}  // namespace testing
