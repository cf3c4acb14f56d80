// aft_simple against its reference: any length and dim, all types, every option.
#include "aft/cases.hpp"
#include "support/catch.hpp"

namespace testing::aft_simple_tests {
namespace {

template <class S>
void check(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {}) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, causal, gate);
  auto p = aft_problem<reference::aft_simple_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  CHECK(aft_error<S>(p) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft_simple: every small dim, lengths about the edges of chunks", "[aft_simple]", exact_types) {
  for (bool causal : {false, true}) {
    for (idx_t dim = 0; dim < 70; ++dim) check<TestType>({.length = 20, .dim = dim}, causal);
    for (idx_t length : {0, 1, 2, 15, 16, 17, 511, 512, 513, 1030})
      check<TestType>({.heads = 1, .length = length, .dim = 3}, causal);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_simple: options combined", "[aft_simple]", all_types) {
  for (bool causal : {false, true})
    for (bool gate : {false, true})
      for (double keys : {1.0, 80.0}) {
        check<TestType>({.length = 100, .dim = 18, .keys = keys}, causal, gate);
        check<TestType>({.batch = 4, .heads = 2, .length = 520, .dim = 3, .keys = keys}, causal, gate,
                        {520, 0, 33, 513});
      }
}

TEST_CASE("aft_simple: keys of -infinity are masked, whatever their values", "[aft_simple]") {
  auto p = aft_problem<reference::aft_simple_options>({.length = 40, .dim = 20});
  for (bool causal : {false, true}) {
    p.options.causal = causal;
    auto without = p;
    for (idx_t j : {0, 1, 17, 39})
      for (idx_t d = 0; d < 20; ++d) {
        without.k(1, 2, j, d) = -std::numeric_limits<double>::infinity();
        without.v(1, 2, j, d) = 0;
        p.v(1, 2, j, d) = j % 2 ? std::numeric_limits<double>::quiet_NaN() : 1e30;
      }
    p.k = without.k;
    attn::execution serial;
    const tensor<double> masked = run_aft<float>(p, serial);
    CHECK(masked == run_aft<float>(without, serial));
    CHECK(all_finite(masked));
    if (causal) CHECK(masked(1, 2, 1, 0) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_simple: the promised accuracy at length 4096", "[aft_simple][long]", exact_types) {
  for (bool causal : {false, true}) check<TestType>({.batch = 1, .heads = 1, .length = 4096, .dim = 3}, causal);
}

}  // namespace testing::aft_simple_tests
