// Universal Sentence Encoder lite: texts to unit vectors, near to each other where the texts mean alike.
//
//   x_t = 2 e_t + position_t,    width 256                     e: the rows of an embedding of 8002 tokens
//   twice: h = W x + attend(norm(x)),  x = h + feed_forward(norm(h))     the first time W widens x to 512, then W = 1
//   the text's vector: tanh(V mean_t(x_t) + b), of length 1
//
// 4 heads of 64 in the first layer, of 128 in the second; ReLU between 512 and 1536 numbers. The mixer of tokens is any
// operator. Texts are packed one after another: all layers but attention see one long sequence.
#pragma once

#include <attn/core/packed.hpp>
#include <attn/core/random.hpp>
#include <attn/layers/encoder_block.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/packed_weights.hpp>

#include <chrono>
#include <cmath>
#include <deque>
#include <span>

#include "../support/arrays.hpp"
#include "operators.hpp"

namespace semantic_search {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class encoder {
 public:
  static constexpr idx_t vocabulary = 8002, narrow = 256, width = 512, hidden = 1536, heads = 4;
  static constexpr std::size_t most_tokens = 128;  // what it was trained with; the rest of a text is left out
  static constexpr std::size_t batch_tokens = 2048;  // computed at a time: their numbers remain in the cache

  /// Throws std::runtime_error if a weight is missing or has another shape.
  explicit encoder(support::arrays weights) : encoder(std::move(weights), false) {}
  /// Random weights of the same shapes.
  static encoder random() { return encoder({}, true); }

  encoder(encoder&&) = default;

  /// A row for every list of tokens, none of which may be empty. Adds the time of the mixer to attention_seconds.
  matrix embed(const std::vector<std::vector<int>>& texts, const attend_function& attend, attn::execution& exec,
               double* attention_seconds = nullptr) const {
    matrix result(std::ssize(texts), width);
    for (std::size_t first = 0, end = 0; first < texts.size(); first = end) {
      std::size_t tokens = 0;
      while (end < texts.size() && tokens < batch_tokens) tokens += texts[end++].size();
      result.middleRows(idx_t(first), idx_t(end - first)) =
          embed_batch({texts.data() + first, end - first}, attend, exec, attention_seconds);
    }
    return result;
  }

 private:
  using token_lists = std::span<const std::vector<int>>;

  matrix embed_batch(token_lists texts, const attend_function& attend, attn::execution& exec,
                     double* attention_seconds) const {
    std::vector<idx_t> offsets(1);
    for (const auto& text : texts) offsets.push_back(offsets.back() + std::ssize(text));
    const Eigen::Map<const matrix> embedding(embedding_, vocabulary, narrow);
    matrix x(offsets.back(), narrow);
    for (std::size_t n = 0; n < texts.size(); ++n)
      for (std::size_t t = 0; t < texts[n].size(); ++t) {
        auto row = x.row(offsets[n] + idx_t(t));
        const auto angles = float(t) * frequencies_;
        row = 2.0f * embedding.row(texts[n][t]);
        row.head(narrow / 2) += angles.array().sin().matrix();
        row.tail(narrow / 2) += angles.array().cos().matrix();
      }

    const auto mix = [&](auto q, auto k, auto v, auto out, attn::execution& threads) {
      const double start = seconds();
      attn::for_each_sequence({.offsets = offsets}, threads, [&](const auto& text, attn::execution& one) {
        attend(text.queries(q), text.keys(k), text.keys(v), text.queries(out), one);
      });
      if (attention_seconds) *attention_seconds += seconds() - start;
    };
    for (const layer& l : layers_) {
      matrix next(x.rows(), width);
      const auto heads_of = [&](auto normed, auto out, attn::execution& threads) {
        attn::multi_head(normed, out, l.attention, mix, {.heads = heads}, threads);
      };
      attn::encoder_block(x, next, l.block, heads_of, {.activation = attn::activation::relu, .eps = 1e-6f}, exec);
      x.swap(next);
    }

    matrix means(std::ssize(texts), width), result(std::ssize(texts), width);
    for (idx_t n = 0; n < means.rows(); ++n)
      means.row(n) = x.middleRows(offsets[n], offsets[n + 1] - offsets[n]).colwise().mean();
    attn::project(means, result, last_, exec);
    result = result.array().tanh().matrix().rowwise().normalized();
    return result;
  }

  struct layer {
    attn::multi_head_weights<float> attention;
    attn::encoder_block_weights<float> block;
  };
  using weight_view = attn::tensor_view<const float, 2>;
  using bias_view = attn::tensor_view<const float, 1>;

  encoder(support::arrays weights, bool draw) : weights_(std::move(weights)), draw_(draw) {
    const std::string base = "module/Encoder_en/", applied = "module_apply_default/Encoder_en/KonaTransformer/Encode/";
    const std::string stack = applied + "TransformerStack/", concat = "/ConcatPartitions/concat";
    const auto norm = [&](const std::string& name, idx_t size) -> attn::layer_norm_weights<float> {
      const std::string from = applied + name + "/layer_prepostprocess/layer_norm/layer_norm_";
      return {.gamma = list(from + "scale" + concat, size), .beta = list(from + "bias" + concat, size)};
    };
    for (idx_t n = 0; n < 2; ++n) {
      const idx_t in = n == 0 ? narrow : width;
      const std::string name = "Layer_" + std::to_string(n) + "/TransformerLayer", feed = name + "/FFN";
      const std::string kernels = base + "KonaTransformer/Encode/" + name + "/MultiheadAttention/";
      const std::string biases = applied + name + "/MultiheadAttention/";
      // Kernels have a row for every input, those of queries, keys and values beside each other; attn takes a row for
      // every output: a transposed view.
      const weight_view qkv = kernel(kernels + "qkv_transform_single/kernel/part_0", in, 3 * in);
      const bias_view qkv_bias = list(biases + "qkv_transform_single/bias" + concat, 3 * in);
      layer& l = layers_.emplace_back();
      l.attention = {.query = pack(qkv.slice(0, 0, in)),
                     .key = pack(qkv.slice(0, in, in)),
                     .value = pack(qkv.slice(0, 2 * in, in)),
                     .output = pack(kernel(kernels + "output_transform_single/kernel/part_0", in, width)),
                     .query_bias = qkv_bias.slice(0, 0, in),
                     .key_bias = qkv_bias.slice(0, in, in),
                     .value_bias = qkv_bias.slice(0, 2 * in, in),
                     .output_bias = list(biases + "output_transform_single/bias" + concat, width)};
      l.block = {.norm_1 = norm(name, in),
                 .norm_2 = norm(feed, width),
                 .feed_forward = {.up = pack(kernel(stack + feed + "/conv1/Tensordot/Reshape_1", width, hidden)),
                                  .down = pack(kernel(stack + feed + "/conv2/Tensordot/Reshape_1", hidden, width)),
                                  .up_bias = list(applied + feed + "/conv1/bias" + concat, hidden),
                                  .down_bias = list(applied + feed + "/conv2/bias" + concat, width)}};
      if (n == 0)
        l.block.residual = {.weight = pack(kernel(applied + name + "/dense/kernel" + concat, in, width)),
                            .bias = list(applied + name + "/dense/bias" + concat, width)};
    }
    last_ = {.weight = pack(kernel(base + "hidden_layers/tanh_layer_0/weights", width, width)),
             .bias = list(base + "hidden_layers/tanh_layer_0/bias", width)};
    embedding_ = numbers("module/Embeddings_en", vocabulary, narrow);
    if (draw_)
      frequencies_ =
          Eigen::RowVectorXf::NullaryExpr(narrow / 2, [](idx_t n) { return std::pow(1e-4f, float(n) / 127); });
    else
      frequencies_ = Eigen::Map<const Eigen::RowVectorXf>(
          numbers(stack + "Layer_0/AddTimingSignal/TimingSignal/ExpandDims_1", 1, narrow / 2), narrow / 2);
  }

  const float* numbers(const std::string& name, idx_t rows, idx_t columns) {
    const std::size_t count = static_cast<std::size_t>(rows * columns);
    if (draw_) {
      support::array drawn{{rows, columns}, std::vector<float>(count)};
      const float size = std::sqrt(12.0f / float(rows));
      for (float& x : drawn.numbers) x = size * (float(random_.below(65536)) / 65536 - 0.5f);
      weights_[name] = std::move(drawn);
    }
    const auto found = weights_.find(name);
    if (found == weights_.end())
      throw std::runtime_error("expected the weight " + name + " in the package; found none");
    const support::array& weight = found->second;
    if (weight.numbers.size() != count || weight.shape.empty() || weight.shape.back() != columns)
      throw std::runtime_error(name + ": expected shape " + support::text_of({rows, columns}) + "; found " +
                               support::text_of(weight.shape));
    return weight.numbers.data();
  }
  weight_view kernel(const std::string& name, idx_t inputs, idx_t outputs) {
    return {numbers(name, inputs, outputs), {outputs, inputs}, {1, outputs}};
  }
  /// Packed once, for all texts.
  const attn::packed_weights<float>& pack(const weight_view& weight) { return packed_.emplace_back(weight); }
  bias_view list(const std::string& name, idx_t size) { return {numbers(name, 1, size), {size}}; }

  support::arrays weights_;
  bool draw_;
  attn::random_numbers random_{1};
  std::deque<attn::packed_weights<float>> packed_;  // which layers point to
  std::vector<layer> layers_;
  attn::project_weights<float> last_;
  const float* embedding_ = nullptr;  // [vocabulary, narrow]
  Eigen::RowVectorXf frequencies_;
};

}  // namespace semantic_search
