// attn::mpi::rfa against rfa on the whole sequence: gates, options, splits, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/rfa.hpp>

#include "mpi/spread.hpp"

namespace testing::rfa_tests {
namespace {

constexpr idx_t segment = 1024;

struct problem {
  idx_t tokens = 4 * segment + 300;
  tensor<double> q = random_normal(1, 2, 4, tokens, 9), k = random_normal(2, 2, 2, tokens, 9),
                 v = random_normal(3, 2, 2, tokens, 5);
};

// Weights of either sign: with eps denominators keep away from 0, but are smaller than the sum of their terms.
template <class S>
constexpr double bound = std::is_same_v<S, float> ? 1e-4 : 0x1p-6;

template <class S>
void check(const problem& p, attn::rfa_options<S> options, idx_t feature_heads = 1, idx_t gate_heads = 0,
           attn::execution exec = attn::execution()) {
  const auto features = attn::draw_features<S>(40, 9, {.seed = 7, .heads = feature_heads});
  const auto gates = gates_near_one<attn::compute_type<S>>(gate_heads, p.tokens);
  check_spread<S>(
      p.q, p.k, p.v, segment, bound<S>,
      [&](const auto& q, const auto& k, const auto& v, const auto& out) {
        if (gate_heads > 0) options.gate = row_view(gates);
        attn::rfa(q, k, v, out, features, options);
      },
      [&](const auto& q, const auto& k, const auto& v, const auto& out, const own_range& range) {
        const auto own = rows(gates, range.begin, range.length);
        if (gate_heads > 0) options.gate = row_view(own);
        attn::mpi::rfa(q, k, v, out, features, MPI_COMM_WORLD, options, exec);
      });
}

TEST_CASE("mpi rfa: options", "[rfa]") {
  const problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 1500};
  for (bool padded : {false, true})
    for (idx_t feature_heads : {1, 2, 4}) {
      CAPTURE(padded, feature_heads);
      attn::rfa_options<float> options{.eps = 0.5f};
      if (padded) options.lengths = lengths, options.norm_eps = 0.1f;
      check<float>(p, options, feature_heads);
      options.causal = true;
      check<float>(p, options, feature_heads);
      check<float>(p, options, feature_heads, feature_heads == 4 ? 2 : 4);
    }
}

TEST_CASE("mpi rfa: element types", "[rfa]") {
  const problem p;
  check<Eigen::bfloat16>(p, {.eps = 0.5f});
  check<Eigen::bfloat16>(p, {.causal = true, .eps = 0.5f}, 1, 2);
}

TEST_CASE("mpi rfa: threads within the processes", "[rfa]") {
  problem p;
  for (int threads : {2, 3}) check<float>(p, {.causal = true, .eps = 0.5f}, 1, 2, attn::execution(threads, 0));
  p.q = head(p.q, 0, 0), p.k = head(p.k, 0, 0), p.v = head(p.v, 0, 0);
  for (bool causal : {false, true}) check<float>(p, {.causal = causal, .eps = 0.5f}, 1, 0, attn::execution(3, 0));
}

TEST_CASE("mpi rfa: what is refused, is refused by all", "[rfa]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  const auto refused = [&](const auto& features, const attn::rfa_options<float>& options) {
    tensor<float> out(1, 2, 10, 4, rubbish);
    const std::string message = refusal_of_all("mpi::rfa", [&] {
      attn::mpi::rfa(view(x), view(x), view(x), view(out), features, MPI_COMM_WORLD, options);
    });
    CHECK(out == tensor<float>(1, 2, 10, 4, rubbish));
    return message;
  };
  const auto features = attn::draw_features<float>(8, 4, {.seed = 7});
  tensor<float> gates(1, 2, 10, 1, 0.5f);
  CHECK(contains(refused(attn::draw_features<float>(8, last ? 5 : 4, {.seed = 7}), {}), "feature columns = query dim"));
  CHECK(contains(refused(features, {.norm_eps = -1}), "norm_eps >= 0"));
  CHECK(contains(refused(features, {.gate = row_view(gates)}), "causal with a gate"));
  if (last) gates.data[3] = -1;
  CHECK(contains(refused(features, {.causal = true, .gate = row_view(gates)}), "gate from 0 to 1"));
  CHECK(contains(refused(features, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() == 1) return;
  const char* const differ = "the same options on all processes";
  CHECK(contains(refused(attn::draw_features<float>(8, 4, {.seed = last ? 7u : 8u}), {}), differ));
  CHECK(contains(refused(features, {.norm_eps = last ? 0.f : 1.f}), differ));
  CHECK(contains(refused(features, {.eps = last ? 0.f : 1.f}), differ));
}

}  // namespace
}  // namespace testing::rfa_tests
