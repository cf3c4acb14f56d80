// A model around one operator: embeddings, blocks, the mean over tokens.
#include <attn/layers/encoder_block.hpp>
#include <attn/layers/mean_pool.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/sinusoidal_positions.hpp>
#include <attn/softmax/full_softmax.hpp>

#include "model.hpp"

void embed(const model& m, const std::vector<int>& ids, Eigen::VectorXf& mean, attn::execution& exec) {
  run_model(m, ids, mean, exec, [](auto q, auto k, auto v, auto out, attn::execution& e) {
    attn::full_softmax(q, k, v, out, e);
  });
}
