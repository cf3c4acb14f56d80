// full_softmax against its reference: every option alone and in combination, odd lengths and dims, all types.
#include <attn/softmax/full_softmax.hpp>

#include <cmath>

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/run.hpp"

namespace testing::full_softmax_tests {
namespace {

full_softmax_problem problem_of(const problem_shape& shape, std::uint64_t seed = 1) {
  return random_problem<full_softmax_problem>(shape, seed);
}

template <class S>
void check(const full_softmax_problem& p) {
  const errors e = errors_of<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

enum class lengths { none, both, queries_and_keys, keys_only };
enum class bias { none, one_row, per_head, everything };

struct choice {
  bool causal, softcap, alibi, sinks, score;
  lengths given;
  bias added;
};

std::vector<choice> every_choice() {
  std::vector<choice> all;
  for (int bits = 0; bits < 32; ++bits)
    for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only})
      for (bias added : {bias::none, bias::one_row, bias::per_head, bias::everything})
        all.push_back(
            {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, (bits & 16) != 0, given, added});
  return selected(all, [](const choice& c) {
    return std::array{+c.causal, +c.softcap, +c.alibi, +c.sinks, +c.score, int(c.given), int(c.added)};
  });
}

full_softmax_problem apply(const choice& c, idx_t queries, idx_t keys) {
  problem_shape shape{.queries = c.given == lengths::both ? keys : queries, .keys = keys, .dim = 9, .value_dim = 12};
  full_softmax_problem p = problem_of(shape);
  auto& o = p.options;
  o.causal = c.causal;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, 0};
  if (c.score)
    o.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (i * 3 + j * 5 + h) % 11 == 0 ? -reference::infinity : s * 0.5 + 0.01 * static_cast<double>(b + i - j);
    };
  if (c.given == lengths::both) o.lengths = {keys - 5, keys};
  if (c.given == lengths::queries_and_keys)
    o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  if (c.given == lengths::keys_only) o.key_lengths = {keys, keys / 2};
  const idx_t rows = shape.queries;
  if (c.added == bias::one_row) o.bias = random_normal(8, 1, 1, 1, keys);
  if (c.added == bias::per_head) o.bias = random_normal(8, 1, shape.heads, rows, keys);
  if (c.added == bias::everything) o.bias = random_normal(8, shape.batch, shape.heads, rows, keys);
  for (std::size_t n = 0; n < o.bias.data.size(); n += 7) o.bias.data[n] = -reference::infinity;
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("full_softmax: every combination of options", "[full_softmax]", exact_types) {
  for (const choice& c : every_choice()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, int(c.given), int(c.added));
    check<TestType>(apply(c, 21, 35));
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: 16-bit storage computes in float", "[full_softmax]", storage_types) {
  check<TestType>(problem_of({.queries = 130, .keys = 130, .dim = 64, .value_dim = 64}));
  check<TestType>(problem_of({.queries = 70, .keys = 257, .dim = 33, .value_dim = 7}));
  for (const choice& c : every_choice())
    if (c.added == bias::none || c.added == bias::everything) {
      CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, int(c.given), int(c.added));
      check<TestType>(apply(c, 5, 19));
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: odd lengths and dims", "[full_softmax]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u, 5u})
      for (bool causal : {false, true}) {
        problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + step) % 8], shape.value_dim = dims[(n + 3 * step) % 8];
        full_softmax_problem p = problem_of(shape, n + 1);
        p.options.causal = causal;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: queries and keys of different lengths", "[full_softmax]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      full_softmax_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24});
      p.options.causal = causal;
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: grouped queries", "[full_softmax]", exact_types) {
  for (auto [heads, kv_heads] : {std::pair<idx_t, idx_t>{8, 1}, {8, 4}, {6, 6}, {6, 2}, {0, 0}, {1, 1}})
    for (idx_t queries : {1, 3, 66}) {
      problem_shape shape{.batch = 2, .heads = heads, .kv_heads = kv_heads, .queries = queries, .keys = 66};
      full_softmax_problem p = problem_of(shape);
      p.options.causal = true;
      CAPTURE(heads, kv_heads, queries);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: a batch of none, heads of no width", "[full_softmax]", exact_types) {
  check<TestType>(problem_of({.batch = 0}));
  check<TestType>(problem_of({.value_dim = 0}));
  full_softmax_problem no_dim = problem_of({.dim = 0});  // every score is 0: plain averages
  no_dim.options.scale = 1;
  check<TestType>(no_dim);
}

TEMPLATE_LIST_TEST_CASE("full_softmax: the scale of the caller", "[full_softmax]", exact_types) {
  for (double scale : {0.0, 0.01, 1.0, -0.3}) {
    full_softmax_problem p = problem_of({.queries = 40, .keys = 67});
    p.options.scale = scale;
    CAPTURE(scale);
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: the promised accuracy at length 4096", "[full_softmax][long]", exact_types) {
  problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape));
}

TEST_CASE("full_softmax: the score function sees real rows and keys only", "[full_softmax]") {
  full_softmax_problem p = problem_of({.queries = 70, .keys = 70});
  p.options.lengths = {13, 67};
  bool inside = true;
  p.options.score = [&](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
    const idx_t length = p.options.lengths[static_cast<std::size_t>(b)];
    inside = inside && 0 <= h && h < 4 && 0 <= i && i < length && 0 <= j && j < length;
    return s;
  };
  run<float>(p);
  CHECK(inside);
}

TEST_CASE("full_softmax: a masked key may hold anything", "[full_softmax]") {
  full_softmax_problem p = problem_of({.queries = 50, .keys = 70});
  const auto hide = [](idx_t j) { return j % 9 == 4; };
  full_softmax_problem dirty = p;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t j = 0; j < 70; ++j)
        if (hide(j))
          for (idx_t d = 0; d < 16; ++d) dirty.k(b, h, j, d) = dirty.v(b, h, j, d) = j % 2 ? NAN : HUGE_VAL;
  SECTION("by a bias of −infinity") {
    p.options.bias = tensor<double>(1, 1, 1, 70);
    for (idx_t j = 0; j < 70; ++j) p.options.bias(0, 0, 0, j) = hide(j) ? -reference::infinity : 0.5;
  }
  SECTION("by the score function") {
    p.options.score = [=](double s, idx_t, idx_t, idx_t, idx_t j) { return hide(j) ? -reference::infinity : s; };
  }
  dirty.options = p.options;
  CHECK(relative_error(run<float>(dirty).out, expected(p).out) <= tolerance<float>::out);
}

TEST_CASE("full_softmax: without options or lse, on Eigen matrices of either order", "[full_softmax]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(40, 8);
  const row_major v = row_major::Random(40, 5);
  const Eigen::MatrixXf scores = (q * k.transpose() / std::sqrt(8.0f)).array().exp();
  const Eigen::MatrixXf wanted = scores.rowwise().sum().cwiseInverse().asDiagonal() * (scores * v);

  row_major out(30, 5);
  attn::full_softmax(q, k, v, out);
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());

  Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(32, 9, 7);
  Eigen::VectorXf lse(30);
  attn::execution threads(2, 0);
  attn::full_softmax(q, k, v, wide.block(1, 2, 30, 5), {.lse = lse}, threads);
  CHECK((wide.block(1, 2, 30, 5) - wanted).norm() <= 2e-6f * wanted.norm());
  CHECK((wide.array() == 7).count() == 32 * 9 - 30 * 5);
  CHECK((lse - scores.rowwise().sum().array().log().matrix()).norm() <= 2e-6f * lse.norm());

  attn::full_softmax(q, k, v, out, {.causal = false},
                     [](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return s; });
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());
}

TEST_CASE("full_softmax: scratch grows with length × dim, never length × length", "[full_softmax]") {
  const auto scratch = [](idx_t length) {
    attn::execution execution;
    run<float>(problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = length, .keys = length}), execution);
    return static_cast<double>(execution.scratch_bytes());
  };
  const double at_1024 = scratch(1024), at_4096 = scratch(4096);
  CHECK(at_4096 - at_1024 <= 4 * 3072 * (16 + 16) * sizeof(float));  // a few copies of the keys and values at most
  CHECK(at_4096 < 4096.0 * 4096 * sizeof(float) / 4);
}

TEST_CASE("full_softmax: the largest finite biases and sinks", "[full_softmax]") {
  constexpr float lowest = std::numeric_limits<float>::lowest();
  for (idx_t queries : {1, 9}) {  // both kernels
    const tensor<float> q = cast<float>(random_normal(1, 1, 1, queries, 16)),
                        k = cast<float>(random_normal(2, 1, 1, 70, 16)), v = cast<float>(random_normal(3, 1, 1, 70, 8));
    tensor<float> out(1, 1, queries, 8), lse(1, 1, queries, 1);
    tensor<double> mean(1, 1, queries, 8);
    for (idx_t i = 0; i < queries; ++i)
      for (idx_t d = 0; d < 8; ++d)
        for (idx_t j = 0; j < 70; ++j) mean(0, 0, i, d) += static_cast<double>(v(0, 0, j, d)) / 70;
    for (const float bias : {lowest, -lowest}) {
      // A score is nothing beside such a bias: all weights are equal.
      const tensor<float> biases(1, 1, queries, 70, bias);
      attn::full_softmax(view(q), view(k), view(v), view(out), {.bias = view(biases), .lse = row_view(lse)});
      CHECK(relative_error(out, mean) <= tolerance<float>::out);
      for (float x : lse.data) CHECK(std::isfinite(x));
      attn::full_softmax(view(q), view(k), view(v), view(out), {}, [&](float, auto...) { return bias; });
      CHECK(relative_error(out, mean) <= tolerance<float>::out);
    }
    const float sink[] = {-lowest};
    attn::full_softmax(view(q), view(k), view(v), view(out), {.sinks = sink, .lse = row_view(lse)});
    for (float x : out.data) CHECK(x == 0);
    for (float x : lse.data) CHECK(std::isfinite(x));
  }
}

TEST_CASE("full_softmax: a query of NaN has a result of NaN, however many queries there are", "[full_softmax]") {
  for (idx_t queries = 1; queries <= 6; ++queries) {
    tensor<float> q(1, 1, queries, 8, 0.5f), k(1, 1, 70, 8, 0.25f), v(1, 1, 70, 3, 1), out(1, 1, queries, 3);
    tensor<float> lse(1, 1, queries, 1);
    q(0, 0, 0, 5) = std::numeric_limits<float>::quiet_NaN();
    attn::full_softmax(view(q), view(k), view(v), view(out), {.lse = row_view(lse)});
    CAPTURE(queries);
    CHECK(std::isnan(out(0, 0, 0, 0)));
    CHECK(std::isnan(lse(0, 0, 0, 0)));
    if (queries > 1) CHECK(std::abs(out(0, 0, 1, 0) - 1) <= 1e-6f);
  }
}

// What first_position took when it was an optional number, and takes as a list.
static_assert(std::is_convertible_v<std::nullopt_t, attn::first_positions>);
static_assert(std::is_convertible_v<std::optional<int>, attn::first_positions>);
static_assert(std::is_convertible_v<const std::vector<idx_t>&, attn::first_positions>);
static_assert(!attn::first_positions(std::nullopt) && attn::first_positions(std::optional<idx_t>(0)));

TEMPLATE_LIST_TEST_CASE("full_softmax: queries at any position", "[full_softmax]", all_types) {
  for (idx_t queries : {3, 21, 200})
    for (idx_t first : {idx_t(-250), idx_t(-20), idx_t(-2), idx_t(0), idx_t(7), idx_t(34), idx_t(35), idx_t(400)})
      for (bool causal : {false, true}) {
        full_softmax_problem p = problem_of({.queries = queries, .keys = 35, .dim = 9, .value_dim = 12});
        p.options.causal = causal;
        p.options.first_position = first;
        p.options.alibi_slopes = {0.05, 0.025, 0.0125, 0};
        if (first % 2) p.options.query_lengths = {queries / 2, queries}, p.options.key_lengths = {35, 11};
        if (first == 7)
          p.options.score = [](double s, idx_t b, idx_t, idx_t i, idx_t j) {
            return s + 0.01 * static_cast<double>(b + i - j);
          };
        CAPTURE(queries, first, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("full_softmax: keys that stand for several tokens", "[full_softmax]", all_types) {
  for (idx_t queries : {1, 3, 21, 60, 200})
    for (idx_t span : {1, 2, 5, 16})
      for (idx_t keys : {35, 600}) {  // with 600 a few queries are attended in blocks
        full_softmax_problem p = problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12});
        p.options.causal = true, p.options.span = span, p.options.sinks = {0.5, -1, 0, 2};
        p.options.first_positions = {keys * span / 2, -3};  // keys of tokens to come are there
        if (span == 2) p.options.first_position = 70, p.options.first_positions = {}, p.options.softcap = 2;
        if (span == 5) p.options.query_lengths = {queries / 2, queries}, p.options.key_lengths = {35, 11};
        if (span == 16) p.options.key_mask = tensor<double>(1, 1, 1, keys, 1), p.options.key_mask(0, 0, 0, 2) = 0;
        CAPTURE(queries, span, keys);
        check<TestType>(p);
      }
}

// Few queries are attended in blocks of keys, the last of which some see.
TEST_CASE("full_softmax: keys of tokens to come are not read", "[full_softmax]") {
  for (idx_t queries : {1, 3, 60}) {
    full_softmax_problem p = problem_of({.queries = queries, .keys = 600});
    p.options.causal = true, p.options.span = 5, p.options.first_positions = {1502, -3};
    const reference::result clean = run<float>(p);
    for (idx_t b = 0; b < 2; ++b)
      for (auto* x : {&p.k, &p.v})
        for (idx_t h = 0; h < x->heads(); ++h)
          for (idx_t j = (p.options.first_positions[static_cast<std::size_t>(b)] + queries) / 5; j < 600; ++j)
            for (idx_t d = 0; d < x->dim(); ++d) (*x)(b, h, j, d) = d % 2 ? 1e30 : std::nan("");
    const reference::result poisoned = run<float>(p);
    CAPTURE(queries);
    CHECK(poisoned.out == clean.out);
    CHECK(poisoned.lse == clean.lse);
  }
}

TEST_CASE("full_softmax: the position queries have anyway changes no bit", "[full_softmax]") {
  for (idx_t queries : {2, 130}) {
    full_softmax_problem p = problem_of({.queries = queries, .keys = 300});
    p.options.causal = true;
    const reference::result plain = run<float>(p);
    p.options.first_position = 300 - queries;
    const reference::result placed = run<float>(p);
    CHECK(plain.out == placed.out);
    CHECK(plain.lse == placed.lse);
  }
}

}  // namespace testing::full_softmax_tests
