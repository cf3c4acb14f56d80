// strided and fixed attention against the reference: every option alone and in combination, odd lengths, all types.
#include "support/catch.hpp"
#include "support/run_pattern.hpp"

namespace testing::strided_tests {
namespace {

using strided_problem = problem<reference::strided_options>;

strided_problem problem_of(const problem_shape& shape, idx_t stride, idx_t summary, std::uint64_t seed = 1) {
  strided_problem p = random_problem<strided_problem>(shape, seed);
  p.options.stride = stride, p.options.fixed = summary >= 0, p.options.summary = summary;
  return p;
}
constexpr idx_t not_fixed = -1;

template <class S>
void check(const strided_problem& p) {
  const errors e = pattern_errors<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

template <class S>
void check_choice(int choice, idx_t queries, idx_t keys, idx_t stride, idx_t summary) {
  CAPTURE(choice, queries, keys, stride, summary);
  strided_problem p = problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, stride, summary);
  choose_of_pattern(p.options, choice, queries, keys);
  check<S>(p);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("strided: every combination of options", "[strided]", exact_types) {
  for (int choice = 0; choice < 64; ++choice)
    for (idx_t summary : {not_fixed, idx_t(2)}) {
      check_choice<TestType>(choice, 40, 40, 7, summary);
      check_choice<TestType>(choice, 25, 38, 5, summary);
      check_choice<TestType>(choice, 38, 25, 4, summary);
    }
}

TEMPLATE_LIST_TEST_CASE("strided: 16-bit storage computes in float", "[strided]", storage_types) {
  check<TestType>(problem_of({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, 16, not_fixed));
  for (int choice = 0; choice < 64; ++choice)
    if (!(choice & 10)) check_choice<TestType>(choice, 21, 21, 4, choice % 2 ? 1 : not_fixed);
}

TEMPLATE_LIST_TEST_CASE("strided: odd lengths, dims and strides", "[strided]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t strides[][2] = {{1, -1}, {2, -1}, {13, -1}, {64, -1}, {1000, -1}, {1, 0},
                              {1, 1},  {8, 8},  {9, 0},   {30, 4},  {64, 1},    {1000, 2}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(strides); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      strided_problem p = problem_of(shape, strides[w][0], strides[w][1], n + 1);
      p.options.causal = (n + w) % 2;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, p.options.stride, p.options.summary, p.options.causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("strided: long rows", "[strided]", exact_types) {
  for (bool causal : {false, true})
    for (idx_t summary : {not_fixed, idx_t(3)}) {
      strided_problem p = problem_of({.batch = 1, .queries = 1500, .keys = 1500}, 40, summary);
      p.options.causal = causal;
      CAPTURE(causal, summary);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("strided: queries and keys of different lengths", "[strided]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (idx_t summary : {not_fixed, idx_t(1)})
      for (bool causal : {false, true}) {
        strided_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, 17, summary);
        p.options.causal = causal;
        CAPTURE(queries, keys, summary, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("strided: huge strides do not overflow", "[strided]", exact_types) {
  const idx_t most = std::numeric_limits<idx_t>::max();
  for (idx_t stride : {most, most / 2})
    for (idx_t summary : {not_fixed, idx_t(0), idx_t(1), stride})
      for (idx_t queries : {60, 90, 110}) {
        CAPTURE(stride, summary, queries);
        check<TestType>(problem_of({.queries = queries, .keys = 90}, stride, summary));
      }
}

TEMPLATE_LIST_TEST_CASE("strided: the promised accuracy at length 4096", "[strided][long]", exact_types) {
  const problem_shape shape{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape, 64, not_fixed));
}

}  // namespace testing::strided_tests
