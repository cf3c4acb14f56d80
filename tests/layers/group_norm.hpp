#pragma once
// A problem of group_norm: by its reference and through the library.
#include "layers/gradients.hpp"

namespace testing {

struct group_norm_problem {
  tensor<double> x, gamma{}, beta{};  // the last two may be empty
  idx_t heads = 1;
  double eps = 1e-5;

  template <class S>
  double stored_eps() const {
    return static_cast<double>(static_cast<real<S>>(eps));
  }
};

inline group_norm_problem random_group_norm(idx_t batch, idx_t length, idx_t heads, idx_t dim, bool parameters) {
  return {random_sequence(1, batch, length, heads * dim),
          parameters ? random_vector(2, heads * dim, 1) : tensor<double>{},
          parameters ? random_vector(3, heads * dim) : tensor<double>{}, heads};
}

template <class S>
tensor<S> group_norm_of(const group_norm_problem& p, attn::execution& exec) {
  const tensor<S> x = cast<S>(p.x), gamma = cast<S>(p.gamma), beta = cast<S>(p.beta);
  tensor<S> out(x.batch(), 1, x.length(), x.dim(), S(7));
  compiled_layers<S>::group_norm(sequence(x), sequence(out), {.gamma = vector(gamma), .beta = vector(beta)},
                                 {.heads = p.heads, .eps = static_cast<real<S>>(p.eps)}, exec);
  return out;
}

template <class S>
layer_backward_case<S> case_of(const group_norm_problem& p) {
  layer_backward_case<S> c;
  c.reference.name = "length " + std::to_string(p.x.length()) + ", dim " + std::to_string(p.x.dim()) + ", heads " +
                     std::to_string(p.heads);
  const bool gamma = !p.gamma.empty(), beta = !p.beta.empty();
  add(c.reference, "x", p.x);
  if (gamma) add(c.reference, "gamma", p.gamma);
  if (beta) add(c.reference, "beta", p.beta);
  c.reference.forward = [=, heads = p.heads, eps = p.stored_eps<S>()](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next(), g = next(gamma), b = next(beta);
    return std::vector{reference::group_norm(x, g, b, heads, eps)};
  };
  c.run = [=, heads = p.heads, eps = static_cast<real<S>>(p.eps)](
              const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& to,
              bool accumulate, attn::execution& exec) {
    attn::group_norm_weights<S> w;
    attn::group_norm_gradients<S> g{.x = sequence_or_none(to[0]), .accumulate = accumulate};
    if (gamma) w.gamma = vector(in[1]), g.gamma = vector_or_none(to[1]);
    if (beta) w.beta = vector(in.back()), g.beta = vector_or_none(to.back());
    compiled_layers<S>::group_norm_backward(sequence(in[0]), w, sequence(d_out), g, {.heads = heads, .eps = eps}, exec);
  };
  return c;
}

}  // namespace testing
