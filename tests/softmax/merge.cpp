// Partial results over disjoint keys merge into the result over all of them.
#include <attn/softmax/merge_softmax.hpp>

#include <cmath>

#include "support/catch.hpp"
#include "support/run.hpp"

namespace testing::merge_tests {
namespace {

template <class S>
struct partial {
  tensor<S> out;
  tensor<real<S>> lse;
};

template <class S>
partial<S> part_of(const full_softmax_problem& p, idx_t begin, idx_t count) {
  full_softmax_problem piece = p;
  piece.k = rows(p.k, begin, count);
  piece.v = rows(p.v, begin, count);
  const reference::result r = run<S>(piece);
  return {cast<S>(r.out), cast<real<S>>(r.lse)};
}

template <class S>
void merge(partial<S>& into, const partial<S>& other) {
  tensor<real<S>> lse = other.lse;
  attn::merge_softmax(view(into.out), row_view(into.lse), view(other.out), row_view(lse));
}

template <class S>
partial<S> nothing(const full_softmax_problem& p) {
  return {tensor<S>(p.q.batch(), p.q.heads(), p.q.length(), p.v.dim()),
          tensor<real<S>>(p.q.batch(), p.q.heads(), p.q.length(), 1, -std::numeric_limits<real<S>>::infinity())};
}

const problem_shape shape{.queries = 37, .keys = 100, .dim = 16, .value_dim = 13};

}  // namespace

TEMPLATE_LIST_TEST_CASE("merge_softmax: pieces give the whole, in any grouping", "[merge]", exact_types) {
  const auto p = random_problem<full_softmax_problem>(shape);
  const reference::result whole = expected(rounded<TestType>(p));
  const auto a = part_of<TestType>(p, 0, 31), b = part_of<TestType>(p, 31, 1), c = part_of<TestType>(p, 32, 68);

  auto left = a;  // (a + b) + c
  merge(left, b);
  merge(left, c);
  auto right = c;  // (c + b) + a
  merge(right, b);
  merge(right, a);
  for (const auto& merged : {left, right}) {
    CHECK(relative_error(merged.out, whole.out) <= 2 * tolerance<TestType>::out);  // two merges round once each
    CHECK(relative_error(merged.lse, whole.lse) <= 2 * tolerance<TestType>::lse);
  }
}

// Chunks of queries by blocks of keys, each at its position, as a long prompt is worked off.
TEMPLATE_LIST_TEST_CASE("merge_softmax: a causal call in blocks of queries and keys gives the whole", "[merge]",
                        exact_types) {
  auto p = random_problem<full_softmax_problem>({.queries = 150, .keys = 170, .dim = 16, .value_dim = 13});
  p.options.causal = true;
  p.options.alibi_slopes = {0.5, 0.25, 0.125, 0};
  const reference::result whole = expected(rounded<TestType>(p));
  const std::array<std::array<idx_t, 2>, 4> query_chunks{{{0, 3}, {3, 97}, {100, 49}, {149, 1}}};
  const std::array<std::array<idx_t, 2>, 3> key_blocks{{{0, 64}, {64, 65}, {129, 41}}};
  for (auto [first_query, queries] : query_chunks) {
    full_softmax_problem piece = p;
    piece.q = rows(p.q, first_query, queries);
    auto sum = nothing<TestType>(piece);
    for (auto [first_key, keys] : key_blocks) {
      piece.options.first_position = first_query + 20 - first_key;
      merge(sum, part_of<TestType>({piece.q, p.k, p.v, piece.options}, first_key, keys));
    }
    CAPTURE(first_query, queries);
    CHECK(relative_error(sum.out, rows(whole.out, first_query, queries)) <= 3 * tolerance<TestType>::out);
    CHECK(relative_error(sum.lse, rows(whole.lse, first_query, queries)) <= 3 * tolerance<TestType>::lse);
  }
}

TEMPLATE_LIST_TEST_CASE("merge_softmax: nothing is neutral, bit by bit", "[merge]", exact_types) {
  const auto p = random_problem<full_softmax_problem>(shape);
  const auto some = part_of<TestType>(p, 0, 50);
  auto left = some;
  merge(left, nothing<TestType>(p));
  auto right = nothing<TestType>(p);
  merge(right, some);
  auto none = nothing<TestType>(p);
  merge(none, nothing<TestType>(p));
  CHECK(left.out == some.out);
  CHECK(left.lse == some.lse);
  CHECK(right.out == some.out);
  CHECK(right.lse == some.lse);
  CHECK(none.out == nothing<TestType>(p).out);
  CHECK(none.lse == nothing<TestType>(p).lse);
}

TEMPLATE_LIST_TEST_CASE("merge_softmax: parts of very different weight", "[merge]", exact_types) {
  auto p = random_problem<full_softmax_problem>(shape);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t j = 40; j < 100; ++j)
        for (idx_t d = 0; d < 16; ++d) p.k(b, h, j, d) *= 1000;
  auto merged = part_of<TestType>(p, 0, 40);
  const auto heavy = part_of<TestType>(p, 40, 60);
  merge(merged, heavy);
  CHECK(all_finite(merged.out));
  CHECK(all_finite(merged.lse));
  for (std::size_t n = 0; n < merged.lse.data.size(); ++n) CHECK(merged.lse.data[n] >= heavy.lse.data[n]);
}

TEMPLATE_LIST_TEST_CASE("merge_softmax: 16-bit storage", "[merge]", storage_types) {
  const auto p = random_problem<full_softmax_problem>(shape);
  const reference::result whole = expected(rounded<TestType>(p));
  auto merged = part_of<TestType>(p, 0, 31);
  merge(merged, part_of<TestType>(p, 31, 69));
  // Each part was rounded to storage; their errors add up to those of a convex combination, and the result is
  // rounded again. Cancellation between the parts makes the sum smaller than they are: a factor 3 covers it.
  CHECK(relative_error(merged.out, whole.out) <= 3 * tolerance<TestType>::out);
  CHECK(relative_error(merged.lse, whole.lse) <= 2 * tolerance<TestType>::lse);
}

TEST_CASE("merge_softmax: Eigen matrices and vectors", "[merge]") {
  Eigen::MatrixXd out = Eigen::MatrixXd::Constant(3, 2, 1), other = Eigen::MatrixXd::Constant(3, 2, 4);
  Eigen::VectorXd lse = Eigen::VectorXd::Zero(3), other_lse = Eigen::VectorXd::Constant(3, std::log(2.0));
  attn::merge_softmax(out, lse, other, other_lse);
  CHECK((out.array() - 3).abs().maxCoeff() <= 1e-15);
  CHECK((lse.array() - std::log(3.0)).abs().maxCoeff() <= 1e-15);
}

}  // namespace testing::merge_tests
