#pragma once
// What the laws for gradients share: they run over the operators of the table that have a backward pass.
#include "laws/law.hpp"

namespace testing {

template <class T>
struct law_gradients {
  tensor<T> q, k, v;  // of k and v only where there are any
  std::vector<T> parameters{};
};

// Gradients that start with poison values: a row that is not written shows.
template <class T>
law_gradients<T> fresh_gradients(const law_operator<T>& op, const law_shape& s) {
  law_gradients<T> g{tensor<T>(s.batch, s.heads, s.queries, s.dim, T(7)), {}, {}};
  if (!op.tied) g.k = tensor<T>(s.batch, s.kv_heads, s.keys, s.dim, T(7));
  if (op.reads_values) g.v = tensor<T>(s.batch, s.kv_heads, s.keys, s.value_dim, T(7));
  return g;
}

template <class T>
bool identical(const law_gradients<T>& a, const law_gradients<T>& b) {
  const auto list = [](const std::vector<T>& x) {
    tensor<T> all(1, 1, 1, std::ssize(x));
    all.data = x;
    return all;
  };
  return identical(a.q, b.q) && identical(a.k, b.k) && identical(a.v, b.v) &&
         identical(list(a.parameters), list(b.parameters));
}
template <class T>
bool all_finite(const law_gradients<T>& g) {
  return all_finite(g.q) && all_finite(g.k) && all_finite(g.v);
}

template <class T>
tensor<T> random_d_out(const law_shape& s, std::uint64_t seed = 400) {
  return cast<T>(random_normal(seed, s.batch, s.heads, s.queries, s.value_dim));
}

// `forward` is what the forward call wrote.
template <class T>
law_backward_call<T> call_of(const law_inputs<T>& in, law_result<T>& forward, const tensor<T>& d_out,
                             law_gradients<T>& g, attn::execution& execution, std::vector<idx_t> lengths = {}) {
  law_backward_call<T> call{.q = view(in.q),
                            .k = view(in.k),
                            .v = view(in.v),
                            .out = view(std::as_const(forward.out)),
                            .d_out = view(d_out),
                            .lse = {},
                            .dq = view(g.q),
                            .dk = {},
                            .dv = {},
                            .lengths = std::move(lengths),
                            .execution = &execution};
  const auto given = [](const tensor<T>& x) { return x.extents != tensor<T>().extents; };
  if (given(forward.lse)) call.lse = row_view(forward.lse);
  if (given(g.k)) call.dk = view(g.k);
  if (given(g.v)) call.dv = view(g.v);
  return call;
}

template <class T>
law_gradients<T> differentiate(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                               law_result<T> forward, const tensor<T>& d_out, attn::execution& execution,
                               std::vector<idx_t> lengths = {}) {
  law_gradients<T> g = fresh_gradients(op, s);
  law_backward_call<T> call = call_of(in, forward, d_out, g, execution, std::move(lengths));
  call.parameters = &g.parameters;
  op.backward(s)(call);
  return g;
}
// After a forward call.
template <class T>
law_gradients<T> differentiate(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                               const tensor<T>& d_out, attn::execution& execution, std::vector<idx_t> lengths = {}) {
  return differentiate(op, s, in, attend(op, s, in, execution, lengths), d_out, execution, lengths);
}
template <class T>
law_gradients<T> differentiate(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                               const tensor<T>& d_out, std::vector<idx_t> lengths = {}) {
  attn::execution serial;
  return differentiate(op, s, in, d_out, serial, std::move(lengths));
}

template <class T>
bool same_rows(const tensor<T>& a, const tensor<T>& b, idx_t item, idx_t h, idx_t i) {
  for (idx_t d = 0; d < a.dim(); ++d)
    if (a(item, h, i, d) != b(item, h, i, d)) return false;
  return true;
}
template <class T>
bool zero_rows(const tensor<T>& x, idx_t item, idx_t begin, idx_t end) {
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = begin; i < end; ++i)
      for (idx_t d = 0; d < x.dim(); ++d)
        if (x(item, h, i, d) != 0) return false;
  return true;
}

}  // namespace testing
