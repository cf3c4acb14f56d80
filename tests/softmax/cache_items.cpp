// Caches of several sequences: lengths of their own, memory of the caller's, pages, values that lie in the keys.
#include <attn/core/paged_cache.hpp>

#include "support/cache_items.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/refusal.hpp"

namespace testing::cache_items_tests {
namespace {

constexpr cache_shape shape{};
const attn::state_extents four{.batch = 4, .heads = 2, .dim = 20, .value_dim = 12},
    one{.batch = 1, .heads = 2, .dim = 20, .value_dim = 12};
attn::page_pool_extents pages_of(idx_t page, idx_t count = 300) {
  return {.pages = count, .page_tokens = page, .heads = 2, .dim = 20, .value_dim = 12};
}

const auto full_step = [](auto& cache, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  attn::full_softmax_step(cache, q, k, v, out, {.lengths = lengths});
};

// A page allocator that gives the highest pages first, and counts.
struct highest_first : attn::page_allocator {
  std::vector<bool> used = std::vector<bool>(300, false);
  int given = 0;
  idx_t available() const override { return std::count(used.begin(), used.end(), false); }
  idx_t allocate() override {
    ++given;
    idx_t page = 299;
    while (used[static_cast<std::size_t>(page)]) --page;
    used[static_cast<std::size_t>(page)] = true;
    return page;
  }
  void free(idx_t page) override { used[static_cast<std::size_t>(page)] = false; }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("kv_cache: items of their own lengths", "[cache_items]", exact_types) {
  attn::kv_cache<TestType> cache(four);
  check_items<TestType>(cache, attn::kv_cache<TestType>(one), full_step);
}

TEST_CASE("kv_cache: in memory of the caller's", "[cache_items]") {
  // [capacity, batch, head, dim], every other number.
  std::vector<float> keys(200 * 4 * 2 * 20 * 2, 7), values(200 * 4 * 2 * 12 * 2, 7);
  const attn::tensor_view<float> k(keys.data(), {4, 2, 200, 20}, {80, 40, 320, 2}),
      v(values.data(), {4, 2, 200, 12}, {48, 24, 192, 2});
  attn::kv_cache<float> cache(k, v);
  CHECK(cache.capacity() == 200);
  CHECK(cache.bytes() == 0);
  check_items<float>(cache, attn::kv_cache<float>(one), full_step);
  CHECK(std::count(keys.begin(), keys.end(), 7.0f) >= std::ssize(keys) / 2);
  // A cache over memory that has tokens already goes on from there.
  const std::vector<idx_t> lengths(cache.lengths().begin(), cache.lengths().end());
  attn::kv_cache<float> again(k, v, lengths);
  const tensor<float> x(4, 4, 1, 20, 0.5f), kt(4, 2, 1, 20, 0.25f), vt(4, 2, 1, 12, 2.0f);
  tensor<float> a(4, 4, 1, 12, 7), b = a;
  attn::full_softmax_step(again, view(x), view(kt), view(vt), view(a));
  attn::full_softmax_step(cache, view(x), view(kt), view(vt), view(b));
  CHECK(a == b);
}

TEST_CASE("kv_cache: values that are the first dims of the keys", "[cache_items]") {
  attn::kv_cache<float> latent({.batch = 4, .heads = 1, .dim = 20, .value_dim = 12}, {.values_in_keys = true});
  attn::kv_cache<float> plain({.batch = 4, .heads = 1, .dim = 20, .value_dim = 12});
  for (idx_t count : {1, 40, 2}) {
    const tensor<float> q = cast<float>(random_normal(1, 4, 4, count, 20)),
                        k = cast<float>(random_normal(2, 4, 1, count, 20));
    tensor<float> a(4, 4, count, 12, 7), b(4, 4, count, 12, 7);
    const auto v = view(k).slice(3, 0, 12);
    attn::full_softmax_step(latent, view(q), view(k), v, view(a));
    attn::full_softmax_step(plain, view(q), view(k), v, view(b));
    CHECK(a == b);
  }
  latent.copy_item(0, 1), plain.copy_item(0, 1);
  latent.reorder(std::vector<idx_t>{3, 0, 1, 2}), plain.reorder(std::vector<idx_t>{3, 0, 1, 2});
  bool same = true;
  for (idx_t b = 0; b < 4; ++b)
    for (idx_t t = 0; t < 43; ++t)
      for (idx_t d = 0; d < 12; ++d) same &= latent.values()(b, 0, t, d) == plain.values()(b, 0, t, d);
  CHECK(same);
  CHECK(latent.bytes() < plain.bytes());
  const tensor<float> k(4, 1, 1, 20, 1), v(4, 1, 1, 12, 1);
  CHECK(well_formed(refusal([&] { latent.append(view(k), view(v)); }), "kv_cache"));
  CHECK(latent.tokens() == 43);
}

TEMPLATE_LIST_TEST_CASE("paged_cache: items of their own lengths", "[cache_items]", exact_types) {
  for (idx_t page : {64, 16, 7}) {
    attn::page_pool<TestType> pool(pages_of(page));
    {
      attn::paged_cache<TestType> cache(pool, 4);
      CAPTURE(page);
      check_items<TestType>(cache, attn::paged_cache<TestType>(pool, 1), full_step);
    }
    CHECK(pool.free_pages() == 300);
  }
  attn::page_pool<TestType> pool(pages_of(64));  // pages of whole tiles: the bits of contiguous memory
  attn::paged_cache<TestType> cache(pool, 4);
  check_items<TestType>(cache, attn::kv_cache<TestType>(one), full_step);
}

TEST_CASE("paged_cache: shared beginnings, tables and an allocator of one's own", "[cache_items]") {
  highest_first allocator;
  std::vector<float> keys(300 * 2 * 16 * 20), values(300 * 2 * 16 * 12);
  attn::page_pool<float> pool(attn::tensor_view<float>(keys.data(), {300, 2, 16, 20}),
                              attn::tensor_view<float>(values.data(), {300, 2, 16, 12}), &allocator);
  attn::paged_cache<float> cache(pool, 3);
  const tensor<float> k = cast<float>(random_normal(1, 3, 2, 40, 20)), v = cast<float>(random_normal(2, 3, 2, 40, 12));
  cache.append(view(k), view(v), {.lengths = std::vector<idx_t>{40, 0, 0}});
  CHECK(allocator.given == 3);
  cache.copy_item(0, 1);
  cache.copy_item(0, 2, 33);
  CHECK(allocator.given == 3);
  CHECK(pool.users(cache.table(0)[2]) == 3);
  CHECK(cache.tokens(2) == 33);
  // Two of the three that write to the shared page copy it.
  cache.append(view(k).slice(2, 0, 1), view(v).slice(2, 0, 1));
  CHECK(allocator.given == 5);
  for (idx_t b = 0; b < 3; ++b) CHECK(pool.users(cache.table(b)[2]) == 1);
  CHECK(pool.users(cache.table(0)[0]) == 3);
  bool same = true;
  for (idx_t b = 0; b < 3; ++b)
    for (idx_t t = 0; t < cache.tokens(b); ++t) {
      const idx_t page = cache.table(b)[static_cast<std::size_t>(t / 16)];
      const bool last = t + 1 == cache.tokens(b);
      same &= pool.keys()(page, 1, t % 16, 3) == (last ? k(b, 1, 0, 3) : k(0, 1, t, 3));
      same &= pool.values()(page, 1, t % 16, 3) == (last ? v(b, 1, 0, 3) : v(0, 1, t, 3));
    }
  CHECK(same);
  // A beginning that is kept while no sequence uses it.
  const std::vector<idx_t> kept(cache.table(0).begin(), cache.table(0).begin() + 2);
  for (idx_t page : kept) pool.retain(page);
  cache.reset();
  CHECK(pool.free_pages() == 298);
  cache.assign(1, kept, 32);
  CHECK(cache.tokens(1) == 32);
  for (idx_t page : kept) pool.release(page);
  cache.reset(1);
  CHECK(pool.free_pages() == 300);
}

TEMPLATE_LIST_TEST_CASE("sliding_window_cache: items of their own lengths", "[cache_items]", exact_types) {
  const std::vector<idx_t> globals = {0, 9}, dilation = {2};
  const auto step = [](auto& cache, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
    attn::sliding_window_step(cache, q, k, v, out, {.lengths = lengths});
  };
  const attn::sliding_window_cache_options window{.left = 9, .dilation = dilation, .global_positions = globals};
  const attn::sliding_window_cache<TestType> alone(one, window);
  attn::sliding_window_cache<TestType> cache(four, window);
  check_items<TestType>(cache, alone, step);
  // Over caches of all tokens; the ring's sums go on at other places.
  const auto over = [&](auto& some, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
    attn::sliding_window_step(some, window, q, k, v, out, {.lengths = lengths});
  };
  attn::kv_cache<TestType> all(four);
  check_items<TestType>(all, attn::kv_cache<TestType>(one), over);
  attn::page_pool<TestType> pool(pages_of(7));
  attn::paged_cache<TestType> paged(pool, 4);
  check_items<TestType>(paged, attn::paged_cache<TestType>(pool, 1), over);
  attn::kv_cache<TestType> once(four);
  attn::sliding_window_cache<TestType> ring(four, window);
  const tensor<TestType> q = cast<TestType>(random_normal(1, 4, 4, 50, 20)),
                         k = cast<TestType>(random_normal(2, 4, 2, 50, 20)),
                         v = cast<TestType>(random_normal(3, 4, 2, 50, 12));
  tensor<TestType> a(4, 4, 50, 12, TestType(7)), b(4, 4, 50, 12, TestType(8));
  attn::sliding_window_step(once, window, view(q), view(k), view(v), view(a));
  attn::sliding_window_step(ring, view(q), view(k), view(v), view(b));
  CHECK(relative_error(cast<double>(a), cast<double>(b)) <= tolerance<TestType>::out);
  tensor<TestType> keys(4, 2, alone.rows() + 1, 20), values(4, 2, alone.rows() + 1, 12);
  attn::sliding_window_cache<TestType> given(view(keys), view(values), window);
  check_items<TestType>(given, alone, step);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_cache: items of their own lengths", "[cache_items]", exact_types) {
  attn::topk_blocks_cache<TestType> cache(four, {.block = 8});
  const auto step = [](auto& c, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
    attn::topk_blocks_step(c, q, k, v, out, {.lengths = lengths, .topk = 3});
  };
  check_items<TestType>(cache, attn::topk_blocks_cache<TestType>(one, {.block = 8}), step);
}

TEMPLATE_LIST_TEST_CASE("steps rotate new queries and keys as rotary does", "[cache_items]", exact_types) {
  using S = TestType;
  const attn::rotary_options<S> rotary{.first_position = 3, .interleaved = true, .dims = 12, .base = 500};
  attn::kv_cache<S> fused(four), plain(four);
  attn::page_pool<S> pool(pages_of(16));
  attn::paged_cache<S> paged(pool, 4);
  attn::sliding_window_cache<S> ring(four, {.left = 9}), plain_ring(four, {.left = 9});
  attn::topk_blocks_cache<S> topk(four, {.block = 8}), plain_topk(four, {.block = 8});
  std::vector<idx_t> lengths = {3, 0, 5, 1};
  for (int round = 0; round < 4; ++round) {
    const tensor<S> q = cast<S>(random_normal(1, 4, 4, 5, 20)), k = cast<S>(random_normal(2, 4, 2, 5, 20)),
                    v = cast<S>(random_normal(3, 4, 2, 5, 12));
    tensor<S> rotated_q = q, rotated_k = k;
    std::vector<idx_t> positions;
    for (idx_t b = 0; b < 4; ++b)
      for (idx_t t = 0; t < 5; ++t) positions.push_back(plain.tokens(b) + 3 + t);
    attn::rotary_options<S> listed = rotary;
    listed.positions = {positions.data(), {4, 5}};
    attn::rotary(view(rotated_q), view(rotated_q), listed);
    attn::rotary(view(rotated_k), view(rotated_k), listed);
    const auto check = [&](const auto& step) {
      tensor<S> a(4, 4, 5, 12, S(7)), b(4, 4, 5, 12, S(7));
      step(view(q), view(k), view(a), true);
      step(view(std::as_const(rotated_q)), view(std::as_const(rotated_k)), view(b), false);
      CHECK(a == b);
    };
    const auto asked = [&](bool yes) { return yes ? std::optional(rotary) : std::nullopt; };
    check([&](auto x, auto y, auto out, bool yes) {
      attn::full_softmax_step(yes ? fused : plain, x, y, view(v), out, {.lengths = lengths, .rotary = asked(yes)});
      if (!yes) return;
      tensor<S> other(4, 4, 5, 12, S(7));
      attn::full_softmax_step(paged, x, y, view(v), view(other), {.lengths = lengths, .rotary = rotary});
      double worst = 0;
      for (idx_t b = 0; b < 4; ++b)
        for (idx_t h = 0; h < 4; ++h)
          for (idx_t t = 0; t < 5; ++t)
            for (idx_t d = 0; d < 12; ++d)
              worst = std::max(worst, std::abs(static_cast<double>(other(b, h, t, d)) -
                                               static_cast<double>(out(b, h, t, d))));
      CHECK(worst <= 10 * tolerance<S>::out);
    });
    check([&](auto x, auto y, auto out, bool yes) {
      attn::sliding_window_step(yes ? ring : plain_ring, x, y, view(v), out,
                                {.lengths = lengths, .rotary = asked(yes)});
    });
    check([&](auto x, auto y, auto out, bool yes) {
      attn::topk_blocks_step(yes ? topk : plain_topk, x, y, view(v), out, {.lengths = lengths, .rotary = asked(yes)});
    });
    std::rotate(lengths.begin(), lengths.begin() + 1, lengths.end());
  }
}

TEST_CASE("paged_cache: what an allocator throws leaves all items as they were", "[cache_items]") {
  struct limited : highest_first {
    int most = 300;
    idx_t allocate() override { return given < most ? highest_first::allocate() : throw std::bad_alloc(); }
  } pages;
  attn::page_pool<float> pool(pages_of(4), {}, &pages);
  attn::paged_cache<float> cache(pool, 4);
  const tensor<float> k = cast<float>(random_normal(1, 4, 2, 9, 20)), v = cast<float>(random_normal(2, 4, 2, 9, 12));
  cache.append(view(k), view(v), {.lengths = std::vector<idx_t>{6, 4, 9, 0}});
  cache.copy_item(0, 3);  // the last page is shared: who writes first takes one of its own
  const std::vector<idx_t> more = {9, 9, 1, 9};
  const tensor<float> q(4, 4, 9, 20, 0.5f);
  tensor<float> out(4, 4, 9, 12, 7), expected_out = out;
  const idx_t free = pool.free_pages();
  constexpr int copies = 1, added = 2 + 3 + 0 + 2;  // pages
  for (int n = 0; n < added; ++n) {  // item 0 keeps the copy that it makes in the second round
    CAPTURE(n);
    pages.most = pages.given + n;
    CHECK_THROWS_AS(full_step(cache, view(q), view(k), view(v), view(out), more), std::bad_alloc);
    for (idx_t b = 0; b < 4; ++b) {
      CHECK(cache.tokens(b) == (b == 1 ? 4 : b == 2 ? 9 : 6));
      CHECK(cache.table(b).size() == (b == 1 ? 1 : b == 2 ? 3 : 2));
    }
    CHECK(out == tensor<float>(4, 4, 9, 12, 7));
    CHECK(pool.free_pages() == free - (n > 0 ? copies : 0));
  }
  pages.most = pages.given + added;
  full_step(cache, view(q), view(k), view(v), view(out), more);
  attn::kv_cache<float> plain(four);
  plain.append(view(k), view(v), {.lengths = std::vector<idx_t>{6, 4, 9, 0}});
  plain.copy_item(0, 3);
  full_step(plain, view(q), view(k), view(v), view(expected_out), more);
  CHECK(relative_error(out, expected_out) <= tolerance<float>::out);
  CHECK(pool.free_pages() == free - copies - added);
}

TEST_CASE("rotary of a ragged chunk looks at no padding", "[cache_items]") {
  const tensor<float> q = cast<float>(random_normal(1, 2, 2, 3, 8)), k = cast<float>(random_normal(2, 2, 1, 3, 8)),
                      v = cast<float>(random_normal(3, 2, 1, 3, 8));
  tensor<float> table(1, 1, 3, 4), a(2, 2, 3, 8, 7), b(2, 2, 3, 8, 7);
  for (std::size_t n = 0; n < table.data.size(); ++n) table.data[n] = std::cos(static_cast<float>(n));
  const attn::tensor_view<const float, 2> rows(table.data.data(), {3, 4});
  const std::vector<idx_t> lengths = {2, 0};
  const auto run = [&](tensor<float>& out, attn::rotary_options<float> options) {
    attn::kv_cache<float> cache({.batch = 2, .dim = 8});
    cache.append(view(k).slice(2, 0, 1), view(v).slice(2, 0, 1));
    attn::full_softmax_step(cache, view(q), view(k), view(v), view(out), {.lengths = lengths, .rotary = options});
  };
  // Item 0 goes on at positions 1 and 2 of three; what its padding's would be, nobody asks.
  run(a, {.cos = rows, .sin = rows});
  constexpr idx_t far = idx_t(1) << 60;
  const std::vector<idx_t> positions = {1, 2, far, -far, far, far};
  run(b, {.positions = {positions.data(), {2, 3}}, .cos = rows, .sin = rows});
  CHECK(a == b);
  attn::kv_cache<float> cache({.batch = 2, .dim = 8});
  const auto message = [&](attn::rotary_options<float> options) {
    return refusal([&] {
      attn::full_softmax_step(cache, view(q), view(k), view(v), view(a), {.lengths = lengths, .rotary = options});
    });
  };
  CHECK(message({.first_position = std::numeric_limits<idx_t>::max()}).find("a first position") != std::string::npos);
  CHECK(message({.positions = {positions.data(), {2, 2}}}).find("positions length") != std::string::npos);
  CHECK(message({.positions = {positions.data(), {3, 3}}}).find("positions batch") != std::string::npos);
  CHECK(cache.tokens() == 0);
}

TEST_CASE("Values in keys: one token with any strides of axes of one, and no rotary", "[cache_items]") {
  const tensor<float> q = cast<float>(random_normal(1, 1, 1, 1, 8)), k = cast<float>(random_normal(2, 1, 1, 1, 8));
  tensor<float> out(1, 1, 1, 6, 7);
  attn::kv_cache<float> cache({.dim = 8, .value_dim = 6}, {.values_in_keys = true});
  const attn::tensor_view<const float> v(k.data.data(), {1, 1, 1, 6});
  attn::full_softmax_step(cache, view(q), view(k), v, view(out));
  for (std::size_t d = 0; d < 6; ++d) CHECK(out.data[d] == k.data[d]);
  const std::string message = refusal([&] {
    attn::full_softmax_step(cache, view(q), view(k), v, view(out), {.rotary = attn::rotary_options<float>{.dims = 2}});
  });
  CHECK(message.find("no rotary where values are dims of the keys") != std::string::npos);
  CHECK(cache.tokens() == 1);
}

TEST_CASE("Windows over a cache may be as wide and as sparse as a number can say", "[cache_items]") {
  constexpr idx_t huge = std::numeric_limits<idx_t>::max();
  const tensor<float> q = cast<float>(random_normal(1, 1, 2, 9, 8)), k = cast<float>(random_normal(2, 1, 1, 9, 8)),
                      v = cast<float>(random_normal(3, 1, 1, 9, 8));
  tensor<float> a(1, 2, 9, 8, 7), b(1, 2, 9, 8, 7);
  const auto run = [&](tensor<float>& out, const attn::sliding_window_cache_options& window) {
    attn::kv_cache<float> cache({.dim = 8});
    attn::sliding_window_step(cache, window, view(q), view(k), view(v), view(out));
  };
  run(a, {.left = huge});
  run(b, {.left = 9});
  CHECK(a == b);
  const std::vector<idx_t> sparse = {huge};
  run(a, {.left = 5, .dilation = sparse});
  run(b, {.left = 0});
  CHECK(a == b);
}

}  // namespace testing::cache_items_tests
