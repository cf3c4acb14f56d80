// keep() of a cache in pages: which are moved, copied and freed, and what they hold.
#include <attn/core/kv_cache.hpp>
#include <attn/core/paged_cache.hpp>

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::keep_pages_tests {
namespace {

constexpr idx_t batch = 3, kv_heads = 2, dim = 20, value_dim = 12, tokens = 40, item = 1;

using position_lists::joined;
using position_lists::positions;
using position_lists::range;

struct inputs {
  tensor<float> k = cast<float>(random_normal(2, batch, kv_heads, tokens, dim)),
                v = cast<float>(random_normal(3, batch, kv_heads, tokens, value_dim));
};

}  // namespace

TEST_CASE("keep: pages move whole, shared ones are not written", "[keep]") {
  const inputs x;
  attn::page_pool<float> pool({.pages = 20, .page_tokens = 10, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  attn::paged_cache<float> cache(pool, batch);
  cache.append(view(x.k), view(x.v), {.lengths = std::vector<idx_t>{0, 40, 0}});
  const positions before(cache.table(item).begin(), cache.table(item).end());
  cache.copy_item(item, 0);
  cache.keep(item, joined(range(0, 10), range(20, 35)));  // nothing is copied
  CHECK(positions(cache.table(item).begin(), cache.table(item).end()) == positions{before[0], before[2], before[3]});
  CHECK(pool.free_pages() == 16);
  CHECK(pool.users(before[1]) == 1);
  cache.keep(item, joined(range(0, 10), range(11, 25)));  // two new pages
  CHECK(pool.free_pages() == 14);
  CHECK(cache.table(item)[0] == before[0]);
  CHECK(pool.users(before[2]) == 1);
  const positions own(cache.table(item).begin(), cache.table(item).end());
  cache.keep(item, joined({0}, range(12, 24)));  // one that is shared becomes own; of two own ones one is free
  CHECK(pool.free_pages() == 14);
  CHECK(cache.table(item)[0] != own[0]);
  bool same = true;
  for (idx_t t = 0; t < 40; ++t)
    same &= pool.keys()(cache.table(0)[static_cast<std::size_t>(t / 10)], 1, t % 10, 3) == x.k(item, 1, t, 3);
  CHECK(same);
  cache.keep(item, {});
  cache.reset(0);
  CHECK(pool.free_pages() == 20);
}

TEST_CASE("keep: among other changes, pages hold what contiguous memory holds", "[keep]") {
  for (const idx_t page : {1, 3, 16}) {
    CAPTURE(page);
    attn::page_pool<float> pool({.pages = 500, .page_tokens = page, .heads = 1, .dim = 2, .value_dim = 1});
    attn::paged_cache<float> paged(pool, batch);
    attn::kv_cache<float> plain({.batch = batch, .heads = 1, .dim = 2, .value_dim = 1});
    random_source random(static_cast<std::uint64_t>(page));
    float next = 0;
    for (int round = 0; round < 400; ++round) {
      const idx_t b = random.below(batch), to = random.below(batch), had = plain.tokens(b);
      const auto both = [&](const auto& change) { change(paged), change(plain); };
      switch (had < 10 ? 0 : had > 80 ? 1 : random.below(5)) {
        case 0: {
          tensor<float> k(batch, 1, 40, 2), v(batch, 1, 40, 1);
          for (float& x : k.data) x = ++next;
          for (float& x : v.data) x = ++next;
          std::vector<idx_t> lengths(batch, 0);
          lengths[static_cast<std::size_t>(b)] = 1 + random.below(40);
          both([&](auto& cache) { cache.append(view(k), view(v), {.lengths = lengths}); });
          break;
        }
        case 1: {
          positions list;
          const idx_t run = 1 + random.below(20);  // tokens that stay together
          for (idx_t t = random.below(3); t < had; t += random.below(4) == 0 ? page : 1 + random.below(8))
            for (idx_t n = 0; n < run && t < had; ++n) list.push_back(t++);
          both([&](auto& cache) { cache.keep(b, list); });
          break;
        }
        case 2: both([&](auto& cache) { cache.copy_item(b, to); }); break;
        case 3: both([&](auto& cache) { cache.truncate(b, had - 5); }); break;
        default: both([&](auto& cache) { cache.reorder(positions{1, 2, 0}); });
      }
      bool same = true;
      std::vector<int> users(500, 0);
      for (idx_t n = 0; n < batch; ++n) {
        same &= paged.tokens(n) == plain.tokens(n);
        for (idx_t p : paged.table(n)) ++users[static_cast<std::size_t>(p)];
        for (idx_t t = 0; t < plain.tokens(n); ++t) {
          const idx_t p = paged.table(n)[static_cast<std::size_t>(t / page)];
          same &= pool.keys()(p, 0, t % page, 1) == plain.keys()(n, 0, t, 1);
          same &= pool.values()(p, 0, t % page, 0) == plain.values()(n, 0, t, 0);
        }
      }
      for (idx_t p = 0; p < 500; ++p) same &= pool.users(p) == users[static_cast<std::size_t>(p)];
      same &= pool.free_pages() == std::count(users.begin(), users.end(), 0);
      CAPTURE(round);
      REQUIRE(same);
    }
  }
}

TEST_CASE("keep: pages that are not to be had leave the cache as it was", "[keep]") {
  struct limited : attn::page_free_list {
    int most = 99;
    limited() : page_free_list(9) {}
    idx_t allocate() override { return most-- > 0 ? page_free_list::allocate() : throw std::bad_alloc(); }
  } pages;
  attn::page_pool<float> pool({.pages = 9, .page_tokens = 10, .heads = kv_heads, .dim = dim, .value_dim = value_dim},
                              {}, &pages);
  const inputs x;
  attn::paged_cache<float> cache(pool, batch);
  cache.append(view(x.k), view(x.v), {.lengths = std::vector<idx_t>{0, 40, 0}});
  cache.copy_item(item, 0);
  const positions list = range(1, 30), before(cache.table(item).begin(), cache.table(item).end());
  const auto unchanged = [&](idx_t free) {
    CHECK(cache.tokens(item) == 40);
    CHECK(positions(cache.table(item).begin(), cache.table(item).end()) == before);
    CHECK(pool.free_pages() == free);
  };
  pages.most = 2;  // of three
  CHECK_THROWS_AS(cache.keep(item, list), std::bad_alloc);
  unchanged(5);
  pages.most = 99;
  cache.append(view(x.k), view(x.v), {.lengths = std::vector<idx_t>{0, 0, 30}});
  const std::string message = refusal([&] { cache.keep(item, list); });
  CHECK(well_formed(message, "paged_cache"));
  CHECK(message.find("at most as many new pages as the 2 that are free; found 3") != std::string::npos);
  unchanged(2);
  cache.reset(0);
  cache.keep(item, list);  // its own pages are enough
  CHECK(cache.tokens(item) == 29);
  CHECK(pool.free_pages() == 3);
}

}  // namespace testing::keep_pages_tests
