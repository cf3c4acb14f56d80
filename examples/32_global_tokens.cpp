// Global tokens of ETC (Ainslie 2020) and BigBird-ETC (Zaheer 2020): extra tokens at the ends of a document, which see
// everything and are seen by everything. Its own tokens also see a window; in BigBird a few random blocks as well.
#include <attn/core/random.hpp>
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/sliding_window.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using attn::idx_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

const idx_t globals = 16, document = 4064, length = globals + document + globals, dim = 64;

double milliseconds(auto&& run) {  // the best of five
  double best = 1e9;
  for (int n = 0; n < 5; ++n) {
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count());
  }
  return best;
}

// attend(q, k, v, out) against full softmax over the pairs of which sees(i, j) is true, beside the global ones.
bool check(const char* name, auto&& attend, auto&& sees) {
  attn::random_numbers random(1);
  matrix x[] = {matrix(length, dim), matrix(length, dim), matrix(length, dim)}, out(length, dim), expected(length, dim);
  for (matrix& m : x)
    for (idx_t n = 0; n < m.size(); ++n) m.data()[n] = float(random.normal());
  const matrix &q = x[0], &k = x[1], &v = x[2];
  const auto global = [](idx_t i) { return i < globals || i >= length - globals; };
  std::vector<std::uint8_t> seen;
  for (idx_t i = 0; i < length; ++i)
    for (idx_t j = 0; j < length; ++j) seen.push_back(global(i) || global(j) || sees(i, j));
  const attn::tensor_view<const std::uint8_t> mask(seen.data(), {1, 1, length, length});
  const double masked = milliseconds([&] { attn::full_softmax(q, k, v, expected, {.mask = mask}); });
  const double named = milliseconds([&] { attend(q, k, v, out); });
  const float difference = (out - expected).norm() / expected.norm();
  std::printf("%-31s %4.1f %% of the pairs, %5.1f ms (with a mask %5.1f), difference %.1e\n", name,
              100. * double(std::count(seen.begin(), seen.end(), 1)) / double(seen.size()), named, masked, difference);
  return difference < 1e-5f;
}

int main() {
  const idx_t reach = 3 * globals, blocks = length / globals, drawn = 3;
  std::vector<idx_t> positions;  // anywhere and in any order
  for (idx_t n = 0; n < globals; ++n) positions.insert(positions.end(), {n, length - 1 - n});
  const auto window = [&](const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    attn::sliding_window(q, k, v, out, {.left = reach, .right = reach, .global_positions = positions});
  };
  bool right = check("a window", window, [&](idx_t i, idx_t j) { return std::abs(i - j) <= reach; });

  // By blocks as large as the groups of global tokens, so that these are the first block and the last one.
  const auto random = attn::draw_random_blocks(blocks, drawn, {.seed = 1, .window_blocks = 7});
  const auto bigbird = [&](const matrix& q, const matrix& k, const matrix& v, matrix& out) {
    attn::bigbird(q, k, v, out, {.size = globals, .window_blocks = 7, .global_blocks = 1, .random = random});
  };
  right &= check("a window of blocks, random ones", bigbird, [&](idx_t i, idx_t j) {
    const idx_t a = i / globals, b = j / globals;
    const idx_t* const row = random.data() + a * drawn;
    return std::abs(a - b) <= 3 || std::find(row, row + drawn, b) != row + drawn;
  });
  return right ? 0 : 1;
}
