// Weights as a folder of .npy files, one for each parameter.
#pragma once

#include "text.hpp"

#include <bit>
#include <cstring>

namespace byte_model {

// Numbers are written, and read, in this machine's order of bytes, which the header names.
inline std::string npy_header(const matrix& m) {
  const std::string order = std::endian::native == std::endian::little ? "<" : ">";
  std::string text = "{'descr': '" + order + "f4', 'fortran_order': False, 'shape': (" + std::to_string(m.rows()) + ", " +
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

// The model that weights belong to, as options of the program.
inline std::string description(const model& m) {
  std::string text = "--operator " + m.op.name;
  for (const auto& [name, value] : {std::pair(" --layers ", m.s.layers), std::pair(" --width ", m.s.width),
                                    std::pair(" --heads ", m.s.heads), std::pair(" --context ", m.s.context)})
    text += name + std::to_string(value);
  return text + (m.s.masked ? " --masked" : "") + (m.s.reversible ? " --reversible" : "");
}

// Throws where the folder holds the weights of another model, or none.
inline void check_description(const model& m, const std::string& folder) {
  std::string found;
  std::ifstream file(folder + "/model.txt");
  std::getline(file, found);
  if (found != description(m))
    fail(folder + ": expected weights of " + description(m) + "; found " + (found.empty() ? "no model.txt" : found));
}

inline void load(model& m, const std::string& folder) {
  check_description(m, folder);
  for (parameter& p : m.parameters)
    if (p.value.size() > 0) p.value = read_npy(file_of(folder, p), p.value);
}

// Makes the folder; throws, before any training, if it exists and holds anything else than weights of the same model.
inline void check_folder(const model& m, const std::string& folder) {
  namespace fs = std::filesystem;
  if (fs::exists(folder) && !fs::is_directory(folder)) fail(folder + " is not a folder");
  fs::create_directories(folder);
  if (fs::is_empty(folder)) return;
  check_description(m, folder);
  for (const parameter& p : m.parameters)
    if (fs::exists(file_of(folder, p))) read_npy(file_of(folder, p), p.value);
}

inline void save(const model& m, const std::string& folder) {
  const auto write = [](const std::string& name, const std::string& content) {
    std::ofstream file(name, std::ios::binary);
    if (!(file << content).flush()) fail("cannot write " + name);
  };
  write(folder + "/model.txt", description(m) + '\n');
  for (const parameter& p : m.parameters) {
    if (p.value.size() == 0) continue;
    std::string content = npy_header(p.value);
    content.append(reinterpret_cast<const char*>(p.value.data()),
                   sizeof(float) * static_cast<std::size_t>(p.value.size()));
    write(file_of(folder, p), content);
  }
}

}  // namespace byte_model
