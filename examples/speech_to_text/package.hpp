// Moonshine as it is distributed: the npm package @moonshine-ai/moonshine-js 0.1.29 (21.5 MB) has the tiny model,
// @usefulsensors/moonshine-js 0.1.16 (66.8 MB) also the base model, both under the licence MIT.
#pragma once

#include <filesystem>

#include "../support/onnx_weights.hpp"
#include "../support/sha256.hpp"

namespace speech {

constexpr const char* fetch_command =
    "npm pack @moonshine-ai/moonshine-js@0.1.29 && tar xf moonshine-ai-moonshine-js-0.1.29.tgz";
constexpr const char* fetch_base =
    "npm pack @usefulsensors/moonshine-js@0.1.16 && tar xf usefulsensors-moonshine-js-0.1.16.tgz";

/// The pieces of the vocabulary, one a line: in the package's script, the first text of more than 200000 digits in
/// base64. Of a script without it, what its last digits are.
inline std::vector<std::string> read_pieces(const std::string& path) {
  const std::string script = support::read_file(path);
  const auto digit = [](char c) {
    const auto at = std::string_view("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/").find(c);
    return at < 64 ? static_cast<int>(at) : -1;
  };
  std::size_t begin = 0, end = 0;
  while (end < script.size() && end - begin <= 200000) {
    for (begin = end; begin < script.size() && digit(script[begin]) < 0;) ++begin;
    for (end = begin; end < script.size() && digit(script[end]) >= 0;) ++end;
  }
  std::vector<std::string> pieces(1);
  unsigned bits = 0;
  for (std::size_t n = begin; n < end; ++n) {
    bits = bits << 6 | static_cast<unsigned>(digit(script[n]));
    const std::size_t place = (n - begin) % 4;  // four digits are three bytes
    if (place == 0) continue;
    const char c = static_cast<char>(bits >> (6 - 2 * place) & 255);
    if (c == '\n') pieces.emplace_back();
    else pieces.back() += c;
  }
  return pieces;
}

struct package {
  support::onnx_file encoder, decoder;
  std::vector<std::string> pieces;
  std::string folder, size;

  /// The files of a size, tiny or base. Throws std::runtime_error if the folder has none.
  package(const std::string& of_folder, const std::string& of_size)
      : encoder(find(of_folder, of_size, "model/" + of_size + "/quantized/encoder_model.onnx")),
        decoder(find(of_folder, of_size, "model/" + of_size + "/quantized/decoder_model_merged.onnx")),
        pieces(read_pieces(find(of_folder, of_size, "moonshine.min.js"))), folder(of_folder), size(of_size) {}

  /// Throws std::runtime_error for files other than those distributed.
  void check() const {
    support::sha256 sum;
    sum.add(encoder.bytes()), sum.add(decoder.bytes());
    for (const std::string& piece : pieces) sum.add(piece + "\n");
    const std::string expected = size == "tiny" ? "e258033a1290e051b0a7052acd186ef8cfd5e9e6ca358b86365ad9f1a18bc4e6"
                                                : "4e3627a57d5c8f96372b6f8d0b95eeb2334241af0f73124e6e237e4c62308f73";
    if (sum.hex() != expected)
      support::fail(folder, "expected files with SHA-256 " + expected + "; found " + sum.hex() +
                                ": fetch them again by " + (size == "tiny" ? fetch_command : fetch_base));
  }

 private:
  static std::string find(const std::string& folder, const std::string& size, const std::string& file) {
    std::string path = folder + (std::filesystem::exists(folder + "/dist") ? "/dist/" : "/") + file;
    if (!std::filesystem::is_regular_file(path))
      support::fail(folder, "expected the unpacked package with dist/" + file + ", as made by " +
                                (size == "tiny" ? fetch_command : fetch_base));
    return path;
  }
};

}  // namespace speech
