// block against its reference: every option alone and in combination, odd lengths and blocks, all types.
#include "support/catch.hpp"
#include "support/run_pattern.hpp"

namespace testing::block_tests {
namespace {

using block_problem = problem<reference::block_options>;

block_problem problem_of(const problem_shape& shape, idx_t size, idx_t neighbours, std::uint64_t seed = 1) {
  block_problem p = random_problem<block_problem>(shape, seed);
  p.options.size = size, p.options.neighbours = neighbours;
  return p;
}

template <class S>
void check(const block_problem& p) {
  const errors e = pattern_errors<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

enum class table { none, per_head, for_all };

template <class S>
void check_choice(int choice, table permuted, idx_t queries, idx_t keys, idx_t size, idx_t neighbours) {
  CAPTURE(choice, int(permuted), queries, keys, size, neighbours);
  block_problem p = problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, size, neighbours);
  choose_of_pattern(p.options, choice, queries, keys);
  if (permuted != table::none)
    p.options.permutation = block_table(0, permuted == table::per_head ? 4 : 1, (keys + size - 1) / size, 1);
  check<S>(p);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("block: every combination of options", "[block]", exact_types) {
  for (int choice = 0; choice < 64; ++choice)
    for (table permuted : {table::none, table::per_head, table::for_all}) {
      check_choice<TestType>(choice, permuted, 40, 40, 7, 1);
      check_choice<TestType>(choice, permuted, 25, 38, 5, 0);
      check_choice<TestType>(choice, permuted, 38, 25, 6, 2);
    }
}

TEMPLATE_LIST_TEST_CASE("block: 16-bit storage computes in float", "[block]", storage_types) {
  check<TestType>(problem_of({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, 40, 1));
  for (int choice = 0; choice < 64; ++choice)
    if (!(choice & 10)) check_choice<TestType>(choice, choice % 2 ? table::per_head : table::none, 21, 21, 4, 1);
}

TEMPLATE_LIST_TEST_CASE("block: odd lengths, dims and blocks", "[block]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t blocks[][2] = {{1, 0}, {1, 3}, {7, 1}, {32, 1}, {64, 0}, {100, 1}, {1000, 0}, {16, 1000}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(blocks); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      block_problem p = problem_of(shape, blocks[w][0], blocks[w][1], n + 1);
      p.options.causal = (n + w) % 2;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, p.options.size, p.options.neighbours, p.options.causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("block: queries and keys of different lengths", "[block]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (idx_t size : {3, 50})
      for (bool causal : {false, true}) {
        block_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, size, 1);
        p.options.causal = causal;
        CAPTURE(queries, keys, size, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("block: huge numbers do not overflow", "[block]", exact_types) {
  const idx_t most = std::numeric_limits<idx_t>::max();
  for (auto [size, neighbours] : {std::array<idx_t, 2>{most, 0}, {most, most}, {1, most}, {most / 2, 3}, {7, most / 3}})
    for (idx_t queries : {60, 90, 110}) {
      CAPTURE(size, neighbours, queries);
      check<TestType>(problem_of({.queries = queries, .keys = 90}, size, neighbours));
    }
}

TEMPLATE_LIST_TEST_CASE("block: the promised accuracy at length 4096", "[block][long]", exact_types) {
  const problem_shape shape{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape, 128, 1));
}

TEST_CASE("block: on Eigen matrices, as a caller writes it", "[block]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(30, 8);
  Eigen::MatrixXf v = Eigen::MatrixXf::Random(30, 5), out(30, 5);
  attn::block(q, k, v, out, {.size = 1, .neighbours = 0});
  CHECK((out - v).norm() <= 1e-6f * v.norm());
  Eigen::Matrix<attn::idx_t, 1, 3> key_block(2, 0, -1);
  attn::block(q, k, v, out, {.size = 10, .permutation = key_block}, [](float, auto, auto, auto i, auto j) {
    return i % 10 == j % 10 ? 0.0f : -std::numeric_limits<float>::infinity();
  });
  CHECK((out.topRows(10) - v.bottomRows(10)).norm() == 0);
  CHECK((out.middleRows(10, 10) - v.topRows(10)).norm() == 0);
  CHECK(out.bottomRows(10).norm() == 0);
}

}  // namespace testing::block_tests
