// Patterns as text: which query (row) sees which key (column).
// Usage: 06_patterns_drawn [length]
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/strided.hpp>

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
}
