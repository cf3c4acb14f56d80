// The files of rwkv.cpp, in float32 or float16: six numbers of 32 bits (magic, version 101, vocabulary, width, layers,
// type), then for each array the number of its axes, the length of its name, its type, the extents (the fastest axis
// first), the name and the numbers.
//
//   const support::rwkv_file file = support::read_rwkv("rwkv.bin");   // file.arrays.at("emb.weight").numbers
//
// Throws std::runtime_error, which names the file and what is wrong with it.
#pragma once

#include "arrays.hpp"

namespace support {

struct rwkv_file {
  std::ptrdiff_t vocabulary = 0, width = 0, layers = 0;
  support::arrays arrays;
};

inline rwkv_file read_rwkv(const std::string& path) {
  const std::string file = read_file(path);
  std::size_t at = 0;
  const auto bytes = [&](std::size_t count) {
    if (count > file.size() - at) fail(path, "the file ends within an array, at byte " + std::to_string(file.size()));
    at += count;
    return std::string_view(file).substr(at - count, count);
  };
  const auto number = [&] {
    std::uint32_t n = 0;
    int shift = 0;
    for (const char c : bytes(4)) n |= std::uint32_t{static_cast<unsigned char>(c)} << shift, shift += 8;
    return n;
  };
  constexpr std::uint32_t magic = 0x67676d66, versions = 101;
  if (file.size() < 24 || number() != magic) fail(path, "expected a file of rwkv.cpp");
  if (const auto version = number(); version != versions)
    fail(path, "expected version 101 of rwkv.cpp's files; found " + std::to_string(version));
  rwkv_file all;
  for (std::ptrdiff_t* n : {&all.vocabulary, &all.width, &all.layers}) *n = number();
  number();  // the type of most arrays, each of which has its own
  while (at < file.size()) {
    const std::uint32_t axes = number(), length = number(), type = number();
    if (axes < 1 || axes > 4) fail(path, "expected arrays of 1 to 4 axes; found " + std::to_string(axes));
    std::vector<std::ptrdiff_t> shape(axes);
    for (auto n = shape.rbegin(); n != shape.rend(); ++n) *n = number();
    const std::string name(bytes(length));
    if (type > 1) fail(path, name + ": expected float32 or float16; found type " + std::to_string(type));
    const std::size_t count = count_of(path, shape);
    all.arrays[name] = type == 0 ? array_of<float>(path, shape, bytes(4 * count))
                                 : array_of<Eigen::half>(path, shape, bytes(2 * count));
  }
  return all;
}

}  // namespace support
