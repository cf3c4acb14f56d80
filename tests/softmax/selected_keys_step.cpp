// Steps of selected_keys and lightning_indexer over every cache: what a whole call gives, rows that no list names not
// read, and refusals.
#include <attn/softmax/lightning_indexer_step.hpp>

#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/refusal.hpp"
#include "support/run_selected_keys.hpp"

namespace testing::selected_keys_step_tests {
namespace {

constexpr idx_t batch = 2, heads = 4, kv_heads = 2, length = 70, dim = 16, value_dim = 8;

struct sequences {
  tensor<double> q = random_normal(1, batch, heads, length, dim), k = random_normal(2, batch, kv_heads, length, dim),
                 v = random_normal(3, batch, kv_heads, length, value_dim);
};

// The rows of lists for tokens [first, first + count), which name no later ones.
tensor<idx_t> lists_of(const tensor<idx_t>& all, idx_t block, idx_t first, idx_t count) {
  tensor<idx_t> some = rows(all, first, count);
  for (idx_t& name : some.data)
    if (name * block >= first + count) name = -1;
  return some;
}

// All tokens, some at a time, through the cache; against one call in double.
template <class S, class Cache>
void check_steps(Cache& cache, idx_t block, idx_t lists, double allowed) {
  selected_problem p{sequences().q, sequences().k, sequences().v, {}};
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.causal = true, p.options.block = block, p.options.softcap = 3, p.options.sinks = {0.3, -1, 2, 0};
  p.options.indices = random_lists(5, batch, lists, length, 12, (length + block - 1) / block);
  const reference::result wanted = expected(p);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const std::vector<real<S>> sinks = cast<real<S>>(p.options.sinks);
  tensor<S> out(batch, heads, length, value_dim, S(7));
  tensor<real<S>> lse(batch, heads, length, 1, real<S>(7));
  attn::execution two(2, 0);
  const auto part = [](auto& x, idx_t first, idx_t count) { return view(x).slice(2, first, count); };
  for (idx_t first = 0, count = 1; first < length; first += count, count = 1 + count * 3 % 7) {
    count = std::min(count, length - first);
    const tensor<idx_t> some = lists_of(p.options.indices, block, first, count);
    attn::selected_keys_step(cache, part(q, first, count), part(k, first, count), part(v, first, count),
                             part(out, first, count), lists_view(some),
                             {.block = block, .softcap = real<S>(3), .sinks = sinks,
                              .lse = row_view(lse).slice(2, first, count)},
                             two);
  }
  CAPTURE(block, lists);
  CHECK(relative_error(cast<double>(out), wanted.out) <= allowed);
  CHECK(relative_error(cast<double>(lse), wanted.lse) <= allowed);
}

constexpr attn::state_extents extents{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};

template <class S, class C>
void check_caches(double allowed) {
  for (idx_t block : {idx_t(1), idx_t(16)})
    for (idx_t lists : {idx_t(1), kv_heads, heads}) {
      attn::kv_cache<C> cache(extents);
      check_steps<S>(cache, block, lists, allowed);
      for (idx_t page : {16, 64}) {
        attn::page_pool<C> pool({.pages = 20, .page_tokens = page, .heads = kv_heads, .dim = dim,
                                 .value_dim = value_dim});
        attn::paged_cache<C> paged(pool, batch);
        check_steps<S>(paged, block, lists, allowed);
      }
    }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("selected_keys_step: over every cache what a whole call gives", "[selected_keys_step]",
                        exact_types) {
  check_caches<TestType, TestType>(10 * tolerance<TestType>::out);
}
TEST_CASE("selected_keys_step: caches of fewer bits", "[selected_keys_step]") {
  check_caches<float, Eigen::bfloat16>(1.5e-2);
  check_caches<float, std::int8_t>(1.5e-2);
  check_caches<float, attn::int8_channels>(1.5e-2);
  check_caches<Eigen::bfloat16, Eigen::bfloat16>(1.5e-2);
}

TEST_CASE("selected_keys_step: rows that no list names are not read", "[selected_keys_step]") {
  attn::kv_cache<float> cache({.dim = 8}), clean({.dim = 8});
  tensor<float> k = cast<float>(random_normal(4, 1, 1, 100, 8));
  clean.append(view(k), view(k));
  for (idx_t j = 0; j < 100; ++j)
    if (j % 7 != 3) k(0, 0, j, j % 8) = std::numeric_limits<float>::quiet_NaN();
  cache.append(view(k), view(k));
  const tensor<float> q = cast<float>(random_normal(5, 1, 1, 1, 8));
  tensor<float> out(1, 1, 1, 8), wanted(1, 1, 1, 8);
  const tensor<idx_t> named = [] {
    tensor<idx_t> x(1, 1, 1, 5);
    x.data = {73, 3, 100, 10, 94};
    return x;
  }();
  attn::selected_keys_step(cache, view(q), view(q), view(q), view(out), lists_view(named));
  attn::selected_keys_step(clean, view(q), view(q), view(q), view(wanted), lists_view(named));
  CHECK(out == wanted);
}

TEST_CASE("selected_keys_step refuses what does not fit", "[selected_keys_step]") {
  attn::kv_cache<float> cache(extents);
  const tensor<float> q(batch, heads, 3, dim), k(batch, kv_heads, 3, dim), v(batch, kv_heads, 3, value_dim);
  tensor<float> out(batch, heads, 3, value_dim);
  cache.append(view(k), view(v));
  const std::vector<idx_t> lengths = {3, 2};
  const auto message = [&](const tensor<idx_t>& lists, const attn::selected_keys_step_options<float>& options) {
    return refusal([&] { attn::selected_keys_step(cache, view(q), view(k), view(v), view(out), lists_view(lists),
                                                  options); });
  };
  const auto check = [&](const char* says, const std::string& said) {
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, "selected_keys_step"));
    CHECK(said.find(says) != std::string::npos);
    CHECK(cache.tokens() == 3);
  };
  tensor<idx_t> lists(batch, heads, 3, 4, 2);
  lists(1, 2, 0, 1) = 6;
  check("keys from -1 to 5; found 6", message(lists, {}));
  lists(1, 2, 0, 1) = -2;
  check("keys from -1 to 5; found -2", message(lists, {}));
  check("block >= 1; found 0", message(lists, {.block = 0}));
  lists(1, 2, 0, 1) = 3;
  check("blocks from -1 to 2; found 3", message(lists, {.block = 2}));
  check("index heads 1, 2 or 4; found 3", message(tensor<idx_t>(batch, 3, 3, 1), {}));
  check("index rows = query length 3; found 2", message(tensor<idx_t>(batch, 4, 2, 1), {}));
  lists(1, 2, 2, 0) = 99;  // padding
  CHECK(message(lists, {.lengths = lengths}) == "");
}

namespace {

template <class S, class C, class Cache>
void check_index_steps(Cache& cache, idx_t topk, bool relu) {
  constexpr idx_t index_heads = 3, tokens = 90;
  const tensor<S> q = cast<S>(random_normal(1, batch, index_heads, tokens, dim)),
                  k = cast<S>(random_normal(2, batch, 1, tokens, dim));
  const tensor<real<S>> w = cast<real<S>>(random_normal(3, 1, batch, tokens, index_heads));
  const attn::tensor_view<const real<S>, 3> weights(w.data.data(), {batch, tokens, index_heads});
  const auto activation = relu ? attn::indexer_activation::relu : attn::indexer_activation::none;
  tensor<idx_t> wanted(batch, 1, tokens, topk), found(batch, 1, tokens, topk);
  attn::lightning_indexer(view(q), view(k), attn::tensor_view<idx_t>(wanted.data.data(), wanted.extents),
                          {.causal = true, .topk = topk, .activation = activation, .w = weights});
  attn::execution two(2, 0);
  for (idx_t first = 0, count = 1; first < tokens; first += count, count = 1 + count * 3 % 7) {
    count = std::min(count, tokens - first);
    attn::lightning_indexer_step(cache, view(q).slice(2, first, count), view(k).slice(2, first, count),
                                 attn::tensor_view<idx_t>(found.data.data(), found.extents).slice(2, first, count),
                                 {.topk = topk, .activation = activation, .w = weights.slice(1, first, count)}, two);
  }
  idx_t different = 0;
  for (std::size_t n = 0; n < wanted.data.size(); ++n) different += wanted.data[n] != found.data[n];
  CAPTURE(topk, relu, different);
  // In other bits keys change places with those that score nearly as much.
  CHECK(different <= (std::same_as<S, C> && sizeof(S) > 2 ? 0 : wanted.size() / 10));
}

// Blocks for each head, of every size of chunk; over pooled keys, of which a chunk completes some.
template <class S>
void check_block_steps(attn::execution& exec) {
  constexpr idx_t tokens = 90, index_heads = 3, topk = 5;
  const tensor<S> q = cast<S>(random_normal(1, batch, index_heads, tokens, dim)),
                  k = cast<S>(random_normal(2, batch, 1, tokens, dim));
  for (bool pooled : {false, true}) {
    const idx_t lists = pooled ? 1 : index_heads, entries = topk + pooled;
    attn::lightning_indexer_options<S> whole{.causal = true, .topk = topk};
    if (pooled)
      whole.span = 4, whole.tail = true, whole.first_position = 0;
    else
      whole.block = 6, whole.per_head = true, whole.local_blocks = 1;
    tensor<idx_t> wanted(batch, lists, tokens, entries), found(batch, lists, tokens, entries);
    const attn::tensor_view<idx_t> to(found.data.data(), found.extents);
    attn::lightning_indexer(view(q), view(k).slice(2, 0, pooled ? tokens / 4 : tokens),
                            attn::tensor_view<idx_t>(wanted.data.data(), wanted.extents), whole);
    attn::kv_cache<S> cache({.batch = batch, .dim = dim, .value_dim = 0});
    for (idx_t first = 0, count = 1; first < tokens; first += count, count = 1 + count * 3 % 7) {
      count = std::min(count, tokens - first);
      const auto some = view(q).slice(2, first, count);
      if (pooled) {
        const auto keys = view(k).slice(2, first / 4, (first + count) / 4 - first / 4);
        cache.append(keys, keys.slice(3, 0, 0));
        attn::lightning_indexer_cached(cache, some, to.slice(2, first, count),
                                       {.first_position = first, .span = 4, .topk = topk, .tail = true}, exec);
      } else {
        attn::lightning_indexer_step(cache, some, view(k).slice(2, first, count), to.slice(2, first, count),
                                     {.topk = topk, .block = 6, .local_blocks = 1, .per_head = true}, exec);
      }
    }
    CAPTURE(pooled);
    CHECK(found == wanted);
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("lightning_indexer_step: blocks for each head, keys of several tokens", "[selected_keys_step]",
                        exact_types) {
  attn::execution serial, three(3, 0);
  check_block_steps<TestType>(serial);
  check_block_steps<TestType>(three);
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer_step: over every cache what a whole call gives", "[selected_keys_step]",
                        exact_types) {
  using S = TestType;
  for (idx_t topk : {1, 8, 200})
    for (bool relu : {false, true}) {
      attn::kv_cache<S> cache({.batch = batch, .dim = dim, .value_dim = 0});
      check_index_steps<S, S>(cache, topk, relu);
      attn::page_pool<S> pool({.pages = 20, .page_tokens = 16, .dim = dim, .value_dim = 0});
      attn::paged_cache<S> paged(pool, batch);
      check_index_steps<S, S>(paged, topk, relu);
    }
}
TEST_CASE("lightning_indexer_step: a cache of eight bits, items of their own lengths, refusals",
          "[selected_keys_step]") {
  attn::kv_cache<std::int8_t> eight({.batch = batch, .dim = dim, .value_dim = 0});
  check_index_steps<float, std::int8_t>(eight, 40, true);
  attn::kv_cache<attn::int8_channels> by_channel({.batch = batch, .dim = dim, .value_dim = 0});
  check_index_steps<float, attn::int8_channels>(by_channel, 40, true);

  attn::kv_cache<float> cache({.batch = 2, .dim = 4, .value_dim = 0});
  const tensor<float> q(2, 1, 2, 4, 1), k(2, 1, 2, 4, 1);
  tensor<std::int32_t> found(2, 1, 2, 3, 7);
  const attn::tensor_view<std::int32_t> to(found.data.data(), found.extents);
  const std::vector<idx_t> lengths = {2, 1};
  attn::lightning_indexer_step(cache, view(q), view(k), to, {.lengths = lengths, .topk = 3});
  CHECK(found.data == std::vector<std::int32_t>{0, -1, -1, 0, 1, -1, 0, -1, -1, -1, -1, -1});
  CHECK(cache.tokens(0) == 2);
  CHECK(cache.tokens(1) == 1);

  const auto check = [&](const char* says, auto&& call) {
    const std::string said = refusal(call);
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, "lightning_indexer_step"));
    CHECK(said.find(says) != std::string::npos);
    CHECK(cache.tokens() == 2);
  };
  attn::kv_cache<float> valued({.batch = 2, .dim = 4});
  check("cache value dim 0; found 4",
        [&] { attn::lightning_indexer_step(valued, view(q), view(k), to, {.topk = 3}); });
  check("topk >= 1; found 0", [&] { attn::lightning_indexer_step(cache, view(q), view(k), to, {.topk = 0}); });
  check("indices of shape", [&] { attn::lightning_indexer_step(cache, view(q), view(k), to, {.topk = 2}); });
  check("at most topk = 3 together; found 2 and 2", [&] {
    attn::lightning_indexer_step(cache, view(q), view(k), to, {.topk = 3, .local_blocks = 2, .first_blocks = 2});
  });
  check("query length = key length",
        [&] { attn::lightning_indexer_step(cache, view(q), view(k).slice(2, 0, 1), to, {.topk = 3}); });
  const std::vector<idx_t> long_chunk = {3, 1};
  const auto cached = [&](const char* says, const attn::lightning_indexer_cached_options<float>& o) {
    const std::string said = refusal([&] { attn::lightning_indexer_cached(cache, view(q), to, o); });
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, "lightning_indexer_cached"));
    CHECK(said.find(says) != std::string::npos);
  };
  cached("first_position, since span is given", {.span = 2, .topk = 3});
  cached("span >= 1; found 0", {.first_position = 0, .span = 0, .topk = 3});
  cached("a block of 1, since span is given; found 2", {.first_position = 0, .span = 2, .topk = 3, .block = 2});
  cached("neither local_blocks nor first_blocks", {.first_position = 0, .span = 2, .topk = 3, .first_blocks = 1});
  cached("span, since tail is given", {.topk = 3, .tail = true});
  cached("at most topk = 3 together; found 4 and 0", {.topk = 3, .local_blocks = 4});
  cached("lengths from 0 to 2; found 3", {.lengths = long_chunk, .topk = 3});
  cached("indices of shape", {.topk = 2});
}

}  // namespace testing::selected_keys_step_tests
