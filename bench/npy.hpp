// attn_bench: reading and writing NumPy's .npy files.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

struct array {
  std::vector<std::ptrdiff_t> shape;
  std::vector<double> values;  // C order
};

/// Little-endian float16, float32 or float64 in C order. Throws std::runtime_error naming the file and what is wrong.
array read_npy(const std::string& path);

/// Float32 of one axis. Throws std::runtime_error naming the file if it cannot be written.
void write_npy(const std::string& path, const std::vector<float>& values);

}  // namespace bench
