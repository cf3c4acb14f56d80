// Streaming through the ring equals one causal call, token by token or in chunks of any size.
#include <attn/softmax/sliding_window_step.hpp>

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/run.hpp"

namespace testing::sliding_window_cache_tests {
namespace {

const std::vector<std::vector<idx_t>> feedings = {
    std::vector<idx_t>(150, 1), {150}, {60, 1, 1, 1, 70, 17}, {1, 148, 1}, {13, 2, 40, 95}, {0, 75, 0, 75}};

template <class S>
struct stream {
  explicit stream(const sliding_window_problem& problem)
      : p(problem),
        stored(p.options),
        cache({.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()},
              {stored.options.left, stored.options.dilation, stored.options.global_positions,
               stored.options.global_counts}) {}

  reference::result feed(const std::vector<idx_t>& chunks) {
    reference::result all = reference::empty_result(p.q, p.v);
    attn::execution serial;
    idx_t begin = 0;
    for (idx_t count : chunks) {
      const auto q = cast<S>(rows(p.q, begin, count)), k = cast<S>(rows(p.k, begin, count)),
                 v = cast<S>(rows(p.v, begin, count));
      tensor<S> out(p.q.batch(), p.q.heads(), count, p.v.dim(), S(7));
      tensor<real<S>> lse(p.q.batch(), p.q.heads(), count, 1, real<S>(7));
      attn::sliding_window_step_options<S> options;
      options.scale = stored.options.scale, options.softcap = stored.options.softcap;
      options.alibi_slopes = stored.options.alibi_slopes, options.sinks = stored.options.sinks;
      options.lse = row_view(lse);
      compiled_sliding_window<S>::step(cache, view(q), view(k), view(v), view(out), options, stored.score, serial);
      for (idx_t b = 0; b < out.batch(); ++b)
        for (idx_t h = 0; h < out.heads(); ++h)
          for (idx_t i = 0; i < count; ++i) {
            for (idx_t d = 0; d < out.dim(); ++d) all.out(b, h, begin + i, d) = static_cast<double>(out(b, h, i, d));
            all.lse(b, h, begin + i, 0) = static_cast<double>(lse(b, h, i, 0));
          }
      begin += count;
    }
    return all;
  }

  sliding_window_problem p;
  stored_options<S, reference::sliding_window_options> stored;
  attn::sliding_window_cache<S> cache;
};

sliding_window_problem tokens(idx_t left) {
  auto p = random_problem<sliding_window_problem>({.queries = 150, .keys = 150, .dim = 20, .value_dim = 12});
  p.options.left = left, p.options.right = 0, p.options.causal = true;
  return p;
}

template <class S>
void check(const sliding_window_problem& problem, const std::vector<idx_t>& chunks) {
  stream<S> s(rounded<S>(problem));
  const reference::result actual = s.feed(chunks), wanted = expected(s.p);
  CHECK(s.cache.tokens() == 150);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("sliding_window_step: any feeding equals one causal call", "[sliding_window_cache]",
                        all_types) {
  for (std::size_t n = 0; n < feedings.size(); ++n)
    for (idx_t left : {0, 1, 30, 149, 400}) {
      CAPTURE(n, left);
      check<TestType>(tokens(left), feedings[n]);
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_step: every option", "[sliding_window_cache]", exact_types) {
  for (int bits : selected_bits(7)) {
    sliding_window_problem p = tokens(9);
    if (bits & 1) p.options.softcap = 1.5;
    if (bits & 2) p.options.alibi_slopes = {0.5, 0.25, 0.125, 0};
    if (bits & 4) p.options.sinks = {0.3, -1, 2, 0};
    if (bits & 8) p.options.global_positions = {120, 0, 5, 64, 5, 1000};
    if ((bits & 9) == 9) p.options.global_counts = {4, 2};
    if (bits & 16) p.options.dilation = {3};
    if (bits & 32) p.options.dilation = {1, 4, 2, 7};
    if (bits & 64)
      p.options.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
        return (i + 2 * j + h) % 7 == 0 ? -reference::infinity : s + 0.01 * static_cast<double>(i - j + b);
      };
    p.options.scale = 0.3;
    CAPTURE(bits);
    check<TestType>(p, feedings[0]);
    check<TestType>(p, feedings[2]);
    check<TestType>(p, feedings[4]);
  }
}

TEST_CASE("sliding_window_cache: size, capacity and bytes", "[sliding_window_cache]") {
  attn::sliding_window_cache_options options;
  options.left = 20;
  const std::vector<idx_t> dilation = {3}, positions = {0, 7};
  options.dilation = dilation, options.global_positions = positions;
  attn::sliding_window_cache<float> cache({.heads = 2, .dim = 8, .value_dim = 6}, options);
  CHECK(cache.tokens() == 0);
  CHECK(cache.capacity() >= 20 * 3 + 1);
  CHECK(cache.capacity() <= 2 * (20 * 3 + 1));  // a ring, not the sequence
  CHECK(cache.bytes() >= static_cast<std::size_t>(20 * 3 + 1) * 2 * (8 + 6) * sizeof(float));
  const std::size_t bytes = cache.bytes();

  const tensor<float> q(1, 4, 1000, 8, 0.5f), k(1, 2, 1000, 8, 0.25f), v(1, 2, 1000, 6, 2.0f);
  tensor<float> out(1, 4, 1000, 6);
  attn::execution serial;
  for (int n = 0; n < 5; ++n)
    compiled_sliding_window<float>::step(cache, view(q), view(k), view(v), view(out), {}, {}, serial);
  CHECK(cache.tokens() == 5000);
  CHECK(cache.bytes() == bytes);
}

TEST_CASE("sliding_window_cache: it keeps its own copy of the options", "[sliding_window_cache]") {
  auto p = rounded<float>(tokens(9));
  p.options.dilation = {2}, p.options.global_positions = {3, 60};
  stream<float> s(p);
  s.stored.options = {};  // nobody holds the lists any more
  const sliding_window_problem given = s.p;
  s.p.options.global_positions.assign(2, 149);
  CHECK(relative_error(s.feed(feedings[2]).out, expected(given).out) <= tolerance<float>::out);
}

TEST_CASE("sliding_window_cache: reset starts over, a copy goes its own way", "[sliding_window_cache]") {
  auto p = rounded<float>(tokens(25));
  p.options.global_positions = {0, 80};
  stream<float> s(p);
  const auto wanted = expected(p).out;
  s.feed({70});
  auto copy = s.cache;
  s.cache.reset();
  CHECK(s.cache.tokens() == 0);
  CHECK(copy.tokens() == 70);
  CHECK(relative_error(s.feed(feedings[4]).out, wanted) <= tolerance<float>::out);

  s.cache = copy;  // go on from token 70
  const auto q = cast<float>(rows(p.q, 70, 80)), k = cast<float>(rows(p.k, 70, 80)), v = cast<float>(rows(p.v, 70, 80));
  tensor<float> out(2, 4, 80, 12);
  attn::execution serial;
  compiled_sliding_window<float>::step(s.cache, view(q), view(k), view(v), view(out), {}, {}, serial);
  CHECK(relative_error(out, rows(wanted, 70, 80)) <= tolerance<float>::out);
}

TEST_CASE("sliding_window_cache: global positions move with their items", "[sliding_window_cache]") {
  auto p = rounded<float>(tokens(3));
  p.options.global_positions = {9, 1, 40, 2}, p.options.global_counts = {3, 1};
  stream<float> s(p);
  s.feed({70});
  const std::vector<idx_t> crossed = {1, 0};
  s.cache.reorder(crossed);
  p.options.global_positions = {2, 9, 1, 40}, p.options.global_counts = {1, 3};
  for (tensor<double>* x : {&p.q, &p.k, &p.v}) {
    tensor<double> y = *x;
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t i = 0; i < x->length(); ++i)
          for (idx_t d = 0; d < x->dim(); ++d) y(b, h, i, d) = (*x)(1 - b, h, i, d);
    *x = y;
  }
  const auto q = cast<float>(rows(p.q, 70, 80)), k = cast<float>(rows(p.k, 70, 80)), v = cast<float>(rows(p.v, 70, 80));
  tensor<float> out(2, 4, 80, 12);
  attn::execution serial;
  compiled_sliding_window<float>::step(s.cache, view(q), view(k), view(v), view(out), {}, {}, serial);
  CHECK(relative_error(out, rows(expected(p).out, 70, 80)) <= tolerance<float>::out);

  s.cache.copy_item(1, 0);  // both have item 1's positions now
  for (idx_t b = 0; b < 2; ++b) s.cache.reset(b);
  p.options.global_positions = {9, 1, 40}, p.options.global_counts = {};
  s.p = p;
  CHECK(relative_error(s.feed({150}).out, expected(p).out) <= tolerance<float>::out);
}

TEST_CASE("sliding_window_step: a cache of all tokens sorts the global positions of each item", "[sliding_window_cache]") {
  auto p = rounded<float>(tokens(3));
  p.options.global_positions = {9, 1, 40, 9, 2}, p.options.global_counts = {4, 1};
  const auto q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  tensor<float> out(2, 4, 150, 12);
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 20, .value_dim = 12});
  attn::sliding_window_step(cache,
                            {.left = 3,
                             .global_positions = p.options.global_positions,
                             .global_counts = p.options.global_counts},
                            view(q), view(k), view(v), view(out));
  CHECK(relative_error(out, expected(p).out) <= tolerance<float>::out);
}

TEST_CASE("sliding_window_cache: tokens may be fed without asking", "[sliding_window_cache]") {
  auto p = rounded<float>(tokens(25));
  p.options.dilation = {2}, p.options.global_positions = {0, 80};
  const auto wanted = expected(p).out;
  for (idx_t quiet : {0, 1, 60, 149}) {
    CAPTURE(quiet);
    stream<float> s(p);
    const auto past_k = cast<float>(rows(p.k, 0, quiet)), past_v = cast<float>(rows(p.v, 0, quiet));
    s.cache.append(view(past_k), view(past_v));
    CHECK(s.cache.tokens() == quiet);
    const idx_t rest = 150 - quiet;
    const auto q = cast<float>(rows(p.q, quiet, rest)), k = cast<float>(rows(p.k, quiet, rest)),
               v = cast<float>(rows(p.v, quiet, rest));
    tensor<float> out(2, 4, rest, 12);
    attn::execution serial;
    compiled_sliding_window<float>::step(s.cache, view(q), view(k), view(v), view(out), {}, {}, serial);
    CHECK(relative_error(out, rows(wanted, quiet, rest)) <= tolerance<float>::out);
  }
}

TEST_CASE("sliding_window_step: what a score function throws resets the stream", "[sliding_window_cache]") {
  attn::sliding_window_cache<float> cache({.dim = 4}, {.left = 3});
  const tensor<float> x(1, 1, 8, 4, 0.5f);
  tensor<float> out(1, 1, 8, 4);
  cache.append(view(x), view(x));
  const auto score = [](float s, idx_t, idx_t, idx_t i, idx_t) { return i < 12 ? s : throw std::runtime_error("no"); };
  CHECK_THROWS_AS(attn::sliding_window_step(cache, view(x), view(x), view(x), view(out), {}, score),
                  std::runtime_error);
  CHECK(cache.tokens() == 0);
}

}  // namespace testing::sliding_window_cache_tests
