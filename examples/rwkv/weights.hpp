// The weights of RWKV: those of a file by name, or random ones.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <random>

#include "../support/rwkv_weights.hpp"

namespace rwkv {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // a row for every token
using idx_t = std::ptrdiff_t;

constexpr idx_t vocabulary = 256;

// The arrays of a file by name, or random ones where there is no file.
class weights {
 public:
  std::string path;
  idx_t width = 64, heads = 8, layers = 3;
  bool version_7 = false;

  explicit weights(bool seven) : version_7(seven) {}
  explicit weights(const std::string& file_path) : path(file_path) {
    const support::rwkv_file file = support::read_rwkv(path);
    if (file.vocabulary != vocabulary)
      support::fail(path, "expected a vocabulary of 256 bytes; found " + std::to_string(file.vocabulary));
    arrays_ = file.arrays, width = file.width, layers = file.layers;
    version_7 = arrays_.contains("blocks.0.att.r_k");
    const auto heads_of = arrays_.find(version_7 ? "blocks.0.att.r_k" : "blocks.0.att.time_faaaa");
    if (heads_of == arrays_.end()) support::fail(path, "expected RWKV-5.2 or RWKV-7; found neither's arrays");
    heads = heads_of->second.shape[0];
    if (heads < 1 || width < 1 || width % heads != 0 || layers < 1)
      support::fail(path, "expected layers, and heads that divide the width " + std::to_string(width));
  }

  /// As a matrix, whatever the axes are in the file; of -1 rows, as many as there are.
  matrix get(const std::string& name, idx_t rows, idx_t cols) const {
    if (path.empty()) {
      if (rows < 0) rows = name.ends_with(".weight") ? 4 * cols : 16;
      std::normal_distribution<float> normal(0, 1 / std::sqrt(float(cols)));
      return matrix::NullaryExpr(rows, cols, [&] { return normal(source_); });
    }
    const auto found = arrays_.find(name);
    if (found == arrays_.end()) support::fail(path, "expected an array " + name + "; found none");
    const support::array& x = found->second;
    const idx_t count = std::ssize(x.numbers);
    if (rows < 0 && count > 0 && count % cols == 0) rows = count / cols;
    if (rows < 0 || count != rows * cols)
      support::fail(path, name + ": expected shape " + support::text_of({rows, cols}) + "; found " +
                              support::text_of(x.shape));
    return Eigen::Map<const matrix>(x.numbers.data(), rows, cols);
  }
  matrix row(const std::string& name) const { return get(name, 1, width); }
  matrix square(const std::string& name) const { return get(name, width, width); }

 private:
  support::arrays arrays_;
  mutable std::mt19937 source_{2};
};

}  // namespace rwkv
