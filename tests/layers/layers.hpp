#pragma once
// What the tests of the layers share: views of tensors, random weights, and full softmax as the operator within.
#include "reference/layers.hpp"
#include "support/call_layers.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing {

template <class S>
in_sequence<S> sequence(const tensor<S>& x) {
  return {x.data.data(), {x.batch(), x.length(), x.dim()}};
}
template <class S>
out_sequence<S> sequence(tensor<S>& x) {
  return {x.data.data(), {x.batch(), x.length(), x.dim()}};
}
// The null view where the tensor is empty and has no extents.
template <class S>
in_matrix<S> matrix(const tensor<S>& x) {
  if (x.extents == std::array<idx_t, 4>{}) return {};
  return {x.data.data(), {x.length(), x.dim()}};
}
// One for each head.
template <class S>
attn::tensor_view<const S, 3> matrices(const tensor<S>& x) {
  return {x.data.data(), {x.heads(), x.length(), x.dim()}};
}
template <class S>
in_vector<S> vector(const tensor<S>& x) {
  if (x.extents == std::array<idx_t, 4>{}) return {};
  return {x.data.data(), {x.dim()}};
}

// Weights that keep the size of what they project.
inline tensor<double> random_weight(std::uint64_t seed, idx_t rows, idx_t columns, double gain = 1) {
  return random_normal(seed, 1, 1, rows, columns, gain / std::sqrt(static_cast<double>(std::max<idx_t>(columns, 1))));
}
inline tensor<double> random_vector(std::uint64_t seed, idx_t n, double scale = 0.5) {
  return random_normal(seed, 1, 1, 1, n, scale);
}
inline tensor<double> random_sequence(std::uint64_t seed, idx_t batch, idx_t length, idx_t dim) {
  return random_normal(seed, batch, 1, length, dim);
}

template <class S>
struct feed_forward_store {
  tensor<S> up, up_bias, down, down_bias, gate, gate_bias;
  explicit feed_forward_store(const reference::feed_forward_weights& w)
      : up(cast<S>(w.up)), up_bias(cast<S>(w.up_bias)), down(cast<S>(w.down)), down_bias(cast<S>(w.down_bias)),
        gate(cast<S>(w.gate)), gate_bias(cast<S>(w.gate_bias)) {}
  attn::feed_forward_weights<S> views() const {
    attn::feed_forward_weights<S> w{
        .up = matrix(up), .down = matrix(down), .up_bias = vector(up_bias), .down_bias = vector(down_bias)};
    if (!gate.empty()) w.gate = matrix(gate), w.gate_bias = vector(gate_bias);
    return w;
  }
};
template <class S>
reference::feed_forward_weights rounded(const reference::feed_forward_weights& w) {
  return {rounded<S>(w.up),        rounded<S>(w.up_bias), rounded<S>(w.down),
          rounded<S>(w.down_bias), rounded<S>(w.gate),    rounded<S>(w.gate_bias)};
}

template <class S>
struct multi_head_store {
  tensor<S> query, key, value, output, query_bias, key_bias, value_bias, output_bias, gate, gate_bias, q_norm, k_norm;
  explicit multi_head_store(const reference::multi_head_weights& w)
      : query(cast<S>(w.query)),
        key(cast<S>(w.key)),
        value(cast<S>(w.value)),
        output(cast<S>(w.output)),
        query_bias(cast<S>(w.query_bias)),
        key_bias(cast<S>(w.key_bias)),
        value_bias(cast<S>(w.value_bias)),
        output_bias(cast<S>(w.output_bias)),
        gate(cast<S>(w.gate)),
        gate_bias(cast<S>(w.gate_bias)),
        q_norm(cast<S>(w.q_norm)),
        k_norm(cast<S>(w.k_norm)) {}
  attn::multi_head_weights<S> views() const {
    return {.query = matrix(query),
            .key = matrix(key),
            .value = matrix(value),
            .output = matrix(output),
            .gate = gate.empty() ? in_matrix<S>() : matrix(gate),
            .query_bias = vector(query_bias),
            .key_bias = vector(key_bias),
            .value_bias = vector(value_bias),
            .output_bias = vector(output_bias),
            .gate_bias = vector(gate_bias),
            .q_norm = vector(q_norm),
            .k_norm = vector(k_norm)};
  }
};
template <class S>
reference::multi_head_weights rounded(const reference::multi_head_weights& w) {
  return {rounded<S>(w.query),      rounded<S>(w.key),      rounded<S>(w.value),      rounded<S>(w.output),
          rounded<S>(w.query_bias), rounded<S>(w.key_bias), rounded<S>(w.value_bias), rounded<S>(w.output_bias),
          rounded<S>(w.gate),       rounded<S>(w.gate_bias), w.silu_gate,           rounded<S>(w.q_norm),
          rounded<S>(w.k_norm)};
}

template <class S>
struct encoder_store {
  tensor<S> gamma_1, beta_1, gamma_2, beta_2, residual, residual_bias;
  feed_forward_store<S> feed;
  explicit encoder_store(const reference::encoder_block_weights& w)
      : gamma_1(cast<S>(w.gamma_1)),
        beta_1(cast<S>(w.beta_1)),
        gamma_2(cast<S>(w.gamma_2)),
        beta_2(cast<S>(w.beta_2)),
        residual(cast<S>(w.residual)),
        residual_bias(cast<S>(w.residual_bias)),
        feed(w.feed) {}
  attn::encoder_block_weights<S> views() const {
    return {.norm_1 = {.gamma = vector(gamma_1), .beta = vector(beta_1)},
            .norm_2 = {.gamma = vector(gamma_2), .beta = vector(beta_2)},
            .feed_forward = feed.views(),
            .residual = {.weight = matrix(residual), .bias = vector(residual_bias)}};
  }
};
template <class S>
reference::encoder_block_weights rounded(const reference::encoder_block_weights& w) {
  return {rounded<S>(w.gamma_1), rounded<S>(w.beta_1), rounded<S>(w.gamma_2),
          rounded<S>(w.beta_2),  rounded<S>(w.feed),   rounded<S>(w.residual),
          rounded<S>(w.residual_bias)};
}

inline reference::feed_forward_weights random_feed_forward(idx_t inputs, idx_t hidden, idx_t outputs,
                                                           bool biases = true, bool gated = false) {
  const auto bias = [&](std::uint64_t seed, idx_t n) { return biases ? random_vector(seed, n) : tensor<double>{}; };
  reference::feed_forward_weights w{random_weight(11, hidden, inputs), bias(12, hidden),
                                    random_weight(13, outputs, hidden), bias(14, outputs)};
  if (gated) w.gate = random_weight(15, hidden, inputs), w.gate_bias = bias(16, hidden);
  return w;
}

template <class S>
attention_of<S> full_attention(const attn::full_softmax_options<S>& options = {}) {
  return [options](in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, attn::execution& exec) {
    compiled_full_softmax<S>::call(q, k, v, out, options, {}, exec);
  };
}

}  // namespace testing
