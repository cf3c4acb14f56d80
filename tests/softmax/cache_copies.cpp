// Copies of caches and of their items: what they cost, and that nothing is shared but the caller's memory.
#include <attn/aft/aft_local_step.hpp>
#include <attn/low_rank/multipole_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include <chrono>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing::cache_copies_tests {
namespace {

// Copies of a cache or its items cost the tokens, not the room. `roomy` and `exact`, of two items, differ in their room
// alone; over a million tokens a walk through the room takes a thousand times as long as the copies allowed here.
template <class S, class Cache>
void check_copies(Cache& roomy, Cache& exact, idx_t heads = 1, idx_t dim = 4) {
  const tensor<S> k = cast<S>(random_normal(31, 2, heads, 60, dim)), v = cast<S>(random_normal(32, 2, heads, 60, dim));
  const std::vector<idx_t> lengths = {60, 41};
  for (Cache* cache : {&roomy, &exact}) cache->append(view(k), view(v), {.lengths = lengths});
  const auto least_seconds = [](auto&& work) {
    double least = 1e9;
    for (int n = 0; n < 9; ++n) {
      const auto start = std::chrono::steady_clock::now();
      work();
      least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return least;
  };
  const auto compare = [&](const char* what, auto&& work) {
    CAPTURE(what);
    const double large = least_seconds([&] { work(roomy); }), small = least_seconds([&] { work(exact); });
    CAPTURE(large, small);
    CHECK(large <= 50 * small + 50e-6);
  };
  const std::vector<idx_t> swapped = {1, 0};
  compare("reorder", [&](Cache& cache) { cache.reorder(swapped); });
  // Where room is allocated anew, as that of a window, a sanitizer marks all of it: what this costs is not compared.
  if constexpr (requires { roomy.reserve(1); })
    compare("copy", [&](Cache& cache) { CHECK(Cache(cache).tokens(0) == cache.tokens(0)); });
  Cache target(exact);
  if constexpr (requires { roomy.reserve(1); })
    compare("assign", [&](Cache& cache) { target = cache; });
  compare("copy_item", [&](Cache& cache) { cache.copy_item(0, 1); });
  if constexpr (requires { roomy.truncate(1, 30); })
    compare("truncate", [&](Cache& cache) { cache.truncate(1, cache.tokens(1) - 1); });
  compare("reset", [&](Cache& cache) { cache.reset(1); });
}

}  // namespace

TEMPLATE_TEST_CASE("Copies of a cache cost its tokens, not its room", "[cache_copies]", float, Eigen::bfloat16,
                   std::int8_t, attn::int8_channels, attn::int4) {
  using S = std::conditional_t<sizeof(TestType) == 1, float, TestType>;
  const attn::state_extents two{.batch = 2, .heads = 1, .dim = 4};
  attn::kv_cache<TestType> roomy(two), exact(two);
  roomy.reserve(2000000);
  check_copies<S>(roomy, exact);
  if constexpr (std::is_same_v<S, TestType> || std::is_same_v<TestType, std::int8_t>) {
    attn::sliding_window_cache<TestType> wide(two, {.left = 2000000}), narrow(two, {.left = 64});
    check_copies<S>(wide, narrow);
  }
  if constexpr (std::is_same_v<S, TestType>) {
    attn::topk_blocks_cache<TestType> many(two, {.block = 4}), few(two, {.block = 4});
    many.reserve(2000000);
    check_copies<S>(many, few);
  }
}

// Equal to the last bit, whatever room the copy's target had, and what is fed to one does not reach the other.
TEMPLATE_TEST_CASE("A copy of a cache has its tokens", "[cache_copies]", float, attn::int4) {
  const attn::state_extents two{.batch = 2, .heads = 2, .dim = 4, .value_dim = 2};
  attn::kv_cache<TestType> cache(two), small(two), large(two), other({.batch = 3, .heads = 1, .dim = 6});
  const auto k = cast<float>(random_normal(3, 2, 2, 70, 4)), v = cast<float>(random_normal(4, 2, 2, 70, 2));
  cache.reserve(5000), large.reserve(9000);
  const std::vector<idx_t> lengths = {70, 37};
  for (auto* c : {&cache, &large}) c->append(view(k), view(v), {.lengths = lengths});
  const auto same = [&](const attn::kv_cache<TestType>& copy) {
    const auto q = cast<float>(random_normal(5, 2, 2, 1, 4));
    tensor<float> a(2, 2, 1, 2), b = a;
    attn::full_softmax_cached(cache, view(q), view(a));
    attn::full_softmax_cached(copy, view(q), view(b));
    bool equal = copy.tokens(0) == cache.tokens(0) && copy.tokens(1) == cache.tokens(1);
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t n = 0; n < 4; ++n) equal &= a(n / 2, h, 0, n % 2) == b(n / 2, h, 0, n % 2);
    return equal;
  };
  attn::kv_cache<TestType> copy(cache);
  CHECK(same(copy));
  CHECK(copy.capacity() >= 70);
  CHECK(copy.bytes() < cache.bytes() / 5);
  large.reset(), large = cache, small = cache, other = cache;
  for (const auto* c : {&large, &small, &other}) CHECK(same(*c));
  CHECK(large.capacity() >= 9000);
  const attn::kv_cache<TestType> moved(std::move(copy));
  copy = moved;
  for (auto* c : {&cache, &copy, &large, &small, &other}) {
    c->append(view(k), view(v));
    c->reorder(std::vector<idx_t>{1, 0});
  }
  CHECK(same(copy));
  for (const auto* c : {&large, &small, &other}) CHECK(same(*c));
  CHECK(moved.tokens() == 70);
}

TEST_CASE("multipole_cache: copies cost the tokens, not the room", "[cache_copies]") {
  const attn::multipole_cache_options few{.clusters = 2, .segment = 8};
  const attn::state_extents two{.batch = 2, .heads = 1, .dim = 4};
  attn::multipole_cache<float> roomy(two, few), exact(two, few);
  roomy.reserve(2000000);
  check_copies<float>(roomy, exact);
}

TEST_CASE("aft_local_state: reset and copy_item cost the tokens, not the window", "[cache_copies]") {
  const attn::state_extents two{.batch = 2, .heads = 1, .dim = 4};
  attn::aft_local_state<float> roomy(two, {.window = 200000}), exact(two, {.window = 64});
  check_copies<float>(roomy, exact);
}

}  // namespace testing::cache_copies_tests
