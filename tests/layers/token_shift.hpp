#pragma once
// A problem of token_shift: by its reference and through the library.
#include "layers/gradients.hpp"
#include "reference/token_shift.hpp"

namespace testing {

struct token_shift_problem {
  tensor<double> x, mix{}, initial_state{};  // the last two may be empty
  std::vector<idx_t> lengths{};

  auto by_reference() const { return reference::token_shift(x, mix, initial_state, lengths); }
};

inline token_shift_problem random_token_shift(idx_t batch, idx_t length, idx_t channels) {
  return {random_sequence(1, batch, length, channels), random_vector(2, channels),
          random_sequence(3, batch, 1, channels)};
}
template <class S>
token_shift_problem rounded(token_shift_problem p) {
  for (tensor<double>* x : {&p.x, &p.mix, &p.initial_state}) *x = rounded<S>(*x);
  return p;
}

// A state as [batch, channels]; the null view where there is none.
template <class S>
in_matrix<S> state_view(const tensor<S>& x) {
  if (x.extents == tensor<S>().extents) return {};
  return {x.data.data(), {x.batch(), x.dim()}};
}
template <class S>
attn::tensor_view<S, 2> state_or_none(tensor<S>* x) {
  return x ? attn::tensor_view<S, 2>(x->data.data(), {x->batch(), x->dim()}) : attn::tensor_view<S, 2>();
}

template <class S>
struct token_shift_memory {
  tensor<S> x, mix, initial_state, out, final_state;
  std::vector<idx_t> lengths;

  explicit token_shift_memory(const token_shift_problem& p)
      : x(cast<S>(p.x)),
        mix(cast<S>(p.mix)),
        initial_state(cast<S>(p.initial_state)),
        out(x.batch(), 1, x.length(), x.dim(), S(7)),
        final_state(x.batch(), 1, 1, x.dim(), S(7)),
        lengths(p.lengths) {}

  attn::token_shift_weights<S> weights() const { return {.mix = vector(mix)}; }
  void run(attn::execution& exec) {
    compiled_layers<S>::token_shift(sequence(std::as_const(x)), sequence(out), weights(),
                                    {.lengths = lengths,
                                     .initial_state = state_view(initial_state),
                                     .final_state = state_or_none(&final_state)},
                                    exec);
  }
};

// The gradients of out and of the final state, as one sequence: its last token is the state's.
template <class S>
layer_backward_case<S> case_of(const token_shift_problem& p) {
  layer_backward_case<S> c;
  c.reference.name = "batch " + std::to_string(p.x.batch()) + ", length " + std::to_string(p.x.length()) +
                     ", channels " + std::to_string(p.x.dim());
  const bool mix = !p.mix.empty(), state = !p.initial_state.empty();
  add(c.reference, "x", p.x);
  if (mix) add(c.reference, "mix", p.mix);
  if (state) add(c.reference, "initial_state", p.initial_state);
  c.reference.forward = [=, lengths = p.lengths](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next(), m = next(mix), s = next(state);
    const auto r = reference::token_shift(x, m, s, lengths);
    tensor<variable> both(x.batch(), 1, x.length() + 1, x.dim());
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t i = 0; i <= x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d)
          both(b, 0, i, d) = i < x.length() ? r.out(b, 0, i, d) : r.final_state(b, 0, 0, d);
    return std::vector{both};
  };
  c.run = [=, lengths = p.lengths](const std::vector<tensor<S>>& in, const tensor<S>& d_both,
                                   const std::vector<tensor<S>*>& to, bool accumulate, attn::execution& exec) {
    const idx_t batch = in[0].batch(), length = in[0].length(), channels = in[0].dim();
    attn::token_shift_weights<S> w;
    attn::token_shift_options<S> options;
    options.lengths = lengths;
    attn::token_shift_gradients<S> g{
        .x = sequence_or_none(to[0]),
        .d_final_state = in_matrix<S>(d_both.data.data() + length * channels, {batch, channels},
                                      {(length + 1) * channels, 1}),
        .accumulate = accumulate};
    if (mix) w.mix = vector(in[1]), g.mix = vector_or_none(to[1]);
    if (state) options.initial_state = state_view(in.back()), g.initial_state = state_or_none(to.back());
    compiled_layers<S>::token_shift_backward(sequence(in[0]), w, sequence(d_both).slice(1, 0, length), g, options,
                                             exec);
  };
  return c;
}

}  // namespace testing
