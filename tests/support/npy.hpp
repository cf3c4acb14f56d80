#pragma once
// Reads NumPy's .npy files: C order, little endian, float16/32/64 and int64. Values arrive as double.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "support/tensor.hpp"

namespace testing {

static_assert(std::endian::native == std::endian::little, "the reader copies little-endian numbers");

struct npy_array {
  std::vector<idx_t> shape;
  std::vector<double> values;
};

inline double from_half(std::uint16_t bits) {
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

namespace detail {

// The text after `'key':` in the header's dictionary.
inline std::string npy_field(const std::string& header, const std::string& key) {
  const auto at = header.find("'" + key + "'");
  const auto colon = at == std::string::npos ? at : header.find(':', at);
  if (colon == std::string::npos) throw std::runtime_error("no '" + key + "' in the header");
  const auto begin = header.find_first_not_of(' ', colon + 1);
  if (begin == std::string::npos) throw std::runtime_error("nothing after '" + key + "'");
  const auto end = header[begin] == '(' ? header.find(')', begin) + 1 : header.find_first_of(",}", begin);
  return header.substr(begin, end - begin);
}

template <class Stored>
std::vector<double> npy_values(const char* from, std::size_t count) {
  std::vector<double> values(count);
  for (std::size_t n = 0; n < count; ++n) {
    Stored x;
    std::memcpy(&x, from + n * sizeof(Stored), sizeof(Stored));
    if constexpr (std::is_same_v<Stored, std::uint16_t>)
      values[n] = from_half(x);
    else
      values[n] = static_cast<double>(x);
  }
  return values;
}

inline npy_array parse_npy(const std::string& bytes) {
  if (bytes.size() < 12 || bytes.compare(0, 6, "\x93NUMPY") != 0) throw std::runtime_error("not an npy file");
  const bool first_version = bytes[6] == 1;  // version 1 has a 2-byte header length, later ones 4
  std::uint32_t header_size = 0;
  std::memcpy(&header_size, bytes.data() + 8, first_version ? 2 : 4);
  const std::size_t begin = first_version ? 10 : 12;
  if (bytes.size() < begin + header_size) throw std::runtime_error("the header is cut off");
  const std::string header = bytes.substr(begin, header_size);
  if (npy_field(header, "fortran_order") != "False") throw std::runtime_error("not in C order");

  npy_array array;
  std::size_t count = 1;
  const std::string shape = npy_field(header, "shape");
  for (std::size_t at = 0; (at = shape.find_first_of("0123456789", at)) != std::string::npos;) {
    std::size_t digits = 0;
    array.shape.push_back(std::stoll(shape.substr(at), &digits));
    count *= static_cast<std::size_t>(array.shape.back());
    at += digits;
  }

  const std::string type = npy_field(header, "descr");
  const char* data = bytes.data() + begin + header_size;
  const std::size_t available = bytes.size() - begin - header_size;
  const auto read = [&]<class Stored>(Stored) {
    if (available != count * sizeof(Stored)) throw std::runtime_error("size and shape disagree");
    array.values = npy_values<Stored>(data, count);
  };
  if (type == "'<f8'")
    read(double{});
  else if (type == "'<f4'")
    read(float{});
  else if (type == "'<f2'")
    read(std::uint16_t{});
  else if (type == "'<i8'")
    read(std::int64_t{});
  else
    throw std::runtime_error("unknown element type " + type);
  return array;
}

}  // namespace detail

inline npy_array read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  try {
    return detail::parse_npy(bytes);
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

}  // namespace testing
