// attn::mpi::aft_simple_backward against aft_simple_backward on the whole sequence: options, splits, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/aft_simple_backward.hpp>

#include "mpi/spread.hpp"

namespace testing::aft_simple_backward_tests {
namespace {

constexpr idx_t segment = 512;

struct problem {
  idx_t tokens = 4 * segment + 300;
  tensor<double> q = random_normal(1, 2, 3, tokens, 19), k = random_normal(2, 2, 3, tokens, 19),
                 v = random_normal(3, 2, 3, tokens, 19), d_out = random_normal(4, 2, 3, tokens, 19);
};

// Both compute what lies within 5e-6 of the exact result, or at most rounding to S.
template <class S>
constexpr double bound = std::is_same_v<S, double> ? 1e-12 : std::is_same_v<S, float> ? 1e-5 : 0x1p-7;

template <class S>
void check(const problem& p, const attn::aft_simple_options<S>& options, bool of_q = true, bool of_keys = true,
           bool accumulate = false, attn::execution exec = attn::execution()) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d_out = cast<S>(p.d_out);
  const auto run = [&](const auto& part, const auto& call) {
    const tensor<S> own_q = part(q), own_k = part(k), own_v = part(v), own_d = part(d_out);
    std::array<tensor<S>, 3> g{own_v, own_q, own_k};  // to be written over
    attn::aft_simple_gradients<S> wanted{.accumulate = accumulate};
    if (of_q) wanted.q = view(g[0]);
    if (of_keys) wanted.k = view(g[1]), wanted.v = view(g[2]);
    call(view(own_q), view(own_k), view(own_v), view(own_d), wanted);
    return g;
  };
  const auto all = run([](const auto& x) { return x; },
                       [&](const auto&... x) { attn::aft_simple_backward(x..., options); });
  int number = 0;
  for (const own_range& range : splits(p.tokens, segment)) {
    CAPTURE(number++, range.begin, range.length, range.aligned);
    const auto own = [&](const auto& x) { return rows(x, range.begin, range.length); };
    const auto g = run(own, [&](const auto&... x) {
      attn::mpi::aft_simple_backward(x..., MPI_COMM_WORLD, options, exec);
    });
    for (std::size_t n = 0; n < 3; ++n) {
      CAPTURE(n);
      if (range.aligned)
        CHECK(g[n] == own(all[n]));
      else
        CHECK(relative_error(g[n], own(all[n])) <= bound<S>);
    }
  }
}

TEST_CASE("mpi aft_simple_backward: options", "[aft_simple_backward]") {
  const problem p;
  const std::vector<idx_t> lengths = {p.tokens - 700, 0};
  for (bool causal : {false, true})
    for (bool gate : {true, false}) {
      CAPTURE(causal, gate);
      check<float>(p, {.causal = causal, .gate = gate});
      check<float>(p, {.causal = causal, .lengths = lengths, .gate = gate}, true, true, true);
      check<float>(p, {.causal = causal, .gate = gate}, false, true);
      check<float>(p, {.causal = causal, .gate = gate}, true, false);
    }
}

TEST_CASE("mpi aft_simple_backward: element types, and threads", "[aft_simple_backward]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<double>(p, {.causal = causal});
    check<Eigen::bfloat16>(p, {.causal = causal});
    check<float>(p, {.causal = causal}, true, true, false, attn::execution(3, 0));
  }
}

// In double: where one key outweighs the others, its gradient is a small difference.
TEST_CASE("mpi aft_simple_backward: keys of any size", "[aft_simple_backward]") {
  problem p;
  for (std::size_t n = 0; n < p.k.data.size(); ++n) p.k.data[n] *= n / 19 % 700 < 300 ? 1 : 100;
  for (bool causal : {false, true}) check<double>(p, {.causal = causal});
}

TEST_CASE("mpi aft_simple_backward: no bit depends on padding", "[aft_simple_backward]") {
  problem p;
  const std::vector<idx_t> lengths = {700, 1700};
  for (tensor<double>* x : {&p.q, &p.k, &p.v, &p.d_out}) poison_padding(*x, lengths);
  for (bool causal : {false, true}) check<float>(p, {.causal = causal, .lengths = lengths});
}

TEST_CASE("mpi aft_simple_backward: what is refused, is refused by all", "[aft_simple_backward]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  tensor<float> dq(1, 2, 10, 4, rubbish), dk = dq, short_dk(1, 2, 9, 4, rubbish);
  const auto refused = [&](const attn::aft_simple_gradients<float>& wanted,
                           const attn::aft_simple_options<float>& options) {
    return refusal_of_all("mpi::aft_simple_backward", [&] {
      attn::mpi::aft_simple_backward(view(x), view(x), view(x), view(x), wanted, MPI_COMM_WORLD, options);
    });
  };
  CHECK(contains(refused({.q = view(dq), .k = view(last ? short_dk : dk)}, {}), "the gradient of k"));
  CHECK(contains(refused({.q = view(dq), .k = view(last ? dq : dk)}, {}), "in separate memory"));
  CHECK(contains(refused({.q = view(dq)}, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  if (process_count() > 1)
    CHECK(contains(refused({.q = view(dq)}, {.causal = last}), "the same options on all processes"));
  CHECK(dq == tensor<float>(1, 2, 10, 4, rubbish));
}

}  // namespace
}  // namespace testing::aft_simple_backward_tests
