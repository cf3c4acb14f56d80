// Your own pattern: every word sees its sentence and the first word of every other sentence.
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/pattern_softmax.hpp>

#include <chrono>
#include <cstdio>
#include <limits>
#include <vector>

// Queries that share keys form a query set: here, the words of a sentence. Every query is in exactly one.
struct sentences {
  std::vector<attn::idx_t> starts;  // of every sentence

  attn::idx_t query_sets(const attn::pattern_shape&) const { return std::ssize(starts); }

  attn::position_range queries(const attn::pattern_shape& s, attn::idx_t set) const {
    return {starts[set], set + 1 < std::ssize(starts) ? starts[set + 1] : s.keys};
  }

  void keys(const attn::pattern_shape& s, attn::idx_t set, auto&& see) const {
    const attn::position_range own = queries(s, set);
    see(attn::position_range{own.begin + 1, own.end});  // no key twice: the first word is in the list
    see(starts);
  }
};

int main() {
  const sentences small{{0, 5, 8, 15, 18}};
  std::printf("Five sentences in 24 words:\n\n%s\n", attn::pattern_text(small, 24).c_str());

  // Sentences of 10 to 50 words.
  const attn::idx_t length = 4096, dim = 64;
  sentences text{{0}};
  for (attn::idx_t n = 0; text.starts.back() < length - 50; ++n)
    text.starts.push_back(text.starts.back() + 10 + n * 17 % 41);
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const matrix q = matrix::Random(length, dim), k = matrix::Random(length, dim), v = matrix::Random(length, dim);
  matrix by_pattern(length, dim), by_mask(length, dim);

  std::vector<attn::idx_t> sentence_of(length);
  for (attn::idx_t s = 0; s < std::ssize(text.starts); ++s)
    for (attn::idx_t i = text.starts[s]; i < length; ++i) sentence_of[i] = s;
  const auto mask = [&](float score, attn::idx_t, attn::idx_t, attn::idx_t i, attn::idx_t j) {
    const bool seen = sentence_of[i] == sentence_of[j] || text.starts[sentence_of[j]] == j;
    return seen ? score : -std::numeric_limits<float>::infinity();
  };
  const auto milliseconds = [](auto&& run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  const double masked = milliseconds([&] { attn::full_softmax(q, k, v, by_mask, {}, mask); });
  const double named = milliseconds([&] { attn::pattern_softmax(q, k, v, by_pattern, text); });
  const float difference = (by_pattern - by_mask).norm() / by_mask.norm();
  std::printf("%td words in %zu sentences: full softmax with a mask %.1f ms, by the pattern %.1f ms, difference %.1e\n",
              length, text.starts.size(), masked, named, difference);
  return difference < 1e-5f ? 0 : 1;
}
