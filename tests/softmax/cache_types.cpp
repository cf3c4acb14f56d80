// Caches whose elements have fewer bits than the tokens: steps over them are attention over what they keep.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <cmath>
#include <cstdlib>

#include "support/cache_items.hpp"
#include "support/catch.hpp"
#include "support/listed_keys.hpp"
#include "support/npy.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"
#include "support/window_pages.hpp"

namespace testing::cache_types_tests {
namespace {

using Eigen::bfloat16;
using int8 = std::int8_t;

// What a cache of C makes of tokens, all of them from the first on. In eight bits a token has a scale, 1/127 of its
// largest number; 16 keys a reference, the first of them as bf16, and the numbers are differences from it, but for keys
// whose largest difference is larger than their largest number.
template <class C>
tensor<double> kept(tensor<double> x, bool keys) {
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t t = x.length() - 1; t >= 0; --t) {  // a row is what its block's first was, which comes last
        double largest = 0, alone = 0;
        bool from_reference = keys;
        const auto reference = [&](idx_t d) {
          return from_reference ? static_cast<double>(bfloat16(static_cast<float>(x(b, h, t / 16 * 16, d)))) : 0.0;
        };
        for (idx_t d = 0; d < x.dim(); ++d) {
          largest = std::max(largest, std::abs(x(b, h, t, d) - reference(d)));
          alone = std::max(alone, std::abs(x(b, h, t, d)));
        }
        if (alone < largest) from_reference = false, largest = alone;
        for (idx_t d = 0; d < x.dim(); ++d) {
          double& number = x(b, h, t, d);
          if constexpr (!std::same_as<C, int8>)
            number = static_cast<double>(static_cast<float>(static_cast<C>(static_cast<float>(number))));
          else if (largest > 0)
            number = reference(d) + std::nearbyint((number - reference(d)) / largest * 127) * largest / 127;
        }
      }
  return x;
}

// Queries and weights are rounded as well: to bf16 for products of its numbers, to 16-bit whole numbers for those in
// eight bits. Exponentials err by 1.02e-4 of themselves there.
template <class C>
constexpr double error_of = std::same_as<C, int8>       ? 3e-4
                            : std::same_as<C, bfloat16> ? tolerance<bfloat16>::out
                                                        : 2e-6;

// How tokens arrive: by few and by many, begun anywhere in a block of 16.
const std::vector<idx_t> some_chunks = {1, 2, 30, 4, 3, 17, 1, 1, 1, 5, 1000};

struct cache_case {
  idx_t heads = 4, kv_heads = 2, dim = 64, value_dim = 64, tokens = 150;
  std::vector<idx_t> chunks = some_chunks;
  std::vector<idx_t> page_tokens = {64};
};
const cache_case cases[] = {{},
                            {.heads = 6, .kv_heads = 1, .dim = 80, .value_dim = 48},
                            {.kv_heads = 4, .dim = 6, .value_dim = 10},
                            {.heads = 5, .kv_heads = 5, .dim = 34, .value_dim = 20, .tokens = 40},
                            {.heads = 3,
                             .kv_heads = 1,
                             .dim = 32,
                             .tokens = 660,
                             .chunks = {520, 63, 9, 2, 65, 1},
                             .page_tokens = {16, 256}}};

full_softmax_problem problem_of(const cache_case& s) {
  auto p = random_problem<full_softmax_problem>({.heads = s.heads,
                                                 .kv_heads = s.kv_heads,
                                                 .queries = s.tokens,
                                                 .keys = s.tokens,
                                                 .dim = s.dim,
                                                 .value_dim = s.value_dim});
  p.options.causal = true;
  for (idx_t b = 0; b < p.k.batch(); ++b)  // a channel that stands out, as in trained models
    for (idx_t h = 0; h < s.kv_heads; ++h)
      for (idx_t t = 0; t < s.tokens; ++t) p.k(b, h, t, 1) += 12, p.v(b, h, t, 0) -= 9;
  return rounded<float>(p);
}

/// step(q, k, v, out, begin) of all chunks.
template <class Step>
tensor<double> decode(const full_softmax_problem& p, const Step& step,
                      const std::vector<idx_t>& chunks = some_chunks) {
  tensor<double> all(p.q.batch(), p.q.heads(), p.q.length(), p.v.dim());
  idx_t begin = 0;
  for (idx_t chunk : chunks) {
    const idx_t count = std::min(chunk, p.q.length() - begin);
    const auto part = [&](const tensor<double>& x) { return cast<float>(rows(x, begin, count)); };
    const tensor<float> q = part(p.q), k = part(p.k), v = part(p.v);
    tensor<float> out(p.q.batch(), p.q.heads(), count, p.v.dim(), 7.0f);
    step(view(q), view(k), view(v), view(out), begin);
    for (idx_t b = 0; b < out.batch(); ++b)
      for (idx_t h = 0; h < out.heads(); ++h)
        for (idx_t i = 0; i < count; ++i)
          for (idx_t d = 0; d < out.dim(); ++d) all(b, h, begin + i, d) = static_cast<double>(out(b, h, i, d));
    begin += count;
  }
  return all;
}

template <class C>
void check_cache() {
  attn::execution exec(2);
  for (const cache_case& s : cases) {
    CAPTURE(s.heads, s.dim, s.value_dim);
    const full_softmax_problem p = problem_of(s);
    full_softmax_problem stored = p;
    stored.k = kept<C>(p.k, true), stored.v = kept<C>(p.v, false);
    const tensor<double> wanted = expected(stored).out;
    attn::kv_cache<C> cache({.batch = p.k.batch(), .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim});
    const auto found = decode(
        p, [&](auto q, auto k, auto v, auto out, idx_t) { attn::full_softmax_step(cache, q, k, v, out, exec); },
        s.chunks);
    CHECK(relative_error(found, wanted) <= error_of<C>);
    for (const idx_t tokens : s.page_tokens) {
      CAPTURE(tokens);
      attn::page_pool<C> pool(
          {.pages = 100, .page_tokens = tokens, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim});
      attn::paged_cache<C> paged(pool, p.k.batch());
      const auto in_pages = decode(
          p, [&](auto q, auto k, auto v, auto out, idx_t) { attn::full_softmax_step(paged, q, k, v, out); }, s.chunks);
      if (std::same_as<C, int8> || tokens % 64 == 0)  // tiles of rows end where pages do, but for those of codes
        CHECK((found.data == in_pages.data));
      CHECK(relative_error(in_pages, wanted) <= error_of<C>);
    }
  }
}

}  // namespace

TEST_CASE("A cache of half attends what it keeps", "[cache_types]") { check_cache<Eigen::half>(); }
TEST_CASE("A cache of bfloat16 attends what it keeps", "[cache_types]") { check_cache<bfloat16>(); }
TEST_CASE("A cache of int8 attends what it keeps", "[cache_types]") { check_cache<int8>(); }
TEST_CASE("A cache of float8_e4m3 attends what it keeps", "[cache_types]") { check_cache<attn::float8_e4m3>(); }

namespace {

template <class C>
void check_window(idx_t left, idx_t dilation, std::vector<idx_t> globals) {
  CAPTURE(left, dilation);
  full_softmax_problem p = problem_of({.value_dim = 32});
  const auto& [batch, heads] = std::pair(p.k.batch(), p.k.heads());
  const std::vector<idx_t> dilations{dilation};
  const attn::sliding_window_cache_options window{.left = left, .dilation = dilations, .global_positions = globals};
  attn::sliding_window_cache<C> ring({.batch = batch, .heads = heads, .dim = 64, .value_dim = 32}, window);
  attn::kv_cache<C> whole({.batch = batch, .heads = heads, .dim = 64, .value_dim = 32});
  const auto of_ring =
      decode(p, [&](auto q, auto k, auto v, auto out, idx_t) { attn::sliding_window_step(ring, q, k, v, out); });
  const auto of_whole = decode(
      p, [&](auto q, auto k, auto v, auto out, idx_t) { attn::sliding_window_step(whole, window, q, k, v, out); });
  // The same by a bias that hides what the window does.
  const idx_t length = p.q.length();
  p.options.bias = tensor<double>(1, 1, length, length);
  const auto global = [&](idx_t t) { return std::find(globals.begin(), globals.end(), t) != globals.end(); };
  for (idx_t i = 0; i < length; ++i)
    for (idx_t j = 0; j <= i; ++j)
      if (!global(i) && !global(j) && ((i - j) % dilation != 0 || (i - j) / dilation > left))
        p.options.bias(0, 0, i, j) = -std::numeric_limits<double>::infinity();
  const full_softmax_problem tokens = p;
  p.k = kept<C>(tokens.k, true), p.v = kept<C>(tokens.v, false);
  CHECK(relative_error(of_whole, expected(p).out) <= error_of<C>);
  // Global tokens have places of their own in a ring, and references among themselves: only without them is it the
  // same.
  CHECK(relative_error(of_ring, expected(p).out) <= (globals.empty() ? error_of<C> : 0.03));
}

}  // namespace

TEST_CASE("Windows over a cache of int8", "[cache_types]") {
  check_window<int8>(20, 1, {});
  check_window<int8>(40, 3, {});
  check_window<int8>(4, 20, {});
  check_window<int8>(0, 1, {});
  check_window<int8>(30, 1, {0, 3, 50});
}
TEST_CASE("Single keys of a cache of int8", "[cache_types]") {
  for (const cache_case& s : cases) {
    const full_softmax_problem p = problem_of(s);
    full_softmax_problem in_codes = p;
    in_codes.k = kept<int8>(p.k, true), in_codes.v = kept<int8>(p.v, false);
    check_listed_keys<int8>(p, in_codes, error_of<int8>);
  }
}

TEST_CASE("Pages change no bit of windows", "[cache_types]") {
  check_window_pages<bfloat16>({128, 5});
  check_window_pages<int8>({16, 48, 256});
  check_window_pages<attn::float8_e5m2>({256});
}
TEST_CASE("Windows over a cache of bfloat16", "[cache_types]") { check_window<bfloat16>(33, 2, {}); }
TEST_CASE("Windows over a cache of float8_e5m2", "[cache_types]") { check_window<attn::float8_e5m2>(33, 2, {}); }

TEST_CASE("Items of a cache of int8 are sequences of their own", "[cache_types]") {
  const auto step = [](auto& cache, auto q, auto k, auto v, auto out, attn::list_view<idx_t> lengths) {
    attn::full_softmax_step(cache, q, k, v, out, {.lengths = lengths});
  };
  attn::kv_cache<int8> cache({.batch = 4, .heads = 2, .dim = 20, .value_dim = 12});
  // Long chunks are attended by packed rows, or not, as an item's part of them is long.
  check_items<float>(cache, attn::kv_cache<int8>({.heads = 2, .dim = 20, .value_dim = 12}), step, {}, 1e-3);
  const attn::state_extents extents{.batch = 4, .heads = 2, .dim = 20, .value_dim = 12};
  attn::sliding_window_cache<int8> ring(extents, {.left = 30});
  check_items<float>(ring, attn::sliding_window_cache<int8>({.heads = 2, .dim = 20, .value_dim = 12}, {.left = 30}),
                     [](auto& c, auto q, auto k, auto v, auto out, attn::list_view<idx_t> lengths) {
                       attn::sliding_window_step(c, q, k, v, out, {.lengths = lengths});
                     });
}

TEST_CASE("A cache of int8 in the caller's memory, and values that are dims of the keys", "[cache_types]") {
  const idx_t heads = 2, dim = 48, value_dim = 32, tokens = 70, blocks = 5;
  full_softmax_problem p = random_problem<full_softmax_problem>({.batch = 1,
                                                                 .heads = 4,
                                                                 .kv_heads = heads,
                                                                 .queries = tokens,
                                                                 .keys = tokens,
                                                                 .dim = dim,
                                                                 .value_dim = value_dim});
  p.options.causal = true;
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t t = 0; t < tokens; ++t)
      for (idx_t d = 0; d < value_dim; ++d) p.v(0, h, t, d) = p.k(0, h, t, d);
  p = rounded<float>(p);
  const idx_t bytes = 64 + 18 * dim, stride = bytes + 14;
  std::vector<int8> memory(static_cast<std::size_t>(heads * blocks * stride));
  const attn::tensor_view<int8> view_of(memory.data(), {1, heads, blocks, bytes}, {0, blocks * stride, stride, 1});
  attn::kv_cache<int8> given(view_of, view_of.slice(3, 0, 64 + 18 * value_dim)),
      own({.heads = heads, .dim = dim, .value_dim = value_dim}, {.values_in_keys = true});
  CHECK(given.dim() == dim);
  CHECK(given.value_dim() == value_dim);
  CHECK(given.capacity() == 16 * blocks);
  CHECK(attn::detail::step_access::of(given).values_in_keys());
  const std::vector<idx_t> there = {20};
  CHECK(attn::kv_cache<int8>(view_of, view_of, there).tokens() == 20);
  const auto run = [&](attn::kv_cache<int8>& cache) {
    return decode(p, [&](auto q, auto k, auto, auto out, idx_t) {
      attn::full_softmax_step(cache, q, k, k.slice(3, 0, value_dim), out);
    });
  };
  const auto a = run(given), b = run(own);
  CHECK(a.data == b.data);
  p.k = kept<int8>(p.k, true);
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t t = 0; t < tokens; ++t)
      for (idx_t d = 0; d < value_dim; ++d) p.v(0, h, t, d) = p.k(0, h, t, d);
  CHECK(relative_error(a, expected(p).out) <= error_of<int8>);
}

TEST_CASE("A query that is not finite reaches its own result alone in a cache of int8", "[cache_types]") {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const tensor<float> k = cast<float>(random_normal(1, 1, 1, 40, 32)),
                        v = cast<float>(random_normal(2, 1, 1, 40, 32));
    tensor<float> q = cast<float>(random_normal(3, 1, 4, 1, 32)), fine(1, 4, 1, 32), poisoned(1, 4, 1, 32);
    const tensor<float> k_new = cast<float>(random_normal(4, 1, 1, 1, 32)),
                        v_new = cast<float>(random_normal(5, 1, 1, 1, 32));
    attn::kv_cache<int8> cache({.dim = 32});
    cache.append(view(k), view(v));
    attn::full_softmax_step(cache, view(std::as_const(q)), view(k_new), view(v_new), view(fine));
    cache.truncate(40);
    q(0, 2, 0, 5) = bad;
    attn::full_softmax_step(cache, view(std::as_const(q)), view(k_new), view(v_new), view(poisoned));
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t d = 0; d < 32; ++d)
        CHECK((h == 2 ? std::isnan(poisoned(0, h, 0, d)) : poisoned(0, h, 0, d) == fine(0, h, 0, d)));
  }
}

TEST_CASE("Caches of int8 refuse what has no finite scale or does not fit", "[cache_types]") {
  const auto wrong = [](const char* name, auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, name));
  };
  attn::kv_cache<int8> cache({.batch = 2, .heads = 2, .dim = 8});
  tensor<float> k = cast<float>(random_normal(1, 2, 2, 3, 8)), v = cast<float>(random_normal(2, 2, 2, 3, 8));
  const auto append = [&](std::vector<idx_t> lengths) {
    cache.append(view(std::as_const(k)), view(std::as_const(v)), {.lengths = lengths});
  };
  append({3, 2});
  const std::vector<int8> before(cache.keys().data(), cache.keys().data() + 64);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1.1e38f}) {
    v(1, 1, 2, 7) = bad;
    wrong("kv_cache", [&] { append({3, 3}); });
    wrong("full_softmax_step", [&] {
      tensor<float> out(2, 2, 3, 8, 7.0f);
      attn::full_softmax_step(cache, view(std::as_const(k)), view(std::as_const(k)), view(std::as_const(v)), view(out));
    });
    CHECK(cache.lengths()[1] == 2);
    CHECK(std::equal(before.begin(), before.end(), cache.keys().data()));
  }
  append({3, 2});  // what is padding may be anything
  CHECK(cache.tokens(1) == 4);
  for (float& x : k.data) x = 0.9e38f;
  wrong("full_softmax_step", [&] {  // finite as they are, but not as they are rotated
    tensor<float> out(2, 2, 3, 8, 7.0f);
    attn::full_softmax_step(cache, view(std::as_const(k)), view(std::as_const(k)), view(std::as_const(v)), view(out),
                            {.lengths = std::vector<idx_t>{0, 2}, .rotary = attn::rotary_options<float>{}});
  });
  CHECK(cache.tokens(1) == 4);
  wrong("kv_cache", [] { attn::kv_cache<int8>({.dim = 7}); });
  wrong("kv_cache", [] { attn::kv_cache<int8>({.dim = 8, .value_dim = 5}); });
  wrong("page_pool", [] { attn::page_pool<int8>({.pages = 2, .dim = 9}); });
  wrong("sliding_window_cache", [] { attn::sliding_window_cache<int8>({.dim = 9}); });
  std::vector<int8> memory(1000);
  const auto given = [&](idx_t offset, idx_t bytes, idx_t stride) {
    const attn::tensor_view<int8> x(memory.data() + offset, {1, 1, 2, bytes}, {0, 0, stride, 1});
    attn::kv_cache<int8>(x, x);
  };
  wrong("kv_cache", [] { attn::kv_cache<int8>({.dim = std::numeric_limits<idx_t>::max() - 1}).reserve(1); });
  wrong("kv_cache", [&] { given(0, 10, 200); });
  given(0, 64 + 18 * 4, 200);  // values are the same: they may be of as many dims
  wrong("kv_cache", [&] { given(0, 64 + 18 * 4 + 2, 200); });
  wrong("kv_cache", [&] { given(0, 64 + 18 * 5, 200); });
  wrong("kv_cache", [&] { given(0, 64 + 18 * 4, 201); });
  wrong("kv_cache", [&] { given(reinterpret_cast<std::uintptr_t>(memory.data()) % 2 + 1, 64 + 18 * 4, 200); });
}

// Two dims that a fast frequency rotates are large in all keys: within 16 tokens they turn around, so that differences
// from the first key are up to twice as large as the keys.
TEST_CASE("Large channels that turn within a block cost int8 no more than one scale per key", "[cache_types]") {
  full_softmax_problem p;
  p.q = random_normal(1, 1, 1, 200, 128), p.k = random_normal(2, 1, 1, 200, 128);
  p.v = random_normal(3, 1, 1, 200, 128);
  for (idx_t t = 0; t < 200; ++t) p.k(0, 0, t, 3) += 100, p.k(0, 0, t, 67) -= 100;
  p.options.causal = true;
  p = rounded<float>(p);
  const attn::rotary_options<float> turns{.base = 1e6};
  tensor<float> q = cast<float>(p.q), k = cast<float>(p.k);
  attn::rotary(view(q), view(q), turns), attn::rotary(view(k), view(k), turns);
  full_softmax_problem turned = p;
  turned.q = cast<double>(q), turned.k = cast<double>(k);
  const auto error = [&](full_softmax_problem x) {
    attn::kv_cache<int8> cache({.dim = 128});
    const auto step = [&](auto... tensors) { attn::full_softmax_step(cache, tensors...); };
    return relative_error(
        decode(x, [&](auto a, auto b, auto c, auto out, idx_t) { step(a, b, c, out); }), expected(turned).out);
  };
  full_softmax_problem scaled = turned;  // one scale per key
  for (idx_t t = 0; t < 200; ++t) {
    double largest = 0;
    for (idx_t d = 0; d < 128; ++d) largest = std::max(largest, std::abs(turned.k(0, 0, t, d)));
    for (idx_t d = 0; d < 128; ++d)
      scaled.k(0, 0, t, d) = std::nearbyint(turned.k(0, 0, t, d) / largest * 127) * largest / 127;
  }
  const double reached = error(turned), allowed = relative_error(expected(scaled).out, expected(turned).out);
  CAPTURE(reached, allowed);
  CHECK(reached < 1.05 * allowed);  // values are rounded too
}

TEST_CASE("A cache of 16 or 8-bit numbers refuses what is beyond them", "[cache_types]") {
  const auto check = [](auto cache, float largest, float beyond) {
    const tensor<float> good = cast<float>(random_normal(1, 1, 2, 3, 8));
    tensor<float> bad = good;
    bad(0, 1, 2, 7) = -largest;
    cache.append(view(good), view(std::as_const(bad)));
    bad(0, 1, 2, 7) = beyond;
    const std::string message = refusal([&] { cache.append(view(good), view(std::as_const(bad))); });
    INFO(message);
    CHECK(well_formed(message, "kv_cache"));
    CHECK(cache.tokens() == 3);
    cache.append(view(good), view(std::as_const(bad)), {.lengths = std::vector<idx_t>{2}});  // padding may be anything
  };
  check(attn::kv_cache<Eigen::half>({.heads = 2, .dim = 8}), 65504.0f, 1e5f);
  check(attn::kv_cache<bfloat16>({.heads = 2, .dim = 8}), 0x1.fep127f, std::numeric_limits<float>::max());
  check(attn::kv_cache<attn::float8_e4m3>({.heads = 2, .dim = 8}), 448, 449);
  check(attn::kv_cache<attn::float8_e5m2>({.heads = 2, .dim = 8}), 57344, std::numeric_limits<float>::infinity());
}

TEST_CASE("A cache of int8 on the keys and values of a trained model errs by less than 0.5 %", "[cache_types]") {
  const std::filesystem::path folder = ATTN_DATA_DIR;
  for (int layer = 0; layer < 2; ++layer) {
    const auto read = [&](const char* name) {
      const npy_array x = read_npy(folder / ("use_lite_layer" + std::to_string(layer)) / name);
      tensor<double> all(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
      all.data = x.values;
      return all;
    };
    full_softmax_problem p;
    p.q = read("q.npy"), p.k = read("k.npy"), p.v = read("v.npy");
    p.options.causal = true;
    p = rounded<float>(p);
    const tensor<double> exact = expected(p).out;
    attn::kv_cache<int8> cache({.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()});
    const double error = relative_error(
        decode(p, [&](auto q, auto k, auto v, auto out, idx_t) { attn::full_softmax_step(cache, q, k, v, out); }),
        exact);
    CAPTURE(layer, error);
    CHECK(error < 0.005);
    CHECK(error > 1e-4);
  }
}

}  // namespace testing::cache_types_tests
