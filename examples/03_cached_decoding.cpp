// Decoding: a prompt in one call, then token by token from the key/value cache; equal to one pass over all.
#include <attn/softmax/full_softmax_step.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int main() {
  // Eight query heads share two key/value heads: the cache is a quarter of what eight would need.
  const attn::idx_t heads = 8, kv_heads = 2, dim = 64, prompt = 1024, total = 1536;

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto draw = [&](attn::idx_t n) {
    std::vector<float> x(n * total * dim);
    for (float& value : x) value = normal(random);
    return x;
  };
  std::vector<float> q_memory = draw(heads), k_memory = draw(kv_heads), v_memory = draw(kv_heads);
  std::vector<float> once(q_memory.size()), stepwise(q_memory.size());

  using view = attn::tensor_view<float>;  // [batch, heads, length, dim]
  const view q(q_memory.data(), {1, heads, total, dim}), out(stepwise.data(), {1, heads, total, dim});
  const view k(k_memory.data(), {1, kv_heads, total, dim}), v(v_memory.data(), {1, kv_heads, total, dim});

  // The expected result of all steps: causal attention over the whole sequence.
  double start = seconds();
  attn::full_softmax(q, k, v, view(once.data(), {1, heads, total, dim}), {.causal = true});
  std::printf("one pass over %td tokens     %8.1f ms\n", total, 1e3 * (seconds() - start));

  attn::kv_cache<float> cache({.heads = kv_heads, .dim = dim});
  cache.reserve(total);  // optional: the cache grows by itself, but must then copy its tokens

  const auto feed = [&](attn::idx_t first, attn::idx_t count) {
    const auto rows = [&](const view& x) { return x.slice(2, first, count); };
    attn::full_softmax_step(cache, rows(q), rows(k), rows(v), rows(out));
  };
  start = seconds();
  feed(0, prompt);
  std::printf("prompt of %td tokens         %8.1f ms\n", prompt, 1e3 * (seconds() - start));

  start = seconds();
  for (attn::idx_t token = prompt; token < total; ++token) feed(token, 1);
  const double each = (seconds() - start) / double(total - prompt);
  std::printf("%td more, one at a time      %8.1f us each: %.0f tokens a second\n", total - prompt, 1e6 * each,
              1 / each);
  std::printf("the cache holds %td tokens in %.2f MiB, read at %.1f GB a second\n", cache.tokens(),
              double(cache.bytes()) / 1048576, 1e-9 * double(cache.bytes()) * (total + prompt) / (2. * total) / each);

  float difference = 0;
  for (std::size_t n = 0; n < once.size(); ++n) difference = std::max(difference, std::abs(once[n] - stepwise[n]));
  std::printf("largest difference from one pass: %.1e\n", difference);

  // Taking tokens back, to try another continuation, costs nothing.
  cache.truncate(prompt);
  feed(prompt, 1);
  std::printf("back to the prompt and one token on: %td tokens\n", cache.tokens());
  return difference < 1e-5f ? 0 : 1;
}
