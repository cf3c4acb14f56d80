// aft_local_backward against the reverse pass of its reference: any window, square or banded biases, all types, every
// option, keys and biases of any size.
#include "aft/gradients.hpp"

namespace testing::aft_local_backward_tests {
namespace {

auto problem_of(const aft_shape& s, idx_t window, bool band, bool causal, bool gate = true,
                const std::vector<idx_t>& lengths = {}, bool per_head = false) {
  auto p = aft_problem<reference::aft_local_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.window = window, p.options.band = band;
  p.options.w = aft_biases(s, per_head ? s.heads : 1, s.length, band ? 2 * window - 1 : s.length);
  return p;
}
template <class S>
void check(const aft_shape& s, idx_t window, bool band, bool causal, bool gate = true,
           const std::vector<idx_t>& lengths = {}, bool per_head = false) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, s.keys, s.biases, window, band, causal, gate, per_head);
  check_aft_gradients<S>(problem_of(s, window, band, causal, gate, lengths, per_head));
}

}  // namespace

TEST_CASE("aft_local_backward: the reverse pass against central differences", "[aft_local_backward]") {
  for (bool causal : {false, true})
    for (bool band : {false, true})
      check_central_differences(aft_gradient_case(
          problem_of({.length = 7, .dim = 3, .masked = 0}, 3, band, causal, true, {7, 4}, causal)));
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: lengths and windows about the edges of blocks", "[aft_local_backward]",
                        exact_types) {
  for (bool causal : {false, true})
    for (bool band : {false, true})
      for (idx_t length : {0, 1, 2, 33, 96, 97, 300})
        for (idx_t window : {1, 7, 97, 400})
          check<TestType>({.batch = 1, .heads = 1, .length = length, .dim = 3}, window, band, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: options combined", "[aft_local_backward]", all_types) {
  for (bool causal : {false, true})
    for (bool band : {false, true})
      for (bool gate : {false, true})
        for (bool per_head : {false, true})
          check<TestType>({.batch = 4, .heads = 2, .length = 130, .dim = 3}, 9, band, causal, gate,
                          {130, 0, 113, 113}, per_head);
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: more heads than one bundle takes", "[aft_local_backward]", all_types) {
  for (bool band : {false, true})
    for (bool per_head : {false, true})
      check<TestType>({.batch = 5, .heads = 3, .length = 30, .dim = 80}, 6, band, per_head, true, {}, per_head);
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: keys of 80, biases of hundreds", "[aft_local_backward]", all_types) {
  for (bool causal : {false, true})
    for (double keys : {1.0, 80.0})
      for (double biases : {1.0, 80.0, 400.0})
        for (idx_t window : {5, 60, 200})
          check<TestType>({.batch = 1, .heads = 2, .length = 150, .dim = 3, .keys = keys, .biases = biases}, window,
                          true, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: keys far away outweigh the window, and the window them",
                        "[aft_local_backward]", all_types) {
  for (bool causal : {false, true})
    for (double inside : {-60.0, 60.0}) {
      auto p = problem_of({.batch = 1, .heads = 1, .length = 300, .dim = 4}, 30, true, causal);
      p.options.w = tensor<double>(1, 1, 300, 59, inside);
      check_saturated_aft_gradients<TestType>(p);
      for (idx_t j = 150; j < 200; ++j)
        for (idx_t d = 0; d < 4; ++d) p.k(0, 0, j, d) += 40;
      check_saturated_aft_gradients<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("aft_local_backward: threads, one gradient at a time, accumulate", "[aft_local_backward]",
                        all_types) {
  for (bool causal : {false, true})
    for (bool band : {false, true}) {
      check_aft_gradient_bits<TestType>(
          problem_of({.batch = 2, .length = 400, .dim = 18}, 20, band, causal, true, {400, 330}, causal));
      check_aft_gradient_bits<TestType>(problem_of({.batch = 1, .length = 200, .keys = 80}, 20, band, causal));
    }
}

}  // namespace testing::aft_local_backward_tests
