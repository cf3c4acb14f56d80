// aft_conv_backward against the reverse pass of its reference: sequences and images, kernels of any odd size, keys per
// head or per channel, all types, every option.
#include "aft/gradients.hpp"

namespace testing::aft_conv_backward_tests {
namespace {

struct conv_shape {
  idx_t height = 1, width = 9, columns = 0;  // of the kernel; of the image
  bool one_key = false, per_head = true;
};

auto problem_of(const aft_shape& s, const conv_shape& c, bool causal = false, bool gate = true,
                const std::vector<idx_t>& lengths = {}) {
  auto p = aft_problem<reference::aft_conv_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.columns = c.columns;
  p.options.w = aft_biases(s, c.per_head ? s.heads : 1, c.height, c.width);
  if (c.one_key) {
    p.k = tensor<double>(s.batch, s.heads, s.length, 1);
    spread(p.k, s.keys, s.seed + 2);
  }
  return p;
}
template <class S>
void check(const aft_shape& s, const conv_shape& c, bool causal = false, bool gate = true,
           const std::vector<idx_t>& lengths = {}) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, s.keys, s.biases, c.height, c.width, c.columns, c.one_key, c.per_head,
          causal, gate);
  check_aft_gradients<S>(problem_of(s, c, causal, gate, lengths));
}

}  // namespace

TEST_CASE("aft_conv_backward: the reverse pass against central differences", "[aft_conv_backward]") {
  for (bool causal : {false, true})
    check_central_differences(aft_gradient_case(
        problem_of({.length = 7, .dim = 3, .masked = 0}, {.width = 5, .one_key = causal}, causal, true, {7, 4})));
  check_central_differences(aft_gradient_case(
      problem_of({.length = 12, .dim = 3, .masked = 0}, {.height = 3, .width = 3, .columns = 4, .per_head = false})));
}

TEMPLATE_LIST_TEST_CASE("aft_conv_backward: lengths and widths about the edges of blocks", "[aft_conv_backward]",
                        exact_types) {
  for (bool causal : {false, true})
    for (idx_t length : {0, 1, 2, 33, 96, 97, 300})
      for (idx_t width : {1, 15, 193, 801})
        check<TestType>({.batch = 1, .heads = 2, .length = length, .dim = 3}, {.width = width}, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_conv_backward: images", "[aft_conv_backward]", exact_types) {
  const idx_t sides[][2] = {{1, 1}, {3, 4}, {14, 14}, {3, 100}, {70, 3}, {0, 9}};
  for (const auto& [rows, columns] : sides)
    for (idx_t height : {1, 3, 21})
      for (idx_t width : {1, 9, 199})
        check<TestType>({.batch = 1, .heads = 2, .length = rows * columns, .dim = 3},
                        {.height = height, .width = width, .columns = columns});
}

TEMPLATE_LIST_TEST_CASE("aft_conv_backward: options combined", "[aft_conv_backward]", all_types) {
  for (bool gate : {false, true})
    for (bool one_key : {false, true})
      for (bool per_head : {false, true}) {
        for (bool causal : {false, true})
          check<TestType>({.batch = 4, .heads = 2, .length = 130, .dim = 18},
                          {.one_key = one_key, .per_head = per_head}, causal, gate, {130, 0, 113, 113});
        check<TestType>({.batch = 4, .heads = 2, .length = 60, .dim = 18},
                        {.height = 3, .width = 5, .columns = 12, .one_key = one_key, .per_head = per_head}, false,
                        gate, {60, 0, 36, 43});
      }
}

TEMPLATE_LIST_TEST_CASE("aft_conv_backward: keys of 80, biases of hundreds", "[aft_conv_backward]", all_types) {
  for (double keys : {1.0, 80.0})
    for (double biases : {1.0, 80.0, 400.0}) {
      const aft_shape s{.batch = 1, .heads = 2, .length = 150, .dim = 3, .keys = keys, .biases = biases};
      for (bool causal : {false, true})
        for (idx_t width : {9, 99, 401})
          check_saturated_aft_gradients<TestType>(problem_of(s, {.width = width}, causal));
      check_saturated_aft_gradients<TestType>(problem_of(s, {.height = 3, .width = 5, .columns = 15}));
    }
}

TEMPLATE_LIST_TEST_CASE("aft_conv_backward: threads, one gradient at a time, accumulate", "[aft_conv_backward]",
                        all_types) {
  for (bool per_head : {false, true}) {
    for (bool causal : {false, true})
      check_aft_gradient_bits<TestType>(problem_of(
          {.batch = 2, .length = 400, .dim = 18}, {.one_key = causal, .per_head = per_head}, causal, true, {400, 330}));
    check_aft_gradient_bits<TestType>(problem_of({.batch = 2, .length = 150, .dim = 18, .keys = 80},
                                                 {.height = 3, .width = 5, .columns = 15, .per_head = per_head}));
  }
}

}  // namespace testing::aft_conv_backward_tests
