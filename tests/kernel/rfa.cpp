// rfa against its reference: gates, options alone and in combination, odd lengths and dims, all types.
#include <attn/kernel/rfa.hpp>

#include "support/call_kernel.hpp"
#include "support/catch.hpp"
#include "support/pairwise.hpp"

namespace testing::rfa_tests {
namespace {

rfa_problem problem_of(const problem_shape& shape, idx_t feature_heads = 1, idx_t count = 64, std::uint64_t seed = 1) {
  auto p = random_problem<rfa_problem>(shape, seed);
  const auto w =
      attn::draw_features<double>(count, std::max<idx_t>(shape.dim, 1), {.seed = seed, .heads = feature_heads});
  p.options.features = tensor<double>(1, feature_heads, count, shape.dim);
  std::copy_n(w.data(), p.options.features.data.size(), p.options.features.data.begin());
  return p;
}

// Weights of either sign: a denominator may be much smaller than its terms, whose rounding is what is bounded.
template <class S>
void check(const rfa_problem& p) {
  CHECK(error_over_terms<S>(p) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("rfa: every combination of options", "[rfa]", exact_types) {
  for (int bits : selected_bits(4))
    for (int lengths = 0; lengths < 4; ++lengths)
      for (idx_t feature_heads : {1, 2, 4}) {
        const bool causal = bits & 1;
        if (bits & 2 && !causal) continue;
        rfa_problem p =
            problem_of({.queries = lengths == 1 ? 90 : 77, .keys = 90, .dim = 5, .value_dim = 3}, feature_heads, 32);
        p.options.causal = causal;
        if (bits & 2) p.options.gate = random_gates(2, bits & 4 ? 2 : 4, 90);
        if (bits & 4) p.options.norm_eps = 0.1;
        if (bits & 8) p.options.eps = 0.25;
        if (lengths == 1) p.options.lengths = {71, 90};
        if (lengths == 2) p.options.query_lengths = {77, 40}, p.options.key_lengths = {50, 89};
        if (lengths == 3) p.options.key_lengths = {90, 70};
        CAPTURE(bits, lengths, feature_heads);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("rfa: 16-bit storage computes in float", "[rfa]", storage_types) {
  for (bool causal : {false, true}) {
    rfa_problem p = problem_of({.queries = 130, .keys = 130, .dim = 33, .value_dim = 7});
    p.options.causal = causal;
    if (causal) p.options.gate = random_gates(2, 2, 130);
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("rfa: odd lengths and dims", "[rfa]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u, 5u})
      for (bool causal : {false, true}) {
        problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + step) % 8], shape.value_dim = dims[(n + 3 * step) % 8];
        rfa_problem p = problem_of(shape, 1, 40, n + 1);
        p.options.causal = causal;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("rfa: several segments, on any number of threads", "[rfa]", exact_types) {
  for (bool causal : {false, true}) {
    rfa_problem p = rounded<TestType>(problem_of(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 40, .keys = 2300, .dim = 16, .value_dim = 5}, 1, 32));
    p.options.causal = causal;
    const auto wanted = expected(p).out, serial = run_serially<TestType>(p).out;
    CHECK(relative_error(serial, wanted) <= 100 * tolerance<TestType>::out);
    attn::execution threads(3, 0);
    CHECK(run<TestType>(p, threads).out == serial);
  }
}

TEST_CASE("rfa: waves beyond the first, on any number of threads", "[rfa]") {
  CHECK(threads_agree_beyond_one_wave<float, rfa_problem>(
      [](const problem_shape& shape) { return problem_of(shape, 1, 8); }));
}

TEMPLATE_LIST_TEST_CASE("rfa: a token of zeros has the features of no direction", "[rfa]", exact_types) {
  rfa_problem p = problem_of({.queries = 20, .keys = 20, .dim = 8, .value_dim = 4});
  for (idx_t d = 0; d < 8; ++d) p.q(0, 1, 3, d) = p.k(1, 0, 5, d) = 0;
  check<TestType>(p);
  p.options.norm_eps = 1e-3;
  check<TestType>(p);
}

// Their squares overflow in float.
TEST_CASE("rfa: tokens of any length", "[rfa]") {
  for (bool causal : {false, true})
    for (double size : {1e18, 1e20, 1e30, 3e37}) {
      rfa_problem p = problem_of({.queries = 70, .keys = 70, .dim = 8, .value_dim = 4});
      p.options.causal = causal;
      for (tensor<double>* x : {&p.q, &p.k})
        for (std::size_t n = 0; n < x->data.size(); ++n) x->data[n] *= n / 8 % 3 == 1 ? size : 1;
      CAPTURE(causal, size);
      check<float>(p);
    }
}

// Far beyond where sines are reduced in registers.
TEMPLATE_LIST_TEST_CASE("rfa: features of any length", "[rfa]", exact_types) {
  rfa_problem p = rounded<TestType>(problem_of({.queries = 20, .keys = 20, .dim = 8, .value_dim = 4}));
  for (double& w : p.options.features.data) w *= 1e5;
  CHECK(all_finite(run_serially<TestType>(p).out));
}

}  // namespace testing::rfa_tests
