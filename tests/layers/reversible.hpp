#pragma once
// A reversible layer for the tests: attention of two heads without output weight, and a feed-forward layer.
#include "layers/gradients.hpp"

namespace testing {

template <class S>
class reversible_layer {
 public:
  using L = compiled_layers<S>;

  // Weights and gradients: query, key, value, up, down.
  reversible_layer(std::vector<tensor<S>> weights, std::vector<tensor<S>*> gradients, bool accumulate)
      : weights_(std::move(weights)), gradients_(std::move(gradients)), accumulate_(accumulate) {}

  mixer_of<S> f() const {
    return [this](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) {
      L::multi_head(x, out, heads(), attend_, {.heads = 2}, exec);
    };
  }
  mixer_of<S> g() const {
    return [this](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) {
      L::feed_forward(x, out, feed(), attn::activation::gelu, exec);
    };
  }
  mixer_backward_of<S> f_backward() const {
    return
        [this](in_sequence<S> x, in_sequence<S> out, in_sequence<S> d_out, out_sequence<S> dx, attn::execution& exec) {
          // f was called just before: its lse is there, and its out, which without an output weight is the heads'
          // output
          const out_sequence<S> attended(const_cast<S*>(out.data()), out.extents(), out.strides());
          const attn::multi_head_options<S> options{.heads = 2, .attended = attended};
          L::multi_head_backward(x, heads(), attend_, attend_backward_, d_out, {.x = dx}, options, exec);
          L::multi_head_backward(x, heads(), attend_, attend_backward_, d_out,
                                 {.query = matrix_or_none(gradients_[0]),
                                  .key = matrix_or_none(gradients_[1]),
                                  .value = matrix_or_none(gradients_[2]),
                                  .accumulate = accumulate_},
                                 options, exec);
        };
  }
  mixer_backward_of<S> g_backward() const {
    return [this](in_sequence<S> x, in_sequence<S>, in_sequence<S> d_out, out_sequence<S> dx, attn::execution& exec) {
      L::feed_forward_backward(x, feed(), d_out, {.x = dx}, attn::activation::gelu, exec);
      L::feed_forward_backward(
          x, feed(), d_out,
          {.up = matrix_or_none(gradients_[3]), .down = matrix_or_none(gradients_[4]), .accumulate = accumulate_},
          attn::activation::gelu, exec);
    };
  }

  void forward(out_sequence<S> x, const attn::reversible_block_options<S>& options, attn::execution& exec) const {
    L::reversible_block(x, x, f(), g(), options, exec);
  }
  void backward(in_sequence<S> out, out_sequence<S> x, in_sequence<S> d_out,
                const attn::reversible_block_gradients<S>& wanted, const attn::reversible_block_options<S>& options,
                attn::execution& exec) const {
    L::reversible_block_backward(out, x, f(), g(), f_backward(), g_backward(), d_out, wanted, options, exec);
  }

 private:
  attn::multi_head_weights<S> heads() const {
    return {.query = matrix(weights_[0]), .key = matrix(weights_[1]), .value = matrix(weights_[2])};
  }
  attn::feed_forward_weights<S> feed() const { return {.up = matrix(weights_[3]), .down = matrix(weights_[4])}; }

  std::vector<tensor<S>> weights_;
  std::vector<tensor<S>*> gradients_;
  bool accumulate_;
  attention_pair<S> attention_{.heads = 2};
  attention_of<S> attend_ = attention_.forward();
  attention_backward_of<S> attend_backward_ = attention_.backward();
};

// Weights of some layers, each query, key, value, up, down.
template <class S>
std::vector<std::vector<tensor<S>>> random_layers(idx_t layers, idx_t dim, idx_t hidden, double gain) {
  std::vector<std::vector<tensor<S>>> all;
  for (std::uint64_t n = 0; n < static_cast<std::uint64_t>(layers); ++n)
    all.push_back({cast<S>(random_weight(10 * n, dim, dim)), cast<S>(random_weight(10 * n + 1, dim, dim)),
                   cast<S>(random_weight(10 * n + 2, dim, dim, gain)), cast<S>(random_weight(10 * n + 3, hidden, dim)),
                   cast<S>(random_weight(10 * n + 4, dim, hidden, gain))});
  return all;
}

}  // namespace testing
