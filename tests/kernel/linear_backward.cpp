// linear_backward against the reverse pass of the reference: every option alone and in combination, odd lengths and
// dims, all types; and what holds for gradients whatever their values.
#include <attn/kernel/linear_backward.hpp>

#include "support/gradient_kernel.hpp"
#include "support/pairwise.hpp"

namespace testing::linear_backward_tests {
namespace {

using reference::linear_feature;

linear_problem problem_of(const problem_shape& shape, std::uint64_t seed = 1) {
  auto p = random_problem<linear_problem>(shape, seed);
  p.options.eps = 1e-6;
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("linear_backward: every combination of options", "[linear_backward]", exact_types) {
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
        check_backward<TestType>(p, feature == linear_feature::elu_plus_one ? 1 : 20);
      }
}

TEST_CASE("linear_backward: the reverse pass agrees with central differences", "[linear_backward]") {
  for (auto feature : {linear_feature::elu_plus_one, linear_feature::products})
    for (bool causal : {false, true}) {
      linear_problem p = problem_of({.batch = 1, .queries = 7, .keys = 9, .dim = 4, .value_dim = 3});
      p.options.feature = feature;
      p.options.causal = causal;
      if (causal) p.options.gate = random_gates(1, 2, 9);
      check_central_differences(case_of(p), 1e-5);
    }
}

TEMPLATE_LIST_TEST_CASE("linear_backward: 16-bit storage computes in float", "[linear_backward]", storage_types) {
  for (bool causal : {false, true}) {
    linear_problem p = problem_of({.queries = 130, .keys = 130, .dim = 33, .value_dim = 7});
    p.options.causal = causal;
    if (causal) p.options.gate = random_gates(2, 4, 130);
    check_backward<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("linear_backward: odd lengths and dims", "[linear_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (bool causal : {false, true}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + 3) % 8], shape.value_dim = dims[(5 * n) % 8];
      linear_problem p = problem_of(shape, n + 1);
      p.options.causal = causal;
      // Of a single key or a single feature all but eps's part of the gradient of q cancels.
      p.options.normalise = lengths[n] > 2 && shape.dim > 1;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
      check_backward<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("linear_backward: queries and keys of different lengths", "[linear_backward]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300}, {2, 129}, {48, 49}, {5, 1},    {300, 1}, {129, 60},
                                        {0, 9},   {9, 0},   {40, 70}, {1, 1100}, {64, 64}, {64, 128}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      linear_problem p = problem_of({.queries = queries, .keys = keys, .dim = 6, .value_dim = 5});
      p.options.causal = causal;
      p.options.eps = 4;  // of a single key all but its part of the gradients cancels
      if (causal) p.options.gate = random_gates(2, 2, keys);
      CAPTURE(queries, keys, causal);
      check_backward<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("linear_backward: grouped queries; a batch of none, heads of no width", "[linear_backward]",
                        exact_types) {
  for (auto [heads, kv_heads] : {std::pair<idx_t, idx_t>{8, 1}, {6, 6}, {6, 2}, {0, 0}, {1, 1}})
    for (bool causal : {false, true}) {
      linear_problem p =
          problem_of({.heads = heads, .kv_heads = kv_heads, .queries = 66, .keys = 66, .dim = 4, .value_dim = 3});
      p.options.causal = causal;
      if (causal) p.options.gate = random_gates(2, heads, 66);
      CAPTURE(heads, kv_heads, causal);
      check_backward<TestType>(p);
    }
  check_backward<TestType>(problem_of({.batch = 0}));
  check_backward<TestType>(problem_of({.value_dim = 0}));
  check_backward<TestType>(problem_of({.dim = 0}));
}

TEMPLATE_LIST_TEST_CASE("linear_backward: several segments", "[linear_backward]", exact_types) {
  for (int form = 0; form < 3; ++form) {
    linear_problem p =
        problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1300, .keys = 2200, .dim = 2, .value_dim = 2});
    p.options.causal = form > 0;
    if (form == 2) {
      p.options.gate = random_gates(1, 1, 2200);
      for (double& g : p.options.gate.data) g = 1 - 0.01 * g;  // reaches over segments
    }
    check_backward_segments<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("linear_backward: the laws", "[linear_backward]", all_types) {
  for (int form = 0; form < 4; ++form) {
    linear_problem p = problem_of({.queries = 100, .keys = 140, .dim = 9, .value_dim = 6});
    p.options.causal = form > 0;
    if (form == 2) p.options.gate = random_gates(2, 2, 140);
    if (form == 3) p.options.gate = random_gates(2, 4, 140);
    p.options.query_lengths = {90, 100}, p.options.key_lengths = {130, 139};
    check_backward_laws<TestType>(p);
  }
}

TEST_CASE("linear_backward: on Eigen matrices and any strides; arguments that are left out", "[linear_backward]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(70, 8), k = Eigen::MatrixXf::Random(90, 8);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(90, 5), d_out = Eigen::MatrixXf::Random(70, 5);
  const row_major q_rows = q, k_rows = k, v_rows = v, d_rows = d_out;
  row_major dq(70, 8), dk(90, 8), dv(90, 5);
  attn::linear_backward(q_rows, k_rows, v_rows, d_rows,
                        {.q = attn::as_view(dq), .k = attn::as_view(dk), .v = attn::as_view(dv)});
  const auto forms = std::initializer_list<std::function<void(const attn::linear_gradients<float>&)>>{
      [&](const auto& g) { attn::linear_backward(q, k, v, d_out, g); },
      [&](const auto& g) { attn::linear_backward(q, k, v, d_out, g, attn::execution(2)); },
      [&](const auto& g) { attn::linear_backward(q, k, v, d_out, g, {}, attn::execution(2)); },
      [&](const auto& g) { attn::linear_backward(q, k, v, d_out, g, {}, {}, attn::execution(2)); },
      [&](const auto& g) { attn::linear_backward(q, k, v, d_out, g, {}, {}, {}, attn::execution(2)); },
      [&](const auto& g) {
        attn::linear_backward(q, k, v, d_out, g, {}, [](float x) { return x > 0 ? x + 1 : std::exp(x); },
                              [](float x, float d) { return x > 0 ? d : d * std::exp(x); });
      }};
  for (const auto& form : forms) {
    Eigen::MatrixXf q_wide = Eigen::MatrixXf::Constant(72, 9, 7), k_other(90, 8), v_other(90, 5);
    auto q_block = q_wide.block(1, 1, 70, 8);
    form({.q = attn::as_view(q_block), .k = attn::as_view(k_other), .v = attn::as_view(v_other)});
    CHECK((q_block - dq).norm() <= 1e-6f * dq.norm());
    CHECK((k_other - dk).norm() <= 1e-6f * dk.norm());
    CHECK((v_other - dv).norm() <= 1e-6f * dv.norm());
    CHECK((q_wide.array() == 7).count() == 72 * 9 - 70 * 8);
  }
}

}  // namespace testing::linear_backward_tests
