// Which operator suits my data? Error and time of those that approximate softmax, on queries, keys and values of your
// own, and the cheapest whose error is below the one wanted. Another operator takes one more line in the table of
// compare.
// Usage: 05_which_operator_suits_my_data [--causal] [q.npy k.npy v.npy [error]]
// The files hold [batch, heads, length, dim] as float16, float32 or float64. Without them, it makes data in which
// neighbouring tokens are similar; the repository's bench/data has data of a trained model. --causal: a token sees none
// after it; operators without such a form are left out.
#include <attn/attn.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

struct array {
  std::array<attn::idx_t, 4> shape{};
  std::vector<float> numbers;
  attn::tensor_view<const float> view() const { return {numbers.data(), shape}; }
};

array read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("file not found: " + path);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = bytes.find("'shape': ("), end = bytes.find('\n', at);  // of the header
  const auto has = [&](const char* text) { return bytes.find(text) < end; };
  array x;
  auto& [b, h, l, d] = x.shape;
  if (end == std::string::npos || !has("'fortran_order': False") ||
      std::sscanf(bytes.c_str() + at, "'shape': (%td, %td, %td, %td)", &b, &h, &l, &d) != 4 ||
      std::min({b, h, l, d}) < 0)
    throw std::runtime_error(path + ": expected a .npy file of [batch, heads, length, dim] in C order");
  const double numbers = double(b) * double(h) * double(l) * double(d);  // may be more than an index holds
  const auto take = [&](auto number) {
    const std::size_t left = bytes.size() - end - 1;
    if (double(sizeof number) * numbers != double(left))
      throw std::runtime_error(path + ": expected as many numbers as its shape says");
    for (std::size_t n = end + 1; n < bytes.size(); n += sizeof number) {
      std::string one = bytes.substr(n, sizeof number);  // the lowest byte first
      if constexpr (std::endian::native == std::endian::big) std::reverse(one.begin(), one.end());
      std::memcpy(&number, one.data(), sizeof number);
      x.numbers.push_back(static_cast<float>(number));
    }
  };
  if (has("'<f2'"))
    take(Eigen::half());
  else if (has("'<f4'"))
    take(float());
  else if (has("'<f8'"))
    take(double());
  else
    throw std::runtime_error(path + ": expected float16, float32 or float64, little endian");
  return x;
}

// Every channel of every head changes slowly from token to token, around `mean`.
array make(attn::idx_t heads, attn::idx_t length, attn::idx_t dim, double size, double mean, std::uint64_t seed) {
  attn::random_numbers numbers(seed);
  array x{{1, heads, length, dim}, std::vector<float>(static_cast<std::size_t>(heads * length * dim))};
  std::vector<double> state(static_cast<std::size_t>(dim));
  for (std::size_t n = 0; n < x.numbers.size(); ++n) {
    double& channel = state[n % static_cast<std::size_t>(dim)];
    channel = 0.98 * channel + 0.2 * numbers.normal();
    x.numbers[n] = static_cast<float>(mean + size * channel);
  }
  return x;
}

// False if full softmax, which the others are compared with, differs from itself.
bool compare(const array& query, const array& key, const array& value, bool causal, double wanted = 0.1) {
  const auto q = query.view(), k = key.view(), v = value.view();
  for (const array* x : {&query, &key, &value})
    for (const float number : x->numbers)
      if (!std::isfinite(number))
        throw std::runtime_error("expected finite queries, keys and values; found " + std::to_string(number));
  array result{{q.extent(0), q.extent(1), q.extent(2), v.extent(3)}, {}};
  result.numbers.resize(static_cast<std::size_t>(result.view().size()));
  const attn::tensor_view<float> out(result.numbers.data(), result.shape);
  attn::full_softmax(q, k, v, out, {.causal = causal});
  const Eigen::VectorXd exact = Eigen::VectorXf::Map(result.numbers.data(), std::ssize(result.numbers)).cast<double>();
  if (exact.norm() == 0)
    throw std::runtime_error("all results of full softmax are 0, as with values of 0: no error is relative to them");
  std::printf("batch %td, %td heads, length %td, dim %td%s\n", q.extent(0), q.extent(1), q.extent(2), q.extent(3),
              causal ? ", causal" : "");

  const auto e = attn::draw_projection<float>(256, k.extent(2), {.seed = 1});  // random, as before training
  const auto features = attn::draw_features<float>(256, q.extent(3), {.seed = 1});
  const auto blocks = attn::draw_random_blocks((q.extent(2) + 31) / 32, 3, {.seed = 1, .causal = causal});
  const auto exact_inverse = attn::pseudo_inverse::exact;
  attn::execution serial;
  struct contender {
    const char* name;
    bool has_causal;
    std::function<void()> run;
  };
  const contender operators[] = {
      {"full_softmax", true, [&] { attn::full_softmax(q, k, v, out, {.causal = causal}, serial); }},
      {causal ? "sliding_window, 64 back" : "sliding_window, 64 each side", true,
       [&] { attn::sliding_window(q, k, v, out, {.causal = causal, .left = 64, .right = 64}, serial); }},
      {"block, 64 and its neighbours", true,
       [&] { attn::block(q, k, v, out, {.causal = causal, .size = 64}, serial); }},
      {"strided, 32", true, [&] { attn::strided(q, k, v, out, {.causal = causal, .stride = 32}, serial); }},
      {"bigbird, blocks of 32, 3 random", true,
       [&] { attn::bigbird(q, k, v, out, {.causal = causal, .size = 32, .random = blocks}, serial); }},
      {"nystrom, 64 landmarks", false, [&] { attn::nystrom(q, k, v, out, {.landmarks = 64}, serial); }},
      {"nystrom, 64, exact inverse", false, [&] { attn::nystrom(q, k, v, out, {.inverse = exact_inverse}, serial); }},
      {"nystrom, 256 landmarks", false, [&] { attn::nystrom(q, k, v, out, {.landmarks = 256}, serial); }},
      {"multipole", true, [&] { attn::multipole(q, k, v, out, {.causal = causal}, serial); }},
      {"multipole, 96 exact", true,
       [&] { attn::multipole(q, k, v, out, {.causal = causal, .exact = 96}, serial); }},
      {"multipole, 384 exact, probes of 16", true,
       [&] { attn::multipole(q, k, v, out, {.causal = causal, .exact = 384, .probe = 16}, serial); }},
      {"linformer, rank 256, not trained", false, [&] { attn::linformer(q, k, v, out, e, e, {}, serial); }},
      {"performer, 256 features", true,
       [&] { attn::performer(q, k, v, out, features, {.causal = causal}, serial); }},
      {"linear", true, [&] { attn::linear(q, k, v, out, {.causal = causal}, serial); }},
  };
  bool agrees = true;
  const char* recommended = operators[0].name;
  double least = 1e9;
  for (const auto& [name, has_causal, run] : operators) {
    if (causal && !has_causal) continue;
    double best = 1e9;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      run();
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count());
    }
    const auto found = Eigen::VectorXf::Map(result.numbers.data(), exact.size()).cast<double>();
    const double error = (found - exact).norm() / exact.norm();
    std::printf("  %-35s error %6.3f  %8.2f ms%s\n", name, error, best,
                name != operators[0].name && error < 1e-5 ? "  (as full_softmax at this length)" : "");
    if (error <= wanted && best < least) recommended = name, least = best;
    if (name == operators[0].name) agrees = error < 1e-5;
  }
  std::printf("  below an error of %g the cheapest is %s\n", wanted, recommended);
  return agrees;
}

double error_wanted(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0))
    throw std::runtime_error("expected an error >= 0, as 0.1; found \"" + text + '"');
  return value;
}

int main(int argc, char** argv) try {
  std::vector<std::string> files(argv + 1, argv + argc);
  const bool causal = std::erase(files, "--causal") > 0;
  if (files.size() == 3 || files.size() == 4)
    return compare(read_npy(files[0]), read_npy(files[1]), read_npy(files[2]), causal,
                   files.size() == 4 ? error_wanted(files[3]) : 0.1)
               ? 0
               : 1;
  if (!files.empty())
    throw std::runtime_error("usage: 05_which_operator_suits_my_data [--causal] [q.npy k.npy v.npy [error]]");
  std::puts("Made-up data. Attention to a few keys:");
  const array keys = make(4, 1024, 64, 1.7, 0, 1), values = make(4, 1024, 64, 1, 0.3, 2);
  bool right = compare(keys, keys, values, causal);
  std::puts("Attention to most of the keys:");
  const array near_zero = make(4, 1024, 64, 0.6, 0, 1);
  right &= compare(near_zero, near_zero, values, causal);
  return right ? 0 : 1;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
