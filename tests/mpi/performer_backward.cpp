// attn::mpi::performer_backward against performer_backward on the whole sequence: kernels, splits, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/performer_backward.hpp>

#include "mpi/features_backward.hpp"

namespace testing::performer_backward_tests {
namespace {

using kernel = attn::performer_kernel;

// Features of either sign have denominators that are smaller than the sum of their terms, and gradients divide by their
// squares.
template <class S>
double bound_of(kernel chosen) {
  const double exact = std::is_same_v<S, float> ? 2e-5 : 0x1p-6;
  return chosen == kernel::trigonometric ? 100 * exact : exact;
}

template <class S>
void check(const features_problem& p, const attn::performer_options<S>& options, idx_t feature_heads = 1,
           attn::execution exec = attn::execution()) {
  check_gradients<S, attn::performer_gradients<S>>(
      p, feature_heads, 0, bound_of<S>(options.kernel),
      [&](const auto& q, const auto& k, const auto& v, const auto& w, const auto& d, const auto& g, const auto&) {
        attn::performer_backward(q, k, v, w, d, g, options);
      },
      [&](const auto& q, const auto& k, const auto& v, const auto& w, const auto& d, const auto& g, const auto&) {
        attn::mpi::performer_backward(q, k, v, w, d, g, MPI_COMM_WORLD, options, exec);
      });
}

TEST_CASE("mpi performer_backward: kernels and options", "[performer_backward]") {
  const features_problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 1500};
  for (kernel chosen : {kernel::positive, kernel::hyperbolic, kernel::trigonometric, kernel::relu})
    for (bool causal : {false, true}) {
      CAPTURE(static_cast<int>(chosen), causal);
      attn::performer_options<float> options{.causal = causal, .kernel = chosen};
      if (chosen == kernel::hyperbolic) options.scale = 0.2f, options.eps = 0.01f;
      if (chosen == kernel::relu) options.lengths = lengths;
      check<float>(p, options, chosen == kernel::positive ? 4 : chosen == kernel::relu ? 1 : 2);
    }
}

TEST_CASE("mpi performer_backward: element types, and threads", "[performer_backward]") {
  const features_problem p;
  for (bool causal : {false, true}) {
    check<Eigen::bfloat16>(p, {.causal = causal});
    check<float>(p, {.causal = causal}, 1, attn::execution(2, 0));
  }
}

TEST_CASE("mpi performer_backward: what is refused, is refused by all", "[performer_backward]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  tensor<float> dq(1, 2, 10, 4, rubbish), dw(1, 1, 9, 4, rubbish);
  const auto features = attn::draw_features<float>(8, 4, {.seed = 7});
  const auto refused = [&](const attn::performer_gradients<float>& wanted,
                           const attn::performer_options<float>& options) {
    return refusal_of_all("mpi::performer_backward", [&] {
      attn::mpi::performer_backward(view(x), view(x), view(x), features, view(x), wanted, MPI_COMM_WORLD,
                                    options);
    });
  };
  CHECK(contains(refused({.q = view(dq), .features = {dw.data.data(), {1, last ? 9 : 8, 4}}}, {}),
                 "the gradient of features"));
  CHECK(contains(refused({.q = view(dq)}, {.center_keys = true}), "no center_keys"));
  CHECK(contains(refused({.q = view(dq)}, {.feature_eps = 0.1f}), "no feature_eps of positive features"));
  CHECK(contains(refused({.q = view(dq)}, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() > 1)
    CHECK(contains(refused({.q = view(dq)}, {.eps = last ? 1.f : 0.f}), "the same options on all processes"));
  CHECK(dq == tensor<float>(1, 2, 10, 4, rubbish));
}

}  // namespace
}  // namespace testing::performer_backward_tests
