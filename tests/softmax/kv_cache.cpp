// A cache holds what was appended; decoding with it equals the rows of one causal call.
#include <attn/softmax/full_softmax_step.hpp>

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/run.hpp"

namespace testing::kv_cache_tests {
namespace {

// How 100 tokens may arrive.
const std::vector<std::vector<idx_t>> feedings = {
    std::vector<idx_t>(100, 1), {100}, {60, 1, 1, 1, 20, 17}, {1, 98, 1}, {33, 33, 34}, {0, 50, 0, 50}};

template <class S>
tensor<S> part(const tensor<double>& x, idx_t begin, idx_t count) {
  return cast<S>(rows(x, begin, count));
}

// All rows of the problem by appending chunk after chunk.
template <class S>
reference::result decode(const full_softmax_problem& p, const std::vector<idx_t>& chunks, attn::kv_cache<S>& cache) {
  stored_options<S, reference::full_softmax_options> stored(p.options);
  reference::result all = reference::empty_result(p.q, p.v);
  attn::execution serial;
  idx_t begin = 0;
  for (idx_t count : chunks) {
    const tensor<S> q = part<S>(p.q, begin, count), k = part<S>(p.k, begin, count), v = part<S>(p.v, begin, count);
    tensor<S> out(p.q.batch(), p.q.heads(), count, p.v.dim(), S(7));
    tensor<real<S>> lse(p.q.batch(), p.q.heads(), count, 1, real<S>(7)), bias;
    stored.options.lse = row_view(lse);
    if (!p.options.bias.empty()) {  // [B, H, count, size after the append]
      bias = tensor<real<S>>(p.q.batch(), p.q.heads(), count, begin + count);
      for (idx_t b = 0; b < bias.batch(); ++b)
        for (idx_t h = 0; h < bias.heads(); ++h)
          for (idx_t i = 0; i < count; ++i)
            for (idx_t j = 0; j < begin + count; ++j)
              bias(b, h, i, j) = static_cast<real<S>>(p.options.bias.broadcast(b, h, begin + i, j));
      stored.options.bias = view(std::as_const(bias));
    }
    compiled_full_softmax<S>::step(cache, view(q), view(k), view(v), view(out), stored.options, stored.score, serial);
    for (idx_t b = 0; b < out.batch(); ++b)
      for (idx_t h = 0; h < out.heads(); ++h)
        for (idx_t i = 0; i < count; ++i) {
          for (idx_t d = 0; d < out.dim(); ++d) all.out(b, h, begin + i, d) = static_cast<double>(out(b, h, i, d));
          all.lse(b, h, begin + i, 0) = static_cast<double>(lse(b, h, i, 0));
        }
    begin += count;
  }
  return all;
}

template <class S>
void check(full_softmax_problem p, const std::vector<idx_t>& chunks) {
  p.options.causal = true;
  p = rounded<S>(p);
  attn::kv_cache<S> cache(
      {.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()});
  const reference::result actual = decode<S>(p, chunks, cache), wanted = expected(p);
  CHECK(cache.tokens() == p.k.length());
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

full_softmax_problem hundred_tokens(idx_t heads = 4, idx_t kv_heads = 2) {
  return random_problem<full_softmax_problem>(
      {.heads = heads, .kv_heads = kv_heads, .queries = 100, .keys = 100, .dim = 20, .value_dim = 12});
}

template <class S>
bool same(const attn::tensor_view<const S>& stored, const tensor<S>& x) {
  if (stored.extents() != x.extents) return false;
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d)
          if (stored(b, h, i, d) != x(b, h, i, d)) return false;
  return true;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("full_softmax_step: any feeding equals one causal call", "[kv_cache]", all_types) {
  for (std::size_t n = 0; n < feedings.size(); ++n) {
    CAPTURE(n);
    check<TestType>(hundred_tokens(), feedings[n]);
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_step: every option", "[kv_cache]", exact_types) {
  for (int bits : selected_bits(5)) {
    full_softmax_problem p = hundred_tokens();
    if (bits & 1) p.options.softcap = 1.5;
    if (bits & 2) p.options.alibi_slopes = {0.5, 0.25, 0.125, 0};
    if (bits & 4) p.options.sinks = {0.3, -1, 2, 0};
    if (bits & 8) p.options.bias = random_normal(4, 1, 4, 100, 100);
    if (bits & 16)
      p.options.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
        return (i + 2 * j + h) % 7 == 0 ? -reference::infinity : s + 0.01 * static_cast<double>(i - j + b);
      };
    p.options.scale = 0.3;
    CAPTURE(bits);
    check<TestType>(p, feedings[0]);
    check<TestType>(p, feedings[2]);
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_step: grouped queries over a longer cache", "[kv_cache]", exact_types) {
  for (auto [heads, kv_heads] : {std::pair<idx_t, idx_t>{32, 8}, {8, 1}, {5, 5}, {7, 1}}) {
    const auto p = random_problem<full_softmax_problem>(
        {.batch = 1, .heads = heads, .kv_heads = kv_heads, .queries = 600, .keys = 600, .dim = 64, .value_dim = 64});
    CAPTURE(heads, kv_heads);
    check<TestType>(p, {590, 1, 1, 1, 5, 2});
  }
}

TEMPLATE_LIST_TEST_CASE("kv_cache: holds what was appended", "[kv_cache]", all_types) {
  const auto p = hundred_tokens();
  const auto k = cast<TestType>(p.k), v = cast<TestType>(p.v);
  attn::kv_cache<TestType> cache({.batch = 2, .heads = 2, .dim = 20, .value_dim = 12});
  CHECK(cache.tokens() == 0);
  CHECK(cache.keys().extents() == std::array<idx_t, 4>{2, 2, 0, 20});
  for (idx_t begin : {0, 10, 20, 90}) {
    const idx_t count = begin == 20 ? 70 : 10;
    const auto some_k = part<TestType>(p.k, begin, count), some_v = part<TestType>(p.v, begin, count);
    cache.append(view(some_k), view(some_v));
    CHECK(cache.tokens() == begin + count);
  }
  CHECK(same(cache.keys(), k));
  CHECK(same(cache.values(), v));
  CHECK(cache.capacity() >= 100);
  CHECK(cache.bytes() >= 100 * 2 * 2 * (20 + 12) * sizeof(TestType));

  SECTION("truncate keeps the first tokens") {
    cache.truncate(37);
    CHECK(cache.tokens() == 37);
    CHECK(same(cache.keys(), rows(k, 0, 37)));
    cache.append(view(std::as_const(k)).slice(2, 37, 63), view(std::as_const(v)).slice(2, 37, 63));
    CHECK(same(cache.keys(), k));
    CHECK(same(cache.values(), v));
  }
  SECTION("reset empties it and keeps the memory") {
    const std::size_t bytes = cache.bytes();
    cache.reset();
    CHECK(cache.tokens() == 0);
    CHECK(cache.bytes() == bytes);
  }
  SECTION("a copy stands for itself") {
    auto copy = cache;
    cache.reset();
    const tensor<TestType> zeros_k(2, 2, 50, 20), zeros_v(2, 2, 50, 12);
    cache.append(view(zeros_k), view(zeros_v));
    CHECK(same(copy.keys(), k));
    CHECK(same(copy.values(), v));
  }
  SECTION("a move takes everything along") {
    const TestType* stored = cache.keys().data();
    const auto moved = std::move(cache);
    CHECK(moved.keys().data() == stored);
    CHECK(same(moved.values(), v));
  }
}

TEST_CASE("kv_cache: what was reserved does not move", "[kv_cache]") {
  attn::kv_cache<float> cache({.heads = 2, .dim = 8});
  cache.reserve(500);
  CHECK(cache.capacity() >= 500);
  CHECK(cache.tokens() == 0);
  const float* stored = cache.keys().data();
  const tensor<float> token(1, 2, 1, 8, 1.5f);
  for (int n = 0; n < 500; ++n) cache.append(view(token), view(token));
  CHECK(cache.keys().data() == stored);
  cache.reserve(10);
  CHECK(cache.tokens() == 500);
}

TEST_CASE("kv_cache: appending is cheap without reserving", "[kv_cache]") {
  attn::kv_cache<float> cache({.dim = 4});
  const tensor<float> token(1, 1, 1, 4, 1.5f);
  int moves = 0;
  for (int n = 0; n < 4000; ++n) {
    const idx_t before = cache.capacity();
    cache.append(view(token), view(token));
    moves += cache.capacity() != before;
  }
  CHECK(moves <= 40);  // growth by a factor, not by a step
}

TEST_CASE("full_softmax_step: scratch does not grow with the cache", "[kv_cache]") {
  for (idx_t count : {1, 9, 64}) {
    attn::kv_cache<float> cache({.heads = 2, .dim = 32});
    attn::execution execution;
    std::size_t at_4096 = 0;  // up to 2048 keys, one piece, may take less
    const tensor<float> q(1, 8, count, 32, 0.1f), token(1, 2, count, 32, 0.2f), chunk(1, 2, 2048 - count, 32, 0.3f);
    tensor<float> out(1, 8, count, 32);
    for (int n = 1; n <= 4; ++n) {
      cache.append(view(chunk), view(chunk));
      compiled_full_softmax<float>::step(cache, view(q), view(token), view(token), view(out), {}, {}, execution);
      if (n == 2) at_4096 = execution.scratch_bytes();
    }
    CHECK(cache.tokens() == 8192);
    CHECK(execution.scratch_bytes() == at_4096);
  }
}

TEST_CASE("full_softmax_step: what a score function throws leaves the cache as it was", "[kv_cache]") {
  attn::kv_cache<float> cache({.dim = 4});
  const tensor<float> x(1, 1, 3, 4, 0.5f);
  tensor<float> out(1, 1, 3, 4);
  cache.append(view(x), view(x));
  const auto score = [](float s, idx_t, idx_t, idx_t i, idx_t) { return i < 5 ? s : throw std::runtime_error("no"); };
  CHECK_THROWS_AS(attn::full_softmax_step(cache, view(x), view(x), view(x), view(out), {}, score), std::runtime_error);
  CHECK(cache.tokens() == 3);
}

TEST_CASE("full_softmax_step: queries that lie in the cache are refused", "[kv_cache]") {
  attn::kv_cache<float> cache({.dim = 4});
  const tensor<float> x(1, 1, 16, 4, 0.5f);
  tensor<float> out(1, 1, 1, 4);
  cache.append(view(x), view(x));
  const auto token = view(x).slice(2, 0, 1);
  CHECK_THROWS_AS(attn::full_softmax_step(cache, cache.keys().slice(2, 3, 1), token, token, view(out)),
                  std::invalid_argument);
  CHECK(cache.tokens() == 16);
}

}  // namespace testing::kv_cache_tests
