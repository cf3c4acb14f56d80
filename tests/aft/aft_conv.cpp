// aft_conv against its reference: sequences and images, kernels of any odd size, keys per head or per channel, all
// types, every option.
#include "aft/cases.hpp"
#include "support/catch.hpp"

namespace testing::aft_conv_tests {
namespace {

struct conv_shape {
  idx_t height = 1, width = 9, columns = 0;  // of the kernel; of the image
  bool one_key = false, per_head = true;
};

template <class S>
void check(const aft_shape& s, const conv_shape& c, bool causal = false, bool gate = true,
           const std::vector<idx_t>& lengths = {}) {
  CAPTURE(s.batch, s.heads, s.length, s.dim, c.height, c.width, c.columns, c.one_key, causal, gate);
  auto p = aft_problem<reference::aft_conv_options>(s);
  p.options.causal = causal, p.options.gate = gate, p.options.lengths = lengths;
  p.options.columns = c.columns;
  p.options.w = aft_biases(s, c.per_head ? s.heads : 1, c.height, c.width);
  if (c.one_key) {
    p.k = tensor<double>(s.batch, s.heads, s.length, 1);
    spread(p.k, s.keys, s.seed + 2);
  }
  CHECK(aft_error<S>(p) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft_conv: lengths and widths about the edges of blocks", "[aft_conv]", exact_types) {
  for (bool causal : {false, true})
    for (idx_t length : {0, 1, 2, 33, 96, 97, 300})
      for (idx_t width : {1, 3, 15, 99, 193, 801})
        check<TestType>({.batch = 1, .heads = 2, .length = length, .dim = 5}, {.width = width}, causal);
}

TEMPLATE_LIST_TEST_CASE("aft_conv: images", "[aft_conv]", exact_types) {
  const idx_t sides[][2] = {{1, 1}, {3, 4}, {14, 14}, {5, 100}, {70, 3}, {2, 250}, {9, 0}, {0, 9}};
  for (const auto& [rows, columns] : sides)
    for (idx_t height : {1, 3, 21})
      for (idx_t width : {1, 3, 9, 199}) {
        if (columns == 0) continue;
        const aft_shape s{.batch = 1, .heads = 2, .length = rows * columns, .dim = 3};
        check<TestType>(s, {.height = height, .width = width, .columns = columns});
      }
}

TEMPLATE_LIST_TEST_CASE("aft_conv: options combined", "[aft_conv]", all_types) {
  for (bool gate : {false, true})
    for (bool one_key : {false, true})
      for (bool per_head : {false, true}) {
        for (bool causal : {false, true}) {
          check<TestType>({.length = 150, .dim = 18}, {.one_key = one_key, .per_head = per_head}, causal, gate);
          check<TestType>({.batch = 4, .heads = 2, .length = 200, .dim = 3}, {.one_key = one_key, .per_head = per_head},
                          causal, gate, {200, 0, 133, 133});
        }
        check<TestType>({.batch = 4, .length = 120, .dim = 18},
                        {.height = 3, .width = 5, .columns = 12, .one_key = one_key, .per_head = per_head}, false, gate,
                        {120, 0, 36, 43});
      }
}

TEMPLATE_LIST_TEST_CASE("aft_conv: the promised accuracy at length 4096", "[aft_conv][long]", exact_types) {
  for (bool causal : {false, true})
    check<TestType>({.batch = 1, .heads = 1, .length = 4096, .dim = 3}, {.width = 301}, causal);
}

}  // namespace testing::aft_conv_tests
