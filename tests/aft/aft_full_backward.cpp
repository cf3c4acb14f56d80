// aft_full_backward against the reverse pass of its reference: any length and dim, all types, every option, keys and
// biases of any size.
#include "aft/gradients.hpp"

namespace testing::aft_full_backward_tests {
namespace {

auto problem_of(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {},
                bool per_head = false) {
  auto p = aft_problem<reference::aft_full_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.w = aft_biases(s, per_head ? s.heads : 1, s.length, s.length);
  return p;
}
template <class S>
void check(const aft_shape& s, bool causal, bool gate = true, const std::vector<idx_t>& lengths = {},
           bool per_head = false) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, s.keys, s.biases, causal, gate, per_head);
  check_aft_gradients<S>(problem_of(s, causal, gate, lengths, per_head));
}

}  // namespace

TEST_CASE("aft_full_backward: the reverse pass against central differences", "[aft_full_backward]") {
  for (bool causal : {false, true})
    check_central_differences(
        aft_gradient_case(problem_of({.length = 7, .dim = 3, .masked = 0}, causal, true, {7, 4}, causal)));
}

TEMPLATE_LIST_TEST_CASE("aft_full_backward: lengths and dims about the edges of blocks and packets",
                        "[aft_full_backward]", exact_types) {
  for (bool causal : {false, true}) {
    for (idx_t length : {0, 1, 2, 15, 17, 95, 96, 97, 200})
      for (idx_t dim : {1, 3}) check<TestType>({.batch = 1, .heads = 2, .length = length, .dim = dim}, causal);
    for (idx_t dim : {0, 16, 33, 70}) check<TestType>({.batch = 1, .heads = 2, .length = 50, .dim = dim}, causal);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_full_backward: options combined", "[aft_full_backward]", all_types) {
  for (bool causal : {false, true})
    for (bool gate : {false, true})
      for (bool per_head : {false, true}) {
        check<TestType>({.length = 100, .dim = 5}, causal, gate, {}, per_head);
        check<TestType>({.batch = 4, .length = 40, .dim = 18}, causal, gate, {40, 0, 33, 33}, per_head);
      }
}

TEMPLATE_LIST_TEST_CASE("aft_full_backward: more heads than one bundle takes", "[aft_full_backward]", all_types) {
  for (bool per_head : {false, true}) {
    check<TestType>({.batch = 5, .heads = 3, .length = 20, .dim = 64}, false, true, {}, per_head);
    check<TestType>({.batch = 3, .heads = 2, .length = 20, .dim = 300}, true, true, {20, 20, 7}, per_head);
  }
}

TEMPLATE_LIST_TEST_CASE("aft_full_backward: keys of 80, biases of hundreds", "[aft_full_backward]", all_types) {
  for (bool causal : {false, true})
    for (double keys : {1.0, 80.0})
      for (double biases : {1.0, 80.0, 400.0})
        check<TestType>({.batch = 1, .length = 120, .dim = 5, .keys = keys, .biases = biases}, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_full_backward: threads, one gradient at a time, accumulate", "[aft_full_backward]",
                        all_types) {
  for (bool causal : {false, true})
    for (bool per_head : {false, true}) {
      check_aft_gradient_bits<TestType>(
          problem_of({.batch = 2, .length = 200, .dim = 18}, causal, true, {200, 130}, per_head));
      check_aft_gradient_bits<TestType>(
          problem_of({.batch = 1, .length = 100, .keys = 80}, causal, true, {}, per_head));
    }
}

}  // namespace testing::aft_full_backward_tests
