// aft_simple_backward against the reverse pass of its reference: any length and dim, all types, every option.
#include "aft/gradients.hpp"

namespace testing::aft_simple_backward_tests {
namespace {

auto problem_of(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {}) {
  auto p = aft_problem<reference::aft_simple_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  return p;
}
template <class S>
void check(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {}) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, s.keys, causal, gate);
  check_aft_gradients<S>(problem_of(s, causal, gate, lengths));
}

}  // namespace

TEST_CASE("aft_simple_backward: the reverse pass against central differences", "[aft_simple_backward]") {
  for (bool causal : {false, true})
    check_central_differences(
        aft_gradient_case(problem_of({.batch = 2, .length = 7, .dim = 3}, causal, true, {7, 4})));
}

TEMPLATE_LIST_TEST_CASE("aft_simple_backward: dims, and lengths about the edges of chunks", "[aft_simple_backward]",
                        exact_types) {
  for (bool causal : {false, true}) {
    for (idx_t dim : {0, 1, 3, 16, 17, 33, 64, 70}) check<TestType>({.length = 20, .dim = dim}, causal);
    for (idx_t length : {0, 1, 2, 15, 16, 17, 127, 128, 129, 300})
      check<TestType>({.heads = 1, .length = length, .dim = 3}, causal);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_simple_backward: options combined", "[aft_simple_backward]", all_types) {
  for (bool causal : {false, true})
    for (bool gate : {false, true})
      for (double keys : {1.0, 80.0}) {
        check<TestType>({.length = 100, .dim = 18, .keys = keys}, causal, gate);
        check<TestType>({.batch = 4, .heads = 2, .length = 140, .dim = 5, .keys = keys}, causal, gate,
                        {140, 0, 33, 129});
      }
}

TEMPLATE_LIST_TEST_CASE("aft_simple_backward: threads, one gradient at a time, accumulate", "[aft_simple_backward]",
                        all_types) {
  for (bool causal : {false, true})
    for (idx_t heads : {1, 8})  // chunks in parallel, or heads
      check_aft_gradient_bits<TestType>(
          problem_of({.batch = 1, .heads = heads, .length = 400, .dim = 70}, causal, true, {390}));
}

}  // namespace testing::aft_simple_backward_tests
