// A lambda changes every score, inlined into the kernel: relative positions, masks, or anything else.
#include <attn/softmax/full_softmax.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

// Row-major [length, heads * dim]: the memory order most models use.
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The fastest of several runs.
template <class F>
double milliseconds(F&& run) {
  double best = 1e9;
  for (int n = 0; n < 10; ++n) {
    const auto start = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

int main() {
  const attn::idx_t length = 1024, heads = 8, dim = 64;
  std::srand(1);
  matrix q = matrix::Random(length, heads * dim), k = matrix::Random(length, heads * dim),
         v = matrix::Random(length, heads * dim), out(length, heads * dim), expected(length, heads * dim);
  const auto Q = attn::split_heads(q, heads), K = attn::split_heads(k, heads), V = attn::split_heads(v, heads);
  const auto O = attn::split_heads(out, heads), E = attn::split_heads(expected, heads);
  const auto difference = [&] { return (out - expected).cwiseAbs().maxCoeff(); };

  // 1. ALiBi: a penalty that grows with the distance, with one slope per head. Once as an option, once by hand.
  std::vector<float> slopes;
  for (int h = 1; h <= heads; ++h) slopes.push_back(std::exp2(-8.f * float(h) / float(heads)));
  const auto alibi = [&](float s, attn::idx_t, attn::idx_t h, attn::idx_t i, attn::idx_t j) {
    return s - slopes[h] * std::abs(float(i - j));
  };
  const double plain = milliseconds([&] { attn::full_softmax(Q, K, V, O); });
  const double built_in = milliseconds([&] { attn::full_softmax(Q, K, V, E, {.alibi_slopes = slopes}); });
  const double by_hand = milliseconds([&] { attn::full_softmax(Q, K, V, O, {}, alibi); });
  std::printf("ALiBi differs from the built-in option by %.1e\n", difference());
  std::printf("  plain %.1f ms, ALiBi built in %.1f ms, ALiBi as a lambda %.1f ms\n", plain, built_in, by_hand);
  std::puts(
      "  (A lambda costs the arithmetic it does for every score. How well that is vectorised depends on the compiler,\n"
      "  so prefer the option where there is one.)");
  bool right = difference() < 1e-5f;

  // 2. Several documents packed into one sequence, none of which sees another: return -infinity for hidden keys.
  const std::vector<attn::idx_t> starts = {0, 300, 301, 777, length};
  std::vector<int> document(length);
  for (std::size_t n = 0; n + 1 < starts.size(); ++n)
    for (attn::idx_t i = starts[n]; i < starts[n + 1]; ++i) document[i] = int(n);
  attn::full_softmax(Q, K, V, O, {}, [&](float s, attn::idx_t, attn::idx_t, attn::idx_t i, attn::idx_t j) {
    return document[i] == document[j] ? s : -std::numeric_limits<float>::infinity();
  });
  for (std::size_t n = 0; n + 1 < starts.size(); ++n) {
    const auto part = [&](const auto& x) { return x.slice(2, starts[n], starts[n + 1] - starts[n]); };
    attn::full_softmax(part(Q), part(K), part(V), part(E));
  }
  std::printf("Documents packed and masked differ from one call per document by %.1e\n", difference());
  return right && difference() < 1e-5f ? 0 : 1;
}
