// Which operator suits my data? Error and time of those that stand in for softmax, on queries, keys and values of your
// own. A further one joins with one line in the table of compare.
// Usage: 05_which_operator_suits_my_data [q.npy k.npy v.npy]
// The files hold [batch, heads, length, dim] as float16, float32 or float64; left out, those of two layers of a trained
// sentence encoder are taken.
#include <attn/attn.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct array {
  std::array<attn::index, 4> shape{};
  std::vector<float> numbers;
  attn::tensor_view<const float> view() const { return {numbers.data(), shape}; }
};

array read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = bytes.find("'shape': ("), end = bytes.find('\n', at);  // of the header
  const auto has = [&](const char* text) { return bytes.find(text) < end; };
  array x;
  auto& [b, h, l, d] = x.shape;
  if (end == std::string::npos || !has("'fortran_order': False") ||
      std::sscanf(bytes.c_str() + at, "'shape': (%td, %td, %td, %td)", &b, &h, &l, &d) != 4)
    throw std::runtime_error(path + " is no .npy file of [batch, heads, length, dim] in C order");
  const double numbers = double(b) * double(h) * double(l) * double(d);  // may be more than an index holds
  const auto take = [&](auto number) {
    const std::size_t left = bytes.size() - end - 1;
    if (double(sizeof number) * numbers != double(left))
      throw std::runtime_error(path + " does not hold as many numbers as its shape says");
    for (std::size_t n = end + 1; n < bytes.size(); n += sizeof number) {
      std::memcpy(&number, bytes.data() + n, sizeof number);
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
    throw std::runtime_error(path + " holds neither float16 nor float32 nor float64, little endian");
  return x;
}

// False if even full softmax errs: it is what the others are compared with.
bool compare(const array& query, const array& key, const array& value) {
  const auto q = query.view(), k = key.view(), v = value.view();
  std::printf("%td heads, length %td, dim %td\n", q.extent(1), q.extent(2), q.extent(3));
  array result{{q.extent(0), q.extent(1), q.extent(2), v.extent(3)}, {}};
  result.numbers.resize(static_cast<std::size_t>(result.view().size()));
  const attn::tensor_view<float> out(result.numbers.data(), result.shape);
  attn::full_softmax(q, k, v, out);
  const Eigen::VectorXf exact = Eigen::VectorXf::Map(result.numbers.data(), std::ssize(result.numbers));

  const auto e = attn::draw_projection<float>(256, k.extent(2), {.seed = 1});  // untrained: what training starts from
  const auto features = attn::draw_features<float>(256, q.extent(3), {.seed = 1});
  const auto blocks = attn::draw_random_blocks((q.extent(2) + 31) / 32, 3, {.seed = 1});
  const auto exact_inverse = attn::pseudo_inverse::exact;
  attn::execution serial;
  const std::pair<const char*, std::function<void()>> operators[] = {
      {"full_softmax", [&] { attn::full_softmax(q, k, v, out, {}, serial); }},
      {"sliding_window, 64 each side", [&] { attn::sliding_window(q, k, v, out, {.left = 64, .right = 64}, serial); }},
      {"block, 64 and its neighbours", [&] { attn::block(q, k, v, out, {.size = 64}, serial); }},
      {"strided, 32", [&] { attn::strided(q, k, v, out, {.stride = 32}, serial); }},
      {"bigbird, blocks of 32, 3 random", [&] { attn::bigbird(q, k, v, out, {.size = 32, .random = blocks}, serial); }},
      {"nystrom, 64 landmarks", [&] { attn::nystrom(q, k, v, out, {.landmarks = 64}, serial); }},
      {"nystrom, 64, exact inverse", [&] { attn::nystrom(q, k, v, out, {.inverse = exact_inverse}, serial); }},
      {"nystrom, 256 landmarks", [&] { attn::nystrom(q, k, v, out, {.landmarks = 256}, serial); }},
      {"linformer, rank 256, untrained", [&] { attn::linformer(q, k, v, out, e, e, {}, serial); }},
      {"performer, 256 features", [&] { attn::performer(q, k, v, out, features, {}, serial); }},
      {"linear", [&] { attn::linear(q, k, v, out, {}, serial); }},
  };
  bool right = true;
  for (const auto& [name, run] : operators) {
    double best = 1e9;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      run();
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count());
    }
    const auto found = Eigen::VectorXf::Map(result.numbers.data(), exact.size());
    const double error = (found - exact).norm() / exact.norm();
    std::printf("  %-31s error %6.3f  %8.2f ms\n", name, error, best);
    if (&name == &operators[0].first) right = error < 1e-5;
  }
  return right;
}

int main(int argc, char** argv) try {
  if (argc == 4) return compare(read_npy(argv[1]), read_npy(argv[2]), read_npy(argv[3])) ? 0 : 1;
  bool right = true;
  for (const char* layer : {"use_lite_layer0", "use_lite_layer1"}) {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / ".." / "bench" / "data" / layer;
    const auto read = [&](const char* name) { return read_npy((folder / name).string()); };
    right &= compare(read("q.npy"), read("k.npy"), read("v.npy"));
  }
  return right ? 0 : 1;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
