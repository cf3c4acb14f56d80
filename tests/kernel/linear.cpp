// linear against its reference: every option alone and in combination, odd lengths and dims, all types.
#include <attn/kernel/linear.hpp>

#include "support/call_kernel.hpp"
#include "support/catch.hpp"
#include "support/pairwise.hpp"

namespace testing::linear_tests {
namespace {

using reference::linear_feature;

linear_problem problem_of(const problem_shape& shape, std::uint64_t seed = 1) {
  auto p = random_problem<linear_problem>(shape, seed);
  p.options.eps = 1e-6;
  return p;
}

// Features of elu + 1 are positive: nothing cancels in the sums, and the errors are those of a softmax. Others may have
// denominators near 0, where they grow: by less than 20 in the cases here.
template <class S>
void check(const linear_problem& p, double factor = 1) {
  CHECK(error_of<S>(p) <= factor * tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("linear: every combination of options", "[linear]", exact_types) {
  for (auto feature : {linear_feature::elu_plus_one, linear_feature::relu, linear_feature::square,
                       linear_feature::products, linear_feature::identity})
    for (int bits : selected_bits(4))
      for (int lengths = 0; lengths < 4; ++lengths) {
        const bool causal = bits & 1, unnormalised = bits & 2 || feature == linear_feature::identity;
        if (bits & 4 && !causal) continue;
        linear_problem p = problem_of({.queries = lengths == 1 ? 90 : 77, .keys = 90, .dim = 5, .value_dim = 3});
        p.options.feature = feature;
        p.options.causal = causal;
        p.options.normalise = !unnormalised;
        if (bits & 4) p.options.gate = random_gates(2, bits & 8 ? 2 : 4, 90);
        if (bits & 8) p.options.eps = 0.5;
        if (lengths == 1) p.options.lengths = {71, 90};
        if (lengths == 2) p.options.query_lengths = {77, 40}, p.options.key_lengths = {50, 89};
        if (lengths == 3) p.options.key_lengths = {90, 70};
        CAPTURE(int(feature), bits, lengths);
        check<TestType>(p, feature == linear_feature::elu_plus_one ? 1 : 20);
      }
}

TEMPLATE_LIST_TEST_CASE("linear: 16-bit storage computes in float", "[linear]", storage_types) {
  for (bool causal : {false, true}) {
    linear_problem p = problem_of({.queries = 130, .keys = 130, .dim = 33, .value_dim = 7});
    p.options.causal = causal;
    if (causal) p.options.gate = random_gates(2, 4, 130);
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("linear: odd lengths and dims", "[linear]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u, 5u})
      for (bool causal : {false, true}) {
        problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + step) % 8], shape.value_dim = dims[(n + 3 * step) % 8];
        linear_problem p = problem_of(shape, n + 1);
        p.options.causal = causal;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("linear: queries and keys of different lengths", "[linear]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300}, {2, 129}, {48, 49},  {5, 1},    {300, 1}, {129, 60},
                                        {0, 9},   {9, 0},   {77, 530}, {1, 1100}, {64, 64}, {64, 128}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      linear_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24});
      p.options.causal = causal;
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("linear: grouped queries; a batch of none, heads of no width", "[linear]", exact_types) {
  for (auto [heads, kv_heads] : {std::pair<idx_t, idx_t>{8, 1}, {8, 4}, {6, 6}, {6, 2}, {0, 0}, {1, 1}})
    for (bool causal : {false, true}) {
      linear_problem p = problem_of({.heads = heads, .kv_heads = kv_heads, .queries = 66, .keys = 66});
      p.options.causal = causal;
      if (causal) p.options.gate = random_gates(2, heads, 66);
      CAPTURE(heads, kv_heads, causal);
      check<TestType>(p);
    }
  check<TestType>(problem_of({.batch = 0}));
  check<TestType>(problem_of({.value_dim = 0}));
  check<TestType>(problem_of({.dim = 0}));  // no features: zeros
}

TEMPLATE_LIST_TEST_CASE("linear: several segments, on any number of threads", "[linear]", exact_types) {
  for (bool causal : {false, true})
    for (bool gated : {false, true}) {
      if (gated && !causal) continue;
      linear_problem p =
          problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 200, .keys = 2600, .dim = 40, .value_dim = 40});
      p.options.causal = causal;
      if (gated) {
        p.options.gate = random_gates(1, 1, 2600);
        for (double& g : p.options.gate.data) g = 1 - 0.01 * g;  // reaches over segments
      }
      p = rounded<TestType>(p);
      const auto wanted = expected(p).out, serial = run_serially<TestType>(p).out;
      CHECK(relative_error(serial, wanted) <= tolerance<TestType>::out);
      attn::execution threads(3, 0);
      CHECK(run<TestType>(p, threads).out == serial);
    }
}

TEST_CASE("linear: waves beyond the first, on any number of threads", "[linear]") {
  CHECK(threads_agree_beyond_one_wave<float, linear_problem>(
      [](const problem_shape& shape) { return problem_of(shape); }));
}

TEST_CASE("linear: scratch does not depend on the length", "[linear]") {
  for (bool causal : {false, true})
    for (int threads : {1, 2}) {
      const auto scratch = [&](idx_t length) {
        attn::execution execution(threads, 0);
        auto p = problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = length, .keys = length});
        p.options.causal = causal;
        tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v), out = q;
        attn::linear_options<float> options;
        options.causal = causal;
        for (int n = 0; n < 20; ++n)  // a thread that comes too late for one call has no scratch yet
          compiled_linear<float>::call(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)),
                                       view(out), options, linear_feature::elu_plus_one, execution);
        return execution.scratch_bytes();
      };
      CHECK(scratch(5000) == scratch(40000));
    }
}

TEST_CASE("linear: on Eigen matrices of either order", "[linear]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(40, 8);
  const row_major v = row_major::Random(40, 5);
  const auto phi = [](const Eigen::MatrixXf& x) -> Eigen::MatrixXf {
    return (x.array() > 0).select(x.array() + 1, x.array().exp());
  };
  const Eigen::MatrixXf weights = phi(q) * phi(k).transpose();
  const Eigen::MatrixXf wanted = weights.rowwise().sum().cwiseInverse().asDiagonal() * (weights * v);
  row_major out(30, 5);
  attn::linear(q, k, v, out);
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());
  Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(32, 9, 7);
  attn::execution threads(2, 0);
  attn::linear(q, k, v, wide.block(1, 2, 30, 5), {.eps = 0}, threads);
  CHECK((wide.block(1, 2, 30, 5) - wanted).norm() <= 2e-6f * wanted.norm());
  CHECK((wide.array() == 7).count() == 32 * 9 - 30 * 5);
  row_major other(30, 5);
  for (const auto& call : std::initializer_list<std::function<void()>>{
           [&] { attn::linear(q, k, v, other, threads); }, [&] { attn::linear(q, k, v, other, {}, threads); },
           [&] { attn::linear(q, k, v, other, attn::execution(2)); },
           [&] { attn::linear(q, k, v, other, {}, attn::feature_maps::elu_plus_one{}, attn::execution(2)); },
           [&] { attn::linear(q, k, v, other, {}, {}, threads); }}) {
    other.setZero();
    call();
    CHECK(other == out);
  }
}

}  // namespace testing::linear_tests
