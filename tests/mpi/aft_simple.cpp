// attn::mpi::aft_simple against aft_simple on the whole sequence: options, splits, large keys, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/aft_simple.hpp>

#include "mpi/spread.hpp"

namespace testing::aft_simple_tests {
namespace {

constexpr idx_t segment = 512;

struct problem {
  idx_t tokens = 4 * segment + 300;
  tensor<double> q = random_normal(1, 2, 3, tokens, 19), k = random_normal(2, 2, 3, tokens, 19),
                 v = random_normal(3, 2, 3, tokens, 19);
};

// Both compute what lies within tolerance<float>::out of the exact result, or at most rounding to S.
template <class S>
constexpr double bound = std::is_same_v<S, double> ? 2e-13 : std::is_same_v<S, float> ? 4e-6 : 0x1p-7;

template <class S>
void check(const problem& p, const attn::aft_simple_options<S>& options, attn::execution exec = attn::execution()) {
  check_spread<S>(
      p.q, p.k, p.v, segment, bound<S>,
      [&](const auto& q, const auto& k, const auto& v, const auto& out) { attn::aft_simple(q, k, v, out, options); },
      [&](const auto& q, const auto& k, const auto& v, const auto& out, const own_range&) {
        attn::mpi::aft_simple(q, k, v, out, MPI_COMM_WORLD, options, exec);
      });
}

TEST_CASE("mpi aft_simple: options", "[aft_simple]") {
  const problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 0};
  for (bool causal : {false, true})
    for (bool gate : {true, false}) {
      CAPTURE(causal, gate);
      check<float>(p, {.causal = causal, .gate = gate});
      check<float>(p, {.causal = causal, .lengths = lengths, .gate = gate});
    }
}

TEST_CASE("mpi aft_simple: element types", "[aft_simple]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<double>(p, {.causal = causal});
    check<Eigen::bfloat16>(p, {.causal = causal});
  }
}

TEST_CASE("mpi aft_simple: threads within the processes", "[aft_simple]") {
  const problem p;
  for (bool causal : {false, true}) check<float>(p, {.causal = causal}, attn::execution(3, 0));
}

TEST_CASE("mpi aft_simple: keys of any size, and masks", "[aft_simple]") {
  problem p;
  for (idx_t b : {0, 1})
    for (idx_t h : {0, 1, 2})
      for (idx_t i = 0; i < p.tokens; ++i)
        for (idx_t d = 0; d < 19; ++d) {
          double& x = p.k(b, h, i, d);
          x *= i % 700 < 300 ? 1 : 300;
          if (i < 600 && d == 3) x = -std::numeric_limits<double>::infinity();
        }
  for (bool causal : {false, true}) check<float>(p, {.causal = causal});
}

TEST_CASE("mpi aft_simple: no bit depends on padding", "[aft_simple]") {
  problem p;
  const std::vector<idx_t> lengths = {700, 1700};
  for (tensor<double>* x : {&p.q, &p.k, &p.v}) poison_padding(*x, lengths);
  for (bool causal : {false, true}) check<float>(p, {.causal = causal, .lengths = lengths});
}

TEST_CASE("mpi aft_simple: sequences and batches without elements", "[aft_simple]") {
  for (bool causal : {false, true})
    for (const tensor<float>& x : {tensor<float>(1, 2, 0, 4), tensor<float>(0, 2, 5, 4), tensor<float>(2, 2, 5, 0)}) {
      tensor<float> out = x;
      attn::mpi::aft_simple(view(x), view(x), view(x), view(out), MPI_COMM_WORLD, {.causal = causal});
      CHECK(out == x);
    }
}

TEST_CASE("mpi aft_simple: what is refused, is refused by all", "[aft_simple]") {
  const bool last = own_rank() == process_count() - 1;
  const auto refused = [&](idx_t batch, idx_t dim, idx_t keys, const attn::aft_simple_options<float>& options) {
    const tensor<float> q(batch, 2, 10, dim, 1), k(batch, 2, keys, dim, 1);
    tensor<float> out(batch, 2, 10, dim, rubbish);
    const std::string message = refusal_of_all("mpi::aft_simple", [&] {
      attn::mpi::aft_simple(view(q), view(k), view(k), view(out), MPI_COMM_WORLD, options);
    });
    CHECK(out == tensor<float>(batch, 2, 10, dim, rubbish));
    return message;
  };
  const std::vector<idx_t> one = {1}, long_one = {1, 10 * process_count() + 1};
  CHECK(contains(refused(2, 4, last ? 9 : 10, {}), "key length = query length"));
  CHECK(contains(refused(2, 4, 10, {.lengths = one}), "lengths, one per batch item"));
  CHECK(contains(refused(2, 4, 10, {.lengths = long_one}), "lengths from 0 to"));
  CHECK(contains(refused(2, 4, 10, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() == 1) return;
  const char* const differ = "the same options on all processes";
  CHECK(contains(refused(last ? 2 : 3, 4, 10, {}), "a batch on all processes"));
  CHECK(contains(refused(2, last ? 4 : 5, 10, {}), "dim on all processes"));
  CHECK(contains(refused(2, 4, 10, {.causal = last}), differ));
  CHECK(contains(refused(2, 4, 10, {.gate = last}), differ));
  const std::vector<idx_t> others = {last ? 3 : 4, 5};
  CHECK(contains(refused(2, 4, 10, {.lengths = others}), differ));
}

}  // namespace
}  // namespace testing::aft_simple_tests
