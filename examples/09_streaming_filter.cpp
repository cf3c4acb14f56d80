// A streaming filter over the bytes of a text: causal aft_local, fed byte by byte, predicts the next byte from the
// frequencies of the bytes so far, recent ones counting more. Its memory does not grow with the text. Usage:
// 09_streaming_filter [file]; without a file it makes a text.
#include <attn/aft/aft_local_step.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

// Paragraphs, each of a few words that are repeated often: recent bytes are then a better guide than older ones.
std::string make_text() {
  std::minstd_rand random(1);
  const auto below = [&](unsigned n) { return static_cast<unsigned>(random() >> 8) % n; };
  std::string text;
  for (int paragraph = 0; paragraph < 60; ++paragraph, text += '\n') {
    std::vector<std::string> words(8);
    for (std::string& word : words)
      for (unsigned n = 2 + below(7); n > 0; --n) word += char('a' + below(5) + below(6) + below(16));
    for (int n = 0; n < 60; ++n) text += words[below(8)] + (below(8) == 0 ? ", " : " ");
  }
  return text;
}

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "text made by this program";
  std::string text = argc > 1 ? std::string() : make_text();
  if (argc > 1) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return std::fprintf(stderr, "file not found: %s\n", path.c_str()), 1;
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  if (text.size() < 2) return std::fprintf(stderr, "%s: expected at least two bytes\n", path.c_str()), 1;

  // Every head is a filter. All keys are 0, so a byte's weight depends on the bias alone: e^b for bytes in the window,
  // 1 for those before it (b decreases by 1 towards the start of the window). With b = 20 only the window counts.
  constexpr attn::idx_t bytes = 256, window = 128, band = 2 * window - 1;
  const std::vector<float> boost = {0, 1, 2, 3, 4, 20};
  const attn::idx_t heads = std::ssize(boost);
  std::vector<float> w(std::size_t(heads * band)), value(bytes), chance(std::size_t(heads * bytes));
  for (attn::idx_t h = 0; h < heads; ++h)
    for (attn::idx_t p = 0; p < window; ++p) w[h * band + p] = boost[h] - (h ? float(window - 1 - p) / window : 0);

  // One row of biases serves every position, one key and one value every head: strides of 0.
  const float no_key = 0;
  const attn::tensor_view<const float> biases(w.data(), {1, heads, std::numeric_limits<int>::max(), band},
                                              {0, band, 0, 1});
  const attn::tensor_view<const float> key(&no_key, {1, heads, 1, bytes}, {0, 0, 0, 0});
  const attn::tensor_view<const float> one_hot(value.data(), {1, heads, 1, bytes}, {0, 0, 0, 1});
  const attn::tensor_view<float> out(chance.data(), {1, heads, 1, bytes});

  attn::aft_local_state<float> state({.heads = heads, .dim = bytes}, {.window = window});
  std::vector<double> bits(boost.size());
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t n = 0; n + 1 < text.size(); ++n) {
    const auto now = static_cast<unsigned char>(text[n]), next = static_cast<unsigned char>(text[n + 1]);
    value[now] = 1;
    attn::aft_local_step(state, key, key, one_hot, out, biases, {.band = true, .gate = false});
    value[now] = 0;
    // The bits a compressor would need for the next byte; bytes that have not occurred yet have a small probability.
    for (attn::idx_t h = 0; h < heads; ++h)
      bits[h] -= std::log2(0.98 * double(chance[h * bytes + next]) + 0.02 / bytes);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  std::printf("%s: %zu bytes, %.0f per second through %td filters of %td channels; state of %zu KiB\n", path.c_str(),
              text.size(), double(text.size()) / seconds, heads, bytes, state.bytes() / 1024);
  std::printf("bits per byte, if the last %td count e^b times as much as those before:\n", window);
  for (attn::idx_t h = 0; h < heads; ++h)
    std::printf("  b = %2.0f  %.3f  %s\n", double(boost[h]), bits[h] / double(text.size() - 1),
                std::string(std::size_t(std::lround(8 * bits[h] / double(text.size() - 1))), '#').c_str());
}
