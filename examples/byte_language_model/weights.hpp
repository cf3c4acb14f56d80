// Weights as a folder of .npy files, one for each parameter.
#pragma once

#include "text.hpp"

#include <cstring>

namespace byte_model {

inline std::string npy_header(const matrix& m) {
  std::string text = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(m.rows()) + ", " +
                     std::to_string(m.cols()) + "), }";
  text.append(63 - (10 + text.size()) % 64, ' ');
  text += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + char(text.size() % 256) + char(text.size() / 256) + text;
}

// Numbers of the shape of m; throws where the file has another.
inline matrix read_npy(const std::string& name, const matrix& m) {
  std::ifstream file(name, std::ios::binary);
  if (!file) fail("file not found: " + name);
  const std::string all{std::istreambuf_iterator<char>(file), {}}, header = npy_header(m);
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(m.size());
  const auto dictionary = [](const std::string& text) {  // without what may differ: version, length and padding
    const std::size_t from = text.find('{'), end = text.find('}');
    return end < text.size() && from < end ? text.substr(from, end - from) : std::string();
  };
  if (dictionary(all) != dictionary(header) || all.size() != all.find('\n', all.find('}')) + 1 + bytes)
    fail(name + ": expected " + std::to_string(m.rows()) + " x " + std::to_string(m.cols()) +
         " numbers of float32; found " + (dictionary(all).empty() ? "no .npy file" : dictionary(all) + "}"));
  matrix numbers(m.rows(), m.cols());
  std::memcpy(numbers.data(), all.data() + all.size() - bytes, bytes);
  return numbers;
}

inline std::string file_of(const std::string& folder, const parameter& p) { return folder + "/" + p.name + ".npy"; }

inline void load(model& m, const std::string& folder) {
  for (parameter& p : m.parameters)
    if (p.value.size() > 0) p.value = read_npy(file_of(folder, p), p.value);
}

// Throws where the folder holds something else than weights of these shapes, before anything is trained or overwritten.
inline void check_folder(const model& m, const std::string& folder) {
  std::filesystem::create_directories(folder);
  for (const parameter& p : m.parameters)
    if (std::filesystem::exists(file_of(folder, p))) read_npy(file_of(folder, p), p.value);
}

inline void save(const model& m, const std::string& folder) {
  for (const parameter& p : m.parameters) {
    if (p.value.size() == 0) continue;
    std::ofstream file(file_of(folder, p), std::ios::binary);
    const std::string header = npy_header(p.value);
    file.write(header.data(), std::ssize(header));
    file.write(reinterpret_cast<const char*>(p.value.data()), p.value.size() * std::ptrdiff_t(sizeof(float)));
    if (!file) fail("cannot write " + file_of(folder, p));
  }
}

}  // namespace byte_model
