// performer_backward against the reverse pass of the reference: all kernels, both eps, centred keys, long queries and
// keys; and what holds for gradients whatever their values.
#include <attn/kernel/performer_backward.hpp>

#include "support/gradient_kernel.hpp"
#include "support/pairwise.hpp"

namespace testing::performer_backward_tests {
namespace {

using reference::performer_kernel;

constexpr performer_kernel kernels[] = {performer_kernel::positive, performer_kernel::hyperbolic,
                                        performer_kernel::trigonometric, performer_kernel::relu};

// `size` of queries and keys: trigonometric features of long ones cancel.
performer_problem problem_of(const problem_shape& shape, performer_kernel kernel, idx_t features = 10,
                             idx_t matrices = 1, std::uint64_t seed = 1, double size = 1) {
  auto p = random_problem<performer_problem>(shape, seed);
  if (kernel == performer_kernel::trigonometric) size *= 0.4;
  for (double& x : p.q.data) x *= size;
  for (double& x : p.k.data) x *= size;
  p.options.kernel = kernel;
  p.options.features = random_normal(seed + 100, 1, matrices, features, shape.dim);
  p.options.scale = 0.25;
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("performer_backward: every combination of options", "[performer_backward]", exact_types) {
  for (auto kernel : kernels)
    for (int bits : selected_bits(5)) {
      const bool causal = bits & 1, centred = bits & 2, own_features = bits & 4, with_eps = bits & 8;
      const bool feature_eps = bits & 16;
      const bool fits = kernel == performer_kernel::relu || kernel == performer_kernel::positive;
      if (causal && centred) continue;
      if (feature_eps && (!fits || (causal && kernel == performer_kernel::positive))) continue;
      performer_problem p = problem_of({.queries = 70, .keys = 85, .dim = 5, .value_dim = 3}, kernel, 7,
                                       own_features ? (with_eps ? 2 : 4) : 1);
      p.options.causal = causal;
      p.options.center_keys = centred;
      if (with_eps) p.options.eps = 0.125;
      if (feature_eps) p.options.feature_eps = 0x1p-6;
      if (bits & 2) p.options.query_lengths = {70, 40}, p.options.key_lengths = {50, 85};
      CAPTURE(int(kernel), bits);
      check_backward<TestType>(p, kernel == performer_kernel::trigonometric ? 20 : 1);
    }
}

TEST_CASE("performer_backward: the reverse pass agrees with central differences", "[performer_backward]") {
  for (auto kernel : kernels)
    for (bool causal : {false, true}) {
      performer_problem p =
          problem_of({.batch = 1, .queries = 7, .keys = 9, .dim = 4, .value_dim = 3}, kernel, 6, 2);
      p.options.causal = causal;
      p.options.center_keys = !causal;
      if (kernel == performer_kernel::positive && !causal) p.options.feature_eps = 0.01;
      check_central_differences(case_of(p), 1e-5);
    }
}

TEMPLATE_LIST_TEST_CASE("performer_backward: 16-bit storage computes in float", "[performer_backward]", storage_types) {
  for (auto kernel : kernels)
    for (bool causal : {false, true}) {
      performer_problem p =
          problem_of({.batch = 1, .queries = 100, .keys = 100, .dim = 17, .value_dim = 7}, kernel, 12);
      p.options.causal = causal;
      check_backward<TestType>(p, kernel == performer_kernel::trigonometric ? 2 : 1);
    }
}

TEMPLATE_LIST_TEST_CASE("performer_backward: odd lengths and dims", "[performer_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130}, dims[] = {1, 3, 8, 16, 33, 64};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (bool causal : {false, true}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + 3) % 6], shape.value_dim = dims[(5 * n) % 6];
      performer_problem p = problem_of(shape, kernels[n % 4], 1 + static_cast<idx_t>(11 * n % 27), 1, n + 1);
      p.options.scale = {};
      p = rounded<TestType>(p);
      if (std::is_same_v<TestType, float>)
        p.options.scale = static_cast<double>(1 / std::sqrt(static_cast<float>(shape.dim)));
      p.options.causal = causal;
      p.options.eps = 0.5;  // of a single key all but eps's part of the gradients cancels
      CAPTURE(shape.queries, shape.dim, shape.value_dim, causal, n % 4);
      check_backward<TestType>(p, kernels[n % 4] == performer_kernel::trigonometric ? 20 : 2);
    }
}

TEST_CASE("performer_backward: features for no head have no gradient", "[performer_backward]") {
  float one = 5;
  attn::detail::kernel_backward_call<float> call;
  call.d_features = {attn::tensor_view<float>(&one, {1, 0, 10, 8}), false};
  attn::execution exec;
  attn::detail::store_feature_gradients<float>(call, nullptr, exec);  // divides the heads of sums by those of features
  CHECK(one == 5);
}

// Pairs underflow where neither shares a large feature with the other: they are recomputed. Of tokens longer than these
// the features leave the range of double, in which the reverse pass computes.
TEMPLATE_LIST_TEST_CASE("performer_backward: long queries and keys", "[performer_backward]", exact_types) {
  for (auto kernel : {performer_kernel::positive, performer_kernel::hyperbolic})
    for (bool causal : {false, true})
      for (double size : {4.0, 8.0}) {
        performer_problem p =
            problem_of({.batch = 1, .queries = 130, .keys = 130, .dim = 32, .value_dim = 5}, kernel, 10, 1, 1, size);
        p.options.causal = causal;
        CAPTURE(int(kernel), causal, size);
        // Logarithms of hundreds or thousands have digits less, as many as their size takes.
        check_backward<TestType>(p, 1 + size * size);
      }
}

TEMPLATE_LIST_TEST_CASE("performer_backward: never NaN, however long queries and keys are", "[performer_backward]",
                        exact_types) {
  for (auto kernel : kernels)
    for (bool causal : {false, true})
      for (double size : {100.0, 1e4, 1e6, 0.0}) {
        const double of_both = size == 0 ? 1 : size;
        performer_problem p = problem_of({.batch = 1, .queries = 130, .keys = 130}, kernel, 20, 1, 1, of_both);
        if (kernel == performer_kernel::relu && size > 1e5) continue;  // plain numbers
        for (double& x : p.q.data)  // queries alone
          if (size == 0) x *= static_cast<double>(std::numeric_limits<TestType>::max()) / 10;
        p.options.causal = causal;
        const auto d_out = random_normal(9, 1, 4, 130, 16);
        for (const auto& gradient : gradients_by<TestType>(p, d_out, {.of = {true, true, true, true, false}})) {
          CAPTURE(int(kernel), causal, size);
          CHECK(all_finite(gradient));
        }
      }
}

TEMPLATE_LIST_TEST_CASE("performer_backward: several segments", "[performer_backward]", exact_types) {
  for (bool causal : {false, true}) {
    performer_problem p = problem_of(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1100, .keys = 2200, .dim = 2, .value_dim = 2},
        performer_kernel::positive, 2);
    p.options.causal = causal;
    check_backward_segments<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("performer_backward: the laws", "[performer_backward]", all_types) {
  for (auto kernel : kernels)
    for (int form = 0; form < 3; ++form) {
      performer_problem p =
          problem_of({.queries = 100, .keys = 140, .dim = 9, .value_dim = 6}, kernel, 12, form == 2 ? 4 : 1);
      p.options.causal = form > 0;
      p.options.center_keys = form == 0;
      if (form == 0 && kernel == performer_kernel::positive) p.options.feature_eps = 0x1p-6;
      p.options.query_lengths = {90, 100}, p.options.key_lengths = {130, 139};
      CAPTURE(int(kernel), form);
      check_backward_laws<TestType>(p);
    }
}

}  // namespace testing::performer_backward_tests
