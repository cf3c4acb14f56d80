// A sliding window with global tokens over a real text: what each word looks back at.
// Usage: 04_sliding_window_document [file] [word]
#include <attn/softmax/sliding_window.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::vector<std::string> read_words(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> words(1);
  for (char c; file.get(c);)
    if (std::isalnum(static_cast<unsigned char>(c)))
      words.back() += char(std::tolower(static_cast<unsigned char>(c)));
    else if (!words.back().empty())
      words.emplace_back();
  if (words.back().empty()) words.pop_back();
  return words;
}

// A hashed embedding: the sum of one fixed random vector per run of three letters, so that like words are near.
Eigen::RowVectorXf embed(const std::string& word, int dim) {
  Eigen::RowVectorXf sum = Eigen::RowVectorXf::Zero(dim);
  const std::string padded = "^" + word + "$";
  for (std::size_t n = 0; n + 2 < padded.size(); ++n) {
    std::minstd_rand random(padded[n] + 131u * padded[n + 1] + 17161u * padded[n + 2]);
    random.discard(3);
    for (float& x : sum) x += float(random()) / float(random.max()) - 0.5f;
  }
  return 6 * sum.normalized();
}

int main(int argc, char** argv) {
  const std::string license = (std::filesystem::path(__FILE__).parent_path() / ".." / "LICENSE").string();
  const std::vector<std::string> words = read_words(argc > 1 ? argv[1] : license);
  if (words.empty()) return std::fprintf(stderr, "no words in %s\n", argc > 1 ? argv[1] : license.c_str()), 1;
  const attn::index length = std::ssize(words), dim = 64;
  matrix x(length, dim), out(length, dim);
  for (attn::index i = 0; i < length; ++i) x.row(i) = embed(words[i], dim);

  // Every word sees the 40 words before it, and from anywhere the first two, the title.
  const std::vector<attn::index> title = {0, 1};
  Eigen::VectorXf lse(length);
  const attn::sliding_window_options<float> window = {
      .causal = true, .left = 40, .global_positions = title, .lse = lse};
  attn::sliding_window(x, x, x, out, window);

  // The log-sum-exp turns a score into its weight, so nothing of size length x length is ever stored.
  const std::string wanted = argc > 2 ? argv[2] : "software";
  bool right = true;
  std::printf("%td words; each sees the %td before it and the first two. What \"%s\" looks back at:\n", length,
              window.left, wanted.c_str());
  for (attn::index i = 0, shown = 0; i < length && shown < 6; ++i) {
    if (words[i] != wanted) continue;
    ++shown;
    std::vector<std::pair<float, attn::index>> seen;
    float sum = 0;
    for (attn::index j = 0; j <= i; ++j)
      if (i - j <= window.left || j < std::ssize(title)) {
        const float weight = std::exp(x.row(i).dot(x.row(j)) / std::sqrt(float(dim)) - lse[i]);
        sum += weight;
        if (j < i) seen.emplace_back(weight, j);
      }
    right &= std::abs(sum - 1) < 1e-5f;
    std::sort(seen.rbegin(), seen.rend());
    std::printf("%6td", i);
    for (std::size_t n = 0; n < std::min<std::size_t>(4, seen.size()); ++n)
      std::printf("  %s(%td) %.0f%%", words[seen[n].second].c_str(), seen[n].second - i, 100 * seen[n].first);
    std::puts("");
  }
  return right ? 0 : 1;
}
