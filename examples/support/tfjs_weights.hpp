// Weights of TensorFlow.js: model.json has a manifest of names, shapes and types; the numbers are in files beside it.
//
//   const support::tfjs_files files = support::read_tfjs("model/model.json");
//   const support::arrays weights = support::tfjs_weights(files);
//
// Weights of float32 are read; those of int32, which are constants of the graph, are left out, and quantised ones are
// refused. Throws std::runtime_error, which names the file, the weight and what is wrong with it.
#pragma once

#include "arrays.hpp"

#include <nlohmann/json.hpp>

namespace support {

/// The files as they are, for a checksum.
struct tfjs_files {
  std::string path, model;          // of model.json, and its text
  std::vector<std::string> shards;  // one for every group of the manifest: its files one after another
};

inline nlohmann::json tfjs_manifest(const tfjs_files& files) {
  const auto model = nlohmann::json::parse(files.model, nullptr, false);
  const auto manifest = model.is_object() ? model.find("weightsManifest") : model.end();
  if (manifest == model.end() || !manifest->is_array()) fail(files.path, "expected weightsManifest in JSON");
  return *manifest;
}

inline tfjs_files read_tfjs(const std::string& path) {
  tfjs_files files{path, read_file(path), {}};
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  for (const auto& group : tfjs_manifest(files)) {
    std::vector<std::string> names;
    try {
      names = group.at("paths").get<std::vector<std::string>>();
    } catch (const nlohmann::json::exception&) {
      fail(path, "expected paths in every group of the manifest");
    }
    files.shards.emplace_back();
    for (const std::string& name : names) {
      if (name.find('/') != std::string::npos) fail(path, "expected files beside it in the manifest; found " + name);
      files.shards.back() += read_file(folder + name);
    }
  }
  return files;
}

inline arrays tfjs_weights(const tfjs_files& files) {
  arrays result;
  std::size_t n = 0;
  for (const auto& group : tfjs_manifest(files)) {
    const std::string_view bytes = files.shards[n++];
    std::size_t at = 0;
    for (const auto& weight : group.value("weights", nlohmann::json::array())) {
      std::string name, type;
      std::vector<std::ptrdiff_t> shape;
      try {
        name = weight.at("name").get<std::string>();
        type = weight.at("dtype").get<std::string>();
        shape = weight.at("shape").get<std::vector<std::ptrdiff_t>>();
      } catch (const nlohmann::json::exception&) {
        fail(files.path, "expected name, dtype and shape of every weight in the manifest");
      }
      const std::string where = files.path + ": " + name;
      if ((type != "float32" && type != "int32") || weight.contains("quantization"))
        fail(where, "expected float32 or int32; found " + (type == "float32" ? "quantised numbers" : type));
      const std::size_t size = 4 * count_of(where, shape);
      if (size > bytes.size() - at)
        fail(where,
             "expected " + std::to_string(size) + " bytes of numbers; found " + std::to_string(bytes.size() - at));
      if (type == "float32") result[name] = array_of<float>(where, shape, bytes.substr(at, size));
      at += size;
    }
    if (at != bytes.size())
      fail(files.path, "expected " + std::to_string(at) + " bytes of numbers by its manifest; found " +
                           std::to_string(bytes.size()));
  }
  return result;
}

}  // namespace support
