// Compiled with -fno-exceptions -fno-rtti: calls work, with threads and caches too, and one that is refused gives its
// message to the handler.
#include <attn/core/paged_cache.hpp>
#include <attn/core/threads.hpp>
#include <attn/kernel/linear_step.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "expected no exceptions and no RTTI"
#endif

namespace {

constexpr attn::idx_t length = 200, dim = 16;
std::vector<float> numbers(length * dim);
attn::tensor_view<const float> tokens() { return {numbers.data(), {1, 1, length, dim}}; }

bool near(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t n = 0; n < a.size(); ++n)
    if (!(std::abs(a[n] - b[n]) <= 1e-5f)) return false;
  return true;
}

}  // namespace

int main() {
  for (std::size_t n = 0; n < numbers.size(); ++n) numbers[n] = std::sin(static_cast<float>(n));
  std::vector<float> whole(numbers.size()), steps(numbers.size());
  const attn::tensor_view<float> out(whole.data(), {1, 1, length, dim}), by_step(steps.data(), {1, 1, length, dim});
  const auto x = tokens();

  attn::full_softmax(x, x, x, out, {.causal = true}, attn::execution(2, 0));
  attn::page_pool<float> pool({.pages = 8, .page_tokens = 32, .heads = 1, .dim = dim});
  attn::paged_cache<float> cache(pool, 1);
  attn::full_softmax_step(cache, x, x, x, by_step);
  if (!near(whole, steps)) return 1;
  attn::sliding_window(x, x, x, out, {.causal = true, .left = 20, .right = 0});
  attn::sliding_window_cache<float> ring({.dim = dim}, {.left = 20});
  attn::sliding_window_step(ring, x, x, x, by_step);
  if (!near(whole, steps)) return 2;
  attn::linear(x, x, x, out, {.causal = true});
  attn::linear_state<float> state({.features = dim, .value_dim = dim});
  attn::linear_step(state, x, x, x, by_step);
  if (!near(whole, steps)) return 3;

  attn::set_error_handler([](const char* message) {
    std::puts(message);
    std::_Exit(std::strcmp(message, "attn::full_softmax: expected out length = query length 200; found 199") == 0 ? 0 : 4);
  });
  attn::full_softmax(x, x, x, out.slice(2, 0, length - 1));
  return 5;
}
