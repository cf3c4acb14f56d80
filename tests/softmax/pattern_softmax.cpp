// Users' patterns against the reference, what is refused of them, and patterns as text.
#include "support/catch.hpp"
#include "support/listed_pattern.hpp"
#include "support/refusal.hpp"
#include "support/run_pattern.hpp"

namespace testing::pattern_softmax_tests {
namespace {

using piece = listed_pattern::piece;
using listed_problem = problem<reference::listed_options>;

// A pattern of odd pieces over positions from `first` on: ranges with and without a step, lists, windows.
listed_pattern odd_pattern(idx_t first, idx_t keys) {
  const std::vector<idx_t> some = {0, 3, 11, 40, 41, 90, 1000000};
  listed_pattern p;
  for (idx_t step : {0, 1, 2})
    p.all.push_back({{first + step, first + 60, 3},
                     {{.range = {-5, 9}},
                      {.range = {20 + step, 200, 7}, .except_self = true},
                      {.range = {9, 20}, .left = 9, .right = 2}}});
  p.all.push_back({{first + 60, first + 61}, {}});
  p.all.push_back({{first + 61, keys + 30}, {{.list = some, .except_self = true}, {.range = {50, 52}}}});
  p.all.push_back({{first - 50, first}, {{.range = {0, 5}}}});
  return p;
}

template <class S, class Pattern>
void check(listed_problem p, const Pattern& pattern, attn::execution& execution) {
  round_options<S>(p.options);
  common_softmax_options<S, attn::pattern_softmax_options<S>> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  stored.options.lse = row_view(lse);
  compiled_pattern_softmax<S>::call(view(q), view(k), view(v), view(out), pattern, stored.options, stored.score,
                                    execution);
  const reference::result wanted = reference::by_pattern(rounded<S>(p.q), rounded<S>(p.k), rounded<S>(p.v), p.options);
  CHECK(relative_error(out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(lse, wanted.lse) <= tolerance<S>::lse);
}

// A query sees every step-th key from 2 on, of those in a range that begins at `begin`.
struct from_anywhere {
  idx_t begin, step;
  idx_t query_sets(const attn::pattern_shape&) const { return 1; }
  attn::position_range queries(const attn::pattern_shape& s, idx_t) const { return {0, s.keys, 1}; }
  void keys(const attn::pattern_shape&, idx_t, auto&& see) const {
    see(attn::position_range{2, attn::unlimited, step}, [b = begin](idx_t p) {
      return attn::position_range{b, p + 1};
    });
  }
};

std::string refused_pattern(const listed_pattern& pattern) {
  tensor<float> q(1, 1, 10, 4, 1), out(1, 1, 10, 4, 7);
  attn::execution serial;
  const std::string message = refusal([&] {
    const auto x = view(std::as_const(q));
    compiled_pattern_softmax<float>::call(x, x, x, view(out), pattern, {}, {}, serial);
  });
  CHECK((out == tensor<float>(1, 1, 10, 4, 7)) == !message.empty());
  return message;
}

template <class Options>
std::string text_by_reference(const Options& options, idx_t length) {
  std::string rows;
  for (idx_t i = 0; i < length; ++i) {
    for (idx_t j = 0; j < length; ++j) rows += (options.causal && j > i) || !sees(options, 0, i, j, length) ? '.' : '#';
    rows += '\n';
  }
  return rows;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pattern_softmax: odd patterns, every combination of options", "[pattern_softmax]",
                        exact_types) {
  attn::execution serial, three(3);
  for (auto [queries, keys] : {std::array<idx_t, 2>{100, 100}, {70, 130}, {130, 70}})
    for (int choice = 0; choice < 32; ++choice) {
      CAPTURE(queries, keys, choice);
      const problem_shape shape{.queries = queries, .keys = keys, .dim = 9, .value_dim = 12};
      listed_problem p = random_problem<listed_problem>(shape);
      choose_of_pattern(p.options, choice, queries, keys);
      const listed_pattern pattern = odd_pattern(keys - queries, keys);
      note(pattern, keys - queries, keys, p.options);
      check<TestType>(p, pattern, choice % 2 ? three : serial);
    }
}

TEMPLATE_LIST_TEST_CASE("pattern_softmax: joined patterns", "[pattern_softmax]", exact_types) {
  attn::execution serial;
  for (int choice = 0; choice < 32; ++choice) {
    CAPTURE(choice);
    listed_problem p = random_problem<listed_problem>(
        {.queries = 150, .keys = 150, .dim = 9, .value_dim = choice % 3 ? 37 : 48});  // 48: rows of out hold the states
    choose_of_pattern(p.options, choice, 150, 150);
    listed_pattern near, far;
    for (idx_t g = 0; g < 3; ++g) near.all.push_back({{50 * g, 50 * g + 50}, {{.range = {50 * g, 50 * g + 50}}}});
    for (idx_t r = 0; r < 50; ++r)  // every 50th key but the query's own
      far.all.push_back({{r, 150, 50}, {{.range = {r, 150, 50}, .except_self = true}}});
    note(near, 0, 150, p.options), note(far, 0, 150, p.options);
    check<TestType>(p, joined_listed_pattern{near, far}, serial);
    check<TestType>(p, joined_listed_pattern{far, near}, serial);
  }
}

TEST_CASE("pattern_softmax: a query's range may begin anywhere", "[pattern_softmax]") {
  constexpr idx_t least = std::numeric_limits<idx_t>::min(), most = std::numeric_limits<idx_t>::max();
  for (idx_t begin : {least, least + 1, idx_t(-1), idx_t(2)})
    CHECK(attn::pattern_text(from_anywhere{begin, 1}, 4) == "....\n....\n..#.\n..##\n");
  CHECK(attn::pattern_text(from_anywhere{least, most}, 4) == "....\n....\n..#.\n..#.\n");
}

TEST_CASE("pattern_softmax refuses patterns that do not fit, out untouched", "[pattern_softmax]") {
  const auto refused = [](const listed_pattern& pattern, const std::string& says) {
    const std::string message = refused_pattern(pattern);
    INFO(message);
    CHECK(message.starts_with("attn::pattern"));
    CHECK(message.find(says) != std::string::npos);
  };
  CHECK(refused_pattern({{{{0, 10}, {{.range = {0, 10}}}}}}) == "");
  refused({}, "query sets that contain each query once: 10 in all; found 0");
  refused({{{{0, 9}, {}}}}, "found 9");
  refused({{{{0, 10}, {}}, {{3, 4}, {}}}}, "found the one at position 3 twice");
  refused({{{{0, 5}, {}}, {{0, 5}, {}}}}, "found the one at position 0 twice");
  refused({{{{0, 10, 0}, {}}}}, "step");
  refused({{{{0, 10}, {{.range = {0, 10, -1}}}}}}, "step");
  refused({{{{0, 10}, {{.list = {-1, 3}}}}}}, "listed keys >= 0; found -1");
  refused({{{{0, 10}, {{.list = {2, 3, 3}}}}}}, "listed keys that ascend; found 3 before 3");
  const std::string text = refusal([] { attn::pattern_text(listed_pattern{{{{0, 10}, {{.list = {-20, 3}}}}}}, 10); });
  CHECK(well_formed(text, "pattern_text"));
  refused({{{{0, 10}, {{.list = {2, 50, 1}}}}}}, "listed keys that ascend; found 50 before 1");
}

TEST_CASE("pattern_softmax: keys and values that nobody sees are never touched", "[pattern_softmax]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  tensor<float> q(1, 1, 200, 8, 0.5f), k(1, 1, 200, 8, nan), v(1, 1, 200, 8, nan), out(1, 1, 200, 8, 7);
  for (idx_t j : {7, 8, 150})
    for (idx_t d = 0; d < 8; ++d) k(0, 0, j, d) = 0.1f, v(0, 0, j, d) = static_cast<float>(j);
  attn::execution serial;
  const listed_pattern pattern{{{{0, 100}, {{.range = {7, 9}}}}, {{100, 200}, {{.list = {150}}}}}};
  compiled_pattern_softmax<float>::call(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)),
                                        view(out), pattern, {}, {}, serial);
  CHECK(out(0, 0, 99, 3) == 7.5f);
  CHECK(out(0, 0, 100, 0) == 150.0f);
}

TEST_CASE("pattern_softmax: more heads than a wave takes, with and without threads", "[pattern_softmax]") {
  // 0.5 MB of keys and values per key head: a wave takes four of the ten.
  const problem_shape shape{
      .batch = 2, .heads = 10, .kv_heads = 5, .queries = 1000, .keys = 1000, .dim = 64, .value_dim = 64};
  const listed_problem p = random_problem<listed_problem>(shape);
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  const std::vector<idx_t> lengths = {1000, 730};
  listed_pattern overlapping, disjoint,
      steps;  // ranges packed once for all query sets; packed by each; gathered by each
  for (idx_t n = 0; n < 1000; n += 100) {
    overlapping.all.push_back({{n, n + 100}, {{.range = {n - 200, n + 100}}}});
    disjoint.all.push_back({{n, n + 100}, {{.range = {n, n + 50}}}});
    steps.all.push_back({{n, n + 100}, {{.range = {3, 1000, 7}}}});
  }
  const auto check = [&](const auto& pattern) {
    tensor<float> alone(2, 10, 1000, 64, 7), shared(2, 10, 1000, 64, 8);
    tensor<float> alone_lse(2, 10, 1000, 1, 7), shared_lse(2, 10, 1000, 1, 8);
    attn::execution serial, two(2), three(3);
    attn::pattern_softmax_options<float> options{.lengths = lengths, .lse = row_view(alone_lse)};
    compiled_pattern_softmax<float>::call(view(q), view(k), view(v), view(alone), pattern, options, {}, serial);
    options.lse = row_view(shared_lse);
    for (attn::execution* threads : {&two, &three}) {
      compiled_pattern_softmax<float>::call(view(q), view(k), view(v), view(shared), pattern, options, {}, *threads);
      CHECK(alone == shared);
      CHECK(alone_lse == shared_lse);
    }
  };
  check(overlapping);
  check(disjoint);
  check(joined_listed_pattern{overlapping, steps});
}

TEST_CASE("pattern_softmax: every view with a layout of its own", "[pattern_softmax]") {
  const problem_shape shape{.heads = 4, .kv_heads = 2, .queries = 90, .keys = 90, .dim = 16, .value_dim = 16};
  const listed_problem p = random_problem<listed_problem>(shape);
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  listed_pattern near, far;
  for (idx_t n = 0; n < 90; n += 30) near.all.push_back({{n, n + 30}, {{.range = {n, n + 30}}}});
  for (idx_t r = 0; r < 30; ++r) far.all.push_back({{r, 90, 30}, {{.range = {r, 90, 30}, .except_self = true}}});
  const joined_listed_pattern pattern{near, far};
  attn::execution serial;
  tensor<float> plain(p.q.batch(), 4, 90, 16);
  compiled_pattern_softmax<float>::call(view(q), view(k), view(v), view(plain), pattern, {}, {}, serial);
  const idx_t batch = q.batch();
  tensor<float> memory[4] = {tensor<float>(1, 1, batch * 4 * 90, 16), tensor<float>(1, 1, batch * 2 * 90, 16),
                             tensor<float>(1, 1, batch * 2 * 90, 40), tensor<float>(1, 1, batch * 4 * 90, 32, 7)};
  const out_view<float> by_token(memory[0].data.data(), {batch, 4, 90, 16}, {90 * 64, 16, 64, 1}),
      columns(memory[1].data.data(), {batch, 2, 90, 16}, {2 * 90 * 16, 90 * 16, 1, 90}),
      gaps(memory[2].data.data() + 5, {batch, 2, 90, 16}, {2 * 90 * 40, 40, 80, 2}),
      result(memory[3].data.data(), {batch, 4, 90, 16}, {4 * 90 * 32, 1, 4 * 32, 4});
  const auto copy = [](const tensor<float>& from, const out_view<float>& to) {
    for (idx_t b = 0; b < from.batch(); ++b)
      for (idx_t h = 0; h < from.heads(); ++h)
        for (idx_t i = 0; i < from.length(); ++i)
          for (idx_t d = 0; d < from.dim(); ++d) to(b, h, i, d) = from(b, h, i, d);
  };
  copy(q, by_token), copy(k, columns), copy(v, gaps);
  compiled_pattern_softmax<float>::call(by_token, columns, gaps, result, pattern, {}, {}, serial);
  tensor<float> gathered(batch, 4, 90, 16);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < 90; ++i)
        for (idx_t d = 0; d < 16; ++d) gathered(b, h, i, d) = result(b, h, i, d);
  CHECK(gathered == plain);
}

TEST_CASE("pattern_softmax: options, score and execution may each be left out", "[pattern_softmax]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(20, 8), k = Eigen::MatrixXf::Random(20, 8);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(20, 8);
  Eigen::MatrixXf wanted(20, 8), out(20, 8);
  const attn::block_pattern pattern{.size = 4, .neighbours = 0};
  const auto same = [](float s, auto, auto, auto, auto) { return s; };
  attn::execution threads(2, 0);
  attn::pattern_softmax(q, k, v, wanted, pattern);
  const auto is_same = [&] { return (out - wanted).norm() <= 1e-6f * wanted.norm() && (out.setZero(), true); };
  attn::pattern_softmax(q, k, v, out, pattern, threads);
  CHECK(is_same());
  attn::pattern_softmax(q, k, v, out, pattern, attn::execution(2));
  CHECK(is_same());
  attn::pattern_softmax(q, k, v, out, pattern, {.causal = false}, threads);
  CHECK(is_same());
  attn::pattern_softmax(q, k, v, out, pattern, {}, same);
  CHECK(is_same());
  attn::pattern_softmax(q, k, v, out, pattern, {.scale = 1 / std::sqrt(8.0f)}, same, attn::execution(2));
  CHECK(is_same());
  attn::block(q, k, v, out, {.causal = false, .size = 4, .neighbours = 0}, same, threads);
  CHECK(is_same());
  const attn::block_options<float> options{.size = 4, .neighbours = 0};
  attn::block(q, k, v, out, options);
  CHECK(is_same());
  attn::strided(q, k, v, wanted, threads);
  attn::bigbird(q, k, v, out, attn::execution(2));  // both see everything
  CHECK(is_same());
}

TEST_CASE("patterns as text show what is seen", "[pattern_softmax]") {
  CHECK(attn::pattern_text(attn::block_pattern{2, 0}, 5) == "##...\n##...\n..##.\n..##.\n....#\n");
  CHECK(attn::pattern_text(attn::block_pattern{2, 0}, 3, true) == "#..\n##.\n..#\n");
  CHECK(attn::pattern_text(attn::block_pattern{2, 0}, 0) == "");
  for (idx_t length : {1, 2, 7, 33})
    for (bool causal : {false, true})
      for (idx_t size : {1, 3, 4, 50}) {
        CAPTURE(length, causal, size);
        reference::block_options block;
        block.causal = causal, block.size = size;
        CHECK(attn::pattern_text(attn::block_pattern{size, 1}, length, causal) == text_by_reference(block, length));
        reference::strided_options strided;
        strided.causal = causal, strided.stride = size;
        CHECK(attn::pattern_text(attn::strided_pattern(size), length, causal) == text_by_reference(strided, length));
        strided.fixed = true;
        CHECK(attn::pattern_text(attn::fixed_pattern{size, 1}, length, causal) == text_by_reference(strided, length));
        reference::bigbird_options bigbird;
        bigbird.causal = causal, bigbird.size = size;
        bigbird.random = block_table(0, 1, (length + size - 1) / size, 2);
        const attn::bigbird_pattern pattern{
            size, 3, 1, {bigbird.random.data.data(), {1, bigbird.random.length(), bigbird.random.dim()}}};
        CHECK(attn::pattern_text(pattern, length, causal) == text_by_reference(bigbird, length));
      }
}

}  // namespace testing::pattern_softmax_tests
