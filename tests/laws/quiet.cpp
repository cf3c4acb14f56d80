// Law 10. Quiet: a NaN in one key or value reaches only the queries that see it. Those it does reach.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::quiet_tests {
namespace {

template <class T>
void check_quiet(const law_operator<T>& op, const law_shape& shape, law_inputs<T> in, const law_result<T>& before,
                 idx_t poisoned, bool in_key) {
  const bool in_query = in_key && op.tied;
  const idx_t b = 1, one = 1, group = in_query ? 1 : shape.heads / shape.kv_heads;
  (in_query ? in.q : in_key ? in.k : in.v)(b, one, poisoned, 0) = std::numeric_limits<T>::quiet_NaN();
  const law_result<T> after = attend(op, shape, in);

  bool others_same = true, seers_know = true;
  for (idx_t item = 0; item < shape.batch; ++item)
    for (idx_t h = 0; h < shape.heads; ++h)
      for (idx_t i = 0; i < shape.queries; ++i) {
        const bool seen =
            item == b && h / group == one && ((in_query && i == poisoned) || op.sees(shape, item, h, i, poisoned));
        if (seen) {
          seers_know = seers_know && std::isnan(after.out(item, h, i, 0));
          continue;
        }
        for (idx_t d = 0; d < shape.value_dim; ++d)
          others_same = others_same && after.out(item, h, i, d) == before.out(item, h, i, d);
        if (op.lse) others_same = others_same && after.lse(item, h, i, 0) == before.lse(item, h, i, 0);
      }
  CHECK(others_same);
  CHECK(seers_know);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 10: a NaN reaches only those who see it", "[quiet]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.sees) continue;
    // Few lengths, but over the edge of every block: who sees it is asked pair by pair.
    for (idx_t n = 0; law_shape shape : law_shapes({7, 64, 65, 130, 257, 1})) {
      shape = fitted(op, shape);
      ++n;
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> before = attend(op, shape, in);
      for (idx_t place = 0; place < 3; ++place)
        for (bool in_key : {false, true}) {
          const idx_t poisoned = std::array{idx_t(0), shape.keys / 2, shape.keys - 1}[static_cast<std::size_t>(place)];
          // Where it costs much, a key and a value by turns.
          if ((few_shapes || shape.keys > 65) && in_key != ((place + n) % 2 == 0)) continue;
          INFO(op.name << ", " << text(shape) << ", NaN in " << (in_key ? "key " : "value ") << poisoned);
          check_quiet(op, shape, in, before, poisoned, in_key);
        }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 10: a NaN stays in its batch item and head", "[quiet]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (op.sees || !op.independent) continue;
    for (law_shape shape : law_shapes({7, 64, 65, 130})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> before = attend(op, shape, in);
      const idx_t b = 1, kv_head = 1, group = shape.heads / shape.kv_heads;
      for (auto* x : {&in.q, &in.k, &in.v})
        (*x)(b, x == &in.q ? kv_head * group : kv_head, shape.keys / 2, 0) = std::numeric_limits<TestType>::quiet_NaN();
      const law_result<TestType> after = attend(op, shape, in);
      bool same = true, reached = false;
      for (idx_t item = 0; item < shape.batch; ++item)
        for (idx_t h = 0; h < shape.heads; ++h) {
          if (item == b && h / group == kv_head)
            reached = reached || !all_finite(head(after.out, item, h));
          else
            same = same && identical(head(after.out, item, h), head(before.out, item, h)) &&
                   (!op.lse || identical(head(after.lse, item, h), head(before.lse, item, h)));
        }
      CHECK(same);
      CHECK(reached);
    }
  }
}

}  // namespace testing::quiet_tests
