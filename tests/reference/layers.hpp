#pragma once
// The layers: sequences are tensors [batch, 1, length, dim], weights [1, 1, rows, columns], vectors [1, 1, 1, n].
#include "reference/full_softmax.hpp"

namespace reference {

// x W^T + b (b may be empty).
inline tensor<double> project(const tensor<double>& x, const tensor<double>& w, const tensor<double>& b = {}) {
  tensor<double> out(x.batch(), 1, x.length(), w.length());
  for (index n = 0; n < x.batch(); ++n)
    for (index i = 0; i < x.length(); ++i)
      for (index o = 0; o < w.length(); ++o) {
        double sum = b.empty() ? 0 : b(0, 0, 0, o);
        for (index d = 0; d < x.dim(); ++d) sum += x(n, 0, i, d) * w(0, 0, o, d);
        out(n, 0, i, o) = sum;
      }
  return out;
}

inline tensor<double> layer_norm(const tensor<double>& x, const tensor<double>& gamma, const tensor<double>& beta,
                                 double eps) {
  tensor<double> out = x;
  for (index n = 0; n < x.batch(); ++n)
    for (index i = 0; i < x.length(); ++i) {
      double mean = 0, variance = 0;
      for (index d = 0; d < x.dim(); ++d) mean += x(n, 0, i, d) / static_cast<double>(x.dim());
      for (index d = 0; d < x.dim(); ++d)
        variance += (x(n, 0, i, d) - mean) * (x(n, 0, i, d) - mean) / static_cast<double>(x.dim());
      for (index d = 0; d < x.dim(); ++d)
        out(n, 0, i, d) = (x(n, 0, i, d) - mean) / std::sqrt(variance + eps) * (gamma.empty() ? 1 : gamma(0, 0, 0, d)) +
                          (beta.empty() ? 0 : beta(0, 0, 0, d));
    }
  return out;
}

inline double relu(double x) { return x < 0 ? 0 : x; }
// erfc keeps the digits of the tail
inline double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
inline double gelu_tanh(double x) {
  const double u = std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
  return x / (1 + std::exp(-2 * u));  // = x (1 + tanh u) / 2
}

struct feed_forward_weights {
  tensor<double> up, up_bias, down, down_bias;
};

inline tensor<double> feed_forward(const tensor<double>& x, const feed_forward_weights& w, double (*f)(double)) {
  tensor<double> hidden = project(x, w.up, w.up_bias);
  for (double& h : hidden.data) h = f(h);
  return project(hidden, w.down, w.down_bias);
}

// [batch, 1, length, heads * dim] to [batch, heads, length, dim], and back.
inline tensor<double> split(const tensor<double>& x, index heads) {
  tensor<double> out(x.batch(), heads, x.length(), x.dim() / heads);
  for (index b = 0; b < x.batch(); ++b)
    for (index h = 0; h < heads; ++h)
      for (index i = 0; i < x.length(); ++i)
        for (index d = 0; d < out.dim(); ++d) out(b, h, i, d) = x(b, 0, i, h * out.dim() + d);
  return out;
}
inline tensor<double> merge(const tensor<double>& x) {
  tensor<double> out(x.batch(), 1, x.length(), x.heads() * x.dim());
  for (index b = 0; b < x.batch(); ++b)
    for (index h = 0; h < x.heads(); ++h)
      for (index i = 0; i < x.length(); ++i)
        for (index d = 0; d < x.dim(); ++d) out(b, 0, i, h * x.dim() + d) = x(b, h, i, d);
  return out;
}

struct multi_head_weights {
  tensor<double> query, key, value, output, query_bias, key_bias, value_bias, output_bias;  // key, output: may be empty
};

inline tensor<double> multi_head(const tensor<double>& x, const tensor<double>& y, const multi_head_weights& w,
                                 index heads, index kv_heads, const full_softmax_options& options = {}) {
  const tensor<double> q = split(project(x, w.query, w.query_bias), heads);
  const tensor<double> k = w.key.empty() ? q : split(project(y, w.key, w.key_bias), kv_heads);
  const tensor<double> mixed =
      merge(full_softmax(q, k, split(project(y, w.value, w.value_bias), kv_heads), options).out);
  return w.output.empty() ? mixed : project(mixed, w.output, w.output_bias);
}

inline tensor<double> sum(const tensor<double>& a, const tensor<double>& b, double factor = 1) {
  tensor<double> out = a;
  for (std::size_t n = 0; n < out.data.size(); ++n) out.data[n] += factor * b.data[n];
  return out;
}

using sequence_function = std::function<tensor<double>(const tensor<double>&)>;

struct encoder_block_weights {
  tensor<double> gamma_1, beta_1, gamma_2, beta_2;
  feed_forward_weights feed;
};

inline tensor<double> encoder_block(const tensor<double>& x, const sequence_function& mix,
                                    const encoder_block_weights& w, bool norm_before, double (*f)(double), double eps) {
  const auto norm_1 = [&](const tensor<double>& s) { return layer_norm(s, w.gamma_1, w.beta_1, eps); };
  const auto norm_2 = [&](const tensor<double>& s) { return layer_norm(s, w.gamma_2, w.beta_2, eps); };
  if (norm_before) {
    const tensor<double> h = sum(x, mix(norm_1(x)));
    return sum(h, feed_forward(norm_2(h), w.feed, f));
  }
  const tensor<double> h = norm_1(sum(x, mix(x)));
  return norm_2(sum(h, feed_forward(h, w.feed, f)));
}

inline tensor<double> half_of(const tensor<double>& x, index which) {
  tensor<double> out(x.batch(), 1, x.length(), x.dim() / 2);
  for (index b = 0; b < x.batch(); ++b)
    for (index i = 0; i < x.length(); ++i)
      for (index d = 0; d < out.dim(); ++d) out(b, 0, i, d) = x(b, 0, i, which * out.dim() + d);
  return out;
}

inline tensor<double> reversible_block(const tensor<double>& x, const sequence_function& f,
                                       const sequence_function& g) {
  const tensor<double> y1 = sum(half_of(x, 0), f(half_of(x, 1))), y2 = sum(half_of(x, 1), g(y1));
  tensor<double> out = x;
  for (index b = 0; b < x.batch(); ++b)
    for (index i = 0; i < x.length(); ++i)
      for (index d = 0; d < y1.dim(); ++d) {
        out(b, 0, i, d) = y1(b, 0, i, d);
        out(b, 0, i, y1.dim() + d) = y2(b, 0, i, d);
      }
  return out;
}

}  // namespace reference
