// A sliding window with global tokens over a real text: what each word looks back at.
// Usage: 04_sliding_window_document [file] [word]; without a file, over the beginning of a book.
#include <attn/softmax/sliding_window.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

const char* const text =  // Lewis Carroll, Alice's Adventures in Wonderland, 1865
    "Rabbit Hole. Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to "
    "do: once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in "
    "it, and what is the use of a book, thought Alice, without pictures or conversations? So she was considering in "
    "her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure "
    "of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White "
    "Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so "
    "very much out of the way to hear the Rabbit say to itself, Oh dear! Oh dear! I shall be late! (when she thought "
    "it over afterwards, it occurred to her that she ought to have wondered at this, but at the time it all seemed "
    "quite natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then "
    "hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit "
    "with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the "
    "field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.";

std::vector<std::string> words_of(std::istream& file) {
  std::vector<std::string> words(1);
  for (char c; file.get(c);)
    if (std::isalnum(static_cast<unsigned char>(c)))
      words.back() += char(std::tolower(static_cast<unsigned char>(c)));
    else if (!words.back().empty())
      words.emplace_back();
  if (words.back().empty()) words.pop_back();
  return words;
}

// A hashed embedding: the sum of one fixed random vector for every three letters in a row, so that words with common
// parts are near each other.
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
  std::istringstream built_in(text);
  std::ifstream file;
  if (argc > 1) file.open(argv[1]);
  if (argc > 1 && !file) return std::fprintf(stderr, "file not found: %s\n", argv[1]), 1;
  const std::vector<std::string> words = words_of(argc > 1 ? static_cast<std::istream&>(file) : built_in);
  if (words.empty()) return std::fprintf(stderr, "no words in %s\n", argv[1]), 1;
  const attn::idx_t length = std::ssize(words), dim = 64;
  matrix x(length, dim), out(length, dim);
  for (attn::idx_t i = 0; i < length; ++i) x.row(i) = embed(words[i], dim);

  // Every word sees the 40 words before it, and from anywhere the first two, the title.
  const std::vector<attn::idx_t> title = {0, 1};
  Eigen::VectorXf lse(length);
  const attn::sliding_window_options<float> window = {
      .causal = true, .left = 40, .global_positions = title, .lse = lse};
  attn::sliding_window(x, x, x, out, window);

  // The log-sum-exp turns a score into its weight, so nothing of size length x length is ever stored.
  const std::string wanted = argc > 2 ? argv[2] : "rabbit";
  bool right = true;
  if (std::find(words.begin(), words.end(), wanted) == words.end())
    return std::fprintf(stderr, "the text has no word \"%s\": name one as the second argument\n", wanted.c_str()), 1;
  std::printf("%td words; each sees the %td before it and the first two. What \"%s\" looks back at:\n", length,
              window.left, wanted.c_str());
  for (attn::idx_t i = 0, shown = 0; i < length && shown < 6; ++i) {
    if (words[i] != wanted) continue;
    ++shown;
    std::vector<std::pair<float, attn::idx_t>> seen;
    float sum = 0;
    for (attn::idx_t j = 0; j <= i; ++j)
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
