#pragma once
// The layers as a table, for the laws.
#include "layers/layers.hpp"

namespace testing {
inline constexpr index width = 24;  // of every layer's input and output

template <class S>
struct layer {
  std::string name;
  std::function<void(in_sequence<S>, out_sequence<S>, attn::execution&)> run;
};

template <class S>
const std::vector<layer<S>>& layers() {
  using L = compiled_layers<S>;
  static const tensor<S> weight = cast<S>(random_weight(1, width, width)), bias = cast<S>(random_vector(2, width));
  static const tensor<S> half_weight = cast<S>(random_weight(3, width / 2, width / 2));
  static const feed_forward_store<S> feed(random_feed_forward(width, 600, width));
  static const auto attend = full_attention<S>();
  static const mixer_of<S> mix = [](auto x, auto out, attn::execution& where) {
    L::multi_head(x, x, out, {matrix(weight), matrix(weight), matrix(weight), matrix(weight), vector(bias)}, attend,
                  {.heads = 4}, where);
  };
  static const mixer_of<S> half = [](auto x, auto out, attn::execution& where) {
    L::project(x, matrix(half_weight), out, {}, where);
  };
  static const attn::encoder_block_weights<S> block{{vector(bias), {}}, {{}, vector(bias)}, feed.views()};
  static const std::vector<layer<S>> all = {
      {"project", [](auto x, auto out, auto& where) { L::project(x, matrix(weight), out, vector(bias), where); }},
      {"layer_norm",
       [](auto x, auto out, auto& where) {
         L::layer_norm(x, out, {vector(bias), vector(bias)}, where);
       }},
      {"feed_forward",
       [](auto x, auto out, auto& where) { L::feed_forward(x, out, feed.views(), attn::activation::gelu, where); }},
      {"multi_head", [](auto x, auto out, auto& where) { mix(x, out, where); }},
      {"encoder_block", [](auto x, auto out, auto& where) { L::encoder_block(x, out, mix, block, {}, where); }},
      {"encoder_block, norm after",
       [](auto x, auto out, auto& where) {
         L::encoder_block(x, out, mix, block, {.norm = attn::norm_place::after}, where);
       }},
      {"reversible_block", [](auto x, auto out, auto& where) { L::reversible_block(x, out, half, half, {}, where); }},
      {"reversible_block_inverse",
       [](auto x, auto out, auto& where) { L::reversible_block_inverse(x, out, half, half, {}, where); }}};
  return all;
}

template <class S>
tensor<S> input(index batch, index length) {
  return cast<S>(random_sequence(9, batch, length, width));
}

template <class S>
tensor<S> result(const layer<S>& op, const tensor<S>& x, attn::execution& where) {
  tensor<S> out(x.batch(), 1, x.length(), width, S(7));
  op.run(sequence(x), sequence(out), where);
  return out;
}
template <class S>
tensor<S> result(const layer<S>& op, const tensor<S>& x) {
  attn::execution serial;
  return result(op, x, serial);
}

inline constexpr index lengths[] = {0, 1, 3, 7, 48, 65, 130};

}  // namespace testing
