// rfa_backward against the reverse pass of the reference: both norms, gates, features of heads; and what holds for
// gradients whatever their values.
#include <attn/kernel/rfa_backward.hpp>

#include "support/gradient_kernel.hpp"
#include "support/pairwise.hpp"

namespace testing::rfa_backward_tests {
namespace {

// Short features keep the cosines positive, and denominators away from 0.
rfa_problem problem_of(const problem_shape& shape, idx_t features = 10, idx_t matrices = 1, std::uint64_t seed = 1) {
  auto p = random_problem<rfa_problem>(shape, seed);
  p.options.features = random_normal(seed + 100, 1, matrices, features, shape.dim, 0.5);
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("rfa_backward: every combination of options", "[rfa_backward]", exact_types) {
  for (int bits : selected_bits(5)) {
    const bool causal = bits & 1, gated = bits & 2;
    if (gated && !causal) continue;
    for (idx_t matrices : {1, 2, 4}) {
      rfa_problem p = problem_of({.queries = 70, .keys = 85, .dim = 5, .value_dim = 3}, 7, matrices);
      p.options.causal = causal;
      if (gated) p.options.gate = random_gates(2, bits & 4 ? 2 : 4, 85);
      if (bits & 8) p.options.norm_eps = 0.125, p.options.eps = 0.5;
      if (bits & 16) p.options.query_lengths = {70, 40}, p.options.key_lengths = {50, 85};
      CAPTURE(bits, matrices);
      check_backward<TestType>(p, 4);
    }
  }
}

TEST_CASE("rfa_backward: the reverse pass agrees with central differences", "[rfa_backward]") {
  for (bool causal : {false, true}) {
    rfa_problem p = problem_of({.batch = 1, .queries = 7, .keys = 9, .dim = 4, .value_dim = 3}, 6, 2);
    p.options.causal = causal;
    p.options.norm_eps = 0.1;
    if (causal) p.options.gate = slow_gates<double>(1, 2, 9, 0, 0);
    check_central_differences(case_of(p), 1e-5);
  }
}

TEMPLATE_LIST_TEST_CASE("rfa_backward: 16-bit storage computes in float", "[rfa_backward]", storage_types) {
  for (bool causal : {false, true}) {
    rfa_problem p = problem_of({.batch = 1, .queries = 100, .keys = 100, .dim = 17, .value_dim = 7}, 12);
    p.options.causal = causal;
    if (causal) p.options.gate = slow_gates<double>(1, 4, 100, 0, 0);
    check_backward<TestType>(p, 2);
  }
}

TEMPLATE_LIST_TEST_CASE("rfa_backward: odd lengths and dims", "[rfa_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130}, dims[] = {1, 3, 8, 16, 33, 64};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (bool causal : {false, true}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + 3) % 6], shape.value_dim = dims[(5 * n) % 6];
      rfa_problem p = problem_of(shape, 1 + static_cast<idx_t>(11 * n % 27), 1, n + 1);
      p.options.norm_eps = 0.25;  // of a single number only the sign counts without it
      p.options.causal = causal;
      p.options.eps = 0.5;  // of a single key all but eps's part of the gradients cancels
      CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
      check_backward<TestType>(p, 20);
    }
}

// Their squares overflow in float.
TEST_CASE("rfa_backward: long tokens", "[rfa_backward]") {
  for (bool causal : {false, true}) {
    rfa_problem p = problem_of({.queries = 70, .keys = 70, .dim = 5, .value_dim = 3}, 7);
    p.options.causal = causal;
    for (tensor<double>* x : {&p.q, &p.k})
      for (double& number : x->data) number *= 1e20;
    CAPTURE(causal);
    check_backward<float>(p, 4);
  }
}

// With norm_eps 0 they stay zeros, and so do their gradients; else those are y / norm_eps.
TEST_CASE("rfa_backward: tokens of zeros", "[rfa_backward]") {
  for (double norm_eps : {0.0, 0.5}) {
    rfa_problem p = problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 9, .keys = 9, .dim = 4});
    p.options.norm_eps = norm_eps;
    for (idx_t d = 0; d < 4; ++d) p.q(0, 0, 3, d) = p.k(0, 0, 5, d) = 0;
    const auto d_out = random_normal(9, 1, 1, 9, 16);
    const tensors all = gradients_by<float>(p, d_out);
    for (const auto& gradient : all) CHECK(all_finite(gradient));
    double of_query = 0, of_key = 0;
    for (idx_t d = 0; d < 4; ++d) of_query += std::abs(all[0](0, 0, 3, d)), of_key += std::abs(all[1](0, 0, 5, d));
    CHECK((of_query > 0) == (norm_eps > 0));
    CHECK((of_key > 0) == (norm_eps > 0));
  }
}

TEMPLATE_LIST_TEST_CASE("rfa_backward: several segments", "[rfa_backward]", exact_types) {
  for (int form = 0; form < 3; ++form) {
    rfa_problem p = problem_of(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1100, .keys = 2200, .dim = 2, .value_dim = 2}, 2);
    for (double& w : p.options.features.data) w *= 0.5;
    p.options.causal = form > 0;
    if (form == 2) {
      p.options.gate = random_gates(1, 1, 2200);
      for (double& g : p.options.gate.data) g = 1 - 0.01 * g;
    }
    check_backward_segments<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("rfa_backward: the laws", "[rfa_backward]", all_types) {
  for (int form = 0; form < 4; ++form) {
    rfa_problem p = problem_of({.queries = 100, .keys = 140, .dim = 9, .value_dim = 6}, 12, form == 1 ? 4 : 1);
    p.options.causal = form > 0;
    if (form == 2) p.options.gate = random_gates(2, 2, 140);
    if (form == 3) p.options.gate = random_gates(2, 4, 140);
    p.options.query_lengths = {90, 100}, p.options.key_lengths = {130, 139};
    CAPTURE(form);
    check_backward_laws<TestType>(p);
  }
}

}  // namespace testing::rfa_backward_tests
