// Patterns as text: which query (row) sees which key (column).
// Usage: 06_patterns_drawn [length]
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/strided.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// Prints drawings side by side.
void print(const std::vector<std::string>& names, const std::vector<std::string>& drawings, attn::index length) {
  for (const std::string& name : names) std::printf("%-*s  ", int(length), name.c_str());
  std::puts("");
  for (attn::index row = 0; row < length; ++row) {
    for (const std::string& drawing : drawings)
      std::printf("%.*s  ", int(length), drawing.c_str() + row * (length + 1));
    std::puts("");
  }
  std::puts("");
}

int main(int argc, char** argv) {
  const attn::index length = argc > 1 ? std::atoi(argv[1]) : 24;
  if (length < 1) return std::fprintf(stderr, "usage: %s [length >= 1]\n", argv[0]), 1;
  const attn::window_pattern window{3, 3};
  const attn::block_pattern block{4, 1};
  const auto strided = attn::strided_pattern(4);
  const attn::fixed_pattern fixed{4, 1};
  const auto random = attn::draw_random_blocks(1, (length + 1) / 2, 1, {.seed = 2});
  const attn::bigbird_pattern bigbird{2, 3, 1, random};
  for (bool causal : {false, true}) {
    if (causal) std::puts("The same with causal = true:\n");
    const auto drawn = [&](const auto& pattern) { return attn::draw_pattern(pattern, length, causal); };
    print({"window 3 + 3", "block 4, 1 neighbour", "strided 4"}, {drawn(window), drawn(block), drawn(strided)}, length);
    print({"fixed 4", "bigbird 2, 1 random"}, {drawn(fixed), drawn(bigbird)}, length);
  }
}
