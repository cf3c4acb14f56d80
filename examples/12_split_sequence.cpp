// One long sequence, split in two: each worker sums up its half, the states are sent as bytes and merged. The sums are
// those of one pass, and so are the results.
#include <attn/kernel/linear_step.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

int main() {
  const attn::idx_t heads = 2, length = 20000, half = length / 2, dim = 32;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q_memory(heads * dim), k_memory(heads * length * dim), v_memory(heads * length * dim);
  for (auto* x : {&q_memory, &k_memory, &v_memory})
    for (float& value : *x) value = normal(random);
  using view = attn::tensor_view<const float>;
  const view k(k_memory.data(), {1, heads, length, dim}), v(v_memory.data(), {1, heads, length, dim});

  const attn::kernel_state_extents extents{.heads = heads, .features = dim, .value_dim = dim};
  const auto feed = [&](attn::linear_state<float>& state, attn::idx_t first, attn::idx_t count) {
    state.append(k.slice(2, first, count), v.slice(2, first, count));
  };

  // Each worker could be a process, or a machine: what it sends back is a stream.
  std::stringstream sent[2];
  const auto work = [&](int n) {
    attn::linear_state<float> state(extents);
    feed(state, n * half, half);
    state.write(sent[n]);
  };
  std::thread first(work, 0), second(work, 1);
  first.join(), second.join();
  std::printf("each half: %td tokens in %zu bytes\n", half, sent[0].str().size());

  attn::linear_state<float> merged(extents), other(extents), whole(extents);
  merged.read(sent[0]);
  other.read(sent[1]);
  merged.merge(other);
  feed(whole, 0, length);
  std::printf("merged: %td tokens; in one pass: %td\n", merged.tokens(), whole.tokens());

  // The next token queries both.
  const view q(q_memory.data(), {1, heads, 1, dim});
  std::vector<float> of_merged(heads * dim), of_whole(heads * dim);
  const auto ask = [&](attn::linear_state<float>& state, std::vector<float>& out) {
    const attn::tensor_view<float> answer(out.data(), {1, heads, 1, dim});
    attn::linear_step(state, q, k.slice(2, 0, 1), v.slice(2, 0, 1), answer);
  };
  ask(merged, of_merged);
  ask(whole, of_whole);
  float difference = 0, largest = 0;
  for (std::size_t n = 0; n < of_merged.size(); ++n) {
    difference = std::max(difference, std::abs(of_merged[n] - of_whole[n]));
    largest = std::max(largest, std::abs(of_whole[n]));
  }
  std::printf("answers up to %.4f; largest difference %.1e\n", largest, difference);

  // A damaged stream is detected.
  std::string bytes = sent[0].str();
  bytes[bytes.size() / 2] ^= 1;
  std::istringstream damaged(bytes);
  try {
    merged.read(damaged);
    return 1;
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
  }
  return difference <= 1e-5f * largest ? 0 : 1;
}
