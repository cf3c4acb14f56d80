// Skip-softmax: keys whose scores lie far below those of others, block by block, are left out as if a mask hid them: in
// gradients, in steps over caches, and under every plan of keys too.
#include <attn/softmax/full_softmax_step.hpp>

#include "support/call_patterns.hpp"
#include "support/call_selected_keys.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing::skipped_tiles_tests {
namespace {

constexpr idx_t dim = 8;
attn::execution serial;

// Scores of keys in far blocks of 64 are about -`depth`, the others about 0: with a threshold of 4 it is clear which
// tiles are left out, on every processor. A far key has 1e-3 of the weight of another one.
template <class S>
struct inputs {
  idx_t batch, heads, kv_heads, queries, keys;
  double depth = 7;
  tensor<S> q, k, v;
  std::vector<std::uint8_t> near{};

  static bool is_far(idx_t j) {
    const idx_t block = j / 64;
    return block == 2 || block == 4 || block == 5 || block == 8 || block == 9 || (block > 11 && block % 4 != 3);
  }
  inputs(idx_t b, idx_t h, idx_t kv, idx_t n, idx_t m, double deep = 7)
      : batch(b), heads(h), kv_heads(kv), queries(n), keys(m), depth(deep) {
    tensor<double> q0 = random_normal(1, b, h, n, dim), k0 = random_normal(2, b, kv, m, dim);
    for (double& x : q0.data) x *= 0.25;
    for (double& x : k0.data) x *= 0.5;
    for (idx_t r = 0; r < b * h * n; ++r) q0.data[static_cast<std::size_t>(r * dim)] = 1;
    for (idx_t r = 0; r < b * kv * m; ++r) k0.data[static_cast<std::size_t>(r * dim)] = is_far(r % m) ? -depth : 0;
    q = cast<S>(q0), k = cast<S>(k0), v = cast<S>(random_normal(3, b, kv, m, dim));
    for (idx_t j = 0; j < m; ++j) near.push_back(!is_far(j));
  }
  attn::tensor_view<const std::uint8_t, 2> near_keys() const { return {near.data(), {1, keys}}; }
};

template <class S>
struct result {
  tensor<S> out;
  tensor<real<S>> lse;
  bool operator==(const result&) const = default;
};

template <class S, class Operator, class Options>
result<S> run(const inputs<S>& x, Options options, attn::execution& exec) {
  result<S> r{tensor<S>(x.batch, x.heads, x.queries, dim), tensor<real<S>>(x.batch, x.heads, x.queries, 1)};
  options.scale = real<S>(1);
  options.lse = row_view(r.lse);
  Operator::call(view(x.q), view(x.k), view(x.v), view(r.out), options, {}, exec);
  return r;
}
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

template <class Cache>
tensor<float> step_over(const inputs<float>& x, attn::softmax_step_options<float> options) {
  Cache cache({.batch = x.batch, .heads = x.kv_heads, .dim = dim});
  const idx_t n = x.queries;
  tensor<float> out(x.batch, x.heads, n, dim);
  const auto part = [&](const tensor<float>& t, idx_t from, idx_t count) { return view(t).slice(2, from, count); };
  cache.append(part(x.k, 0, x.keys - n), part(x.v, 0, x.keys - n));
  options.scale = 1.F;
  attn::full_softmax_step(cache, view(x.q), part(x.k, x.keys - n, n), part(x.v, x.keys - n, n), view(out), options);
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("skip: steps over caches", "[skip]", attn::kv_cache<float>, (attn::kv_cache<std::int8_t>),
                   (attn::kv_cache<attn::int4>)) {
  for (idx_t queries : {1, 3, 20}) {
    inputs<float> x(2, 4, 2, queries, 830);
    attn::skipped_tiles tiles;
    // Rows in codes take 256 keys at a time, of which only the last ones are all far.
    constexpr bool coded = !std::same_as<TestType, attn::kv_cache<float>>;
    if (coded)
      for (idx_t j = 0; j < x.keys; ++j) x.near[static_cast<std::size_t>(j)] = j < 768;
    const tensor<float> exact = step_over<TestType>(x, {}), same = step_over<TestType>(x, {.skip_below = HUGE_VALF}),
                        r = step_over<TestType>(x, {.skip_below = 4, .skipped = &tiles});
    CHECK(same == exact);
    CHECK(tiles.seen > 0);
    CHECK(tiles.skipped > 0);
    CHECK(relative_error(r, step_over<TestType>(x, {.key_mask = x.near_keys()})) < (coded ? 5e-5 : 4e-6));
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

TEST_CASE("skip: every plan of keys leaves out what is far", "[skip]") {
  const inputs<float> x(1, 2, 2, 900, 900, 40);  // nothing of them is left in float
  const auto check = [&]<class Operator>(std::type_identity<Operator>, typename Operator::options options) {
    attn::skipped_tiles tiles;
    const result<float> exact = run<float, Operator>(x, options, serial);
    options.skip_below = HUGE_VALF, options.skipped = &tiles;
    CHECK(run<float, Operator>(x, options, serial) == exact);
    CHECK(tiles.skipped == 0);
    options.skip_below = 12;
    const result<float> r = run<float, Operator>(x, options, serial);
    CHECK(tiles.skipped > 0);
    CHECK(relative_error(r.out, exact.out) <= 4e-6);
    CHECK(relative_error(r.lse, exact.lse) <= 4e-6);
  };
  check(std::type_identity<compiled_sliding_window<float>>(), {.left = 300, .right = 200});
  check(std::type_identity<compiled_block<float>>(), {.size = 450});
  check(std::type_identity<compiled_strided<float>>(), {.stride = 2});
  std::vector<std::int32_t> blocks, singles;
  for (idx_t i = 0; i < 900; ++i)
    for (std::int32_t n = 0; n < 256; ++n) {
      if (n < 14) blocks.push_back(n);
      singles.push_back(2 * n);
    }
  compiled_selected_keys<float>::options by_block, one_by_one;
  by_block.block = 64, by_block.indices = attn::tensor_view<const std::int32_t>(blocks.data(), {1, 1, 900, 14});
  one_by_one.indices = attn::tensor_view<const std::int32_t>(singles.data(), {1, 1, 900, 256});
  check(std::type_identity<compiled_selected_keys<float>>(), by_block);
  check(std::type_identity<compiled_selected_keys<float>>(), one_by_one);
}

}  // namespace testing::skipped_tiles_tests
