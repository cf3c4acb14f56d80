// attn::mpi::rfa_backward against rfa_backward on the whole sequence: gates, options, splits, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/rfa_backward.hpp>

#include "mpi/features_backward.hpp"

namespace testing::rfa_backward_tests {
namespace {

// Weights of either sign: denominators are smaller than the sum of their terms, and gradients divide by their squares.
template <class S>
constexpr double bound = std::is_same_v<S, float> ? 1e-3 : 0x1p-5;

template <class S>
void check(const features_problem& p, attn::rfa_options<S> options, idx_t feature_heads = 1, idx_t gate_heads = 0,
           attn::execution exec = attn::execution()) {
  options.eps = 30;  // keeps sums over thousands of keys of either sign away from 0
  check_gradients<S, attn::rfa_gradients<S>>(
      p, feature_heads, gate_heads, bound<S>,
      [&](const auto& q, const auto& k, const auto& v, const auto& w, const auto& d, const auto& g, const auto& gate) {
        if (gate_heads > 0) options.gate = gate;
        attn::rfa_backward(q, k, v, w, d, g, options);
      },
      [&](const auto& q, const auto& k, const auto& v, const auto& w, const auto& d, const auto& g, const auto& gate) {
        if (gate_heads > 0) options.gate = gate;
        attn::mpi::rfa_backward(q, k, v, w, d, g, MPI_COMM_WORLD, options, exec);
      });
}

TEST_CASE("mpi rfa_backward: options", "[rfa_backward]") {
  const features_problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 1500};
  for (idx_t feature_heads : {1, 4}) {
    CAPTURE(feature_heads);
    attn::rfa_options<float> options;
    if (feature_heads == 4) options.lengths = lengths, options.norm_eps = 0.1f;
    check<float>(p, options, feature_heads);
    options.causal = true;
    check<float>(p, options, feature_heads);
    check<float>(p, options, feature_heads, feature_heads == 4 ? 2 : 4);
  }
}

TEST_CASE("mpi rfa_backward: element types, and threads", "[rfa_backward]") {
  const features_problem p;
  for (bool causal : {false, true}) {
    check<Eigen::bfloat16>(p, {.causal = causal}, 1, causal ? 2 : 0);
    check<float>(p, {.causal = causal}, 1, causal ? 2 : 0, attn::execution(2, 0));
  }
}

TEST_CASE("mpi rfa_backward: what is refused, is refused by all", "[rfa_backward]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  tensor<float> dq(1, 2, 10, 4, rubbish), dw(1, 1, 9, 4, rubbish);
  const auto features = attn::draw_features<float>(8, 4, {.seed = 7});
  const auto refused = [&](const attn::rfa_gradients<float>& wanted, const attn::rfa_options<float>& options) {
    return refusal_of_all("mpi::rfa_backward", [&] {
      attn::mpi::rfa_backward(view(x), view(x), view(x), features, view(x), wanted, MPI_COMM_WORLD,
                              options);
    });
  };
  CHECK(contains(refused({.q = view(dq), .features = {dw.data.data(), {1, last ? 9 : 8, 4}}}, {}),
                 "the gradient of features"));
  CHECK(contains(refused({.q = view(dq)}, {.norm_eps = -1}), "norm_eps >= 0"));
  CHECK(contains(refused({.q = view(dq)}, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() > 1) {
    CHECK(contains(refused({.q = view(dq), .accumulate = last}, {}), "the same options on all processes"));
    CHECK(contains(refused({.q = view(dq)}, {.norm_eps = last ? 1.f : 0.f}), "the same options on all processes"));
  }
  CHECK(dq == tensor<float>(1, 2, 10, 4, rubbish));
}

}  // namespace
}  // namespace testing::rfa_backward_tests
