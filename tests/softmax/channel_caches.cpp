// Caches with a scale and an offset for each channel of 32 tokens: what they keep, and steps over it.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <cmath>

#include "support/cache_items.hpp"
#include "support/catch.hpp"
#include "support/listed_keys.hpp"
#include "support/npy.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"
#include "support/window_pages.hpp"

namespace testing::channel_caches_tests {
namespace {

using attn::int4, attn::int8_channels;
template <class C>
constexpr int most = attn::detail::channel_layout<C>::most;

// What a cache keeps of the first `count` tokens, fed in order.
template <class C>
tensor<double> kept(const tensor<double>& all, bool keys, idx_t count) {
  const tensor<float> given = cast<float>(rows(all, 0, count));
  attn::kv_cache<C> cache({.batch = given.batch(), .heads = given.heads(), .dim = given.dim()});
  cache.append(view(given), view(given));
  tensor<double> x = cast<double>(given);
  std::vector<float> row(static_cast<std::size_t>(given.dim()));
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t t = 0; t < count; ++t) {
        attn::detail::cache_rows<const C>(keys ? cache.keys() : cache.values(), b, h, x.dim(), keys, {})
            .from(t)
            .expand(0, 1, row.data(), x.dim());
        for (idx_t d = 0; d < x.dim(); ++d) x(b, h, t, d) = static_cast<double>(row[static_cast<std::size_t>(d)]);
      }
  return x;
}

// Queries and weights become 16-bit whole numbers, and exponentials err by 1.02e-4 of themselves, as with int8.
constexpr double error = 3e-4;

struct cache_case {
  idx_t heads = 4, kv_heads = 2, dim = 64, value_dim = 64, tokens = 150;
  std::vector<idx_t> chunks = {1, 2, 30, 4, 3, 17, 1, 1, 1, 5, 1000};  // begun anywhere in a block
  idx_t page_tokens = 64;
};
const std::vector<idx_t> long_chunks = {520, 63, 9, 2, 65, 1};
const cache_case cases[] = {
    {},
    {.heads = 6, .kv_heads = 1, .dim = 80, .value_dim = 48, .page_tokens = 32},
    {.kv_heads = 4, .dim = 1, .value_dim = 3, .tokens = 70},
    {.heads = 5, .kv_heads = 5, .dim = 33, .value_dim = 20, .tokens = 70, .page_tokens = 1},
    {.heads = 3, .kv_heads = 1, .dim = 32, .value_dim = 32, .tokens = 660, .chunks = long_chunks, .page_tokens = 256}};

full_softmax_problem problem_of(const cache_case& s) {
  auto p = random_problem<full_softmax_problem>({.heads = s.heads, .kv_heads = s.kv_heads, .queries = s.tokens,
                                                 .keys = s.tokens, .dim = s.dim, .value_dim = s.value_dim});
  p.options.causal = true;
  for (idx_t b = 0; b < p.k.batch(); ++b)  // a channel of large numbers
    for (idx_t h = 0; h < s.kv_heads; ++h)
      for (idx_t t = 0; t < s.tokens; ++t) p.k(b, h, t, 0) = 5 * p.k(b, h, t, 0) + 12, p.v(b, h, t, 0) -= 9;
  return rounded<float>(p);
}

/// step(q, k, v, out) of a chunk.
template <class Step>
tensor<float> feed(const full_softmax_problem& p, idx_t begin, idx_t count, const Step& step) {
  const auto part = [&](const tensor<double>& x) { return cast<float>(rows(x, begin, count)); };
  const tensor<float> q = part(p.q), k = part(p.k), v = part(p.v);
  tensor<float> out(q.batch(), q.heads(), count, v.dim(), 7.0f);
  step(view(q), view(k), view(v), view(out));
  return out;
}
/// The chunk's queries over what a cache of C keeps; hide(problem) adds what hides keys.
template <class C, class Hide>
tensor<double> wanted(const full_softmax_problem& p, idx_t begin, idx_t count, const Hide& hide) {
  full_softmax_problem part = p;
  part.q = rows(p.q, begin, count), part.k = kept<C>(p.k, true, begin + count);
  part.v = kept<C>(p.v, false, begin + count);
  hide(part);
  return expected(part).out;
}

template <class C>
void check_cache() {
  attn::execution two(2);
  for (const cache_case& s : cases) {
    CAPTURE(s.heads, s.dim, s.value_dim);
    const full_softmax_problem p = problem_of(s);
    const attn::state_extents extents{.batch = p.k.batch(), .heads = s.kv_heads, .dim = s.dim,
                                      .value_dim = s.value_dim};
    attn::kv_cache<C> cache(extents), serial(extents);
    attn::page_pool<C> pool({.pages = 30, .page_tokens = s.page_tokens, .heads = s.kv_heads, .dim = s.dim,
                             .value_dim = s.value_dim});
    CHECK(pool.page_tokens() % 32 == 0);
    attn::paged_cache<C> paged(pool, p.k.batch());
    for (idx_t begin = 0, n = 0; begin < s.tokens; ++n) {
      const idx_t count = std::min(s.chunks[static_cast<std::size_t>(n)], s.tokens - begin);
      const auto found = feed(p, begin, count, [&](auto... x) { attn::full_softmax_step(cache, x..., two); });
      CHECK(found == feed(p, begin, count, [&](auto... x) { attn::full_softmax_step(serial, x...); }));
      const auto in_pages = feed(p, begin, count, [&](auto... x) { attn::full_softmax_step(paged, x...); });
      CHECK(found == in_pages);
      const tensor<double> all = wanted<C>(p, begin, count, [](auto&) {});
      CHECK(relative_error(cast<double>(found), all) <= error);
      CHECK(relative_error(cast<double>(in_pages), all) <= error);
      begin += count;
    }
  }
}

// Of one item and head.
template <class C>
std::vector<float> decoded(const attn::kv_cache<C>& cache, bool of_keys, idx_t count) {
  const idx_t cols = of_keys ? cache.dim() : cache.value_dim();
  std::vector<float> numbers(static_cast<std::size_t>(count * cols));
  attn::detail::cache_rows<const C>(of_keys ? cache.keys() : cache.values(), 0, 0, cols, of_keys, {})
      .from(0)
      .expand(0, count, numbers.data(), cols);
  return numbers;
}

}  // namespace

TEST_CASE("A cache of int4 attends what it keeps", "[channel_caches]") { check_cache<int4>(); }
TEST_CASE("A cache of int8_channels attends what it keeps", "[channel_caches]") { check_cache<int8_channels>(); }

TEST_CASE("Numbers on a grid of codes are kept as they are", "[channel_caches]") {
  const idx_t dim = 11, tokens = 70;
  const auto check = [&]<class C>(C) {
    tensor<float> k(1, 1, tokens, dim), v(1, 1, tokens, dim);
    for (idx_t t = 0; t < tokens; ++t)
      for (idx_t d = 0; d < dim; ++d) {  // every block has the least and the largest code
        const auto code = static_cast<float>(t % 32 == 0 ? 0 : t % 32 == 1 ? most<C> : (7 * t + d) % (most<C> + 1));
        k(0, 0, t, d) = code * std::ldexp(1.0f, static_cast<int>(d) - 5), v(0, 0, t, d) = d % 2 ? -code : 3;
      }
    attn::kv_cache<C> cache({.dim = dim});
    cache.append(view(k), view(v));
    CHECK(decoded(cache, true, tokens) == std::vector<float>(k.data.begin(), k.data.end()));
    CHECK(decoded(cache, false, tokens) == std::vector<float>(v.data.begin(), v.data.end()));
  };
  check(int4{}), check(int8_channels{});
}

TEST_CASE("Numbers err by half of a step of their channel, before a block is full as bfloat16", "[channel_caches]") {
  const auto check = [&]<class C>(C) {
    const tensor<double> x = problem_of({}).k;
    for (bool keys : {true, false}) {
      const tensor<double> found = kept<C>(x, keys, 150);
      double beyond = 0;
      for (idx_t t = 0; t < 150; ++t)
        for (idx_t d = 0; d < 64; ++d) {
          double least = 1e9, largest = -1e9;
          for (idx_t r = t / 32 * 32; r < std::min<idx_t>(150, t / 32 * 32 + 32); ++r)
            least = std::min(least, x(0, 0, r, d)), largest = std::max(largest, x(0, 0, r, d));
          const double size = std::max(std::abs(least), std::abs(largest)), number = x(0, 0, t, d);
          // All are rounded to 8 bits first, and the scale up to 8 bits.
          const double step = t >= 128 ? 0 : (largest - least + size / 128) / most<C> * (1 + 1.0 / 128);
          beyond = std::max(beyond, std::abs(number - found(0, 0, t, d)) - 0.5001 * step - std::abs(number) / 256);
        }
      CHECK(beyond <= 1e-6);
    }
  };
  check(int4{}), check(int8_channels{});
}

// Where numbers are large beside what they differ by, offsets are coarse: as bfloat16 a step of 1 to 8 numbers apart.
TEST_CASE("Numbers of int4 that are far from 0 err by half of a step of their channel", "[channel_caches]") {
  const idx_t dim = 32, tokens = 32;
  const auto whole = [](double x) { return static_cast<float>(2 * std::round(x / 2)); };
  const tensor<float> normal = cast<float>(random_normal(3, 1, 1, tokens, dim));
  tensor<float> x(1, 1, tokens, dim);
  for (idx_t t = 0; t < tokens; ++t)
    for (idx_t d = 0; d < dim; ++d)
      x(0, 0, t, d) = whole(300.0 + (1.0 + static_cast<double>(d)) * (0.5 * normal(0, 0, t, d) - (t % 11 == 0)));
  attn::kv_cache<int4> cache({.dim = dim});
  cache.append(view(x), view(x));
  const std::vector<float> found = decoded(cache, false, tokens);
  double beyond = 0;  // half of a step, the scale of which is rounded up to 8 bits
  for (idx_t d = 0; d < dim; ++d) {
    float least = x(0, 0, 0, d), largest = least, worst = 0;
    for (idx_t t = 0; t < tokens; ++t) {
      const float number = x(0, 0, t, d);
      least = std::min(least, number), largest = std::max(largest, number);
      worst = std::max(worst, std::abs(number - found[static_cast<std::size_t>(t * dim + d)]));
    }
    beyond = std::max(beyond, static_cast<double>(worst - (largest - least) / 30 * (1 + 1.0f / 128)));
  }
  CHECK(beyond <= 1e-4);
}

TEST_CASE("Tokens forgotten, kept and overwritten within blocks of int4", "[channel_caches]") {
  const idx_t dim = 10, tokens = 100;
  const tensor<float> k = cast<float>(random_normal(1, 1, 1, tokens, dim)),
                      v = cast<float>(random_normal(2, 1, 1, tokens, dim));
  const auto append = [&](attn::kv_cache<int4>& cache, idx_t begin, idx_t end) {
    cache.append(view(k).slice(2, begin, end - begin), view(v).slice(2, begin, end - begin));
  };
  attn::kv_cache<int4> cache({.dim = dim}), again({.dim = dim});
  append(cache, 0, tokens);
  for (idx_t t = 0; t < tokens; ++t) append(again, t, t + 1);
  const auto whole = decoded(cache, true, tokens);
  CHECK(whole == decoded(again, true, tokens));
  // Drafts that end in the block they began in leave no trace; a full block is rounded once more.
  again.truncate(98), append(again, 10, 30), again.truncate(98), append(again, 98, tokens);
  CHECK(whole == decoded(again, true, tokens));
  again.truncate(45), append(again, 45, tokens);
  const auto found = decoded(again, true, tokens);
  CHECK(std::equal(whole.begin(), whole.begin() + 32 * dim, found.begin()));
  for (std::size_t i = 0; i < found.size(); ++i)  // a step of a block is at most 6 / 15, and half of it is lost twice
    CHECK(std::abs(found[i] - k.data[i]) < 0.45f);
  // A list that leaves the tail where it is, and one that moves it into a block before.
  cache.keep(0, std::vector<idx_t>{0, 1, 2, 96, 99});
  const auto few = decoded(cache, true, 5);
  CHECK(std::equal(whole.begin(), whole.begin() + 3 * dim, few.begin(), [](float a, float b) {
    return std::abs(a - b) <= std::abs(a) / 256;  // as bfloat16
  }));
  CHECK(std::equal(whole.begin() + 96 * dim, whole.begin() + 97 * dim, few.begin() + 3 * dim));
  CHECK(std::equal(whole.begin() + 99 * dim, whole.end(), few.begin() + 4 * dim));
}

TEST_CASE("Windows over a cache of int4", "[channel_caches]") {
  const full_softmax_problem p = problem_of({.value_dim = 32});
  const auto check = [&](idx_t left, idx_t dilation, idx_t page_tokens) {
    const std::vector<idx_t> dilations{dilation};
    const attn::sliding_window_cache_options window{.left = left, .dilation = dilations};
    attn::page_pool<int4> pool(
        {.pages = 20, .page_tokens = page_tokens, .heads = p.k.heads(), .dim = 64, .value_dim = 32});
    attn::paged_cache<int4> cache(pool, p.k.batch());
    for (idx_t begin = 0, count = 1; begin < 150; begin += count, count = std::min<idx_t>(3 * count, 150 - begin)) {
      const auto found =
          feed(p, begin, count, [&](auto... x) { attn::sliding_window_step(cache, window, x...); });
      const auto hide = [&](full_softmax_problem& part) {
        part.options.bias = tensor<double>(1, 1, count, begin + count);
        for (idx_t i = 0; i < count; ++i)
          for (idx_t j = 0; j <= begin + i; ++j)
            if ((begin + i - j) % dilation != 0 || (begin + i - j) / dilation > left)
              part.options.bias(0, 0, i, j) = -std::numeric_limits<double>::infinity();
      };
      CHECK(relative_error(cast<double>(found), wanted<int4>(p, begin, count, hide)) <= error);
    }
  };
  check(20, 1, 512), check(60, 1, 64), check(4, 20, 32);
}

TEST_CASE("Single keys of caches with scales for each channel", "[channel_caches]") {
  const auto check = []<class C>(const cache_case& s) {
    const full_softmax_problem p = problem_of(s);
    full_softmax_problem in_codes = p;
    in_codes.k = kept<C>(p.k, true, s.tokens), in_codes.v = kept<C>(p.v, false, s.tokens);
    check_listed_keys<C>(p, in_codes, error);
  };
  for (const cache_case& s : cases) check.operator()<int4>(s), check.operator()<int8_channels>(s);
}

TEST_CASE("Pages change no bit of windows over a cache of int4", "[channel_caches]") {
  check_window_pages<int4>({32, 64, 256});
}

TEST_CASE("Items of a cache of int4 are sequences of their own", "[channel_caches]") {
  const auto step = [](auto& cache, auto q, auto k, auto v, auto out, attn::list_view<idx_t> lengths) {
    attn::full_softmax_step(cache, q, k, v, out, {.lengths = lengths});
  };
  attn::kv_cache<int4> cache({.batch = 4, .heads = 2, .dim = 20, .value_dim = 12});
  check_items<float>(cache, attn::kv_cache<int4>({.heads = 2, .dim = 20, .value_dim = 12}), step, {}, 1e-3);
  attn::page_pool<int4> pool({.pages = 40, .page_tokens = 32, .heads = 2, .dim = 20, .value_dim = 12});
  attn::paged_cache<int4> paged(pool, 4);
  check_items<float>(paged, attn::kv_cache<int4>({.heads = 2, .dim = 20, .value_dim = 12}), step, {}, 1e-3);
}

TEST_CASE("A cache of int4 in the caller's memory, and values that are dims of the keys", "[channel_caches]") {
  const idx_t heads = 2, dim = 48, value_dim = 32, tokens = 70, blocks = 3 + 4;
  full_softmax_problem p = problem_of({.kv_heads = heads, .dim = dim, .value_dim = value_dim, .tokens = tokens});
  p.v = p.k;
  const idx_t bytes = 20 * dim, stride = bytes + 14;
  std::vector<int4> memory(static_cast<std::size_t>(2 * heads * blocks * stride), int4{0x55});
  const attn::tensor_view<int4> view_of(memory.data(), {p.k.batch(), heads, blocks, bytes},
                                        {heads * blocks * stride, blocks * stride, stride, 1});
  attn::kv_cache<int4> given(view_of, view_of.slice(3, 0, 20 * value_dim)),
      own({.batch = p.k.batch(), .heads = heads, .dim = dim, .value_dim = value_dim}, {.values_in_keys = true});
  CHECK(given.dim() == dim);
  CHECK(given.value_dim() == value_dim);
  CHECK(given.capacity() == 96);
  p.options.scale = 0.2;
  for (idx_t begin = 0; begin < tokens; begin += 35) {
    const auto step = [&](attn::kv_cache<int4>& cache) {
      const tensor<float> q = cast<float>(rows(p.q, begin, 35)), k = cast<float>(rows(p.k, begin, 35));
      tensor<float> out(q.batch(), q.heads(), 35, value_dim);
      attn::full_softmax_step(cache, view(q), view(k), view(k).slice(3, 0, value_dim), view(out), {.scale = 0.2f});
      return out;
    };
    const auto a = step(given), b = step(own);
    CHECK(a == b);
    const tensor<double> all = wanted<int4>(p, begin, 35, [](auto&) {});
    double worst = 0;
    for (idx_t i = 0; i < a.batch(); ++i)
      for (idx_t h = 0; h < a.heads(); ++h)
        for (idx_t t = 0; t < 35; ++t)
          for (idx_t d = 0; d < value_dim; ++d)
            worst = std::max(worst, std::abs(static_cast<double>(a(i, h, t, d)) - all(i, h, t, d)));
    CHECK(worst < 0.02);  // of numbers up to 30
  }
  // What lies between the blocks is the caller's.
  for (idx_t n = 0; n < 2 * heads * blocks; ++n)
    for (idx_t i = bytes; i < stride; ++i) CHECK(memory[static_cast<std::size_t>(n * stride + i)] == int4{0x55});
}

TEST_CASE("A query that is not finite reaches its own result alone in a cache of int4", "[channel_caches]") {
  const tensor<float> k = cast<float>(random_normal(1, 1, 1, 65, 32)), v = cast<float>(random_normal(2, 1, 1, 65, 32));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    tensor<float> q = cast<float>(random_normal(3, 1, 4, 1, 32)), fine(1, 4, 1, 32), poisoned(1, 4, 1, 32);
    attn::kv_cache<int4> cache({.dim = 32});
    cache.append(view(k), view(v));
    attn::full_softmax_cached(cache, view(q), view(fine));
    q(0, 2, 0, 5) = bad;
    attn::full_softmax_cached(cache, view(q), view(poisoned));
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t d = 0; d < 32; ++d)
        CHECK((h == 2 ? std::isnan(poisoned(0, h, 0, d)) : poisoned(0, h, 0, d) == fine(0, h, 0, d)));
  }
}

TEST_CASE("Caches of int4 refuse what has no finite scale or does not fit", "[channel_caches]") {
  const auto wrong = [](const char* name, auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, name));
  };
  attn::kv_cache<int4> cache({.heads = 2, .dim = 7});
  tensor<float> k = cast<float>(random_normal(1, 1, 2, 3, 7)), v = cast<float>(random_normal(2, 1, 2, 3, 7));
  cache.append(view(k), view(v));
  const auto memory_of = [&] { return std::vector<int4>(cache.keys().data(), cache.keys().data() + 200); };
  const std::vector<int4> before = memory_of();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1.1e38f}) {
    v(0, 1, 2, 6) = bad;
    wrong("kv_cache", [&] { cache.append(view(k), view(v)); });
    CHECK(cache.tokens() == 3);
    CHECK(memory_of() == before);
  }
  std::vector<int4> memory(3000);
  const auto given = [&](idx_t offset, idx_t bytes, idx_t stride) {
    const attn::tensor_view<int4> x(memory.data() + offset, {1, 1, 7, bytes}, {0, 0, stride, 1});
    attn::kv_cache<int4>(x, x);
  };
  given(0, 20 * 8, 200);
  wrong("kv_cache", [&] { given(0, 20 * 8 + 2, 200); });
  wrong("kv_cache", [&] { given(0, 20 * 8, 201); });
  wrong("kv_cache", [&] { given(1, 20 * 8, 200); });
  wrong("kv_cache", [] { attn::kv_cache<int4>({.dim = std::numeric_limits<idx_t>::max() - 1}).reserve(1); });
}

namespace {

// Causal attention over a cache that has all tokens, relative to the exact result's norm.
template <class C>
double error_of(const full_softmax_problem& p, const tensor<double>& exact) {
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  tensor<float> out(q.batch(), q.heads(), q.length(), v.dim());
  attn::kv_cache<C> cache({.batch = k.batch(), .heads = k.heads(), .dim = k.dim(), .value_dim = v.dim()});
  cache.append(view(k), view(v));
  attn::full_softmax_cached(cache, view(q), view(out));
  return relative_error(cast<double>(out), exact);
}

}  // namespace

TEST_CASE("Caches of int4 and int8_channels on the keys and values of a trained model", "[channel_caches]") {
  const std::filesystem::path folder = ATTN_DATA_DIR;
  for (int layer = 0; layer < 2; ++layer) {
    const auto read = [&](const char* name) {
      const npy_array x = read_npy(folder / ("use_lite_layer" + std::to_string(layer)) / name);
      tensor<double> all(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
      all.data = x.values;
      return rows(all, 0, 512);
    };
    full_softmax_problem p;
    p.q = read("q.npy"), p.k = read("k.npy"), p.v = read("v.npy");
    p.options.causal = true;
    const tensor<double> exact = expected(p).out;
    const double four = error_of<int4>(p, exact), eight = error_of<int8_channels>(p, exact);
    CAPTURE(layer, four, eight);
    CHECK(four < 0.06);
    CHECK(eight < 0.004);
    CHECK(eight < error_of<std::int8_t>(p, exact));
  }
}

TEST_CASE("Large channels cost the others nothing where each has its own scale", "[channel_caches]") {
  full_softmax_problem p;
  p.q = random_normal(1, 1, 1, 300, 128), p.k = random_normal(2, 1, 1, 300, 128);
  p.v = random_normal(3, 1, 1, 300, 128);
  p.options.causal = true;
  const tensor<double> even = expected(p).out;
  const double four = error_of<int4>(p, even), eight = error_of<int8_channels>(p, even);
  for (idx_t t = 0; t < 300; ++t)
    for (idx_t d : {3, 67}) p.k(0, 0, t, d) *= 50, p.q(0, 0, t, d) /= 50;
  const tensor<double> exact = expected(p).out;
  const double large_four = error_of<int4>(p, exact), large_eight = error_of<int8_channels>(p, exact),
               by_token = error_of<std::int8_t>(p, exact);
  CAPTURE(four, large_four, eight, large_eight, by_token);
  CHECK(large_four < 1.1 * four);
  CHECK(large_eight < 1.1 * eight);
  CHECK(by_token > 5 * large_eight);
}

}  // namespace testing::channel_caches_tests
