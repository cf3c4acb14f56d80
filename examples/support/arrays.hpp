// Arrays of numbers as files of weights have them: what the readers beside this file return.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace support {

struct array {
  std::vector<std::ptrdiff_t> shape;
  std::vector<float> numbers;  // the last axis fastest
};
using arrays = std::map<std::string, array>;

[[noreturn]] inline void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error(path + ": " + what);
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "file not found");
  file.peek();
  if (file.bad()) fail(path, "expected a file that can be read");  // as a folder cannot
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string text_of(const std::vector<std::ptrdiff_t>& shape) {
  std::string text = "[";
  for (const auto n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

/// How many numbers a shape has. Throws for negative extents, and where they are more than memory can hold.
inline std::size_t count_of(const std::string& path, const std::vector<std::ptrdiff_t>& shape) {
  constexpr std::ptrdiff_t most = std::ptrdiff_t(1) << 40;
  std::ptrdiff_t count = 1;
  for (const auto n : shape) {
    if (n < 0 || (n > 0 && count > most / n)) fail(path, "expected the shape of an array; found " + text_of(shape));
    count *= n;
  }
  return static_cast<std::size_t>(count);
}

/// Little-endian numbers of type T, as float.
template <class T>
array array_of(const std::string& path, const std::vector<std::ptrdiff_t>& shape, std::string_view bytes) {
  const std::size_t count = count_of(path, shape);
  if (bytes.size() != count * sizeof(T))
    fail(path, "expected " + std::to_string(count * sizeof(T)) + " bytes for the shape " + text_of(shape) + "; found " +
                   std::to_string(bytes.size()));
  array result{shape, std::vector<float>(count)};
  for (std::size_t n = 0; n < count; ++n) {
    char own[sizeof(T)];
    std::memcpy(own, bytes.data() + n * sizeof(T), sizeof(T));
    if constexpr (std::endian::native == std::endian::big) std::reverse(std::begin(own), std::end(own));
    T number;
    std::memcpy(&number, own, sizeof(T));
    result.numbers[n] = static_cast<float>(number);
  }
  return result;
}

}  // namespace support
