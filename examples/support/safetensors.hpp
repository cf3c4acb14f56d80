// Files of weights in the format safetensors: eight bytes with the length of a header in JSON, the header, the numbers.
//
//   const support::arrays weights = support::read_safetensors("model.safetensors");
//   weights.at("encoder.layer.0.output.dense.weight").shape
//
// Tensors of F64, F32, F16 and BF16 are read, all as float; others, such as tables of positions, are left out.
// Throws std::runtime_error, which names the file, the tensor and what is wrong with it.
#pragma once

#include "arrays.hpp"

#include <nlohmann/json.hpp>

namespace support {

inline arrays read_safetensors(const std::string& path) {
  using nlohmann::json;
  const std::string file = read_file(path);
  std::uint64_t length = 0;
  if (file.size() < 8) fail(path, "expected a safetensors file; found " + std::to_string(file.size()) + " bytes");
  for (std::size_t n = 0; n < 8; ++n) length |= std::uint64_t{static_cast<unsigned char>(file[n])} << (8 * n);
  if (length > file.size() - 8) fail(path, "expected a safetensors file; its header ends beyond the file");
  const std::string_view numbers = std::string_view(file).substr(8 + length);
  const json header =
      json::parse(file.begin() + 8, file.begin() + 8 + static_cast<std::ptrdiff_t>(length), nullptr, false);
  if (!header.is_object()) fail(path, "expected a safetensors file; its header is no JSON object");

  arrays result;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const std::string where = path + ": " + name;
    std::string type;
    std::vector<std::ptrdiff_t> shape;
    std::vector<std::size_t> range;
    try {
      type = entry.at("dtype").get<std::string>();
      shape = entry.at("shape").get<std::vector<std::ptrdiff_t>>();
      range = entry.at("data_offsets").get<std::vector<std::size_t>>();
    } catch (const json::exception&) {
      fail(where, "expected dtype, shape and data_offsets in the header");
    }
    if (range.size() != 2 || range[0] > range[1] || range[1] > numbers.size())
      fail(where, "expected data_offsets within the " + std::to_string(numbers.size()) + " bytes of numbers");
    const std::string_view bytes = numbers.substr(range[0], range[1] - range[0]);
    if (type == "F64") result[name] = array_of<double>(where, shape, bytes);
    if (type == "F32") result[name] = array_of<float>(where, shape, bytes);
    if (type == "F16") result[name] = array_of<Eigen::half>(where, shape, bytes);
    if (type == "BF16") result[name] = array_of<Eigen::bfloat16>(where, shape, bytes);
  }
  return result;
}

}  // namespace support
