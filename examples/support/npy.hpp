// NumPy's .npy files: little-endian float16, float32 and float64 in C order, of any number of axes.
//
//   const support::array x = support::read_npy("query.npy");   // x.shape, x.numbers
//
// Throws std::runtime_error, which names the file and what is wrong with it.
#pragma once

#include "arrays.hpp"

namespace support {

inline array read_npy(const std::string& path) {
  const std::string file = read_file(path);
  if (file.size() < 12 || file.compare(0, 6, "\x93NUMPY") != 0) fail(path, "expected an .npy file");
  const bool long_header = file[6] >= 2;  // version 1 has two bytes for the header's length, later ones four
  std::size_t begin = long_header ? 12 : 10, length = 0;
  for (std::size_t n = 8; n < begin; ++n) length |= std::size_t{static_cast<unsigned char>(file[n])} << (8 * (n - 8));
  if (length > file.size() - begin) fail(path, "the file ends within its header");
  const std::string header = file.substr(begin, length);  // the text of a Python dictionary
  begin += length;

  const auto value_of = [&](const std::string& key) {
    const std::size_t at = header.find("'" + key + "':");
    if (at == std::string::npos) fail(path, "expected " + key + " in the header");
    return header.substr(std::min(header.find_first_not_of(' ', at + key.size() + 3), header.size()));
  };
  if (!value_of("fortran_order").starts_with("False")) fail(path, "expected C order; found Fortran order");
  std::string axes = value_of("shape");
  axes = axes.substr(0, axes.find(')'));
  if (!axes.starts_with('(') || axes.find_first_not_of("0123456789, ", 1) != std::string::npos)
    fail(path, "expected the shape of an array; found " + axes + ")");
  std::vector<std::ptrdiff_t> shape;
  for (std::size_t at = 0; (at = axes.find_first_of("0123456789", at)) != std::string::npos;) {
    const std::size_t end = std::min(axes.find_first_not_of("0123456789", at), axes.size());
    if (end - at > 15) fail(path, "expected the shape of an array; found " + axes + ")");
    shape.push_back(std::stoll(axes.substr(at, end - at)));
    at = end;
  }
  const std::string type = value_of("descr").substr(0, 5);
  const std::string_view bytes = std::string_view(file).substr(begin);
  if (type == "'<f2'") return array_of<Eigen::half>(path, shape, bytes);
  if (type == "'<f4'") return array_of<float>(path, shape, bytes);
  if (type == "'<f8'") return array_of<double>(path, shape, bytes);
  fail(path, "expected float16, float32 or float64, '<f2', '<f4' or '<f8'; found " + type);
}

}  // namespace support
