#include <attn/layers/multi_head_latent.hpp>

void attend(const Eigen::MatrixXf& x, const Eigen::MatrixXf& w, Eigen::MatrixXf& out) {
  attn::multi_head_latent(x, out, {.query = w, .latent = w, .latent_up = w, .output = w},
                          {.heads = 4, .attention = {.causal = true}, .rotary = {{.interleaved = true}}});
}
