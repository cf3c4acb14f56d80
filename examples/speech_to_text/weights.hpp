// The weights of Moonshine as matrices: those of a package by the names of its layers, or random ones.
#pragma once

#include <attn/core/random.hpp>

#include <cmath>

#include "../support/onnx_weights.hpp"

namespace speech {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // a row for every token
using idx_t = attn::idx_t;

/// A part of the model: the encoder or the decoder.
class weights {
 public:
  idx_t width = 288, layers = 6;

  /// Random ones, for the tiny model.
  explicit weights(std::uint64_t seed) : random_(seed) {}
  /// Those of a file, which has to stay.
  static weights of_encoder(const support::onnx_file& file) { return {file, "", "", ""}; }
  static weights of_decoder(const support::onnx_file& file) {
    return {file, "/model/decoder", "model.decoder.", "_merged_0"};
  }

  /// A vector, as a matrix of one row.
  matrix row(const std::string& name, idx_t size) const { return tensor(tensors_ + name + ending_, {1, size}); }
  matrix row_of_node(const std::string& node, idx_t size) const { return tensor(input_of(node), {1, size}); }

  /// What multiplies in a layer, [inputs, outputs]: (code - zero point) scale. Its node writes sums of codes.
  matrix product(const std::string& layer, idx_t inputs, idx_t outputs) const {
    return codes(input_of(nodes_ + layer + "/MatMul_output_0_output_quantized"), {inputs, outputs});
  }
  /// A row for every word of the vocabulary.
  matrix embedding(idx_t rows) const {
    return codes(tensors_ + "embed_tokens.weight" + ending_ + suffix, {rows, width});
  }

  /// [outputs, kernel * inputs], from [outputs, inputs, kernel]: code scale + offset.
  matrix convolution(const std::string& name, idx_t outputs, idx_t inputs, idx_t kernel) const {
    matrix w = tensor(name + suffix, {outputs, inputs * kernel});
    if (file_) w = w.array() * scalar(name + "_scale") + scalar(name + "_zero_point");
    matrix ordered(outputs, kernel * inputs);
    for (idx_t i = 0; i < inputs; ++i)
      for (idx_t k = 0; k < kernel; ++k) ordered.col(k * inputs + i) = w.col(i * kernel + k);
    return ordered;
  }

 private:
  /// `nodes` begins the names of the nodes of layers, `tensors` and `ending` surround those of tensors.
  weights(const support::onnx_file& file, const std::string& nodes, const std::string& tensors,
          const std::string& ending)
      : file_(&file), nodes_(nodes), tensors_(tensors), ending_(ending), random_(0) {
    const auto name_of = [&](idx_t n) {
      return tensors_ + "layers." + std::to_string(n) + ".input_layernorm.weight" + ending_;
    };
    width = std::ssize(file.tensor(name_of(0)).numbers);
    for (layers = 0; file.has(name_of(layers));) ++layers;
  }

  static constexpr const char* suffix = "_quantized";

  std::string input_of(const std::string& node) const {
    if (!file_) return "";
    const support::onnx_node& found = file_->node_of(node);
    if (found.inputs.size() < 2) support::fail(file_->path(), "expected a node of two inputs for " + node);
    return found.inputs[1];
  }
  float scalar(const std::string& name) const { return tensor(name, {1, 1})(0, 0); }

  matrix codes(const std::string& name, const std::vector<idx_t>& shape) const {
    matrix w = tensor(name, shape);
    const std::string base = name.substr(0, name.rfind(suffix));
    if (file_) w = (w.array() - scalar(base + "_zero_point")) * scalar(base + "_scale");
    return w;
  }
  matrix tensor(const std::string& name, const std::vector<idx_t>& shape) const {
    if (!file_) {
      const float size = std::sqrt(12.0f / float(std::min(shape[0], shape[1])));
      return matrix::NullaryExpr(shape[0], shape[1],
                                 [&] { return size * (float(random_.below(65536)) / 65536 - 0.5f); });
    }
    const support::array x = file_->tensor(name);
    if (std::ssize(x.numbers) != shape[0] * shape[1])
      support::fail(file_->path(),
                    name + ": expected " + support::text_of(shape) + "; found " + support::text_of(x.shape));
    return Eigen::Map<const matrix>(x.numbers.data(), shape[0], shape[1]);
  }

  const support::onnx_file* file_ = nullptr;
  std::string nodes_, tensors_, ending_;
  mutable attn::random_numbers random_;
};

}  // namespace speech
