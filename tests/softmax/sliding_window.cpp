// sliding_window against its reference: every option alone and in combination, odd lengths and dims, all types.
#include <attn/softmax/sliding_window.hpp>

#include "support/catch.hpp"
#include "support/guarded_memory.hpp"
#include "support/pairwise.hpp"
#include "support/run.hpp"

namespace testing::sliding_window_tests {
namespace {

sliding_window_problem problem_of(const problem_shape& shape, idx_t left, idx_t right, std::uint64_t seed = 1) {
  sliding_window_problem p = random_problem<sliding_window_problem>(shape, seed);
  p.options.left = left, p.options.right = right;
  return p;
}

template <class S>
void check(const sliding_window_problem& p) {
  const errors e = errors_of<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

enum class dilation { none, all_heads, per_head };
enum class global { none, shared, own_projections };

struct choice {
  bool causal, softcap, sinks, alibi, score, lengths;
  dilation steps;
  global tokens;
};

std::vector<choice> every_choice() {
  std::vector<choice> all;
  for (int bits = 0; bits < 64; ++bits)
    for (dilation steps : {dilation::none, dilation::all_heads, dilation::per_head})
      for (global tokens : {global::none, global::shared, global::own_projections})
        all.push_back({(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, (bits & 16) != 0,
                       (bits & 32) != 0, steps, tokens});
  return selected(all, [](const choice& c) {
    return std::array{+c.causal, +c.softcap, +c.sinks, +c.alibi, +c.score, +c.lengths, int(c.steps), int(c.tokens)};
  });
}

sliding_window_problem apply(const choice& c, idx_t queries, idx_t keys, idx_t left, idx_t right) {
  const problem_shape shape{.queries = queries, .keys = keys, .dim = 9, .value_dim = 12};
  sliding_window_problem p = problem_of(shape, left, right);
  auto& o = p.options;
  o.causal = c.causal;
  if (c.softcap) o.softcap = 1.5;
  if (c.sinks) o.sinks = {0.3, -1, 2, 0};
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.score)
    o.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (i * 3 + j * 5 + h) % 11 == 0 ? -reference::infinity : s * 0.5 + 0.01 * static_cast<double>(b + i - j);
    };
  if (c.lengths) o.query_lengths = {queries, queries - 9}, o.key_lengths = {keys - 6, keys};
  if (c.steps == dilation::all_heads) o.dilation = {3};
  if (c.steps == dilation::per_head) o.dilation = {1, 4, 2, 7};
  if (c.tokens != global::none) o.global_positions = {keys - 1, 0, 11, 3, 0, keys + 40};
  if (c.tokens != global::none && c.alibi) o.global_counts = {4, 2};
  if (c.tokens == global::own_projections) {
    o.q_global = random_normal(70, 2, 4, queries, 9);
    o.k_global = random_normal(71, 2, 2, keys, 9);
    o.v_global = random_normal(72, 2, 2, keys, 12);
  }
  return p;
}

template <class S>
void check_choice(const choice& c, idx_t queries, idx_t keys, idx_t left, idx_t right) {
  CAPTURE(c.causal, c.softcap, c.sinks, c.alibi, c.score, c.lengths, int(c.steps), int(c.tokens));
  CAPTURE(queries, keys, left, right);
  check<S>(apply(c, queries, keys, left, right));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("sliding_window: every combination of options", "[sliding_window]", exact_types) {
  for (const choice& c : every_choice()) {
    check_choice<TestType>(c, 40, 40, 3, 5);
    check_choice<TestType>(c, 25, 38, 6, 0);
  }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: 16-bit storage computes in float", "[sliding_window]", storage_types) {
  check<TestType>(problem_of({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, 20, 30));
  for (const choice& c : every_choice())
    if (!c.softcap && !c.alibi) check_choice<TestType>(c, 21, 21, 3, 2);
}

TEMPLATE_LIST_TEST_CASE("sliding_window: odd lengths, dims and windows", "[sliding_window]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t windows[][2] = {{0, 0}, {1, 0}, {0, 2}, {7, 7}, {64, 0}, {63, 65}, {1000, 1}, {5, attn::unlimited}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(windows); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      sliding_window_problem p = problem_of(shape, windows[w][0], windows[w][1], n + 1);
      p.options.causal = (n + w) % 2;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, p.options.left, p.options.right, p.options.causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: long rows with dilation and global tokens", "[sliding_window]", exact_types) {
  for (bool causal : {false, true}) {
    sliding_window_problem p = problem_of({.batch = 1, .queries = 1500, .keys = 1500}, 100, 60);
    p.options.causal = causal;
    p.options.dilation = {1, 2, 5, 16};
    p.options.global_positions = {0, 1, 700, 1499};
    CAPTURE(causal);
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: queries and keys of different lengths", "[sliding_window]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      sliding_window_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, 33, 4);
      p.options.causal = causal;
      p.options.global_positions = {2, keys - 2 > 0 ? keys - 2 : 0};
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: huge windows and steps do not overflow", "[sliding_window]", exact_types) {
  const idx_t most = attn::unlimited;
  for (auto [left, right, step] : {std::array<idx_t, 3>{most, most, 1},
                                   {most - 1, most - 1, 1},
                                   {most / 2, 3, 5},
                                   {most, 0, 7},
                                   {1, 1, most},
                                   {most - 1, most, most},
                                   {2, most / 3, 1000}}) {
    sliding_window_problem p = problem_of({.queries = 90, .keys = 100}, left, right);
    p.options.dilation = {step};
    CAPTURE(left, right, step);
    check<TestType>(p);
    p.options.causal = true;
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: the promised accuracy at length 4096", "[sliding_window][long]", exact_types) {
  problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape, 128, 128));
}

TEST_CASE("sliding_window: on Eigen matrices, as a caller writes it", "[sliding_window]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(30, 8);
  Eigen::MatrixXf v = Eigen::MatrixXf::Random(30, 5), out(30, 5), whole(30, 5);
  const std::vector<attn::idx_t> first = {0};
  attn::sliding_window(q, k, v, out, {.left = 0, .right = 0});
  CHECK((out - v).norm() <= 1e-6f * v.norm());
  attn::sliding_window(q, k, v, out, {.left = 4, .right = 0, .global_positions = first});
  attn::full_softmax(q, k, v, whole);
  CHECK((out.row(0) - whole.row(0)).norm() <= 2e-6f * whole.row(0).norm());
}

TEST_CASE("sliding_window: keys and values that nobody sees are never touched", "[sliding_window]") {
  // The last 8 of 20000 queries see 64 keys back; what lies far before them faults when read.
  constexpr idx_t length = 20000, dim = 16, queries = 8;
  guarded_memory<float> k(length * dim, 18000 * dim), v(length * dim, 18000 * dim);
  const tensor<double> q = random_normal(1, 1, 1, queries, dim);
  const tensor<double> tail = random_normal(2, 1, 1, length - k.first_readable(dim), dim);
  for (idx_t n = 0; n < tail.size(); ++n)
    k.data()[length * dim - tail.size() + n] = v.data()[length * dim - tail.size() + n] =
        static_cast<float>(tail.data[static_cast<std::size_t>(n)]);
  const tensor<float> row = cast<float>(q);
  tensor<float> out(1, 1, queries, dim);
  attn::execution serial;
  attn::sliding_window(view(row), in_view<float>(k.data(), {1, 1, length, dim}),
                       in_view<float>(v.data(), {1, 1, length, dim}), view(out), {.left = 64, .right = 0}, serial);
  reference::sliding_window_options options;
  options.left = 64, options.right = 0;
  CHECK(relative_error(out, reference::sliding_window(q, tail, tail, options).out) <= tolerance<float>::out);
}

TEST_CASE("sliding_window: scratch does not grow with the length", "[sliding_window]") {
  const auto scratch = [](idx_t length, bool causal) {
    attn::execution execution;
    sliding_window_problem p =
        problem_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = length, .keys = length, .dim = 8}, 40, 40);
    p.options.causal = causal;
    run<float>(p, execution);
    return execution.scratch_bytes();
  };
  CHECK(scratch(16384, false) == scratch(4096, false));
  CHECK(scratch(16384, true) == scratch(4096, true));
}

TEST_CASE("sliding_window: steps beyond the sequence leave each query itself", "[sliding_window]") {
  tensor<float> q(1, 1, 10, 8, 0.5f), v(1, 1, 10, 3), out(1, 1, 10, 3, 7);
  for (idx_t i = 0; i < 10; ++i)
    for (idx_t d = 0; d < 3; ++d) v(0, 0, i, d) = static_cast<float>(i);
  for (idx_t steps : {idx_t(10), idx_t(1) << 40, attn::unlimited}) {
    const std::vector<idx_t> dilation = {steps};
    attn::sliding_window(view(q), view(q), view(v), view(out), {.dilation = dilation});
    CHECK(out == v);
  }
}

TEMPLATE_LIST_TEST_CASE("sliding_window: queries at any position", "[sliding_window]", exact_types) {
  for (idx_t first : {idx_t(-250), idx_t(-20), idx_t(-2), idx_t(0), idx_t(7), idx_t(60), idx_t(400)})
    for (bool causal : {false, true})
      for (idx_t queries : {21, 200})
        for (dilation steps : {dilation::none, dilation::per_head})
          for (bool globals : {false, true}) {
            sliding_window_problem p = problem_of({.queries = queries, .keys = 65, .dim = 9, .value_dim = 12},
                                                  first == 0 ? reference::unlimited : 11, first == 7 ? 0 : 5);
            p.options.causal = causal;
            p.options.first_position = first;
            p.options.alibi_slopes = {0.05, 0.025, 0.0125, 0};
            if (steps == dilation::per_head) p.options.dilation = {1, 4, 2, 7};
            if (globals) p.options.global_positions = {3, 0, 63, 70, 211, 405};  // keys, queries, both or neither
            if (queries == 21 && globals) p.options.query_lengths = {21, 9}, p.options.key_lengths = {65, 30};
            CAPTURE(queries, first, causal, int(steps), globals);
            check<TestType>(p);
          }
}

TEST_CASE("sliding_window: the position queries have anyway changes no bit", "[sliding_window]") {
  sliding_window_problem p = problem_of({.queries = 500, .keys = 700}, 40, 20);
  p.options.global_positions = {650, 3};
  const reference::result plain = run<float>(p);
  p.options.first_position = 200;
  const reference::result placed = run<float>(p);
  CHECK(plain.out == placed.out);
  CHECK(plain.lse == placed.lse);
}

}  // namespace testing::sliding_window_tests
