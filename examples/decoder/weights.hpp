// The weights of the decoder: drawn from a seed, or read from a file of llama2.c, which has seven numbers of 32 bits
// (width, hidden width, layers, heads, key heads, vocabulary, positions; a vocabulary < 0 says that the classifier is
// not the embedding), then the matrices as float in the order of for_each_matrix, each [outputs, inputs].
//
// Throws std::runtime_error, which names the file and what is wrong with it.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <random>

#include "../support/arrays.hpp"

namespace decoder {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using idx_t = std::ptrdiff_t;

struct shape {
  idx_t vocabulary = 256, layers = 4, heads = 4, kv_heads = 2, head_dim = 32, hidden = 256, positions = 512;
  idx_t width() const { return heads * head_dim; }
};

struct layer_weights {
  matrix attention_norm, query, key, value, output, feed_norm, gate, down, up;
};
struct weights {
  shape sizes;
  matrix embedding, last_norm, own_classifier;  // the last is empty where the embedding is the classifier
  std::vector<layer_weights> layers;
  const matrix& classifier() const { return own_classifier.size() > 0 ? own_classifier : embedding; }
};

/// visit(matrix, rows, columns) for all of them, in the order of the file.
template <class F>
void for_each_matrix(weights& w, bool with_classifier, F&& visit) {
  const shape& s = w.sizes;
  const idx_t width = s.width(), keys = s.kv_heads * s.head_dim;
  w.layers.resize(std::size_t(s.layers));
  const auto in_all_layers = [&](matrix layer_weights::*which, idx_t rows, idx_t cols) {
    for (layer_weights& layer : w.layers) visit(layer.*which, rows, cols);
  };
  visit(w.embedding, s.vocabulary, width);
  in_all_layers(&layer_weights::attention_norm, 1, width);
  in_all_layers(&layer_weights::query, width, width);
  in_all_layers(&layer_weights::key, keys, width);
  in_all_layers(&layer_weights::value, keys, width);
  in_all_layers(&layer_weights::output, width, width);
  in_all_layers(&layer_weights::feed_norm, 1, width);
  in_all_layers(&layer_weights::gate, s.hidden, width);
  in_all_layers(&layer_weights::down, width, s.hidden);
  in_all_layers(&layer_weights::up, s.hidden, width);
  visit(w.last_norm, 1, width);
  matrix rotations;  // cosines and sines, which attn computes
  visit(rotations, s.positions, s.head_dim);
  if (with_classifier) visit(w.own_classifier, s.vocabulary, width);
}

inline weights draw_weights() {
  std::mt19937 source(2);
  std::normal_distribution<float> normal;
  weights w;
  for_each_matrix(w, false, [&](matrix& m, idx_t rows, idx_t cols) {
    const float size = (&m == &w.embedding ? 4 : 1) / std::sqrt(float(cols));
    m = matrix::NullaryExpr(rows, cols, [&] { return rows == 1 ? 1.0f : normal(source) * size; });  // a row is a norm's
  });
  return w;
}

inline weights read_weights(const std::string& path) {
  const std::string file = support::read_file(path);
  constexpr std::size_t header = 28;
  std::vector<idx_t> n(7);
  for (std::size_t at = 0; at < header && file.size() >= header; ++at)
    n[at / 4] |= idx_t{static_cast<unsigned char>(file[at])} << (8 * (at % 4));
  const bool with_classifier = n[5] >= idx_t(1) << 31;
  if (with_classifier) n[5] = (idx_t(1) << 32) - n[5];
  constexpr idx_t most = 1 << 20, most_layers = 1 << 10;
  bool right = n[2] <= most_layers && n[1] > 0;
  for (const idx_t x : n) right &= x > 0 && x <= most;
  if (!right || n[0] % (2 * n[3]) != 0 || n[3] % n[4] != 0) support::fail(path, "expected a model of llama2.c");

  weights w{{.vocabulary = n[5], .layers = n[2], .heads = n[3], .kv_heads = n[4], .head_dim = n[0] / n[3],
             .hidden = n[1], .positions = n[6]}, {}, {}, {}, {}};
  std::size_t bytes = header;
  for_each_matrix(w, with_classifier, [&](matrix&, idx_t rows, idx_t cols) {
    bytes += sizeof(float) * std::size_t(rows) * std::size_t(cols);
  });
  if (file.size() != bytes)
    support::fail(path, "expected " + std::to_string(bytes) + " bytes, as its first numbers say; found " +
                            std::to_string(file.size()));
  std::size_t at = header;
  for_each_matrix(w, with_classifier, [&](matrix& m, idx_t rows, idx_t cols) {
    const std::size_t size = sizeof(float) * std::size_t(rows) * std::size_t(cols);
    const auto x = support::array_of<float>(path, {rows, cols}, std::string_view(file).substr(at, size));
    m = Eigen::Map<const matrix>(x.numbers.data(), rows, cols);
    if (!m.allFinite()) support::fail(path, "expected finite weights; found another number");
    at += size;
  });
  return w;
}

}  // namespace decoder
