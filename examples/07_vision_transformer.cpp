// A Vision Transformer's encoder over the patches of an image, with any operator of the library in it: time, scratch
// memory, and how far the result is from that of full softmax with the same weights.
// Usage: 07_vision_transformer [operator] [side of the image in pixels, a multiple of 16]
#include <attn/attn.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr attn::idx_t patch = 16, width = 256, head_count = 4, layer_count = 4;

matrix random_matrix(attn::random_numbers& numbers, attn::idx_t rows, attn::idx_t columns) {
  matrix m(rows, columns);
  for (float& x : m.reshaped()) x = static_cast<float>(numbers.normal() / std::sqrt(static_cast<double>(columns)));
  return m;
}

// A picture of smooth waves of colour, cut into patches: [tokens, 3 * patch * patch].
matrix patches_of_image(attn::idx_t side) {
  const attn::idx_t across = side / patch;
  matrix patches(across * across, 3 * patch * patch);
  for (attn::idx_t y = 0; y < side; ++y)
    for (attn::idx_t x = 0; x < side; ++x)
      for (attn::idx_t colour = 0; colour < 3; ++colour) {
        const double u = 2.0 * x / side - 1, v = 2.0 * y / side - 1, r = std::hypot(u, v), turn = std::atan2(v, u);
        const attn::idx_t token = y / patch * across + x / patch, pixel = y % patch * patch + x % patch;
        patches(token, 3 * pixel + colour) = float(std::sin(9 * r + 3 * turn + 2 * colour) * std::cos(5 * u * v));
      }
  return patches;
}

struct block {
  matrix query, key, value, output, up, down;

  explicit block(attn::random_numbers& n)
      : query(2 * random_matrix(n, width, width)),
        key(random_matrix(n, width, width)),
        value(random_matrix(n, width, width)),
        output(random_matrix(n, width, width)),
        up(random_matrix(n, 4 * width, width)),
        down(random_matrix(n, width, 4 * width)) {}
};

// The mixer of a block: attention between projections or, for FNet, a transform without parameters.
using sequence = attn::tensor_view<const float, 3>;
using sequence_out = attn::tensor_view<float, 3>;
using mixer = std::function<void(const block&, sequence, sequence_out, attn::execution&)>;

mixer attention(auto attend) {
  return [attend](const block& w, sequence x, sequence_out out, attn::execution& exec) {
    attn::multi_head(x, out, {.query = w.query, .key = w.key, .value = w.value, .output = w.output}, attend,
                     {.heads = head_count}, exec);
  };
}

// One line per operator. Parameters that a model would have learned are random.
std::vector<std::pair<std::string, mixer>> operators(attn::idx_t across) {
  using in = attn::tensor_view<const float>;
  using to = attn::tensor_view<float>;
  using on = attn::execution;
  const attn::idx_t tokens = across * across;
  attn::random_numbers numbers(2);
  const auto e = attn::draw_projection<float>(64, tokens, {.seed = 2});
  const auto features = attn::draw_features<float>(256, width / head_count, {.seed = 3});
  // Biases of aft_*, as large as trained ones: standard deviation 2. With small ones all four are nearly aft_simple.
  const matrix biases = 2 * std::sqrt(float(tokens)) * random_matrix(numbers, tokens, tokens),
               around = 2 * 9 * random_matrix(numbers, 1, 9 * 9),
               logits = random_matrix(numbers, tokens, 16);
  // clang-format off
  return {
      {"full_softmax", attention([](in q, in k, in v, to o, on& x) { attn::full_softmax(q, k, v, o, {}, x); })},
      {"sliding_window", attention([](in q, in k, in v, to o, on& x) { attn::sliding_window(q, k, v, o, {.left = 64, .right = 64}, x); })},
      {"block", attention([](in q, in k, in v, to o, on& x) { attn::block(q, k, v, o, {.size = 64}, x); })},
      {"strided", attention([across](in q, in k, in v, to o, on& x) { attn::strided(q, k, v, o, {.stride = across}, x); })},
      {"bigbird", attention([](in q, in k, in v, to o, on& x) { attn::bigbird(q, k, v, o, {.size = 32}, x); })},
      {"lsh", attention([](in q, in, in v, to o, on& x) { attn::lsh(q, v, o, {.buckets = 16}, x); })},
      {"long_short", attention([logits](in q, in k, in v, to o, on& x) {
         const in same({logits.data(), {1, head_count, logits.rows(), logits.cols()}, {0, 0, logits.cols(), 1}});
         attn::long_short(q, k, v, o, same, {.left = 64, .right = 64}, x);
       })},
      {"linformer", attention([e](in q, in k, in v, to o, on& x) { attn::linformer(q, k, v, o, e, e, {}, x); })},
      {"nystrom", attention([](in q, in k, in v, to o, on& x) { attn::nystrom(q, k, v, o, {.landmarks = 64}, x); })},
      {"multipole", attention([](in q, in k, in v, to o, on& x) { attn::multipole(q, k, v, o, {.exact = 64}, x); })},
      {"linear", attention([](in q, in k, in v, to o, on& x) { attn::linear(q, k, v, o, {}, x); })},
      {"performer", attention([features](in q, in k, in v, to o, on& x) { attn::performer(q, k, v, o, features, {}, x); })},
      {"rfa", attention([features](in q, in k, in v, to o, on& x) { attn::rfa(q, k, v, o, features, {}, x); })},
      {"aft_full", attention([biases](in q, in k, in v, to o, on& x) { attn::aft_full(q, k, v, o, biases, {}, x); })},
      {"aft_local", attention([biases](in q, in k, in v, to o, on& x) { attn::aft_local(q, k, v, o, biases, {.window = 64}, x); })},
      {"aft_simple", attention([](in q, in k, in v, to o, on& x) { attn::aft_simple(q, k, v, o, {}, x); })},
      {"aft_conv", attention([around, across](in q, in k, in v, to o, on& x) {
         attn::aft_conv(q, k, v, o, attn::tensor_view<const float, 3>(around.data(), {1, 9, 9}), {.grid = attn::token_grid{across, across}}, x);
       })},
      {"fnet", [](const block&, sequence s, sequence_out o, on& x) { attn::fnet(attn::split_heads(s, 1), attn::split_heads(o, 1), {}, x); }},
  };
  // clang-format on
}

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  const attn::idx_t side = argc > 2 ? std::atol(argv[2]) : 512, tokens = side / patch * (side / patch);
  if (side < patch || side % patch != 0) return std::fprintf(stderr, "the side must be a multiple of 16\n"), 1;

  attn::random_numbers numbers(1);
  const matrix embedding = random_matrix(numbers, width, 3 * patch * patch),
               place = 5 * random_matrix(numbers, tokens, width);
  const std::vector<block> blocks = [&] {
    std::vector<block> all;
    for (attn::idx_t n = 0; n < layer_count; ++n) all.emplace_back(numbers);
    return all;
  }();
  matrix embedded(tokens, width);
  attn::project(patches_of_image(side), embedded, {.weight = embedding});
  embedded += place;

  const auto encode = [&](const mixer& mix, matrix& x, attn::execution& exec) {
    x = embedded;
    for (const block& w : blocks)
      attn::encoder_block(x, x, {.feed_forward = {.up = w.up, .down = w.down}}, std::bind_front(mix, std::cref(w)),
                          exec);
    attn::layer_norm(x, x, exec);
  };

  const auto table = operators(side / patch);
  if (wanted != "all" &&
      std::none_of(table.begin(), table.end(), [&](const auto& entry) { return entry.first == wanted; })) {
    std::fprintf(stderr, "no operator is called %s; these are there:", wanted.c_str());
    for (const auto& entry : table) std::fprintf(stderr, " %s", entry.first.c_str());
    return std::fputs("\n", stderr), 1;
  }
  matrix exact;
  attn::execution first;
  encode(table.front().second, exact, first);
  std::printf("%td x %td pixels, %td patches; %td blocks of width %td with %td heads, one thread\n\n", side, side,
              tokens, layer_count, width, head_count);
  std::printf("%-16s %10s %12s %30s\n", "operator", "time", "scratch", "distance from full softmax");
  bool right = true;
  for (const auto& [name, mix] : table) {
    if (wanted != "all" && wanted != name) continue;
    matrix x;
    attn::execution exec;
    double best = 1e9;
    for (int n = 0; n < 3; ++n) {
      const auto start = std::chrono::steady_clock::now();
      encode(mix, x, exec);
      best =
          std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    const double distance = (x - exact).norm() / exact.norm();
    std::printf("%-16s %7.1f ms %8.1f MiB %30.3f\n", name.c_str(), best, double(exec.scratch_bytes()) / (1 << 20),
                distance);
    right &= name == "full_softmax" ? distance == 0 : std::isfinite(distance);
  }
  std::puts(
      "\nWeights are random. Without training, the aft_* stay near the mean of all tokens, and so near each other.");
  return right ? 0 : 1;
}
