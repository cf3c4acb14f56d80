// keep(): of the tokens of an item some remain. What follows is what a cache gives that was fed with those alone. Which
// pages are moved, copied and freed: core/keep_pages.cpp.
#include <attn/core/paged_cache.hpp>
#include <attn/low_rank/multipole_step.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::keep_tests {
namespace {

constexpr idx_t batch = 3, heads = 4, kv_heads = 2, dim = 20, value_dim = 12, tokens = 77, item = 1;
const attn::state_extents extents{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};
const std::vector<idx_t> fed = {30, tokens, 9};

using position_lists::joined;
using position_lists::positions;
using position_lists::range;
positions random_positions(std::uint64_t seed, idx_t of_ten) {
  random_source random(seed);
  positions all;
  for (idx_t t = 0; t < tokens; ++t)
    if (random.below(10) < of_ten) all.push_back(t);
  return all;
}

// A branch at the end; eviction at the start, of pages and of others; of the middle; a sink and the last; anything.
const std::vector<positions> lists = {joined(range(0, 60), {61, 64, 65, 70, 76}),
                                      range(16, tokens),
                                      range(48, 77),
                                      range(5, tokens),
                                      range(76, 77),
                                      joined(range(0, 31), range(40, 70)),
                                      joined({0, 1, 2, 3}, range(64, 77)),
                                      joined(joined(range(0, 16), range(32, 48)), range(51, 70)),
                                      random_positions(1, 5),
                                      random_positions(2, 1),
                                      random_positions(3, 9),
                                      range(0, 40),
                                      range(0, tokens),
                                      {}};

template <class S>
struct inputs {
  tensor<S> q, k, v;
  inputs(std::uint64_t seed, idx_t count)
      : q(cast<S>(random_normal(seed, batch, heads, count, dim))),
        k(cast<S>(random_normal(seed + 1, batch, kv_heads, count, dim))),
        v(cast<S>(random_normal(seed + 2, batch, kv_heads, count, value_dim))) {}
};

template <class S>
tensor<S> only(const tensor<S>& x, const positions& list) {
  tensor<S> y = x;
  for (idx_t h = 0; h < x.heads(); ++h)
    for (std::size_t n = 0; n < list.size(); ++n)
      for (idx_t d = 0; d < x.dim(); ++d) y(item, h, static_cast<idx_t>(n), d) = x(item, h, list[n], d);
  return y;
}

// Three steps of two tokens.
template <class S, class Cache, class Step>
std::vector<S> answers(Cache& cache, const Step& step) {
  std::vector<S> all;
  for (std::uint64_t seed = 50; seed < 53; ++seed) {
    const inputs<S> x(seed, 2);
    tensor<S> out(batch, heads, 2, value_dim, S(7));
    step(cache, view(x.q), view(x.k), view(x.v), view(out));
    all.insert(all.end(), out.data.begin(), out.data.end());
  }
  return all;
}

const auto full_step = [](auto& cache, auto q, auto k, auto v, auto out) {
  attn::full_softmax_step(cache, q, k, v, out);
};

// make() gives an empty cache that shares nothing with others.
template <class S, class Make, class Step>
void check_keep(const Make& make, const Step& step, double tolerance = 0) {
  const inputs<S> x(1, tokens);
  for (std::size_t n = 0; n < lists.size(); ++n) {
    CAPTURE(n);
    const positions& list = lists[n];
    auto cache = make(), own = make(), alone = make();
    for (auto* to : {&cache, &own})
      for (idx_t begin = 0; begin < tokens; begin += 26) {  // so that there are clusters and sums
        const idx_t count = std::min<idx_t>(26, tokens - begin);
        std::vector<idx_t> lengths;
        for (idx_t f : fed) lengths.push_back(std::clamp<idx_t>(f - begin, 0, count));
        to->append(view(x.k).slice(2, begin, count), view(x.v).slice(2, begin, count), {.lengths = lengths});
      }
    alone.append(view(only(x.k, list)), view(only(x.v, list)),
                 {.lengths = std::vector<idx_t>{fed[0], static_cast<idx_t>(list.size()), fed[2]}});
    auto branch = cache;  // shares all pages
    branch.keep(item, list);
    own.keep(item, list);
    CHECK(own.tokens(item) == std::ssize(list));
    CHECK(own.tokens(0) == fed[0]);
    const std::vector<S> wanted = answers<S>(alone, step);
    double worst = 0;
    for (auto* kept : {&branch, &own}) {
      const std::vector<S> found = answers<S>(*kept, step);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const double difference = std::abs(static_cast<double>(found[i]) - static_cast<double>(wanted[i]));
        worst = difference <= worst ? worst : difference;  // NaN, too
      }
    }
    CHECK(worst <= tolerance);
    auto whole = make();
    whole.append(view(x.k), view(x.v), {.lengths = fed});
    CHECK(answers<S>(cache, step) == answers<S>(whole, step));
  }
}

template <class Cache>
std::vector<float> decoded(const Cache& cache, bool of_keys, idx_t b) {
  const auto all = of_keys ? cache.keys() : cache.values();
  const idx_t cols = of_keys ? dim : value_dim;
  std::vector<float> numbers(static_cast<std::size_t>(kv_heads * cache.tokens(b) * cols));
  for (idx_t h = 0; h < kv_heads; ++h)
    attn::detail::cache_rows<const std::int8_t>(all, b, h, cols, of_keys, {})
        .from(0)
        .expand(0, cache.tokens(b), numbers.data() + h * cache.tokens(b) * cols, cols);
  return numbers;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("keep: kv_cache and pages give what the tokens alone give", "[keep]", exact_types) {
  using S = TestType;
  check_keep<S>([] { return attn::kv_cache<S>(extents); }, full_step);
  for (idx_t page : {1, 3, 16}) {
    CAPTURE(page);
    attn::page_pool<S> pool(
        {.pages = 900, .page_tokens = page, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
    check_keep<S>([&] { return attn::paged_cache<S>(pool, batch); }, full_step);
    CHECK(pool.free_pages() == 900);
  }
}

TEST_CASE("keep: caches of float tokens in 16 bits", "[keep]") {
  check_keep<float>([] { return attn::kv_cache<Eigen::half>(extents); }, full_step);
  attn::page_pool<Eigen::bfloat16> pool(
      {.pages = 900, .page_tokens = 3, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  check_keep<float>([&] { return attn::paged_cache<Eigen::bfloat16>(pool, batch); }, full_step);
}

TEMPLATE_LIST_TEST_CASE("keep: sums of blocks and clusters follow", "[keep]", exact_types) {
  using S = TestType;
  check_keep<S>([] { return attn::topk_blocks_cache<S>(extents, {.block = 8}); },
                [](auto& cache, auto q, auto k, auto v, auto out) {
                  attn::topk_blocks_step(cache, q, k, v, out, {.topk = 2});
                });
  check_keep<S>(
      [] {
        return attn::multipole_cache<S>(
            extents, {.exact = 4, .clusters = 3, .candidate_clusters = 2, .segment = 16, .iterations = 2});
      },
      [](auto& cache, auto q, auto k, auto v, auto out) { attn::multipole_step(cache, q, k, v, out); });
}

TEST_CASE("keep: a scale for each channel", "[keep]") {
  // Rounded once more where a block is another one: by 1/512 of a channel's range, and as bfloat16.
  using attn::int8_channels;
  check_keep<float>([] { return attn::kv_cache<int8_channels>(extents); }, full_step, 0.05);
  attn::page_pool<int8_channels> pool(
      {.pages = 90, .page_tokens = 32, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  check_keep<float>([&] { return attn::paged_cache<int8_channels>(pool, batch); }, full_step, 0.05);
  CHECK(pool.free_pages() == 90);
}

TEST_CASE("keep: eight bits", "[keep]") {
  check_keep<float>([] { return attn::kv_cache<std::int8_t>(extents); }, full_step, 0.05);
  attn::page_pool<std::int8_t> pool(
      {.pages = 90, .page_tokens = 16, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  check_keep<float>([&] { return attn::paged_cache<std::int8_t>(pool, batch); }, full_step, 0.05);
  CHECK(pool.free_pages() == 90);

  const inputs<float> x(1, tokens);
  for (std::size_t n = 0; n < lists.size(); ++n) {
    CAPTURE(n);
    const positions& list = lists[n];
    attn::kv_cache<std::int8_t> cache(extents);
    cache.append(view(x.k), view(x.v), {.lengths = fed});
    const std::vector<float> k = decoded(cache, true, item), v = decoded(cache, false, item);
    cache.keep(item, list);
    const std::vector<float> kept_k = decoded(cache, true, item), kept_v = decoded(cache, false, item);
    const auto at = [](const std::vector<float>& numbers, idx_t all, idx_t h, idx_t t, idx_t cols) {
      return numbers.data() + (h * all + t) * cols;
    };
    double beyond = 0;
    bool exact = true;
    for (idx_t h = 0; h < kv_heads; ++h)
      for (idx_t t = 0; t < std::ssize(list); ++t) {
        const idx_t from = list[static_cast<std::size_t>(t)];
        const float* const value = at(kept_v, std::ssize(list), h, t, value_dim);
        exact &= std::equal(value, value + value_dim, at(v, tokens, h, from, value_dim));
        const float *row = at(kept_k, std::ssize(list), h, t, dim), *before = at(k, tokens, h, from, dim);
        if (list[static_cast<std::size_t>(t / 16 * 16)] / 16 == from / 16) exact &= std::equal(row, row + dim, before);
        double largest = 0, error = 0;
        for (idx_t d = 0; d < dim; ++d) {
          largest = std::max<double>(largest, std::abs(before[d]));
          error = std::max<double>(error, std::abs(row[d] - before[d]));
        }
        beyond = std::max(beyond, error - largest / 254);
      }
    CHECK(exact);
    CHECK(beyond <= 1e-6);
  }
  // A branch of drafts within a block: as if the others had never been.
  attn::kv_cache<std::int8_t> tree(extents), chain(extents);
  const positions branch = joined(range(0, 21), {23, 26, 27});
  tree.append(view(x.k).slice(2, 0, 30), view(x.v).slice(2, 0, 30));
  chain.append(view(only(x.k, branch)).slice(2, 0, 30), view(only(x.v, branch)).slice(2, 0, 30),
               {.lengths = std::vector<idx_t>{30, std::ssize(branch), 30}});
  tree.keep(item, branch);
  CHECK(answers<float>(tree, full_step) == answers<float>(chain, full_step));
}

TEST_CASE("keep: memory of the caller's, and values that lie in the keys", "[keep]") {
  const inputs<float> x(1, tokens);
  std::vector<float> keys(100 * batch * kv_heads * dim * 2, 7), values(100 * batch * kv_heads * value_dim * 2, 7);
  const attn::tensor_view<float> k(keys.data(), {batch, kv_heads, 100, dim}, {80, 40, 240, 2}),
      v(values.data(), {batch, kv_heads, 100, value_dim}, {48, 24, 144, 2});
  const auto v_in_k = view(x.k).slice(3, 0, value_dim);
  for (const positions& list : lists) {
    const std::vector<idx_t> lengths = {fed[0], std::ssize(list), fed[2]};
    attn::kv_cache<float> cache(k, v), alone(extents);
    cache.append(view(x.k), view(x.v), {.lengths = fed});
    alone.append(view(only(x.k, list)), view(only(x.v, list)), {.lengths = lengths});
    cache.keep(item, list);
    CHECK(answers<float>(cache, full_step) == answers<float>(alone, full_step));

    attn::kv_cache<float> latent(extents, {.values_in_keys = true}), latent_alone(extents, {.values_in_keys = true});
    const tensor<float> picked = only(x.k, list);
    latent.append(view(x.k), v_in_k, {.lengths = fed});
    latent_alone.append(view(picked), view(picked).slice(3, 0, value_dim), {.lengths = lengths});
    latent.keep(item, list);
    const auto latent_step = [](auto& c, auto q, auto kt, auto, auto out) {
      attn::full_softmax_step(c, q, kt, kt.slice(3, 0, value_dim), out);
    };
    CHECK(answers<float>(latent, latent_step) == answers<float>(latent_alone, latent_step));
  }
}

TEST_CASE("keep: a draft tree in one step, then its branch", "[keep]") {
  // Each draft sees the tokens before the tree and its ancestors, and is rotated to its depth.
  const std::vector<idx_t> parents = {-1, 0, 0, 1, 2, 2, 5}, path = {0, 2, 5, 6};
  constexpr idx_t prefix = 19, drafts = 7, all = prefix + drafts;
  const inputs<float> x(1, all);
  const attn::rotary_options<float> rope{.base = 500};
  std::vector<idx_t> depths;
  tensor<std::uint8_t> mask(1, 1, drafts, all, 0);
  for (idx_t n = 0; n < drafts; ++n) {
    const idx_t parent = parents[static_cast<std::size_t>(n)];
    depths.push_back(parent < 0 ? prefix : depths[static_cast<std::size_t>(parent)] + 1);
    for (idx_t j = 0; j < prefix; ++j) mask(0, 0, n, j) = 1;
    for (idx_t a = n; a >= 0; a = parents[static_cast<std::size_t>(a)]) mask(0, 0, n, prefix + a) = 1;
  }
  attn::rotary_options<float> at_depth = rope;
  at_depth.positions = {depths.data(), {1, drafts}};
  attn::page_pool<float> pool({.pages = 90, .page_tokens = 4, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  const auto check = [&](auto tree, auto chain) {
    const auto feed = [&](auto& cache, idx_t begin, idx_t count, const auto& options) {
      tensor<float> out(batch, heads, count, value_dim, 7);
      attn::full_softmax_step(cache, view(x.q).slice(2, begin, count), view(x.k).slice(2, begin, count),
                              view(x.v).slice(2, begin, count), view(out), options);
      return out;
    };
    using options = attn::full_softmax_step_options<float>;
    feed(tree, 0, prefix, options{.rotary = rope});
    feed(chain, 0, prefix, options{.rotary = rope});
    const tensor<float> of_tree =
        feed(tree, prefix, drafts,
             options{.rotary = at_depth, .mask = attn::tensor_view<const std::uint8_t>(view(mask))});
    for (idx_t n : path) {
      const tensor<float> of_chain = feed(chain, prefix + n, 1, options{.rotary = rope});
      double worst = 0;
      for (idx_t b = 0; b < batch; ++b)
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t d = 0; d < value_dim; ++d)
            worst = std::max<double>(worst, std::abs(of_tree(b, h, n, d) - of_chain(b, h, 0, d)));
      CHECK(worst <= 2e-6);
    }
    positions branch = range(0, prefix);
    for (idx_t n : path) branch.push_back(prefix + n);
    for (idx_t b = 0; b < batch; ++b) tree.keep(b, branch);
    CHECK(answers<float>(tree, full_step) == answers<float>(chain, full_step));
  };
  check(attn::kv_cache<float>(extents), attn::kv_cache<float>(extents));
  check(attn::paged_cache<float>(pool, batch), attn::paged_cache<float>(pool, batch));
}

TEST_CASE("keep refuses what does not fit", "[keep]") {
  const inputs<float> x(1, tokens);
  const auto check = [&](auto cache, const char* name) {
    cache.append(view(x.k), view(x.v), {.lengths = fed});
    auto other = cache;
    const std::vector<float> before = answers<float>(other, full_step);
    const auto refuses = [&](idx_t of, const positions& list, const char* says) {
      const std::string message = refusal([&] { cache.keep(of, list); });
      INFO(message << " should mention " << says);
      CHECK(well_formed(message, name));
      CHECK(message.find(says) != std::string::npos);
      auto after = cache;
      CHECK(answers<float>(after, full_step) == before);
    };
    refuses(item, {0, 1, 1}, "positions to keep that rise, one from 2 on; found 1");
    refuses(item, {3, 7, 5, 9}, "positions to keep that rise, one from 8 on; found 5");
    refuses(item, {3, tokens}, "positions to keep of the 77 tokens of item 1; found 77");
    refuses(item, {-1, 3}, "positions to keep of the 77 tokens of item 1; found -1");
    refuses(2, {0, 9}, "positions to keep of the 9 tokens of item 2; found 9");
    refuses(batch, {0}, "a batch item from 0 to 2; found 3");
    refuses(-1, {}, "a batch item from 0 to 2; found -1");
  };
  check(attn::kv_cache<float>(extents), "kv_cache");
  check(attn::kv_cache<std::int8_t>(extents), "kv_cache");
  attn::page_pool<float> pool({.pages = 99, .page_tokens = 7, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  check(attn::paged_cache<float>(pool, batch), "paged_cache");
  CHECK(pool.free_pages() == 99);
}

}  // namespace testing::keep_tests
