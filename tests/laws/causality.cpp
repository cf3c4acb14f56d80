// Law 5. Causality: changing, even to NaN, what lies in the future changes no earlier output bit.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::causality_tests {
namespace {

// Rows from `begin` on of every head become those of `from`.
template <class T>
void replace_rows(tensor<T>& x, const tensor<T>& from, idx_t begin) {
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = begin; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = from(b, h, i, d);
}

enum class change { not_finite, other_numbers, large };

// Nothing before key `now`, nor the queries that stand before it, may learn of a change from there on.
template <class T>
void check_future(const law_operator<T>& op, const law_shape& shape, const law_inputs<T>& in,
                  const law_result<T>& before, idx_t now, change what) {
  const idx_t first = std::clamp<idx_t>(now - (shape.keys - shape.queries), 0, shape.queries);
  INFO(op.name << ", " << text(shape) << ", future from " << now << ", change " << int(what));
  law_inputs<T> changed = in;
  if (what == change::not_finite) {
    for (idx_t b = 0; b < shape.batch; ++b) {
      poison_rows(changed.q, b, first, shape.queries);
      for (auto* x : {&changed.k, &changed.v}) poison_rows(*x, b, now, shape.keys);
    }
  } else {
    law_inputs<T> other = what == change::large ? in : random_inputs<T>(shape, 9);
    if (what == change::large)
      for (auto* x : {&other.q, &other.k, &other.v})
        for (T& number : x->data) number *= T(1e5);
    replace_rows(changed.q, other.q, first);
    replace_rows(changed.k, other.k, now);
    replace_rows(changed.v, other.v, now);
  }
  const law_result<T> after = attend(op, shape, changed);
  CHECK(identical(rows(after.out, 0, first), rows(before.out, 0, first)));
  if (op.lse) CHECK(identical(rows(after.lse, 0, first), rows(before.lse, 0, first)));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 5: the future changes no earlier bit", "[causality]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.causal) continue;
    std::vector<law_shape> shapes = law_shapes({2, 7, 16, 63, 64, 65, 127, 130, 257});
    if (op.cross)
      for (auto [queries, keys] : {std::pair<idx_t, idx_t>{65, 130}, {130, 65}, {1, 40}})
        shapes.push_back({.queries = queries, .keys = keys, .dim = 33, .value_dim = 8});
    for (idx_t n = 0; law_shape shape : shapes) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> before = attend(op, shape, in);
      const idx_t length = shape.keys;
      // The changes by turns: four places and three changes, so that from shape to shape each place meets all.
      for (idx_t now : {idx_t(1), length / 3, length / 2 + 1, length - 1}) {
        ++n;
        if (few_shapes && now != length / 3 && now != length - 1) continue;
        check_future(op, shape, in, before, now, static_cast<change>(n % 3));
      }
    }
  }
}

}  // namespace testing::causality_tests
