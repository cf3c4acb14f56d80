// nystrom against its reference: every inverse, with and without the convolution, lengths, odd shapes, all types.
#include <array>

#include "support/call_low_rank.hpp"
#include "support/catch.hpp"

namespace testing::nystrom_tests {
namespace {

using reference::pinv;

nystrom_problem problem_of(const problem_shape& s, idx_t landmarks, pinv inverse = pinv::per_head,
                           std::uint64_t seed = 1) {
  nystrom_problem p = random_problem<nystrom_problem>(s, seed);
  p.options.landmarks = landmarks;
  p.options.inverse = inverse;
  p.options.cutoff = 0.03;
  return p;
}

// The inverse enlarges rounding errors: little where steps are few or small singular values are damped, by some tens
// where A is inverted in full.
constexpr double enlarged = 5, enlarged_in_full = 50;

template <class S>
void check(const nystrom_problem& p, double factor = enlarged) {
  const nystrom_problem given = rounded<S>(p);
  attn::execution serial;
  const double error = relative_error(run<S>(given, serial).out, expected(given).out);
  const double rounding = std::is_same_v<S, real<S>> ? 0 : made_keys_tolerance<S>::out;
  CHECK(error <= rounding + factor * tolerance<real<S>>::out);
}

enum class lengths { none, both, queries_and_keys, keys_only };

}  // namespace

TEMPLATE_LIST_TEST_CASE("nystrom: every inverse, convolution and kind of lengths", "[nystrom]", all_types) {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (idx_t width : {0, 1, 3, 9, 301})
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only}) {
        problem_shape shape{.queries = 50, .keys = 77, .dim = 9, .value_dim = 12};
        if (given == lengths::both) shape.queries = shape.keys;
        nystrom_problem p = problem_of(shape, 13, inverse);
        auto& o = p.options;
        if (width > 0) o.convolution = random_normal(9, 1, 1, shape.heads, width, 0.3);
        if (given == lengths::both) o.lengths = {33, 77};
        if (given == lengths::queries_and_keys) o.query_lengths = {50, 11}, o.key_lengths = {13, 64};
        if (given == lengths::keys_only) o.key_lengths = {76, 0};
        if (width == 9) o.scale = 0.3;
        CAPTURE(int(inverse), width, int(given));
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("nystrom: odd lengths, dims and landmarks", "[nystrom]", exact_types) {
  const idx_t sizes[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(sizes); ++n)
    for (idx_t landmarks : {1, 2, 6, 31, 64}) {
      problem_shape shape{.queries = sizes[(3 * n + 1) % 11], .keys = sizes[n]};
      shape.dim = dims[(n + static_cast<std::size_t>(landmarks)) % 8], shape.value_dim = dims[(3 * n) % 8];
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, landmarks);
      check<TestType>(problem_of(shape, landmarks, n % 2 ? pinv::per_head : pinv::exact, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom: grouped queries, empty batches and heads", "[nystrom]", exact_types) {
  for (auto [batch, heads, kv_heads] :
       {std::array<idx_t, 3>{0, 4, 2}, {2, 0, 0}, {0, 0, 0}, {1, 1, 1}, {2, 6, 1}, {1, 6, 3}, {3, 6, 6}})
    for (pinv inverse : {pinv::per_head, pinv::whole_batch}) {
      CAPTURE(batch, heads, kv_heads, int(inverse));
      check<TestType>(problem_of({.batch = batch, .heads = heads, .kv_heads = kv_heads}, 20, inverse));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom: any number of iterations", "[nystrom]", exact_types) {
  for (idx_t iterations : {0, 1, 2, 12}) {
    nystrom_problem p = problem_of({.queries = 90, .keys = 90}, 10);
    p.options.iterations = iterations;
    CAPTURE(iterations);
    check<TestType>(p, iterations > 8 ? enlarged_in_full : enlarged);
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom: many landmarks", "[nystrom]", exact_types) {
  const problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 500, .dim = 16};
  for (pinv inverse : {pinv::per_head, pinv::exact}) check<TestType>(problem_of(shape, 130, inverse));
}

TEMPLATE_LIST_TEST_CASE("nystrom: keys in several pieces", "[nystrom][long]", exact_types) {
  problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 5000, .keys = 5000, .dim = 16};
  check<TestType>(problem_of(shape, 32));
  shape.queries = 20;  // all of them landmarks
  check<TestType>(problem_of(shape, 32));
  shape.queries = 300, shape.keys = 40000;
  check<TestType>(problem_of(shape, 32));
}

TEMPLATE_LIST_TEST_CASE("nystrom: the start of the whole batch, padded and by threads", "[nystrom]", exact_types) {
  nystrom_problem p = problem_of({.batch = 3, .queries = 130, .keys = 130}, 16, pinv::whole_batch);
  p.options.lengths = {130, 12, 77};
  attn::execution serial, two(2), seven(7);
  const auto alone = run<TestType>(p, serial);
  CHECK(run<TestType>(p, two).out == alone.out);
  CHECK(run<TestType>(p, seven).out == alone.out);
  for (tensor<double>* x : {&p.q, &p.k, &p.v}) poison_padding(*x, p.options.lengths);
  CHECK(run<TestType>(p, serial).out == alone.out);
}

TEMPLATE_LIST_TEST_CASE("nystrom: a converged iteration is the exact inverse", "[nystrom]", exact_types) {
  // More weight on the landmarks' own: A is far from singular, and 20 steps converge.
  nystrom_problem p = problem_of({.queries = 64, .keys = 64}, 8);
  p.k = random_normal(5, 2, 2, 64, 16), p.q = tensor<double>(2, 4, 64, 16);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < 64; ++i)
        for (idx_t d = 0; d < 16; ++d) p.q(b, h, i, d) = 8 * p.k(b, h / 2, i, d);
  p.options.iterations = 20;
  attn::execution serial;
  const auto iterated = run<TestType>(p, serial);
  p.options.inverse = pinv::exact, p.options.cutoff = 0;
  CHECK(relative_error(run<TestType>(p, serial).out, iterated.out) <= enlarged_in_full * tolerance<TestType>::out);
}

TEST_CASE("nystrom: the cutoff damps small singular values", "[nystrom]") {
  for (double cutoff : {0.0, 1e-3, 0.05, 0.5, 0.999}) {
    nystrom_problem p = problem_of({.queries = 90, .keys = 90}, 10, pinv::exact);
    p.options.cutoff = cutoff;
    CAPTURE(cutoff);
    check<widest_type>(p, cutoff < 0.03 ? enlarged_in_full : enlarged);
  }
}

TEST_CASE("nystrom: equal landmarks make A singular, and nothing breaks", "[nystrom]") {
  tensor<float> q(1, 1, 60, 8, 0.5f), v = cast<float>(random_normal(3, 1, 1, 60, 4)), out(1, 1, 60, 4);
  double mean[4] = {};
  for (idx_t j = 0; j < 60; ++j)
    for (idx_t d = 0; d < 4; ++d) mean[d] += static_cast<double>(v(0, 0, j, d)) / 60;
  for (auto inverse : {attn::pseudo_inverse::exact, attn::pseudo_inverse::per_head}) {
    attn::nystrom_options<float> options;
    options.landmarks = 6, options.inverse = inverse;
    attn::execution serial;
    compiled_nystrom<float>::call(view(std::as_const(q)), view(std::as_const(q)), view(std::as_const(v)), view(out),
                                  options, serial);
    double worst = 0;
    for (idx_t i = 0; i < 60; ++i)
      for (idx_t d = 0; d < 4; ++d) worst = std::max(worst, std::abs(static_cast<double>(out(0, 0, i, d)) - mean[d]));
    CHECK(worst <= 1e-6);
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom: keys that are hidden", "[nystrom][key_mask]", all_types) {
  attn::execution serial, seven(7, 0);
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (idx_t landmarks : {13, 26, 60, 90})  // segments with keys that are seen, segments without, few queries, few keys
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys})
        for (idx_t hidden : {-1, 1}) {
          problem_shape shape{.queries = 50, .keys = 77, .dim = 9, .value_dim = 12};
          if (given == lengths::both) shape.queries = shape.keys;
          nystrom_problem p = problem_of(shape, landmarks, inverse);
          auto& o = p.options;
          if (given == lengths::both) o.lengths = {33, 77};
          if (given == lengths::queries_and_keys) o.query_lengths = {50, 11}, o.key_lengths = {76, 64};
          if (landmarks != 13) o.convolution = random_normal(9, 1, 1, 4, 9, 0.3);
          o.key_mask = gapped_key_mask(given == lengths::none && hidden < 0 ? 1 : 2, 77, hidden);
          CAPTURE(int(inverse), landmarks, int(given), hidden);
          check<TestType>(p);
          CHECK(run<TestType>(p, serial).out == run<TestType>(poisoned(p), seven).out);
        }
}

TEMPLATE_LIST_TEST_CASE("nystrom: hidden keys of several parts and blocks", "[nystrom][key_mask][long]", exact_types) {
  attn::execution serial, seven(7, 0);
  nystrom_problem p = problem_of({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 900, .keys = 9000, .dim = 16}, 32);
  p.options.key_mask = gapped_key_mask(2, 9000);
  check<TestType>(p);
  CHECK(run<TestType>(p, serial).out == run<TestType>(poisoned(p), seven).out);
}

// Of equal queries the landmark is one of them, however many there are: its rounding times scale k is that of scores.
TEST_CASE("nystrom: landmarks of long segments", "[nystrom][long]") {
  constexpr idx_t length = 262144;
  const tensor<float> q(1, 1, length, 1, 0.7f);
  tensor<float> k(1, 1, length, 1), out = k;
  for (idx_t j = 0; j < length; ++j) k(0, 0, j, 0) = j % 2 ? -0.4f : 1.3f;
  attn::execution serial;
  compiled_nystrom<float>::call(view(q), view(k), view(k), view(out), {.scale = 1.0f, .landmarks = 1}, serial);
  const double large = std::exp(0.7 * 1.3), small = std::exp(-0.7 * 0.4);
  const double right = (1.3 * large - 0.4 * small) / (large + small);
  CHECK(std::abs(static_cast<double>(out(0, 0, 5, 0)) / right - 1) <= 1e-5);  // a row as long as this: 2e-6 8 at most
}

TEST_CASE("nystrom: on Eigen matrices, as a caller writes it", "[nystrom]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(90, 8), v = Eigen::MatrixXf::Random(90, 5);
  const Eigen::MatrixXf kernel = Eigen::RowVector3f(0, 1, 0);
  Eigen::MatrixXf out(90, 5), more(90, 5);
  attn::nystrom(q, q, v, out, {.landmarks = 9});
  attn::nystrom(q, q, v, more, {.landmarks = 9, .convolution = kernel});
  CHECK((out + v - more).norm() <= 1e-6f * more.norm());
}

TEST_CASE("nystrom: scratch does not grow with the length", "[nystrom]") {
  const auto scratch = [](idx_t length) {
    attn::execution execution;
    run<float>(problem_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = length, .keys = length, .dim = 8}, 16),
               execution);
    return execution.scratch_bytes();
  };
  CHECK(scratch(80000) == scratch(40000));
}

}  // namespace testing::nystrom_tests
