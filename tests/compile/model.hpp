#pragma once
// A model as a user writes it, around any operator: its headers are included before this one.
#include <vector>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct block_weights {
  matrix query, key, value, output, up, down;
  Eigen::VectorXf query_bias, key_bias, value_bias, output_bias, up_bias, down_bias, gamma_1, beta_1, gamma_2, beta_2;
};

struct model {
  matrix embeddings;
  std::vector<block_weights> blocks;
};

template <class Operator>
void run_model(const model& m, const std::vector<int>& ids, Eigen::VectorXf& mean, attn::execution& exec,
               const Operator& attend) {
  matrix x(std::ssize(ids), m.embeddings.cols());
  for (Eigen::Index i = 0; i < x.rows(); ++i) x.row(i) = 2 * m.embeddings.row(ids[static_cast<std::size_t>(i)]);
  attn::sinusoidal_positions(x, {.accumulate = true});
  for (const block_weights& w : m.blocks) {
    const auto mix = [&](auto from, auto to, attn::execution& e) {
      attn::multi_head(from, to,
                       {.query = w.query,
                        .key = w.key,
                        .value = w.value,
                        .output = w.output,
                        .query_bias = w.query_bias,
                        .key_bias = w.key_bias,
                        .value_bias = w.value_bias,
                        .output_bias = w.output_bias},
                       attend, {.heads = 4}, e);
    };
    attn::encoder_block(x, x,
                        {.norm_1 = {.gamma = w.gamma_1, .beta = w.beta_1},
                         .norm_2 = {.gamma = w.gamma_2, .beta = w.beta_2},
                         .feed_forward = {.up = w.up, .down = w.down, .up_bias = w.up_bias, .down_bias = w.down_bias}},
                        mix, {.activation = attn::activation::relu}, exec);
  }
  attn::mean_pool(x, mean, exec);
}
