#include "npy.hpp"

#include <attn/core/detail/eigen.hpp>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace bench {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("attn_bench: " + path + ": " + what);
}

/// What follows 'key': in the header, which is the text of a Python dictionary.
std::string after(const std::string& path, const std::string& header, const std::string& key) {
  const auto at = header.find("'" + key + "'");
  const auto colon = at == std::string::npos ? at : header.find(':', at);
  const auto begin = colon == std::string::npos ? colon : header.find_first_not_of(' ', colon + 1);
  if (begin == std::string::npos) fail(path, "no " + key + " in the header");
  return header.substr(begin);
}

template <class T>
std::vector<double> convert(const std::string& path, const std::string& bytes, std::size_t begin, std::size_t count) {
  if (bytes.size() - begin != count * sizeof(T))
    fail(path, "expected " + std::to_string(count * sizeof(T)) + " bytes of data; found " +
                   std::to_string(bytes.size() - begin));
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    char number[sizeof(T)];
    std::memcpy(number, bytes.data() + begin + i * sizeof(T), sizeof(T));
    if constexpr (std::endian::native == std::endian::big) std::reverse(number, number + sizeof(T));
    T value;
    std::memcpy(&value, number, sizeof(T));
    values[i] = static_cast<double>(value);
  }
  return values;
}

}  // namespace

array read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() < 12 || bytes.compare(0, 6, "\x93NUMPY") != 0) fail(path, "is not a .npy file");

  const bool long_header = bytes[6] >= 2;  // format version 1 has two bytes for the header's length, later ones four
  std::size_t header_bytes = 0;
  for (std::size_t i = 0; i < (long_header ? 4U : 2U); ++i)
    header_bytes |= std::size_t{static_cast<std::uint8_t>(bytes[8 + i])} << (8 * i);
  const std::size_t data = (long_header ? 12 : 10) + header_bytes;
  if (data > bytes.size()) fail(path, "ends within its header");
  const std::string header = bytes.substr(0, data);

  array result;
  if (!after(path, header, "fortran_order").starts_with("False")) fail(path, "expected C order; found Fortran order");
  std::string shape = after(path, header, "shape");
  shape = shape.substr(0, shape.find(')'));
  constexpr std::size_t most = std::size_t{1} << 40;  // more than memory can hold
  std::size_t count = 1;
  bool valid = shape.starts_with('(') && shape.find_first_not_of("0123456789, ", 1) == std::string::npos;
  for (std::size_t at = 0; valid && (at = shape.find_first_of("0123456789", at)) != std::string::npos;) {
    std::size_t extent = 0;
    const auto [end, error] = std::from_chars(shape.data() + at, shape.data() + shape.size(), extent);
    valid = error == std::errc{} && extent <= most && (extent == 0 || count <= most / extent);
    result.shape.push_back(static_cast<std::ptrdiff_t>(extent));
    count *= extent;
    at = static_cast<std::size_t>(end - shape.data());
  }
  if (!valid) fail(path, "expected the shape of an array; found " + shape + ")");
  const std::string type = after(path, header, "descr").substr(0, 5);
  if (type == "'<f2'")
    result.values = convert<Eigen::half>(path, bytes, data, count);
  else if (type == "'<f4'")
    result.values = convert<float>(path, bytes, data, count);
  else if (type == "'<f8'")
    result.values = convert<double>(path, bytes, data, count);
  else
    fail(path, "expected float16, float32 or float64 ('<f2', '<f4', '<f8'); found " + type);
  return result;
}

void write_npy(const std::string& path, const std::vector<float>& values) {
  const char* const type = std::endian::native == std::endian::little ? "<f4" : ">f4";
  std::string header = std::string("{'descr': '") + type + "', 'fortran_order': False, 'shape': (" +
                       std::to_string(values.size()) + ",), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');  // with what stands before it, in 64s
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << "\x93NUMPY" << '\x01' << '\0' << static_cast<char>(header.size() & 255U)
       << static_cast<char>(header.size() >> 8U) << header;
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  file.close();
  if (!file) fail(path, "cannot be written");
}

}  // namespace bench
