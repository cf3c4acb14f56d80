// topk_blocks_step against one call over the whole sequence: token by token and in chunks, after append, truncate,
// reset and copies.
#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing::topk_blocks_step_tests {
namespace {

using chunks = std::vector<idx_t>;

chunks of_equal(idx_t length, idx_t count) {
  chunks all(static_cast<std::size_t>(length / count), count);
  if (length % count > 0) all.push_back(length % count);
  return all;
}

constexpr idx_t length = 150;
const std::vector<chunks> feedings = {of_equal(length, 1),          of_equal(length, 2),  of_equal(length, 4),
                                      of_equal(length, 5),          of_equal(length, 64), {length},
                                      {60, 1, 4, 5, 3, 0, 70, 2, 5}};

template <class S>
struct stream {
  explicit stream(const topk_problem& problem)
      : p(problem),
        q(cast<S>(p.q)),
        k(cast<S>(p.k)),
        v(cast<S>(p.v)),
        stored(p.options),
        cache({.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()},
              {.block = p.options.block}),
        out(q.batch(), q.heads(), q.length(), v.dim(), S(7)),
        lse(q.batch(), q.heads(), q.length(), 1, real<S>(7)) {}

  // The next tokens, after those in the cache.
  void feed(const chunks& counts, attn::execution& exec) {
    for (idx_t count : counts) {
      attn::topk_blocks_step_options<S> o;
      const auto next = [&](auto&& x) { return view(x).slice(2, cache.tokens(), count); };
      o.scale = stored.options.scale, o.softcap = stored.options.softcap, o.topk = p.options.topk;
      o.alibi_slopes = stored.options.alibi_slopes, o.sinks = stored.options.sinks;
      o.lse = row_view(lse).slice(2, cache.tokens(), count);
      compiled_topk_blocks<S>::step(cache, next(std::as_const(q)), next(std::as_const(k)), next(std::as_const(v)),
                                    next(out), o, stored.score, exec);
    }
  }
  void feed(const chunks& counts) {
    attn::execution serial;
    feed(counts, serial);
  }
  void append(idx_t count) {
    const idx_t begin = cache.tokens();
    cache.append(view(std::as_const(k)).slice(2, begin, count), view(std::as_const(v)).slice(2, begin, count));
  }
  // Rows from `first` on, bit by bit.
  bool same_from(idx_t first, const stream& other) const {
    return rows(out, first, out.length() - first) == rows(other.out, first, out.length() - first) &&
           rows(lse, first, out.length() - first) == rows(other.lse, first, out.length() - first);
  }

  topk_problem p;
  tensor<S> q, k, v;
  common_softmax_options<S, attn::topk_blocks_options<S>> stored;
  attn::topk_blocks_cache<S> cache;
  tensor<S> out;
  tensor<real<S>> lse;
};

template <class S>
void check(const topk_problem& p, const chunks& counts) {
  stream<S> s(p);
  s.feed(counts);
  const reference::result wanted = expected(p);
  CHECK(s.cache.tokens() == length);
  CHECK(relative_error(s.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(s.lse, wanted.lse) <= tolerance<S>::lse);
}

template <class S>
topk_problem tokens(idx_t block, idx_t topk, const problem_shape& given = {}) {
  reference::topk_blocks_options o;
  o.block = block, o.topk = topk;
  problem_shape shape = given;
  shape.queries = shape.keys = length;
  return topk_of<S>(shape, o);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: any feeding equals one call", "[topk_blocks_step]", all_types) {
  constexpr idx_t huge = idx_t(1) << 62;
  for (auto [block, topk] : {std::array<idx_t, 2>{16, 3},
                             {1, 4},
                             {5, 2},
                             {7, 1},
                             {64, 2},
                             {4, huge},
                             {huge, 3},
                             {std::numeric_limits<idx_t>::max(), std::numeric_limits<idx_t>::max()}}) {
    const topk_problem p = tokens<TestType>(block, topk, {.dim = 20, .value_dim = 12});
    for (std::size_t n = 0; n < feedings.size(); ++n) {
      CAPTURE(block, topk, n);
      check<TestType>(p, feedings[n]);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: every option", "[topk_blocks_step]", exact_types) {
  for (int bits : selected_bits(5)) {
    reference::topk_blocks_options o = chosen_topk(bits, 8, 3, length, length);
    o.query_lengths = o.key_lengths = {};
    const topk_problem p = topk_of<TestType>({.queries = length, .keys = length, .dim = 9, .value_dim = 12}, o);
    for (std::size_t n : {0u, 3u, 6u}) {
      CAPTURE(bits, n);
      check<TestType>(p, feedings[n]);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: batches, grouped queries, odd dims", "[topk_blocks_step]", exact_types) {
  const idx_t dims[] = {1, 3, 8, 33, 80, 128};
  for (std::size_t n = 0;
       auto [batch, heads, kv_heads] : {std::array<idx_t, 3>{1, 1, 1}, {3, 6, 1}, {1, 8, 2}, {2, 5, 5}})
    for (std::size_t step : {1u, 2u}) {
      ++n;
      const topk_problem p = tokens<TestType>(8, 4,
                                              {.batch = batch,
                                               .heads = heads,
                                               .kv_heads = kv_heads,
                                               .dim = dims[n % 6],
                                               .value_dim = dims[(n + step) % 6]});
      CAPTURE(batch, heads, kv_heads, p.q.dim(), p.v.dim());
      check<TestType>(p, feedings[0]);
      check<TestType>(p, feedings[6]);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: any number of threads gives the same bits", "[topk_blocks_step]",
                        exact_types) {
  const topk_problem p = tokens<TestType>(8, 3);
  attn::execution three(3, 0);
  for (const chunks& counts : feedings) {
    stream<TestType> alone(p), shared(p);
    alone.feed(counts), shared.feed(counts, three);
    CHECK(alone.same_from(0, shared));
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_step: truncated tokens leave nothing behind", "[topk_blocks_step]", exact_types) {
  const topk_problem p = tokens<TestType>(16, 3);
  topk_problem other = tokens<TestType>(16, 3);  // what is forgotten
  for (tensor<double>* x : {&other.k, &other.v})
    for (double& value : x->data) value = 3 * value + 1;
  for (idx_t d = 0; d < 16; ++d) other.k(1, 1, 85, d) = std::numeric_limits<double>::quiet_NaN();
  const tensor<TestType> k = cast<TestType>(other.k), v = cast<TestType>(other.v);
  for (idx_t kept : {0, 1, 16, 37, 64, 79, 80, 89})
    for (const chunks& counts : {of_equal(length, 1), of_equal(length, 3), of_equal(length, 5), chunks{length}}) {
      CAPTURE(kept, counts.front());
      stream<TestType> never(p), once(p);
      const auto feed_on = [&](stream<TestType>& s) {
        while (s.cache.tokens() < length) s.feed({std::min(counts.front(), length - s.cache.tokens())});
      };
      never.append(kept), once.append(kept);
      once.cache.append(view(k).slice(2, kept, 90 - kept), view(v).slice(2, kept, 90 - kept));
      once.cache.truncate(kept);
      CHECK(once.cache.tokens() == kept);
      feed_on(never), feed_on(once);
      CHECK(once.same_from(kept, never));
      const reference::result wanted = expected(p);
      CHECK(relative_error(rows(once.out, kept, length - kept), rows(wanted.out, kept, length - kept)) <=
            tolerance<TestType>::out);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_cache: tokens fed without queries, reset, copies", "[topk_blocks_step]",
                        exact_types) {
  const topk_problem p = tokens<TestType>(8, 3);
  const chunks mixed = {1, 4, 9, 2, 30, 1};  // 47
  stream<TestType> whole(p);
  whole.feed({103}), whole.feed(mixed);

  stream<TestType> s(p);
  s.append(60), s.append(1), s.append(0), s.append(42);
  CHECK(s.cache.tokens() == 103);
  attn::topk_blocks_cache<TestType> copy = s.cache;
  s.feed(mixed);
  CHECK(s.same_from(103, whole));
  CHECK(copy.tokens() == 103);

  s.cache.reset();
  CHECK(s.cache.tokens() == 0);
  s.feed({103}), s.feed(mixed);
  CHECK(s.same_from(0, whole));

  stream<TestType> later(p);
  later.cache = copy;
  later.feed(mixed);
  CHECK(later.same_from(103, whole));
  const attn::topk_blocks_cache<TestType> moved = std::move(later.cache);
  CHECK(moved.tokens() == length);
  bool same = true;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t i = 0; i < length; ++i)
        for (idx_t d = 0; d < 16; ++d)
          same = same && moved.keys()(b, h, i, d) == s.k(b, h, i, d) && moved.values()(b, h, i, d) == s.v(b, h, i, d);
  CHECK(same);
}

TEST_CASE("topk_blocks_cache: extents, memory, and what is reserved", "[topk_blocks_step]") {
  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 3, .dim = 8, .value_dim = 5}, {.block = 4}),
      by_default({.dim = 8});
  CHECK(by_default.block() == 128);
  CHECK(by_default.value_dim() == 8);
  CHECK(cache.tokens() == 0);
  CHECK(cache.batch() == 2);
  CHECK(cache.heads() == 3);
  CHECK(cache.dim() == 8);
  CHECK(cache.value_dim() == 5);
  CHECK(cache.block() == 4);
  cache.reserve(400);
  CHECK(cache.tokens() == 0);
  CHECK(cache.capacity() >= 400);
  const std::size_t bytes = cache.bytes();
  CHECK(bytes >= 2 * 3 * (400 * (8 + 5) + 400 / 4 * 8) * sizeof(float));
  const float* keys = cache.keys().data();
  const tensor<float> k(2, 3, 40, 8, 0.5f), v(2, 3, 40, 5, 2);
  for (int n = 0; n < 10; ++n) cache.append(view(k), view(v));
  CHECK(cache.tokens() == 400);
  CHECK(cache.keys().data() == keys);
  CHECK(cache.bytes() == bytes);
  cache.reset();
  CHECK(cache.bytes() == bytes);
}

TEST_CASE("topk_blocks_step: what a score function throws leaves the cache as it was", "[topk_blocks_step]") {
  attn::execution serial, three(3, 0);
  const topk_problem p = tokens<float>(8, 3);
  const score_of<float> thrower = [](float s, idx_t, idx_t h, idx_t i, idx_t) {
    return h < 3 || i < 101 ? s : throw std::runtime_error("no");
  };
  for (idx_t count : {2, 4, 5, 49})
    for (attn::execution* exec : {&serial, &three}) {
      CAPTURE(count);
      stream<float> once(p), never(p);
      once.feed({100}), never.feed({100});
      tensor<float> q(2, 4, count, 16, 0.5f), k(2, 2, count, 16, -3), v(2, 2, count, 16, 9), out(2, 4, count, 16);
      CHECK_THROWS_AS(compiled_topk_blocks<float>::step(once.cache, view(std::as_const(q)), view(std::as_const(k)),
                                                        view(std::as_const(v)), view(out), {}, thrower, *exec),
                      std::runtime_error);
      CHECK(once.cache.tokens() == 100);
      once.feed({1, 3, 6, 40}, *exec), never.feed({1, 3, 6, 40});
      CHECK(once.same_from(0, never));
    }
}

TEST_CASE("topk_blocks_cache: floats may be kept in fewer bits", "[topk_blocks_step]") {
  const tensor<float> k = cast<float>(random_normal(1, 2, 2, 9, 16)), v = cast<float>(random_normal(2, 2, 2, 9, 16));
  const tensor<Eigen::half> k_half = cast<Eigen::half>(k), v_half = cast<Eigen::half>(v);
  const attn::state_extents extents{.batch = 2, .heads = 2, .dim = 16};
  attn::topk_blocks_cache<Eigen::half> of_floats(extents, {.block = 4}), of_halves(extents, {.block = 4});
  of_floats.append(view(k), view(v)), of_halves.append(view(k_half), view(v_half));
  const tensor<Eigen::half> q(2, 4, 1, 16, Eigen::half(0.5f)), one(2, 2, 1, 16, Eigen::half(0.25f));
  tensor<Eigen::half> a(2, 4, 1, 16), b(2, 4, 1, 16);
  attn::topk_blocks_step(of_floats, view(q), view(one), view(one), view(a), {.topk = 2});
  attn::topk_blocks_step(of_halves, view(q), view(one), view(one), view(b), {.topk = 2});
  CHECK(a == b);
}

TEST_CASE("topk_blocks_step: options, score and execution may each be left out", "[topk_blocks_step]") {
  const tensor<float> q(1, 2, 6, 8, 0.5f), v(1, 2, 6, 5, 2);
  tensor<float> out(1, 2, 6, 5);
  attn::execution threads(2);
  const auto plain = [](float s, idx_t, idx_t, idx_t, idx_t) { return s; };
  attn::topk_blocks_cache<float> cache({.heads = 2, .dim = 8, .value_dim = 5}, {.block = 2});
  const auto check = [&](auto&&... rest) {
    out = tensor<float>(1, 2, 6, 5, 7);
    attn::topk_blocks_step(cache, view(q), view(q), view(v), view(out), std::forward<decltype(rest)>(rest)...);
    CHECK(relative_error(out, v) <= 1e-6);
  };
  check();
  check(threads);
  check(attn::execution(2));
  check(attn::topk_blocks_step_options<float>{.topk = 2});
  check(attn::topk_blocks_step_options<float>{}, plain);
  check(attn::topk_blocks_step_options<float>{.scale = 0.5f}, plain, attn::execution(2));
  attn::topk_blocks_step(cache, view(q), view(q), view(v), view(out), {.topk = 2}, threads);
  CHECK(cache.tokens() == 42);
}

}  // namespace testing::topk_blocks_step_tests
