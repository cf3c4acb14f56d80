#pragma once
// A problem of pooled_tokens: by its reference and through the library.
#include <attn/layers/pooled_tokens_backward.hpp>
#include <attn/layers/pooled_tokens_step.hpp>

#include "layers/gradients.hpp"
#include "reference/pooled_tokens.hpp"

namespace testing {

struct pooled_tokens_problem {
  tensor<double> x, logits{}, bias{};  // the bias [1, H or 1, window, C]; the last two may be empty
  reference::pooled_tokens_options options{};

  tensor<double> by_reference() const { return reference::pooled_tokens(x, logits, bias, options); }
};

// With which of logits and bias: bits of `given`.
inline pooled_tokens_problem random_pooled_tokens(std::array<idx_t, 4> extents, idx_t window, bool overlap,
                                                  int given = 3) {
  const auto [b, h, l, c] = extents;
  pooled_tokens_problem p{random_normal(1, b, h, l, c), {}, {}, {window, overlap}};
  if (given & 1) p.logits = random_normal(2, b, h, l, c);
  if (given & 2) p.bias = random_normal(3, 1, window % 2 == 0 ? h : 1, window, c);
  return p;
}
template <class S>
pooled_tokens_problem rounded(pooled_tokens_problem p) {
  for (tensor<double>* x : {&p.x, &p.logits, &p.bias}) *x = rounded<S>(*x);
  return p;
}

template <class S>
attn::tensor_view<const S, 3> bias_view(const tensor<S>& x) {
  if (x.extents == tensor<S>().extents) return {};
  return {x.data.data(), {x.heads(), x.length(), x.dim()}};
}
template <class S>
attn::tensor_view<const S> view_or_none(const tensor<S>& x) {
  if (x.extents == tensor<S>().extents) return {};
  return view(x);
}

template <class S>
struct pooled_tokens_memory {
  tensor<S> x, logits, bias, out;
  reference::pooled_tokens_options o;

  explicit pooled_tokens_memory(const pooled_tokens_problem& p)
      : x(cast<S>(p.x)),
        logits(cast<S>(p.logits)),
        bias(cast<S>(p.bias)),
        out(x.batch(), x.heads(), x.length() / p.options.window, p.options.overlap ? x.dim() / 2 : x.dim(), S(7)),
        o(p.options) {}

  attn::pooled_tokens_options<S> options() const {
    attn::pooled_tokens_options<S> all{.window = o.window, .overlap = o.overlap};
    all.lengths = o.lengths, all.logits = view_or_none(logits), all.bias = bias_view(bias);
    return all;
  }
  void run(attn::execution& exec) { attn::pooled_tokens(view(std::as_const(x)), view(out), options(), exec); }
};

inline gradient_case case_of(const pooled_tokens_problem& p) {
  gradient_case c;
  c.name = "length " + std::to_string(p.x.length()) + ", channels " + std::to_string(p.x.dim()) + ", window " +
           std::to_string(p.options.window) + (p.options.overlap ? ", overlap" : "");
  const bool logits = !p.logits.empty(), bias = !p.bias.empty();
  add(c, "x", p.x);
  if (logits) add(c, "logits", p.logits);
  if (bias) add(c, "bias", p.bias);
  c.forward = [=](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next(), z = next(logits), b = next(bias);
    return std::vector{reference::pooled_tokens(x, z, b, p.options)};
  };
  return c;
}

// The library's, to those that are not null, in the order of the case's inputs.
template <class S>
void pooled_tokens_gradients_of(const pooled_tokens_problem& p, const std::vector<tensor<S>>& in,
                                const tensor<S>& d_out, const std::vector<tensor<S>*>& to, bool accumulate,
                                attn::execution& exec) {
  const bool logits = !p.logits.empty(), bias = !p.bias.empty();
  attn::pooled_tokens_options<S> options{.window = p.options.window, .overlap = p.options.overlap};
  options.lengths = p.options.lengths;
  attn::pooled_tokens_gradients<S> g{.accumulate = accumulate};
  if (to[0]) g.x = view(*to[0]);
  if (logits) options.logits = view(in[1]);
  if (logits && to[1]) g.logits = view(*to[1]);
  if (bias) options.bias = bias_view(in.back());
  if (tensor<S>* const x = to.back(); bias && x)
    g.bias = attn::tensor_view<S, 3>(x->data.data(), {x->heads(), x->length(), x->dim()});
  attn::pooled_tokens_backward(view(in[0]), view(d_out), g, options, exec);
}

}  // namespace testing
