// Moonshine: speech to tokens of text, by an encoder of the sound and a decoder with cross attention to it.
//
//   samples, 16000 a second -> three convolutions -> a row for every 384 samples
//   encoder, 6 layers:  x += attention(norm(x)),   x += feed_forward(norm(x))             attention: 8 heads, rotary
//   decoder, 6 layers:  x += causal attention(norm(x)),   x += attention(norm(x), to the encoder's rows),
//                       x += gated feed_forward(norm(x))
//   logits: norm(x) times the rows of the embedding
//
// A convolution is a projection of overlapping views: of a sequence [length, channels] `kernel` rows are one row of
// kernel * channels numbers in memory, and the next one begins stride * channels numbers later.
#pragma once

#include <attn/layers/encoder_block.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/packed_weights.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include <deque>
#include <span>
#include <variant>

#include "weights.hpp"

namespace speech {

constexpr idx_t heads = 8, vocabulary = 32768, first_token = 1, last_token = 2;
constexpr idx_t least_samples = 895;  // which give the encoder one row

/// How numbers are kept: float, half (16 bits; weights only) or int8. The weights of the package are codes of 8 bits.
struct storage {
  std::string weights = "half", cache = "float";
};

class model {
 public:
  using cache = std::variant<attn::kv_cache<float>, attn::kv_cache<std::int8_t>>;
  /// What a sound was encoded to, and the tokens so far.
  struct state {
    std::vector<cache> self, cross;  // of the layers
  };

  model(const weights& encoder, const weights& decoder, const storage& stored)
      : stored_(stored), width_(encoder.width) {
    const idx_t wide = 2 * width_, hidden = 4 * width_;
    if (decoder.width != width_ || width_ % (2 * heads) != 0 || width_ < 32 * heads)
      throw std::runtime_error("expected an encoder and a decoder of one width for 8 heads; found " +
                               std::to_string(width_) + " and " + std::to_string(decoder.width));
    convolutions_[0] = {.weight = pack(encoder.convolution("conv1.weight", width_, 1, 127))};
    convolutions_[1] = {.weight = pack(encoder.convolution("conv2.weight", wide, width_, 7)),
                        .bias = keep(encoder.row("conv2.bias", wide))};
    convolutions_[2] = {.weight = pack(encoder.convolution("conv3.weight", width_, wide, 3)),
                        .bias = keep(encoder.row("conv3.bias", width_))};
    gamma_ = encoder.row_of_node("/groupnorm/Mul_output_0", width_);
    beta_ = encoder.row_of_node("/groupnorm/Add_output_0", width_);
    encoder_norm_ = encoder.row("layer_norm.weight", width_);
    decoder_norm_ = decoder.row("norm.weight", width_);
    embedding_ = decoder.embedding(vocabulary);
    words_ = pack(embedding_);

    const auto square = [&](const weights& w, const std::string& layer) {
      return pack(w.product(layer, width_, width_).transpose());
    };
    const auto attention = [&](const weights& w, const std::string& layer) -> attention_weights {
      return {.query = square(w, layer + "/q_proj"), .key = square(w, layer + "/k_proj"),
              .value = square(w, layer + "/v_proj"), .output = square(w, layer + "/dense")};
    };
    for (idx_t n = 0; n < encoder.layers; ++n) {
      const std::string node = "/layers." + std::to_string(n), name = node.substr(1);
      encoder_layers_.push_back(
          {.attention = attention(encoder, node + "/self_attn"),
           .block = {.norm_1 = {.gamma = keep(encoder.row(name + ".input_layernorm.weight", width_))},
                     .norm_2 = {.gamma = keep(encoder.row(name + ".post_attention_layernorm.weight", width_))},
                     .feed_forward = {
                         .up = pack(encoder.product(node + "/mlp/fc1", width_, hidden).transpose()),
                         .down = pack(encoder.product(node + "/mlp/fc2", hidden, width_).transpose()),
                         .up_bias = keep(encoder.row(name + ".mlp.fc1.bias", hidden)),
                         .down_bias = keep(encoder.row(name + ".mlp.fc2.bias", width_))}}});
    }
    for (idx_t n = 0; n < decoder.layers; ++n) {
      const std::string node = "/layers." + std::to_string(n), name = node.substr(1);
      const matrix down = decoder.product(node + "/mlp/down_proj", hidden, width_).transpose();
      const matrix up = decoder.product(node + "/mlp/up_proj", width_, 2 * hidden).transpose();
      const matrix& bias = keep(decoder.row(name + ".mlp.up_proj.bias", 2 * hidden));
      const attention_weights cross = attention(decoder, node + "/encoder_attn");
      decoder_layers_.push_back(
          {.norm = keep(decoder.row(name + ".input_layernorm.weight", width_)),
           .attention = attention(decoder, node + "/self_attn"),
           .cross = {.query = cross.query, .output = cross.output},
           .cross_key = cross.key,
           .cross_value = cross.value,
           .block = {.norm_1 = {.gamma = keep(decoder.row(name + ".post_attention_layernorm.weight", width_))},
                     .norm_2 = {.gamma = keep(decoder.row(name + ".final_layernorm.weight", width_))},
                     .feed_forward = {.up = pack(up.topRows(hidden)),
                                      .down = pack(down),
                                      .gate = pack(up.bottomRows(hidden)),
                                      .up_bias = bias.leftCols(hidden),
                                      .down_bias = keep(decoder.row(name + ".mlp.down_proj.bias", width_)),
                                      .gate_bias = bias.rightCols(hidden)}}});
    }
  }
  model(const model&) = delete;  // layers point to their weights

  /// The rows that the encoder takes: [samples, 1] to [rows, width]; least_samples or more.
  matrix front_end(std::span<const float> samples, attn::execution& exec) const {
    const auto gelu = [](float v) { return 0.5f * v * (1 + std::erf(v * 0.70710678f)); };
    matrix x = convolve({samples.data(), {1, std::ssize(samples), 1}}, 0, 127, 64, exec);
    x = x.array().tanh();
    const double mean = x.cast<double>().mean(), variance = x.cast<double>().array().square().mean() - mean * mean;
    x = (x.array() - float(mean)) / float(std::sqrt(variance + 1e-5));
    x = (x.array().rowwise() * gamma_.row(0).array()).rowwise() + beta_.row(0).array();
    x = convolve(x, 1, 7, 3, exec).unaryExpr(gelu);
    return convolve(x, 2, 3, 2, exec).unaryExpr(gelu);
  }

  matrix encode(matrix x, attn::execution& exec) const {
    const auto attend = [](auto q, auto k, auto v, auto out, attn::execution& e) {
      attn::full_softmax(q, k, v, out, {}, e);
    };
    for (const encoder_layer& l : encoder_layers_) {
      const auto mix = [&](auto normed, auto out, attn::execution& e) {
        attn::multi_head(normed, out, l.attention, attend, {.heads = heads, .rotary = positions()}, e);
      };
      attn::encoder_block(x, x, l.block, mix, {}, exec);
    }
    attn::layer_norm(x, x, {.gamma = encoder_norm_}, {}, exec);
    return x;
  }

  /// Keys and values of what was encoded, which all tokens read.
  state start(const matrix& encoded, attn::execution& exec) const {
    state s;
    matrix k(encoded.rows(), width_), v(encoded.rows(), width_);
    for (const decoder_layer& l : decoder_layers_) {
      attn::project(encoded, k, {.weight = l.cross_key}, exec);
      attn::project(encoded, v, {.weight = l.cross_value}, exec);
      s.self.push_back(make_cache()), s.cross.push_back(make_cache());
      std::visit([&](auto& c) { c.append(attn::split_heads(k, heads), attn::split_heads(v, heads)); }, s.cross.back());
    }
    return s;
  }

  /// Logits after each of the tokens, which follow those before.
  matrix feed(std::span<const idx_t> tokens, state& s, attn::execution& exec) const {
    matrix x(std::ssize(tokens), width_), y(x.rows(), width_), logits(x.rows(), vocabulary);
    for (idx_t t = 0; t < x.rows(); ++t) x.row(t) = embedding_.row(tokens[std::size_t(t)]);
    for (std::size_t n = 0; n < decoder_layers_.size(); ++n) {
      const decoder_layer& l = decoder_layers_[n];
      const auto step = [&](auto q, auto k, auto v, auto out, attn::execution& e) {
        std::visit([&](auto& c) { attn::full_softmax_step(c, q, k, v, out, {.rotary = positions()}, e); }, s.self[n]);
      };
      const auto attend = [&](auto q, auto out, attn::execution& e) {
        std::visit([&](auto& c) { attn::full_softmax_cached(c, q, out, {.causal = false}, e); }, s.cross[n]);
      };
      const auto mix = [&](auto normed, auto out, attn::execution& e) {
        attn::multi_head(normed, out, l.cross, attend, {.heads = heads}, e);
      };
      matrix mixed(x.rows(), width_);
      attn::layer_norm(x, y, {.gamma = l.norm}, {}, exec);
      attn::multi_head(y, mixed, l.attention, step, {.heads = heads}, exec);
      x += mixed;
      attn::encoder_block(x, x, l.block, mix, {.activation = attn::activation::silu}, exec);
    }
    attn::layer_norm(x, x, {.gamma = decoder_norm_}, {}, exec);
    attn::project(x, logits, {.weight = words_}, exec);
    return logits;
  }

 private:
  using attention_weights = attn::multi_head_weights<float>;
  using block_weights = attn::encoder_block_weights<float>;
  struct encoder_layer {
    attention_weights attention;
    block_weights block;
  };
  struct decoder_layer {
    const matrix& norm;
    attention_weights attention, cross;
    attn::weight_field<float> cross_key, cross_value;
    block_weights block;
  };

  static attn::rotary_options<float> positions() { return {.interleaved = true, .dims = 32}; }

  cache make_cache() const {
    const attn::state_extents extents{.heads = heads, .dim = width_ / heads};
    if (stored_.cache == "int8") return attn::kv_cache<std::int8_t>(extents);
    return attn::kv_cache<float>(extents);
  }
  /// [outputs, inputs], packed once.
  attn::weight_field<float> pack(const attn::tensor_view<const float, 2>& w) {
    if (stored_.weights == "int8") return int8_.emplace_back(w);
    if (stored_.weights == "half") return half_.emplace_back(w);
    return float_.emplace_back(w);
  }
  const matrix& keep(matrix x) { return kept_.emplace_back(std::move(x)); }

  matrix convolve(const attn::tensor_view<const float, 3>& x, std::size_t n, idx_t kernel, idx_t stride,
                  attn::execution& exec) const {
    const idx_t channels = x.extent(2), rows = (x.extent(1) - kernel) / stride + 1;
    matrix out(rows, convolutions_[n].weight.extent(0));
    attn::project(attn::tensor_view<const float, 3>(x.data(), {1, rows, kernel * channels},
                                                    {0, stride * channels, 1}),
                  out, convolutions_[n], exec);
    return out;
  }

  storage stored_;
  idx_t width_;
  std::deque<attn::packed_weights<float>> float_;
  std::deque<attn::packed_weights<Eigen::half>> half_;
  std::deque<attn::packed_weights<std::int8_t>> int8_;
  std::deque<matrix> kept_;
  attn::project_weights<float> convolutions_[3];
  matrix gamma_, beta_, encoder_norm_, decoder_norm_, embedding_;
  attn::weight_field<float> words_;  // the embedding, packed
  std::vector<encoder_layer> encoder_layers_;
  std::vector<decoder_layer> decoder_layers_;
};

}  // namespace speech
