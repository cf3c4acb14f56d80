// Steps of pointwise over caches of every kind: what a whole call gives; what is cached alone, and refusals.
#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/refusal.hpp"
#include "support/run_pointwise.hpp"

#include <attn/core/paged_cache.hpp>

namespace testing::pointwise_step_tests {
namespace {

constexpr idx_t batch = 2, heads = 4, kv_heads = 2, length = 70, dim = 16, value_dim = 8;
constexpr attn::state_extents extents{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};

pointwise_problem problem_of(int f, idx_t left) {
  pointwise_problem p{random_normal(1, batch, heads, length, dim), random_normal(2, batch, kv_heads, length, dim),
                      random_normal(3, batch, kv_heads, length, value_dim), {}};
  auto& o = p.options;
  o.kind = static_cast<reference::pointwise_kind>(f), o.left = left, o.causal = true, o.softcap = 3, o.shift = -1;
  o.alibi_slopes = {0.5, 0.25, 0.125, 0}, o.row_weights = random_normal(4, 1, 1, batch, length);
  return p;
}

// All tokens, some at a time, through the cache; against one call in double.
template <class S, class Cache>
void check_steps(Cache& cache, int f, idx_t left, double allowed) {
  const pointwise_problem p = rounded<S>(problem_of(f, left));
  const stored_pointwise<S> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(batch, heads, length, value_dim, S(7));
  attn::execution two(2, 0);
  const auto part = [](auto& x, idx_t first, idx_t count) { return view(x).slice(2, first, count); };
  for (idx_t first = 0, count = 1; first < length; first += count, count = 1 + count * 3 % 23) {
    count = std::min(count, length - first);
    const attn::pointwise_options<S> all = stored.options();
    attn::pointwise_step(cache, part(q, first, count), part(k, first, count), part(v, first, count),
                         part(out, first, count),
                         {.activation = all.activation, .left = all.left, .weight = all.weight,
                          .row_weights = table_view(stored.rows).slice(1, first, count), .shift = all.shift,
                          .softcap = all.softcap, .alibi_slopes = all.alibi_slopes},
                         two);
  }
  CAPTURE(f, left);
  CHECK(relative_error(cast<double>(out), expected(p).out) <= allowed);
}

template <class S, class C>
void check_caches(double allowed) {
  for (int f : {0, 1, 2})
    for (idx_t left : {idx_t(-1), idx_t(20)}) {
      attn::kv_cache<C> cache(extents);
      check_steps<S>(cache, f, left, allowed);
      attn::page_pool<C> pool({.pages = 20, .page_tokens = 16, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
      attn::paged_cache<C> paged(pool, batch);
      check_steps<S>(paged, f, left, allowed);
    }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pointwise_step: over every cache what a whole call gives", "[pointwise_step]", exact_types) {
  check_caches<TestType, TestType>(tolerance<TestType>::out);
}
TEST_CASE("pointwise_step: caches of fewer bits", "[pointwise_step]") {
  check_caches<float, std::int8_t>(2e-2);
  check_caches<float, attn::int8_channels>(2e-2);
}

TEST_CASE("pointwise_cached: the tokens that a cache has", "[pointwise_step]") {
  const pointwise_problem p = rounded<float>(problem_of(1, 20));
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  tensor<float> stepped(batch, heads, length, value_dim), cached = stepped, crossed = stepped, whole = stepped;
  attn::kv_cache<float> cache(extents);
  const auto silu = attn::pointwise_activation::silu;
  attn::pointwise_step(cache, view(q), view(k), view(v), view(stepped), {.activation = silu, .left = 20});
  attn::pointwise_cached(cache, view(q), view(cached), {.activation = silu, .left = 20});
  CHECK(cached == stepped);
  attn::pointwise_cached(cache, view(q), view(crossed), {.activation = silu, .causal = false});
  attn::pointwise(view(q), view(k), view(v), view(whole), {.activation = silu});
  CHECK(relative_error(cast<double>(crossed), cast<double>(whole)) <= 1e-6);
  CHECK(cache.tokens() == length);
}

TEST_CASE("pointwise_step refuses what does not fit", "[pointwise_step]") {
  attn::kv_cache<float> cache(extents);
  const tensor<float> q(batch, heads, 3, dim), k(batch, kv_heads, 3, dim), v(batch, kv_heads, 3, value_dim),
      rows(1, 1, 2, 2);
  tensor<float> out(batch, heads, 3, value_dim);
  cache.append(view(k), view(v));
  const auto check = [&](const char* says, const attn::pointwise_step_options<float>& options) {
    const std::string said =
        refusal([&] { attn::pointwise_step(cache, view(q), view(k), view(v), view(out), options); });
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, "pointwise_step"));
    CHECK(said.find(says) != std::string::npos);
    CHECK(cache.tokens() == 3);
  };
  check("left >= 0; found -1", {.left = -1});
  check("row_weights length = query length 3; found 2", {.row_weights = table_view(rows)});
  check("a finite shift", {.shift = NAN});
  const std::vector<float> slopes(3, 1.0f);
  check("alibi_slopes", {.alibi_slopes = slopes});
  const std::string said = refusal(
      [&] { attn::pointwise_cached(cache, view(q), view(out), {.causal = false, .left = 2}); });
  CHECK(said.find("a causal call, since left is given; found causal = false") != std::string::npos);
}

}  // namespace testing::pointwise_step_tests
