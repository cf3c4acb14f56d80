// How full_softmax and sliding_window are called: which arguments may be left out, where queries are, layouts that
// differ, views of nothing, and what threads do.
#include <attn/softmax/merge_softmax.hpp>

#include <mutex>
#include <set>
#include <thread>

#include "support/catch.hpp"
#include "support/run.hpp"

namespace testing::calls_tests {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

full_softmax_problem problem_of(const problem_shape& shape) { return random_problem<full_softmax_problem>(shape); }

// ALiBi as a caller would write it.
const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
const auto alibi = [](float s, idx_t, idx_t h, idx_t i, idx_t j) {
  return s - slopes[static_cast<std::size_t>(h)] * std::abs(static_cast<float>(i - j));
};

// What can be attended can be asked: arguments of which no view can be made are no error, but the answer "no".
template <class X>
concept attended = requires(X& x) { attn::full_softmax(x, x, x, x); };
static_assert(attended<Eigen::MatrixXf> && attended<attn::tensor_view<Eigen::half>>);
static_assert(!attended<std::vector<float>> && !attended<int> && !attended<const char*>);
static_assert(!attended<decltype(Eigen::MatrixXf() * Eigen::MatrixXf())>);

}  // namespace

TEST_CASE("full_softmax: options, score and execution may each be left out", "[full_softmax]") {
  const tensor<float> q(1, 2, 6, 8, 0.5f), v(1, 2, 6, 5, 2);
  tensor<float> out(1, 2, 6, 5);
  attn::execution threads(2);
  const auto plain = [](float s, idx_t, idx_t, idx_t, idx_t) { return s; };
  const attn::full_softmax_options<float> options = {.scale = 0.5f, .causal = true};
  const auto check = [&](auto&&... rest) {
    out = tensor<float>(1, 2, 6, 5, 7);
    attn::full_softmax(view(q), view(q), view(v), view(out), std::forward<decltype(rest)>(rest)...);
    CHECK(out == v);
  };
  check();
  check(threads);
  check(attn::execution(2));
  check(options);
  check(options, threads);
  check(options, plain);
  check(options, plain, attn::execution(2));
  attn::full_softmax(view(q), view(q), view(v), view(out), {.causal = true}, threads);
  attn::full_softmax(view(q), view(q), view(v), view(out), {}, plain, attn::execution(3));
  attn::full_softmax(view(q), view(q), view(v), view(out), {}, {}, threads);
  attn::sliding_window(view(q), view(q), view(v), view(out), {.causal = true, .left = 2}, threads);
  attn::sliding_window(view(q), view(q), view(v), view(out), threads);
  attn::kv_cache<float> cache({.heads = 2, .dim = 8, .value_dim = 5});
  attn::full_softmax_step(cache, view(q), view(q), view(v), view(out), threads);
  attn::full_softmax_step(cache, view(q), view(q), view(v), view(out), {}, plain, attn::execution(2));
  attn::sliding_window_cache<float> ring({.heads = 2, .dim = 8, .value_dim = 5}, {.left = 3});
  attn::sliding_window_step(ring, view(q), view(q), view(v), view(out), {.scale = 1.0f}, attn::execution(2));
  CHECK(out == v);
}

TEST_CASE("full_softmax: in a score function i and j are positions", "[full_softmax]") {
  for (auto [queries, keys] : {std::pair<idx_t, idx_t>{3, 40}, {40, 40}, {25, 90}, {90, 25}, {2, 1}})
    for (bool causal : {false, true}) {
      const auto p = rounded<float>(problem_of({.queries = queries, .keys = keys}));
      const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
      tensor<float> built_in(2, 4, queries, 16), by_hand = built_in;
      const std::vector<idx_t> lengths = {keys, keys / 2};
      const attn::full_softmax_options<float> options = {.causal = causal, .key_lengths = lengths};
      auto with_slopes = options;
      with_slopes.alibi_slopes = slopes;
      CAPTURE(queries, keys, causal);
      attn::full_softmax(view(q), view(k), view(v), view(built_in), with_slopes);
      attn::full_softmax(view(q), view(k), view(v), view(by_hand), options, alibi);
      CHECK(relative_error(by_hand, built_in) <= 1e-6);
      const std::vector<idx_t> globals = {0, 7};
      const attn::sliding_window_options<float> window = {
          .causal = causal, .key_lengths = lengths, .left = 9, .right = 4, .global_positions = globals};
      auto window_with_slopes = window;
      window_with_slopes.alibi_slopes = slopes;
      attn::sliding_window(view(q), view(k), view(v), view(built_in), window_with_slopes);
      attn::sliding_window(view(q), view(k), view(v), view(by_hand), window, alibi);
      CHECK(relative_error(by_hand, built_in) <= 1e-6);
    }
}

TEST_CASE("full_softmax_step: in a score function i and j are positions since the start", "[full_softmax]") {
  const auto p = rounded<float>(problem_of({.queries = 50, .keys = 50}));
  tensor<float> whole(2, 4, 50, 16), windowed = whole;
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  attn::full_softmax(view(q), view(k), view(v), view(whole), {.causal = true, .alibi_slopes = slopes});
  attn::sliding_window(view(q), view(k), view(v), view(windowed), {.causal = true, .left = 11, .alibi_slopes = slopes});
  const attn::state_extents extents = {.batch = 2, .heads = 2, .dim = 16};
  attn::kv_cache<float> cache(extents);
  attn::sliding_window_cache<float> ring(extents, {.left = 11});
  idx_t begin = 0;
  for (idx_t count : {1, 2, 7, 0, 40}) {
    const auto rows_of = [&](const tensor<float>& x) { return view(x).slice(2, begin, count); };
    tensor<float> out(2, 4, count, 16);
    attn::full_softmax_step(cache, rows_of(q), rows_of(k), rows_of(v), view(out), {}, alibi);
    CHECK(relative_error(out, rows(whole, begin, count)) <= 1e-6);
    attn::sliding_window_step(ring, rows_of(q), rows_of(k), rows_of(v), view(out), {}, alibi);
    CHECK(relative_error(out, rows(windowed, begin, count)) <= 1e-6);
    begin += count;
  }
}

TEST_CASE("full_softmax_step: no tokens are a chunk too, with a bias of their shape", "[full_softmax]") {
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
  const tensor<float> k(2, 2, 3, 8, 0.5f), v(2, 2, 3, 5, 1), none(2, 4, 0, 8), none_k(2, 2, 0, 8), none_v(2, 2, 0, 5),
      bias(2, 4, 0, 3), one_row(1, 1, 1, 3);
  cache.append(view(k), view(v));
  tensor<float> out(2, 4, 0, 5);
  attn::full_softmax_step(cache, view(none), view(none_k), view(none_v), view(out), {.bias = view(bias)});
  attn::full_softmax_step(cache, view(none), view(none_k), view(none_v), view(out), {.bias = view(one_row)});
  CHECK(cache.tokens() == 3);
}

TEST_CASE("full_softmax: rows that see no key are zero, their lse is the sink", "[full_softmax]") {
  const std::vector<float> sinks = {0.5f, 3};
  const tensor<float> q(1, 2, 9, 8, 0.5f), k(1, 2, 4, 8, 0.5f), v(1, 2, 4, 5, 2);
  tensor<float> out(1, 2, 9, 5, 7), lse(1, 2, 9, 1, 7);
  attn::full_softmax(view(q), view(k), view(v), view(out), {.causal = true, .sinks = sinks, .lse = row_view(lse)});
  for (idx_t h = 0; h < 2; ++h)
    for (idx_t i = 0; i < 9; ++i) {
      CHECK((out(0, h, i, 3) == 0) == (i < 5));
      CHECK((std::abs(lse(0, h, i, 0) - sinks[static_cast<std::size_t>(h)]) <= 1e-6f) == (i < 5));
    }
}

TEST_CASE("full_softmax: a sink of -infinity is none", "[full_softmax]") {
  for (idx_t queries : {2, 30}) {
    const full_softmax_problem p = problem_of({.queries = queries, .keys = 30});
    full_softmax_problem with_sinks = p;
    with_sinks.options.sinks.assign(4, -infinity);
    const auto without = run<float>(p), with = run<float>(with_sinks);
    CHECK(with.out == without.out);
    CHECK(with.lse == without.lse);
  }
}

TEST_CASE("full_softmax: the smallest softcap and the largest scale that are taken", "[full_softmax]") {
  const tensor<float> q(1, 1, 9, 4, 1e-20f), v(1, 1, 9, 3, 2);
  tensor<float> out(1, 1, 9, 3);
  attn::full_softmax(view(q), view(q), view(v), view(out), {.softcap = 3e-39f});
  CHECK(all_finite(out));
  attn::full_softmax(view(q), view(q), view(v), view(out), {.scale = 2e38f});
  CHECK(all_finite(out));
}

TEST_CASE("full_softmax: q, k, v and out of different layouts in one call", "[full_softmax]") {
  for (idx_t queries : {3, 50}) {
    const full_softmax_problem p = problem_of({.queries = queries, .keys = 70});
    const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
    tensor<float> plain(2, 4, queries, 16), strided = plain;
    // q column-major, k [batch, length, head, dim], v every second number and its heads from the last to the first,
    // out with batch and heads interchanged and its rows from the last to the first.
    tensor<float> q_memory(2, 4, 16, queries), k_memory(2, 70, 2, 16), v_memory(2, 2, 70, 32),
        out_memory(4, 2, queries, 19);
    const in_view<float> q2(q_memory.data.data(), {2, 4, queries, 16}, {64 * queries, 16 * queries, 1, queries});
    const in_view<float> k2(k_memory.data.data(), {2, 2, 70, 16}, {70 * 32, 16, 32, 1});
    const in_view<float> v2(v_memory.data.data() + 70 * 32, {2, 2, 70, 16}, {140 * 32, -70 * 32, 32, 2});
    const out_view<float> out2(out_memory.data.data() + (queries - 1) * 19, {2, 4, queries, 16},
                               {queries * 19, 2 * queries * 19, -19, 1});
    const auto copy = [](const tensor<float>& from, const in_view<float>& to) {
      for (idx_t b = 0; b < from.batch(); ++b)
        for (idx_t h = 0; h < from.heads(); ++h)
          for (idx_t i = 0; i < from.length(); ++i)
            for (idx_t d = 0; d < from.dim(); ++d) const_cast<float&>(to(b, h, i, d)) = from(b, h, i, d);
    };
    copy(q, q2), copy(k, k2), copy(v, v2);
    const auto compare = [&] {
      for (idx_t b = 0; b < 2; ++b)
        for (idx_t h = 0; h < 4; ++h)
          for (idx_t i = 0; i < queries; ++i)
            for (idx_t d = 0; d < 16; ++d) strided(b, h, i, d) = out2(b, h, i, d);
      CHECK(strided == plain);
    };
    CAPTURE(queries);
    attn::full_softmax(view(q), view(k), view(v), view(plain), {.causal = true});
    attn::full_softmax(q2, k2, v2, out2, {.causal = true});
    compare();
    attn::sliding_window(view(q), view(k), view(v), view(plain), {.left = 9, .right = 3});
    attn::sliding_window(q2, k2, v2, out2, {.left = 9, .right = 3});
    compare();
  }
}

TEST_CASE("full_softmax: views of nothing, with strides", "[full_softmax]") {
  const tensor<float> some(2, 4, 6, 8, 0.5f);
  tensor<float> out(2, 4, 6, 8, 7);
  const auto null = [](std::array<idx_t, 4> extents) { return in_view<float>(nullptr, extents, {64, 16, 8, 1}); };
  const auto null_out = [](std::array<idx_t, 4> extents) { return out_view<float>(nullptr, extents, {64, 16, 8, 1}); };
  const auto both = [&](const auto&... views) {
    attn::full_softmax(views...);
    attn::sliding_window(views...);
  };
  both(null({2, 4, 0, 8}), view(some), view(some), null_out({2, 4, 0, 8}));
  both(view(some), null({2, 4, 0, 8}), null({2, 4, 0, 8}), view(out));
  CHECK(out == tensor<float>(2, 4, 6, 8));
  for (idx_t queries : {6, 2}) {  // no dim: plain averages
    both(null({2, 4, queries, 0}), null({2, 4, 6, 0}), view(some), view(out).slice(2, 0, queries));
    CHECK(std::abs(out(1, 3, 1, 7) - 0.5f) <= 1e-6f);
    both(view(some).slice(2, 0, queries), view(some), null({2, 4, 6, 0}), null_out({2, 4, queries, 0}));
  }
  attn::merge_softmax(null_out({2, 4, 6, 0}), attn::tensor_view<float, 3>(out.data.data(), {2, 4, 6}),
                      null({2, 4, 6, 0}), attn::tensor_view<const float, 3>(some.data.data(), {2, 4, 6}));
  attn::kv_cache<float> cache({.batch = 2, .heads = 4, .dim = 8});
  attn::full_softmax_step(cache, null({2, 4, 0, 8}), null({2, 4, 0, 8}), null({2, 4, 0, 8}), null_out({2, 4, 0, 8}));
  attn::sliding_window_cache<float> ring({.batch = 2, .heads = 4, .dim = 0, .value_dim = 8});
  attn::sliding_window_step(ring, null({2, 4, 6, 0}), null({2, 4, 6, 0}), view(some), view(out));
  CHECK(std::abs(out(1, 3, 5, 7) - 0.5f) <= 1e-6f);
}

TEST_CASE("full_softmax: small calls stay on the caller's thread", "[full_softmax]") {
  const tensor<float> x(1, 8, 1, 64, 0.5f);
  tensor<float> out(1, 8, 1, 64);
  attn::execution threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  const auto score = [&](float s, idx_t, idx_t, idx_t, idx_t) {
    const std::scoped_lock lock(mutex);
    seen.insert(std::this_thread::get_id());
    return s;
  };
  attn::kv_cache<float> cache({.heads = 8, .dim = 64});
  attn::sliding_window_cache<float> ring({.heads = 8, .dim = 64});
  for (int n = 0; n < 20; ++n) {
    attn::full_softmax(view(x), view(x), view(x), view(out), {}, score, threads);
    attn::sliding_window(view(x), view(x), view(x), view(out), {}, score, threads);
    attn::full_softmax_step(cache, view(x), view(x), view(x), view(out), {}, score, threads);
    attn::sliding_window_step(ring, view(x), view(x), view(x), view(out), {}, score, threads);
  }
  CHECK(seen == std::set{std::this_thread::get_id()});
}

TEST_CASE("full_softmax: more heads than one wave takes, by several threads as by one", "[full_softmax]") {
  const auto check = [](const problem_shape& shape, bool causal) {
    full_softmax_problem p = problem_of(shape);
    p.options.causal = causal;
    p.options.query_lengths = {shape.queries, shape.queries / 2};
    attn::execution serial, threads(3);
    const auto one = run<float>(p, serial), several = run<float>(p, threads);
    CHECK(several.out == one.out);
    CHECK(several.lse == one.lse);
  };
  // Packed keys and values of a head take 563 KiB: a wave is three of eight.
  for (bool causal : {false, true})
    check({.batch = 2, .heads = 8, .kv_heads = 4, .queries = 110, .keys = 1100, .dim = 64, .value_dim = 64}, causal);
  // Few queries: a wave is twelve chunks, and a head has five.
  check({.batch = 2, .heads = 4, .kv_heads = 4, .queries = 2, .keys = 8200, .dim = 8, .value_dim = 8}, true);
}

TEST_CASE("full_softmax takes pieces of one buffer that do not overlap", "[full_softmax]") {
  tensor<float> fused(1, 1, 9, 4 * 8, 0.5f);  // [length, q | k | v | out]
  const auto piece = [&](idx_t n) { return view(fused).slice(3, 8 * n, 8); };
  attn::execution serial;
  compiled_full_softmax<float>::call(piece(0), piece(1), piece(2), piece(3), {}, {}, serial);
  CHECK(fused(0, 0, 8, 31) == 0.5f);
}

}  // namespace testing::calls_tests
