#pragma once
// The layers: sequences are tensors [batch, 1, length, dim], weights [1, 1, rows, columns], vectors [1, 1, 1, n].
// Numbers are of type N: double, or reference::variable (variable.hpp).
#include "reference/full_softmax.hpp"

namespace reference {

// x W^T + b (b may be empty). W [1, heads, rows, columns] is one for each head of x.
template <class N>
tensor<N> project(const tensor<N>& x, const tensor<N>& w, const tensor<N>& b = {}) {
  const idx_t rows = w.length(), columns = w.dim();
  tensor<N> out(x.batch(), 1, x.length(), w.heads() * rows);
  for (idx_t n = 0; n < x.batch(); ++n)
    for (idx_t i = 0; i < x.length(); ++i)
      for (idx_t o = 0; o < w.heads() * rows; ++o) {
        N sum = b.empty() ? N(0) : b(0, 0, 0, o);
        const idx_t h = o / rows;
        for (idx_t d = 0; d < columns; ++d) sum += x(n, 0, i, h * columns + d) * w(0, h, o % rows, d);
        out(n, 0, i, o) = sum;
      }
  return out;
}

template <class N>
tensor<N> layer_norm(const tensor<N>& x, const tensor<N>& gamma, const tensor<N>& beta, double eps) {
  using std::sqrt;
  tensor<N> out = x;
  for (idx_t n = 0; n < x.batch(); ++n)
    for (idx_t i = 0; i < x.length(); ++i) {
      N mean = 0, variance = 0;
      for (idx_t d = 0; d < x.dim(); ++d) mean += x(n, 0, i, d) / static_cast<double>(x.dim());
      for (idx_t d = 0; d < x.dim(); ++d)
        variance += (x(n, 0, i, d) - mean) * (x(n, 0, i, d) - mean) / static_cast<double>(x.dim());
      for (idx_t d = 0; d < x.dim(); ++d)
        out(n, 0, i, d) = (x(n, 0, i, d) - mean) / sqrt(variance + eps) * (gamma.empty() ? N(1) : gamma(0, 0, 0, d)) +
                          (beta.empty() ? N(0) : beta(0, 0, 0, d));
    }
  return out;
}

// layer_norm of the channels of each head.
template <class N>
tensor<N> group_norm(const tensor<N>& x, const tensor<N>& gamma, const tensor<N>& beta, idx_t heads, double eps) {
  tensor<N> out = x;
  const idx_t dim = x.dim() / heads;
  for (idx_t h = 0; h < heads; ++h) {
    const auto of_head = [&](const tensor<N>& all) {
      if (all.empty()) return tensor<N>{};
      tensor<N> part(all.batch(), 1, all.length(), dim);
      for (idx_t n = 0; n < all.batch(); ++n)
        for (idx_t i = 0; i < all.length(); ++i)
          for (idx_t d = 0; d < dim; ++d) part(n, 0, i, d) = all(n, 0, i, h * dim + d);
      return part;
    };
    const tensor<N> normed = layer_norm(of_head(x), of_head(gamma), of_head(beta), eps);
    for (idx_t n = 0; n < normed.batch(); ++n)
      for (idx_t i = 0; i < normed.length(); ++i)
        for (idx_t d = 0; d < dim; ++d) out(n, 0, i, h * dim + d) = normed(n, 0, i, d);
  }
  return out;
}

template <class N>
tensor<N> rms_norm(const tensor<N>& x, const tensor<N>& gamma, double eps) {
  using std::sqrt;
  tensor<N> out = x;
  for (idx_t n = 0; n < x.batch(); ++n)
    for (idx_t i = 0; i < x.length(); ++i) {
      N square = 0;
      for (idx_t d = 0; d < x.dim(); ++d) square += x(n, 0, i, d) * x(n, 0, i, d) / static_cast<double>(x.dim());
      for (idx_t d = 0; d < x.dim(); ++d)
        out(n, 0, i, d) = x(n, 0, i, d) / sqrt(square + eps) * (gamma.empty() ? N(1) : gamma(0, 0, 0, d));
    }
  return out;
}

inline double relu(double x) { return x < 0 ? 0 : x; }
// erfc keeps the digits of the tail
inline double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
template <class N>
N gelu_tanh_of(const N& x) {
  using std::exp;
  const N u = std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
  return x / (1 + exp(-2 * u));  // = x (1 + tanh u) / 2
}
inline double gelu_tanh(double x) { return gelu_tanh_of(x); }
template <class N>
N silu_of(const N& x) {
  using std::exp;
  return x / (1 + exp(N(0) - x));
}
inline double silu(double x) { return silu_of(x); }
template <class N>
N sigmoid_of(const N& x) {
  using std::exp;
  return N(1) / (1 + exp(N(0) - x));
}
inline double sigmoid(double x) { return sigmoid_of(x); }
inline double tangent(double x) { return std::tanh(x); }
inline double identity(double x) { return x; }

template <class N>
struct basic_feed_forward_weights {
  tensor<N> up, up_bias, down, down_bias, gate{}, gate_bias{};  // gate: may be empty
};
using feed_forward_weights = basic_feed_forward_weights<double>;

template <class N, class F>
tensor<N> feed_forward(const tensor<N>& x, const basic_feed_forward_weights<N>& w, F&& f) {
  tensor<N> hidden = project(x, w.up, w.up_bias);
  if (w.gate.empty()) {
    for (N& h : hidden.data) h = f(h);
  } else {
    const tensor<N> gate = project(x, w.gate, w.gate_bias);
    for (std::size_t n = 0; n < hidden.data.size(); ++n) hidden.data[n] = f(gate.data[n]) * hidden.data[n];
  }
  return project(hidden, w.down, w.down_bias);
}

// [batch, 1, length, heads * dim] to [batch, heads, length, dim], and back.
template <class N>
tensor<N> split(const tensor<N>& x, idx_t heads) {
  tensor<N> out(x.batch(), heads, x.length(), x.dim() / heads);
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < out.dim(); ++d) out(b, h, i, d) = x(b, 0, i, h * out.dim() + d);
  return out;
}
template <class N>
tensor<N> merge(const tensor<N>& x) {
  tensor<N> out(x.batch(), 1, x.length(), x.heads() * x.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) out(b, 0, i, h * x.dim() + d) = x(b, h, i, d);
  return out;
}

template <class N>
struct basic_multi_head_weights {
  tensor<N> query, key, value, output, query_bias, key_bias, value_bias, output_bias;  // all but query may be empty
  tensor<N> gate{}, gate_bias{};  // may be empty
  bool silu_gate = false;
  tensor<N> q_norm{}, k_norm{};  // may be empty
};
using multi_head_weights = basic_multi_head_weights<double>;

// Each run of gamma's numbers of a token by the root of the mean of its squares.
template <class N>
tensor<N> normed_heads(tensor<N> x, const tensor<N>& gamma, double eps) {
  using std::sqrt;
  const idx_t count = gamma.empty() ? x.dim() : static_cast<idx_t>(gamma.data.size());
  for (idx_t b = 0; b < x.batch() && !gamma.empty(); ++b)
    for (idx_t i = 0; i < x.length(); ++i)
      for (idx_t begin = 0; begin < x.dim(); begin += count) {
        N squares = N(eps * double(count));
        for (idx_t d = 0; d < count; ++d) squares += x(b, 0, i, begin + d) * x(b, 0, i, begin + d);
        for (idx_t d = 0; d < count; ++d)
          x(b, 0, i, begin + d) = x(b, 0, i, begin + d) / sqrt(squares / N(double(count))) * gamma.data[static_cast<std::size_t>(d)];
      }
  return x;
}
struct head_rotation {
  idx_t dims = 0, first_position = 0;
  double base = 10000;
  bool interleaved = false;
  idx_t begin = 0;  // the first of the dims
  idx_t step = 1;   // from row to row
  bool back = false;
};
template <class N>
tensor<N> rotated_heads(tensor<N> x, const head_rotation& r) {
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t n = 0; n < r.dims / 2; ++n) {
          const double at = double(i * r.step + r.first_position) * (r.back ? -1 : 1);
          const double angle = at * std::pow(r.base, -2.0 * double(n) / double(r.dims));
          N& first = x(b, h, i, r.begin + (r.interleaved ? 2 * n : n));
          N& second = x(b, h, i, r.begin + (r.interleaved ? 2 * n + 1 : n + r.dims / 2));
          const N one = first, other = second;
          first = one * N(std::cos(angle)) - other * N(std::sin(angle));
          second = other * N(std::cos(angle)) + one * N(std::sin(angle));
        }
  return x;
}

// Around op(q, k, v): without key weights k is q, without value weights v is y, without both they are empty.
template <class N, class Operator>
tensor<N> multi_head_around(const tensor<N>& x, const tensor<N>& y, const basic_multi_head_weights<N>& w, idx_t heads,
                            idx_t kv_heads, Operator&& op, const head_rotation& rotation = {}, double norm_eps = 1e-6) {
  const auto prepared = [&](const tensor<N>& projected, const tensor<N>& gamma, idx_t count) {
    return rotated_heads(split(normed_heads(projected, gamma, norm_eps), count), rotation);
  };
  const tensor<N> q = prepared(project(x, w.query, w.query_bias), w.q_norm, heads);
  tensor<N> k, v;
  if (!w.key.empty()) k = prepared(project(y, w.key, w.key_bias), w.k_norm, kv_heads);
  if (!w.value.empty()) v = split(project(y, w.value, w.value_bias), kv_heads);
  if (w.key.empty() && !w.value.empty()) k = q;
  if (w.value.empty() && !w.key.empty()) v = split(y, kv_heads);
  tensor<N> mixed = merge(op(q, k, v));
  if (!w.gate.empty()) {
    using std::exp;
    const tensor<N> gate = project(x, w.gate, w.gate_bias);
    for (std::size_t n = 0; n < mixed.data.size(); ++n)
      mixed.data[n] = mixed.data[n] * (w.silu_gate ? gate.data[n] : N(1)) / (N(1) + exp(-gate.data[n]));
  }
  return w.output.empty() ? mixed : project(mixed, w.output, w.output_bias);
}
inline tensor<double> multi_head(const tensor<double>& x, const tensor<double>& y, const multi_head_weights& w,
                                 idx_t heads, idx_t kv_heads, const full_softmax_options& options = {},
                                 const head_rotation& rotation = {}) {
  return multi_head_around(
      x, y, w, heads, kv_heads,
      [&](const auto& q, const auto& k, const auto& v) { return full_softmax(q, k, v, options).out; }, rotation);
}

template <class N>
tensor<N> sum(const tensor<N>& a, const tensor<N>& b) {
  tensor<N> out = a;
  for (std::size_t n = 0; n < out.data.size(); ++n) out.data[n] += b.data[n];
  return out;
}

template <class N>
struct basic_encoder_block_weights {
  tensor<N> gamma_1, beta_1, gamma_2, beta_2;
  basic_feed_forward_weights<N> feed;
  tensor<N> residual{}, residual_bias{};  // may be empty
};
using encoder_block_weights = basic_encoder_block_weights<double>;

template <class N, class Mixer, class F>
tensor<N> encoder_block(const tensor<N>& x, Mixer&& mix, const basic_encoder_block_weights<N>& w, bool norm_before,
                        F&& f, double eps, bool rms = false) {
  const auto norm = [&](const tensor<N>& s, const tensor<N>& gamma, const tensor<N>& beta) {
    if (!rms) return layer_norm(s, gamma, beta, eps);
    tensor<N> out = rms_norm(s, gamma, eps);
    for (idx_t b = 0; !beta.empty() && b < s.batch(); ++b)
      for (idx_t i = 0; i < s.length(); ++i)
        for (idx_t d = 0; d < s.dim(); ++d) out(b, 0, i, d) += beta(0, 0, 0, d);
    return out;
  };
  const auto norm_1 = [&](const tensor<N>& s) { return norm(s, w.gamma_1, w.beta_1); };
  const auto norm_2 = [&](const tensor<N>& s) { return norm(s, w.gamma_2, w.beta_2); };
  const tensor<N> direct = w.residual.empty() ? x : project(x, w.residual, w.residual_bias);
  if (norm_before) {
    const tensor<N> h = sum(direct, mix(norm_1(x)));
    return sum(h, feed_forward(norm_2(h), w.feed, f));
  }
  const tensor<N> h = norm_1(sum(direct, mix(x)));
  return norm_2(sum(h, feed_forward(h, w.feed, f)));
}

template <class N>
tensor<N> half_of(const tensor<N>& x, idx_t which) {
  tensor<N> out(x.batch(), 1, x.length(), x.dim() / 2);
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t i = 0; i < x.length(); ++i)
      for (idx_t d = 0; d < out.dim(); ++d) out(b, 0, i, d) = x(b, 0, i, which * out.dim() + d);
  return out;
}

template <class N, class F, class G>
tensor<N> reversible_block(const tensor<N>& x, F&& f, G&& g) {
  const tensor<N> y1 = sum(half_of(x, 0), f(half_of(x, 1))), y2 = sum(half_of(x, 1), g(y1));
  tensor<N> out = x;
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t i = 0; i < x.length(); ++i)
      for (idx_t d = 0; d < y1.dim(); ++d) {
        out(b, 0, i, d) = y1(b, 0, i, d);
        out(b, 0, i, y1.dim() + d) = y2(b, 0, i, d);
      }
  return out;
}

}  // namespace reference
