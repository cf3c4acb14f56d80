// attn::mpi::performer against performer on the whole sequence: kernels, options, splits, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/performer.hpp>

#include "mpi/spread.hpp"

namespace testing::performer_tests {
namespace {

constexpr idx_t segment = 1024;
using kernel = attn::performer_kernel;

struct problem {
  idx_t tokens = 4 * segment + 300;
  tensor<double> q = random_normal(1, 2, 4, tokens, 9, 0.7), k = random_normal(2, 2, 2, tokens, 9, 0.7),
                 v = random_normal(3, 2, 2, tokens, 5);
};

// Sums in other segments: both round the features' exponents, up to 10 here, by half a unit each. Features of either
// sign have denominators that are smaller than the sum of their terms.
template <class S>
double bound_of(kernel chosen) {
  const double exact = std::is_same_v<S, float> ? 5e-6 : 0x1p-7;
  return chosen == kernel::trigonometric ? 20 * exact : exact;
}

template <class S>
void check(const problem& p, const attn::performer_options<S>& options, idx_t heads = 1,
           attn::execution exec = attn::execution()) {
  const auto features = attn::draw_features<S>(20, 9, {.seed = 7, .heads = heads});
  check_spread<S>(
      p.q, p.k, p.v, segment, bound_of<S>(options.kernel),
      [&](const auto& q, const auto& k, const auto& v, const auto& out) {
        attn::performer(q, k, v, out, features, options);
      },
      [&](const auto& q, const auto& k, const auto& v, const auto& out, const own_range&) {
        attn::mpi::performer(q, k, v, out, features, MPI_COMM_WORLD, options, exec);
      });
}

TEST_CASE("mpi performer: kernels and options", "[performer]") {
  const problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 1500};
  for (kernel chosen : {kernel::positive, kernel::hyperbolic, kernel::trigonometric, kernel::relu})
    for (bool causal : {false, true})
      for (idx_t heads : {1, 2, 4}) {
        CAPTURE(static_cast<int>(chosen), causal, heads);
        attn::performer_options<float> options{.causal = causal, .kernel = chosen};
        if (heads == 1) options.lengths = lengths;
        if (heads == 2) options.scale = 0.2f, options.eps = 0.01f;
        check<float>(p, options, heads);
      }
}

TEST_CASE("mpi performer: what is taken from all keys", "[performer]") {
  const problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 1500};
  for (bool padded : {false, true}) {
    attn::performer_options<float> options;
    if (padded) options.lengths = lengths;
    options.center_keys = true;
    for (kernel chosen : {kernel::positive, kernel::hyperbolic, kernel::trigonometric}) {
      CAPTURE(padded, static_cast<int>(chosen));
      options.kernel = chosen;
      check<float>(p, options);
    }
    options.kernel = kernel::positive, options.feature_eps = 0.01f;
    check<float>(p, options);
    options.center_keys = false;
    check<float>(p, options, 4);
  }
}

TEST_CASE("mpi performer: element types", "[performer]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<Eigen::bfloat16>(p, {.causal = causal, .center_keys = !causal});
  }
}

TEST_CASE("mpi performer: threads within the processes", "[performer]") {
  problem p;
  p.q = head(p.q, 0, 0), p.k = head(p.k, 0, 0), p.v = head(p.v, 0, 0);
  for (bool causal : {false, true})
    check<float>(p, {.causal = causal, .center_keys = !causal}, 1, attn::execution(3, 0));
}

// Log scales that differ by hundreds from one process to the next.
TEST_CASE("mpi performer: keys of very different sizes", "[performer]") {
  problem p;
  for (idx_t i = 0; i < p.tokens; ++i)
    for (idx_t b : {0, 1})
      for (idx_t h : {0, 1})
        for (idx_t d = 0; d < 9; ++d) p.k(b, h, i, d) *= i % 2000 < 1000 ? 0.1 : 30;
  for (bool causal : {false, true}) check<float>(p, {.causal = causal});
}

TEST_CASE("mpi performer: sequences without keys", "[performer]") {
  const auto features = attn::draw_features<float>(8, 4, {.seed = 7});
  const idx_t own = own_rank() == process_count() - 1 ? 3 : 0;
  const tensor<float> q(1, 2, own, 4, 1), none(1, 2, 0, 4);
  for (bool causal : {false, true}) {
    tensor<float> out(1, 2, own, 4, rubbish);
    attn::mpi::performer(view(q), view(none), view(none), view(out), features, MPI_COMM_WORLD,
                         {.causal = causal, .center_keys = !causal});
    CHECK(out == tensor<float>(1, 2, own, 4));
  }
}

TEST_CASE("mpi performer: what is refused, is refused by all", "[performer]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  const auto refused = [&](const auto& features, const attn::performer_options<float>& options) {
    tensor<float> out(1, 2, 10, 4, rubbish);
    const std::string message = refusal_of_all("mpi::performer", [&] {
      attn::mpi::performer(view(x), view(x), view(x), view(out), features, MPI_COMM_WORLD, options);
    });
    CHECK(out == tensor<float>(1, 2, 10, 4, rubbish));
    return message;
  };
  const auto features = attn::draw_features<float>(8, 4, {.seed = 7});
  const auto of_dim = [&](idx_t dim) { return attn::draw_features<float>(8, dim, {.seed = 7}); };
  CHECK(contains(refused(of_dim(last ? 5 : 4), {}), "feature columns = query dim"));
  CHECK(contains(refused(features, {.scale = -1}), "scale >= 0"));
  CHECK(contains(refused(features, {.causal = true, .center_keys = true}), "no causal with center_keys"));
  CHECK(contains(refused(features, {.causal = true, .feature_eps = 0.1f}), "no causal with feature_eps"));
  CHECK(contains(refused(features, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() == 1) return;
  const char* const differ = "the same options on all processes";
  CHECK(contains(refused(attn::draw_features<float>(8, 4, {.seed = last ? 7u : 8u}), {}), differ));
  CHECK(contains(refused(attn::draw_features<float>(last ? 8 : 9, 4, {.seed = 7}), {}), differ));
  CHECK(contains(refused(attn::draw_features<float>(8, 4, {.seed = 7, .heads = last ? 2 : 1}), {}), differ));
  CHECK(contains(refused(features, {.scale = last ? 1.f : 2.f}), differ));
  CHECK(contains(refused(features, {.kernel = last ? kernel::relu : kernel::positive}), differ));
  CHECK(contains(refused(features, {.center_keys = last}), differ));
  attn::performer_options<float> options;
  if (last) options.feature_eps = 0.1f;
  CHECK(contains(refused(features, options), differ));
}

}  // namespace
}  // namespace testing::performer_tests
