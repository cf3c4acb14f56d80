// Skip-softmax: keys whose scores lie far below those of others, block by block, are left out as if a mask hid them: in
// gradients and in steps over caches too. Of other operators: skipped_plans.cpp.
#include <attn/softmax/full_softmax_step.hpp>

#include <algorithm>

#include "support/catch.hpp"
#include "support/far_keys.hpp"

namespace testing::skipped_tiles_tests {
namespace {

using namespace far_keys;

attn::execution serial;

template <class S>
result<S> full(const inputs<S>& x, const attn::full_softmax_options<S>& options = {}) {
  return run<S, compiled_full_softmax<S>>(x, options, serial);
}

template <class S>
constexpr double same_tolerance = 2 * tolerance<S>::out;

}  // namespace

TEMPLATE_LIST_TEST_CASE("skip: far tiles are left out as if a mask hid them", "[skip]", all_types) {
  using S = TestType;
  const auto check = [](const inputs<S>& x, attn::full_softmax_options<S> options, double share) {
    CAPTURE(x.queries, x.keys);
    attn::full_softmax_options<S> masked = options;
    masked.key_mask = x.near_keys();
    const result<S> expected = full<S>(x, masked), exact = full<S>(x, options);
    attn::skipped_tiles tiles;
    options.skip_below = real<S>(4), options.skipped = &tiles;
    const result<S> r = full<S>(x, options);
    CHECK(relative_error(r.out, expected.out) <= same_tolerance<S>);
    CHECK(relative_error(r.lse, expected.lse) <= 4 * tolerance<S>::lse);
    if (sizeof(S) >= sizeof(float)) CHECK(relative_error(exact.out, expected.out) > 1e-4);
    if (share > 0) CHECK(tiles.share() == share);
    CHECK(tiles.skipped > 0);
    options.skip_below = {}, options.skip_share = std::exp(real<S>(-4)) * static_cast<real<S>>(x.keys);
    CHECK(relative_error(full<S>(x, options).out, expected.out) <= same_tolerance<S>);
  };
  const inputs<S> many(2, 2, 1, 130, 700);  // 11 blocks of keys, 5 of them far
  check(many, {}, 5.0 / 11);
  check(many, {.softcap = real<S>(30)}, 5.0 / 11);
  const std::vector<real<S>> sinks = {real<S>(0.5), real<S>(-1)}, slopes = {real<S>(1e-4), real<S>(0)};
  check(many, {.alibi_slopes = slopes, .sinks = sinks}, 5.0 / 11);
  check(many, {.dropout = {.rate = 0.2, .seed = 3}}, 5.0 / 11);
  const tensor<real<S>> bias = cast<real<S>>(random_normal(5, 1, 1, 130, 700));
  tensor<real<S>> small = bias;
  for (auto& b : small.data) b *= real<S>(0.05);
  check(many, {.bias = view(small)}, 5.0 / 11);
  check(inputs<S>(1, 2, 2, 9, 1500), {}, 0);   // packed by blocks
  check(inputs<S>(1, 1, 1, 700, 700), {.causal = true}, 0);
}

TEMPLATE_LIST_TEST_CASE("skip: a threshold without effect changes no bit", "[skip]", all_types) {
  using S = TestType;
  constexpr real<S> infinity = std::numeric_limits<real<S>>::infinity();
  for (const inputs<S>& x : {inputs<S>(1, 2, 1, 130, 700), inputs<S>(1, 2, 1, 3, 700), inputs<S>(2, 2, 2, 9, 900)}) {
    attn::skipped_tiles tiles;
    const result<S> exact = full<S>(x);
    CHECK(full<S>(x, {.skip_below = infinity, .skipped = &tiles}) == exact);
    CHECK(full<S>(x, {.skip_share = std::numeric_limits<real<S>>::denorm_min()}) == exact);
    CHECK(tiles.skipped == 0);
    CHECK(tiles.seen > 0);
  }
}

TEST_CASE("skip: neither threads nor other heads change results or counts", "[skip]") {
  for (idx_t queries : {1, 3, 9, 130, 700}) {
    const inputs<float> x(2, 4, 2, queries, queries == 700 ? 700 : 2500);
    attn::skipped_tiles tiles, more, alone;
    const attn::full_softmax_options<float> options{.causal = true, .skip_below = 4, .skipped = &tiles};
    const result<float> r = full<float>(x, options);
    attn::full_softmax_options<float> counted = options;
    for (int threads : {2, 3}) {
      attn::execution exec(threads, 0);
      more = {}, counted.skipped = &more;
      CHECK(run<float, compiled_full_softmax<float>>(x, counted, exec) == r);
      CHECK(more.seen == tiles.seen);
      CHECK(more.skipped == tiles.skipped);
    }
    counted.skipped = &alone;
    counted.scale = 1;
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 4; ++h) {
        tensor<float> out(1, 1, queries, dim);
        const auto head = [&](const auto& t, idx_t of) { return view(t).slice(0, b, 1).slice(1, of, 1); };
        compiled_full_softmax<float>::call(head(x.q, h), head(x.k, h / 2), head(x.v, h / 2), view(out), counted, {},
                                           serial);
        for (idx_t i = 0; i < queries; ++i)
          for (idx_t d = 0; d < dim; ++d) REQUIRE(out(0, 0, i, d) == r.out(b, h, i, d));
      }
    CHECK(alone.seen == tiles.seen);
    CHECK(alone.skipped == tiles.skipped);
  }
}

namespace {

template <class S>
struct gradients {
  tensor<S> q, k, v;
};

template <class S>
gradients<S> differentiate(const inputs<S>& x, attn::full_softmax_options<S> options, bool with_lse) {
  const result<S> r = full<S>(x, options);
  result<S> given = r;
  options.scale = real<S>(1), options.skipped = nullptr;
  if (with_lse) options.lse = row_view(given.lse);
  const tensor<S> d_out = cast<S>(random_normal(9, x.batch, x.heads, x.queries, dim));
  gradients<S> g{tensor<S>(x.batch, x.heads, x.queries, dim), tensor<S>(x.batch, x.kv_heads, x.keys, dim),
                 tensor<S>(x.batch, x.kv_heads, x.keys, dim)};
  compiled_full_softmax<S>::backward(view(x.q), view(x.k), view(x.v), view(r.out), view(d_out),
                                     {.q = view(g.q), .k = view(g.k), .v = view(g.v)}, options, {}, {}, serial);
  return g;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("skip: gradients are those of what is kept", "[skip]", all_types) {
  using S = TestType;
  const double error = 2 * product_gradient_tolerance<S>;
  for (const inputs<S>& x : {inputs<S>(1, 2, 1, 130, 700), inputs<S>(2, 1, 1, 9, 500)}) {
    const gradients<S> expected = differentiate<S>(x, {.key_mask = x.near_keys()}, true),
                       exact = differentiate<S>(x, {}, true);
    for (bool with_lse : {false, true}) {
      const gradients<S> g = differentiate<S>(x, {.skip_below = real<S>(4)}, with_lse);
      CHECK(relative_error(g.q, expected.q) <= error);
      CHECK(relative_error(g.k, expected.k) <= error);
      CHECK(relative_error(g.v, expected.v) <= error);
      for (idx_t j = 0; j < x.keys; ++j)
        if (inputs<S>::is_far(j)) REQUIRE(static_cast<double>(g.v(0, 0, j, 0)) == 0);
    }
    const gradients<S> none = differentiate<S>(x, {.skip_below = std::numeric_limits<real<S>>::infinity()}, true);
    CHECK(none.q == exact.q);
    CHECK(none.k == exact.k);
    CHECK(none.v == exact.v);
  }
}

// The function that is computed, by central differences: weights of .02 are left out, and .02 is what gradients of the
// whole softmax err by.
TEST_CASE("skip: gradients agree with central differences", "[skip]") {
  const inputs<widest_type> x(1, 1, 1, 20, 700, 5);
  using S = widest_type;
  if (!std::same_as<S, double>) return;
  const attn::full_softmax_options<S> options{.skip_below = S(3)};
  const gradients<S> g = differentiate<S>(x, options, true);
  const tensor<S> d_out = cast<S>(random_normal(9, 1, 1, 20, dim));
  const auto loss = [&](const inputs<S>& at) {
    const result<S> r = full<S>(at, options);
    S sum = 0;
    for (std::size_t n = 0; n < r.out.data.size(); ++n) sum += r.out.data[n] * d_out.data[n];
    return sum;
  };
  const auto derivative = [&](auto member, std::size_t n) {
    inputs<S> up = x, down = x;
    (up.*member).data[n] += S(1e-4), (down.*member).data[n] -= S(1e-4);
    return (loss(up) - loss(down)) / S(2e-4);
  };
  for (std::size_t n : {1u, 13u, 77u}) {
    CHECK(std::abs(derivative(&inputs<S>::q, n) - g.q.data[n]) < 1e-6);
    CHECK(std::abs(derivative(&inputs<S>::k, n * 50) - g.k.data[n * 50]) < 1e-6);
    CHECK(std::abs(derivative(&inputs<S>::v, n * 50) - g.v.data[n * 50]) < 1e-6);
  }
}

namespace {

template <class C>
tensor<float> step_over(const inputs<float>& x, attn::softmax_step_options<float> options) {
  attn::kv_cache<C> cache({.batch = x.batch, .heads = x.kv_heads, .dim = dim});
  const idx_t n = x.queries;
  tensor<float> out(x.batch, x.heads, n, dim);
  const auto part = [&](const tensor<float>& t, idx_t from, idx_t count) { return view(t).slice(2, from, count); };
  cache.append(part(x.k, 0, x.keys - n), part(x.v, 0, x.keys - n));
  options.scale = 1.F;
  attn::full_softmax_step(cache, view(x.q), part(x.k, x.keys - n, n), part(x.v, x.keys - n, n), view(out), options);
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("skip: steps over caches", "[skip]", float, Eigen::bfloat16, attn::float8_e4m3, std::int8_t,
                   attn::int4) {
  for (idx_t queries : {1, 3, 20}) {
    inputs<float> x(2, 4, 2, queries, 830);
    attn::skipped_tiles tiles;
    // As many keys are left out together as are attended together.
    constexpr bool coded = attn::detail::coded<TestType>;
    const idx_t tile = coded || queries <= 4 ? attn::detail::stream_tile_of<TestType> : 64;
    const auto is_near = [&](idx_t from) {
      const auto begin = x.near.begin() + from, end = x.near.begin() + std::min(from + tile, x.keys);
      return std::any_of(begin, end, [](std::uint8_t near) { return near != 0; });
    };
    for (idx_t j = 0; j < x.keys; j += tile)
      std::fill(x.near.begin() + j, x.near.begin() + std::min(j + tile, x.keys), is_near(j));
    constexpr double error = std::same_as<TestType, Eigen::bfloat16> ? tolerance<Eigen::bfloat16>::out
                             : coded                                 ? 5e-5
                                                                     : 4e-6;
    const tensor<float> exact = step_over<TestType>(x, {}), same = step_over<TestType>(x, {.skip_below = HUGE_VALF}),
                        r = step_over<TestType>(x, {.skip_below = 4, .skipped = &tiles});
    CHECK(same == exact);
    CHECK(tiles.seen > 0);
    CHECK(tiles.skipped > 0);
    CHECK(relative_error(r, step_over<TestType>(x, {.key_mask = x.near_keys()})) < error);
    CHECK(relative_error(r, exact) > 1e-4);
  }
  // All of a tile of 256.
  inputs<float> x(1, 2, 1, 1, 900);
  for (idx_t j = 256; j < 768; ++j) x.k(0, 0, j, 0) = -7;
  for (idx_t j = 0; j < 256; ++j) x.k(0, 0, j, 0) = 0;
  attn::skipped_tiles tiles;
  step_over<TestType>(x, {.skip_below = 4, .skipped = &tiles});
  CHECK(tiles.skipped > 0);
}

}  // namespace testing::skipped_tiles_tests
