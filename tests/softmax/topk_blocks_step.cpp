// Decoding with a topk_blocks_cache equals the rows of one topk_blocks call; the cache can be cut, copied and refilled.
#include <stdexcept>

#include "support/catch.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing {
namespace {

// How 100 tokens may arrive.
const std::vector<std::vector<index>> feedings = {
    std::vector<index>(100, 1), {100}, {60, 1, 1, 1, 20, 17}, {1, 98, 1}, {33, 4, 33, 5, 25}, {0, 50, 0, 50}};

topk_blocks_problem some(index block, index topk, std::uint64_t seed = 1) {
  return topk_problem({.queries = 100, .keys = 100, .dim = 9, .value_dim = 12}, block, topk, seed);
}
template <class S>
attn::topk_blocks_cache<S> cache_for(const topk_blocks_problem& p) {
  return attn::topk_blocks_cache<S>(
      {.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()},
      {.block = p.options.block});
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: token by token, in chunks and at once agree", "[topk_blocks_step]",
                        all_types) {
  using S = TestType;
  attn::execution serial, three(3, 0);
  for (auto [block, topk] : {std::array<index, 2>{8, 3}, {1, 4}, {30, 2}, {7, 100}, {1000, 2}, {16, 1}})
    for (int choice : {0, 14, 48}) {  // all terms but a score, which has its own positions
      topk_blocks_problem p = rounded<S>(some(block, topk, 2));
      choose(p.options, choice, 100, 100);
      p.options.query_lengths = p.options.key_lengths = {};
      REQUIRE(reference::topk_gap(p.q, p.k, p.options) > 1e-6);  // rounding does not choose
      const reference::result wanted = reference::topk_blocks(p.q, p.k, p.v, p.options);
      for (const auto& chunks : feedings) {
        CAPTURE(block, topk, choice, chunks);
        auto cache = cache_for<S>(p);
        const reference::result actual = in_steps<S>(p, cache, chunks, serial);
        CHECK(cache.tokens() == 100);
        CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
        CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
        auto shared = cache_for<S>(p);
        CHECK(in_steps<S>(p, shared, chunks, three).out == actual.out);
      }
    }
}

TEST_CASE("topk_blocks_cache: what was cut off was never there", "[topk_blocks_step]") {
  const topk_blocks_problem p = rounded<float>(some(8, 3)), other = rounded<float>(some(8, 3, 5));
  attn::execution serial;
  for (index kept : {0, 3, 8, 37, 64, 71})
    for (index more : {1, 29}) {
      CAPTURE(kept, more);
      auto cache = cache_for<float>(p), fresh = cache;
      const tensor<float> k = cast<float>(p.k), v = cast<float>(p.v);
      const tensor<float> k2 = cast<float>(other.k), v2 = cast<float>(other.v);
      const auto part = [](const tensor<float>& x, index begin, index count) { return view(x).slice(2, begin, count); };
      cache.append(part(k, 0, kept), part(v, 0, kept));
      cache.append(part(k2, kept, more), part(v2, kept, more));
      cache.truncate(kept);
      fresh.append(part(k, 0, kept), part(v, 0, kept));
      CHECK(cache.tokens() == kept);
      const std::vector<index> rest(static_cast<std::size_t>(100 - kept), 1);
      auto copy = cache;
      const reference::result went_on = in_steps<float>(p, cache, rest, serial);
      CHECK(went_on.out == in_steps<float>(p, fresh, rest, serial).out);
      CHECK(went_on.out == in_steps<float>(p, copy, rest, serial).out);
      cache.reset();
      CHECK(cache.tokens() == 0);
      auto empty = cache_for<float>(p);
      CHECK(in_steps<float>(p, cache, {100}, serial).out == in_steps<float>(p, empty, {100}, serial).out);
    }
}

TEST_CASE("topk_blocks_cache: extents, room and bytes", "[topk_blocks_step]") {
  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 3, .dim = 4, .value_dim = 5}, {.block = 16});
  CHECK(cache.bytes() == 0);
  cache.reserve(100);
  CHECK(cache.capacity() == 100);
  CHECK(cache.bytes() >= 2 * 3 * (100 * (4 + 5) + 7 * 4) * sizeof(float));
  const tensor<float> k(2, 3, 10, 4, 1), v(2, 3, 10, 5, 2);
  cache.append(view(k), view(v));
  CHECK(cache.tokens() == 10);
  CHECK(cache.batch() == 2);
  CHECK(cache.heads() == 3);
  CHECK(cache.dim() == 4);
  CHECK(cache.value_dim() == 5);
  CHECK(cache.block() == 16);
  CHECK(cache.keys().extents() == std::array<index, 4>{2, 3, 10, 4});
  CHECK(cache.values()(1, 2, 9, 4) == 2);
}

TEST_CASE("topk_blocks_step: a score function that throws leaves the cache as it was", "[topk_blocks_step]") {
  const topk_blocks_problem p = rounded<float>(some(8, 2));
  attn::execution serial;
  for (index count : {1, 20}) {
    auto cache = cache_for<float>(p), untroubled = cache;
    in_steps<float>(p, cache, {43}, serial);
    in_steps<float>(p, untroubled, {43}, serial);
    const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
    tensor<float> out(2, 4, count, 12);
    const auto part = [&](const tensor<float>& x) { return view(x).slice(2, 70, count); };
    const auto throws = [](float s, index, index, index i, index) -> float {
      if (i == 43) throw std::runtime_error("score");
      return s;
    };
    CHECK_THROWS_AS(compiled_topk_blocks<float>::step(cache, part(q), part(k), part(v), view(out), {.topk = 2}, throws,
                                                      serial),
                    std::runtime_error);
    CHECK(cache.tokens() == 43);
    const std::vector<index> rest(57, 1);
    CHECK(in_steps<float>(p, cache, rest, serial).out == in_steps<float>(p, untroubled, rest, serial).out);
  }
}

}  // namespace testing
