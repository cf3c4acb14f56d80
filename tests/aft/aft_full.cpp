// aft_full against its reference: any length and dim, all types, every option; what it refuses.
#include "aft/cases.hpp"
#include "support/catch.hpp"

namespace testing::aft_full_tests {
namespace {

template <class S>
void check(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {},
           bool per_head = false) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, causal, gate);
  auto p = aft_problem<reference::aft_full_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.w = aft_biases(s, per_head ? s.heads : 1, s.length, s.length);
  CHECK(aft_error<S>(p) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft_full: lengths and dims about the edges of blocks and packets", "[aft_full]", exact_types) {
  for (bool causal : {false, true})
    for (idx_t length : {0, 1, 2, 15, 16, 33, 95, 96, 97, 130, 385})
      for (idx_t dim : {0, 1, 3, 16, 33}) check<TestType>({.length = length, .dim = dim}, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_full: options combined", "[aft_full]", all_types) {
  for (bool causal : {false, true})
    for (bool gate : {false, true})
      for (bool per_head : {false, true}) {
        check<TestType>({.length = 100, .dim = 24}, causal, gate, {}, per_head);
        check<TestType>({.batch = 4, .length = 70}, causal, gate, {70, 0, 33, 33}, per_head);
      }
}

TEMPLATE_LIST_TEST_CASE("aft_full: more heads than one group of channels takes", "[aft_full]", exact_types) {
  for (bool per_head : {false, true}) {
    check<TestType>({.batch = 5, .heads = 3, .length = 20, .dim = 64}, false, true, {}, per_head);
    check<TestType>({.batch = 3, .heads = 2, .length = 20, .dim = 600}, true, true, {20, 20, 7}, per_head);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_full: a long sequence", "[aft_full][long]", exact_types) {
  for (bool causal : {false, true}) check<TestType>({.batch = 1, .heads = 1, .length = 2000, .dim = 5}, causal);
}

}  // namespace testing::aft_full_tests
