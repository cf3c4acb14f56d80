// The weights of the decoder: drawn from a seed, or read from a folder of NumPy's .npy files (float32, two axes, C order):
// embedding.npy, and for every layer n = 0, 1, ...: n.query.npy, n.key.npy, n.value.npy, n.output.npy, n.gate.npy,
// n.up.npy, n.down.npy, one row for every number that comes out.
#pragma once

#include <Eigen/Core>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

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
  const auto fail = [&](const std::string& what) { throw std::runtime_error(path + ": " + what); };
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("file not found");
  char magic[8] = {};
  unsigned char size[4] = {};
  file.read(magic, 8);
  if (std::memcmp(magic, "\x93NUMPY", 6) != 0) fail("not an .npy file");
  file.read(reinterpret_cast<char*>(size), magic[6] == 1 ? 2 : 4);
  std::string header(size[0] + 256u * size[1] + 65536u * size[2], ' ');
  file.read(header.data(), std::streamsize(header.size()));
  const std::size_t at = header.find("'shape': (");
  const char* const type = std::endian::native == std::endian::little ? "'<f4'" : "'>f4'";
  long long found_rows = 0, found_cols = 0;
  if (header.find(type) == std::string::npos || header.find("'fortran_order': False") == std::string::npos ||
      at == std::string::npos ||
      std::sscanf(header.c_str() + at, "'shape': (%lld, %lld", &found_rows, &found_cols) != 2)
    fail("expected float32 of this machine's byte order in C order with two axes");
  if (found_rows != rows || found_cols != cols)
    fail("expected shape (" + std::to_string(rows) + ", " + std::to_string(cols) + "); found (" +
         std::to_string(found_rows) + ", " + std::to_string(found_cols) + ")");
  matrix m(rows, cols);
  if (!file.read(reinterpret_cast<char*>(m.data()), m.size() * idx_t(sizeof(float)))) fail("the file ends early");
  return m;
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
