// A million tokens through linear attention, one at a time: memory and time per token stay constant.
#include <attn/kernel/linear_step.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int main() {
  const attn::idx_t heads = 4, dim = 64, tokens = 1'000'000, period = 1000;

  // Tokens repeat after a while, which makes no difference to the state.
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> memory[3], out_memory(heads * period * dim);
  for (auto& x : memory)
    for (attn::idx_t n = 0; n < heads * period * dim; ++n) x.push_back(normal(random));
  const auto view = [&](float* data) { return attn::tensor_view<float>(data, {1, heads, period, dim}); };
  const auto q = view(memory[0].data()), k = view(memory[1].data()), v = view(memory[2].data()),
             out = view(out_memory.data());

  attn::linear_state<float> state({.heads = heads, .features = dim, .value_dim = dim});
  attn::execution exec;  // keeps its scratch memory from step to step
  const auto feed = [&](attn::idx_t first, attn::idx_t count) {
    const auto rows = [&](const auto& x) { return x.slice(2, first % period, count); };
    attn::linear_step(state, rows(q), rows(k), rows(v), rows(out), exec);
  };

  std::printf("%9s  %12s  %s\n", "tokens", "tokens/s", "bytes of state and scratch");
  double start = seconds();
  for (attn::idx_t token = 0, shown = 0; token < tokens; ++token) {
    feed(token, 1);
    if (token + 1 != 100'000 * (shown == 0 ? 1 : 3 * shown + 1)) continue;
    ++shown;
    std::printf("%9td  %12.0f  %zu\n", state.tokens(), double(state.tokens()) / (seconds() - start),
                state.bytes() + exec.scratch_bytes());
  }
  const std::vector<float> one_by_one = out_memory;

  // The same tokens in chunks, like a prompt: the same results, much faster.
  state.reset();
  start = seconds();
  for (attn::idx_t token = 0; token < tokens; token += period) feed(token, period);
  std::printf("%9td  %12.0f  %zu, in chunks of %td\n", state.tokens(), double(tokens) / (seconds() - start),
              state.bytes() + exec.scratch_bytes(), period);

  double difference = 0, size = 0;
  for (std::size_t n = 0; n < one_by_one.size(); ++n) {
    difference += std::pow(one_by_one[n] - out_memory[n], 2);
    size += std::pow(out_memory[n], 2);
  }
  const double relative = std::sqrt(difference / size);
  std::printf("relative difference of the last %td answers: %.1e\n", period, relative);
  return relative < 1e-3 ? 0 : 1;
}
