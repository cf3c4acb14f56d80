// What tests of the readers share: files that go away with the test, and what a broken one is told.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../support/catch.hpp"

namespace testing {

// A folder that goes away with the test.
struct temporary_folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("attn_examples_" + std::to_string(getpid()));
  temporary_folder() { std::filesystem::create_directories(path); }
  ~temporary_folder() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name, std::ios::binary) << bytes;
    return (path / name).string();
  }
};

template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing thrown";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

using shape = std::vector<std::ptrdiff_t>;
using numbers = std::vector<float>;

// A field of a protocol buffer: a number, or bytes with their length.
inline std::string field(unsigned number, unsigned value) {
  std::string result(1, static_cast<char>(number << 3));
  for (; value >= 128; value >>= 7) result += static_cast<char>((value & 127) | 128);
  return result + static_cast<char>(value);
}
inline std::string field(unsigned number, const std::string& bytes) {
  std::string result = field(number, static_cast<unsigned>(bytes.size()));
  result[0] |= 2;
  return result + bytes;
}

}  // namespace testing
