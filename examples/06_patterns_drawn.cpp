// Patterns as text: which query (row) sees which key (column); and what the last token of stacked windows depends on.
// Usage: 06_patterns_drawn [length]
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/sliding_window.hpp>
#include <attn/softmax/strided.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// Prints patterns side by side.
void print(const std::vector<std::string>& names, const std::vector<std::string>& texts, attn::idx_t length) {
  for (const std::string& name : names) std::printf("%-*s  ", int(length), name.c_str());
  std::puts("");
  for (attn::idx_t row = 0; row < length; ++row) {
    for (const std::string& text : texts)
      std::printf("%.*s  ", int(length), text.c_str() + row * (length + 1));
    std::puts("");
  }
  std::puts("");
}

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The derivatives of the last token by all tokens' values after each layer of a causal window, drawn where they are not
// 0. They are products of weights: with the identity as values each call multiplies by one more layer's. False where
// the field is not the sum of the windows.
bool draw_field(attn::idx_t length, bool doubling) {
  const attn::idx_t left = 3;
  const matrix q = matrix::Random(length, 8), k = matrix::Random(length, 8);
  matrix derivatives = matrix::Identity(length, length), next(length, length);
  bool right = true;
  for (attn::idx_t layer = 0, reach = 0, dilation = 1; layer < 4; ++layer) {
    attn::sliding_window(q, k, derivatives, next, {.causal = true, .left = left, .dilation = {&dilation, 1}});
    derivatives.swap(next);
    reach += left * dilation;
    const auto last = derivatives.row(length - 1);
    for (const float x : last) std::putchar(x != 0 ? '#' : '.');
    std::printf("  layer %td, dilation %td: %td tokens\n", layer + 1, dilation, (last.array() != 0).count());
    right &= (last.array() != 0).count() == std::min(length, reach + 1);
    if (doubling) dilation *= 2;
  }
  std::puts("");
  return right;
}

int main(int argc, char** argv) {
  const attn::idx_t length = argc > 1 ? std::atoi(argv[1]) : 24;
  if (length < 1) return std::fprintf(stderr, "usage: %s [length >= 1]\n", argv[0]), 1;
  const attn::window_pattern window{.left = 3, .right = 3};
  const attn::block_pattern block{.size = 4, .neighbours = 1};
  const auto strided = attn::strided_pattern(4);
  const attn::fixed_pattern fixed{.stride = 4, .summary = 1};
  const auto random = attn::draw_random_blocks((length + 1) / 2, 1, {.seed = 2});
  const attn::bigbird_pattern bigbird{.size = 2, .random = random};
  for (bool causal : {false, true}) {
    if (causal) std::puts("The same with causal = true:\n");
    const auto text = [&](const auto& pattern) { return attn::pattern_text(pattern, length, causal); };
    print({"window 3 + 3", "block 4, 1 neighbour", "strided 4"}, {text(window), text(block), text(strided)}, length);
    print({"fixed 4", "bigbird 2, 1 random"}, {text(fixed), text(bigbird)}, length);
  }
  std::puts("What the last token depends on, through layers of the window 3 + 0:\n");
  const bool constant = draw_field(2 * length, false), doubled = draw_field(2 * length, true);
  return constant && doubled ? 0 : 1;
}
