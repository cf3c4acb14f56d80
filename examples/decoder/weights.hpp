// The weights of the decoder: drawn from a seed, or read from a folder of NumPy's .npy files (two axes, C order):
// embedding.npy, and for every layer n = 0, 1, ...: n.query.npy, n.key.npy, n.value.npy, n.output.npy, n.gate.npy,
// n.up.npy, n.down.npy, one row for every number that comes out.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../support/npy.hpp"

namespace decoder {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using idx_t = std::ptrdiff_t;

struct shape {
  idx_t vocabulary = 256, layers = 4, heads = 8, kv_heads = 2, head_dim = 32, hidden = 512;
  idx_t width() const { return heads * head_dim; }
};

struct layer_weights {
  matrix query, key, value, output, gate, up, down;
};
struct weights {
  matrix embedding;
  std::vector<layer_weights> layers;
};

inline matrix read_npy(const std::string& path, idx_t rows, idx_t cols) {
  const support::array x = support::read_npy(path);
  if (x.shape != std::vector<idx_t>{rows, cols})
    support::fail(path, "expected shape " + support::text_of({rows, cols}) + "; found " + support::text_of(x.shape));
  return Eigen::Map<const matrix>(x.numbers.data(), rows, cols);
}

/// From the folder, or drawn where its name is empty.
inline weights make_weights(const shape& s, const std::string& folder) {
  std::mt19937 source(2);
  std::normal_distribution<float> normal;
  const auto made = [&](const std::string& name, idx_t rows, idx_t cols, float size = 1) -> matrix {
    if (!folder.empty()) return read_npy(folder + "/" + name + ".npy", rows, cols);
    return matrix::NullaryExpr(rows, cols, [&] { return normal(source) * size / std::sqrt(float(cols)); });
  };
  weights w{made("embedding", s.vocabulary, s.width(), 16), {}};
  for (idx_t n = 0; n < s.layers; ++n) {
    const auto of = [&](const char* name, idx_t rows, idx_t cols) {
      return made(std::to_string(n) + "." + name, rows, cols);
    };
    const idx_t width = s.width(), keys = s.kv_heads * s.head_dim;
    w.layers.push_back({of("query", width, width), of("key", keys, width), of("value", keys, width),
                        of("output", width, width), of("gate", s.hidden, width), of("up", s.hidden, width),
                        of("down", width, s.hidden)});
  }
  return w;
}

}  // namespace decoder
