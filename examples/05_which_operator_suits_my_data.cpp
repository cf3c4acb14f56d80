// Which operator suits my data? The error and the time of each, on queries, keys and values of your own.
// Usage: 05_which_operator_suits_my_data [q.npy k.npy v.npy]
// The files hold [batch, heads, length, dim] as float16, float32 or float64; left out, those of two layers of a trained
// sentence encoder are taken. A further operator joins with one line in the table of main.
#include <attn/attn.hpp>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

struct array {
  std::vector<float> numbers;
  std::array<attn::index, 4> shape{};
  attn::tensor_view<const float> view() const { return {numbers.data(), shape}; }
};

template <class T>
void convert(const std::string& bytes, std::vector<float>& to) {
  T number;
  for (std::size_t at = bytes.size() - to.size() * sizeof(T), n = 0; n < to.size(); ++n, at += sizeof(T)) {
    std::memcpy(&number, bytes.data() + at, sizeof(T));
    to[n] = static_cast<float>(number);
  }
}

array read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  array x;
  const std::size_t at = bytes.find("'shape': (");
  if (at == std::string::npos || bytes.find("'fortran_order': False") == std::string::npos ||
      std::sscanf(bytes.c_str() + at, "'shape': (%td, %td, %td, %td)", &x.shape[0], &x.shape[1], &x.shape[2],
                  &x.shape[3]) != 4)
    throw std::runtime_error(path + " is no .npy file of [batch, heads, length, dim] in C order");
  x.numbers.resize(static_cast<std::size_t>(x.view().size()));
  const auto is = [&](const char* type) { return bytes.find(type) < at; };
  is("<f2")   ? convert<Eigen::half>(bytes, x.numbers)
  : is("<f4") ? convert<float>(bytes, x.numbers)
              : convert<double>(bytes, x.numbers);
  return x;
}

void compare(const array& query, const array& key, const array& value) {
  const auto q = query.view(), k = key.view(), v = value.view();
  std::printf("%td heads, length %td, dim %td\n", q.extent(1), q.extent(2), q.extent(3));
  array exact{std::vector<float>(static_cast<std::size_t>(q.size() / q.extent(3) * v.extent(3))),
              {q.extent(0), q.extent(1), q.extent(2), v.extent(3)}};
  array result = exact;
  const attn::tensor_view<float> out(result.numbers.data(), result.shape);
  attn::full_softmax(q, k, v, attn::tensor_view<float>(exact.numbers.data(), exact.shape));

  const auto e = attn::draw_projection<float>(256, k.extent(2), {.seed = 1});  // untrained: what training starts from
  const auto features = attn::draw_features<float>(256, q.extent(3), {.seed = 1});
  const auto exact_inverse = attn::pseudo_inverse::exact;
  attn::execution serial;
  const std::pair<const char*, std::function<void()>> operators[] = {
      {"full_softmax", [&] { attn::full_softmax(q, k, v, out, {}, serial); }},
      {"sliding_window, 64 each side", [&] { attn::sliding_window(q, k, v, out, {.left = 64, .right = 64}, serial); }},
      {"nystrom, 64 landmarks", [&] { attn::nystrom(q, k, v, out, {.landmarks = 64}, serial); }},
      {"nystrom, 64, exact inverse", [&] { attn::nystrom(q, k, v, out, {.inverse = exact_inverse}, serial); }},
      {"nystrom, 256 landmarks", [&] { attn::nystrom(q, k, v, out, {.landmarks = 256}, serial); }},
      {"linformer, rank 256, untrained", [&] { attn::linformer(q, k, v, out, e, e, {}, serial); }},
      {"performer, 256 features", [&] { attn::performer(q, k, v, out, features, {}, serial); }},
      {"linear", [&] { attn::linear(q, k, v, out, {}, serial); }},
  };
  for (const auto& [name, run] : operators) {
    double best = 1e9, wrong = 0, whole = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      run();
      best =
          std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    for (std::size_t n = 0; n < exact.numbers.size(); ++n) {
      const double difference = result.numbers[n] - exact.numbers[n];
      wrong += difference * difference, whole += exact.numbers[n] * exact.numbers[n];
    }
    std::printf("  %-31s error %6.3f  %8.2f ms\n", name, std::sqrt(wrong / whole), best);
  }
}

int main(int argc, char** argv) try {
  if (argc == 4) return compare(read_npy(argv[1]), read_npy(argv[2]), read_npy(argv[3])), 0;
  for (const char* layer : {"use_lite_layer0", "use_lite_layer1"}) {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / ".." / "bench" / "data" / layer;
    const auto read = [&](const char* name) { return read_npy((folder / name).string()); };
    compare(read("q.npy"), read("k.npy"), read("v.npy"));
  }
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
