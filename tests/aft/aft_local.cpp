// aft_local against its reference: any window, square or banded biases, all types, every option.
#include "aft/cases.hpp"
#include "support/catch.hpp"

namespace testing::aft_local_tests {
namespace {

template <class S>
void check(const aft_shape& s, idx_t window, bool band, bool causal, bool gate = true,
           const std::vector<idx_t>& lengths = {}, bool per_head = false) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, window, band, causal, gate);
  auto p = aft_problem<reference::aft_local_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.window = window, p.options.band = band;
  p.options.w = aft_biases(s, per_head ? s.heads : 1, s.length, band ? 2 * window - 1 : s.length);
  CHECK(aft_error<S>(p) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft_local: lengths and windows about the edges of blocks", "[aft_local]", exact_types) {
  for (bool causal : {false, true})
    for (bool band : {false, true})
      for (idx_t length : {0, 1, 2, 33, 96, 97, 300})
        for (idx_t window : {1, 2, 7, 50, 97, 400})
          check<TestType>({.batch = 1, .heads = 2, .length = length, .dim = 5}, window, band, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_local: options combined", "[aft_local]", all_types) {
  for (bool causal : {false, true})
    for (bool band : {false, true})
      for (bool gate : {false, true})
        for (bool per_head : {false, true}) {
          check<TestType>({.length = 200, .dim = 18}, 20, band, causal, gate, {}, per_head);
          check<TestType>({.batch = 4, .heads = 2, .length = 200, .dim = 3}, 9, band, causal, gate, {200, 0, 133, 133},
                          per_head);
        }
}

TEMPLATE_LIST_TEST_CASE("aft_local: more heads than one group of channels takes", "[aft_local]", exact_types) {
  for (bool per_head : {false, true})
    check<TestType>({.batch = 5, .heads = 3, .length = 120, .dim = 80}, 6, false, per_head, true, {}, per_head);
}

TEMPLATE_LIST_TEST_CASE("aft_local: keys far away outweigh the window, and the window them", "[aft_local]",
                        exact_types) {
  // A total with the window taken out again would have no digits left.
  for (bool causal : {false, true})
    for (double inside : {-60.0, 60.0}) {
      const aft_shape s{.batch = 1, .heads = 1, .length = 400, .dim = 8};
      auto p = aft_problem<reference::aft_local_options>(s);
      p.options.causal = causal, p.options.window = 30, p.options.band = true;
      p.options.w = tensor<double>(1, 1, 400, 59, inside);
      CHECK(aft_error<TestType>(p) <= tolerance<TestType>::out);
      for (idx_t j = 150; j < 200; ++j)  // a few keys hold nearly all of the weight: in the window, before it, after it
        for (idx_t d = 0; d < 8; ++d) p.k(0, 0, j, d) += 40;
      CHECK(aft_error<TestType>(p) <= tolerance<TestType>::out);
    }
}

TEMPLATE_LIST_TEST_CASE("aft_local: the promised accuracy at length 4096", "[aft_local][long]", exact_types) {
  for (bool causal : {false, true})
    check<TestType>({.batch = 1, .heads = 1, .length = 4096, .dim = 3}, 200, true, causal);
}

}  // namespace testing::aft_local_tests
