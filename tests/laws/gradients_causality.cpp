// Laws 5 and 10 of gradients. Causality turned round: what lies in the future of every row with a d_out has no
// gradient, and what is there changes no bit. Quiet: a NaN in a key, a value or a row of d_out reaches only what it
// takes part in.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::gradients_causality_tests {
namespace {

// Rows before `first` of the queries, and keys before `now`, are the past; only they have a d_out.
template <class T>
void check_future_gradients(const law_operator<T>& op, const law_shape& shape, const law_inputs<T>& in, tensor<T> d_out,
                            idx_t now) {
  const idx_t first = std::clamp<idx_t>(now - (shape.keys - shape.queries), 0, shape.queries);
  INFO(op.name << ", " << text(shape) << ", future from " << now);
  law_inputs<T> changed = in;
  const law_inputs<T> other = random_inputs<T>(shape, 9);
  const auto replace = [](tensor<T>& x, idx_t begin, auto value) {
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = begin; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = value(b, h, i, d);
  };
  replace(d_out, first, [](auto...) { return T(0); });
  replace(changed.q, first, other.q), replace(changed.k, now, other.k), replace(changed.v, now, other.v);
  const law_gradients<T> before = differentiate(op, shape, in, d_out), after = differentiate(op, shape, changed, d_out);
  for (const law_gradients<T>* g : {&before, &after})
    for (idx_t b = 0; b < shape.batch; ++b) {
      CHECK(zero_rows(g->q, b, first, g->q.length()));
      CHECK(zero_rows(g->k, b, now, g->k.length()));
      CHECK(zero_rows(g->v, b, now, g->v.length()));
    }
  const auto same = [](const tensor<T>& a, const tensor<T>& b, idx_t end) {
    for (idx_t item = 0; item < a.batch(); ++item)
      for (idx_t h = 0; h < a.heads(); ++h)
        for (idx_t i = 0; i < std::min(end, a.length()); ++i)
          if (!same_rows(a, b, item, h, i)) return false;
    return true;
  };
  CHECK(same(before.q, after.q, first));
  CHECK(same(before.k, after.k, now));
  CHECK(same(before.v, after.v, now));
}

enum class place { key, value, d_out };

// A NaN in row `row` of head 1 (of keys, or of d_out).
template <class T>
void check_quiet_gradients(const law_operator<T>& op, const law_shape& shape, law_inputs<T> in, tensor<T> d_out,
                           const law_gradients<T>& before, idx_t row, place poisoned) {
  constexpr idx_t item = 1, one = 1;
  const idx_t group = shape.heads / shape.kv_heads, of_one = poisoned == place::d_out ? one / group : one;
  const bool in_query = poisoned == place::key && op.tied;
  tensor<T>& x = poisoned == place::d_out ? d_out : poisoned == place::value ? in.v : in_query ? in.q : in.k;
  x(item, one, row, 0) = std::numeric_limits<T>::quiet_NaN();
  const law_gradients<T> after = differentiate(op, shape, in, d_out);
  // The queries that see it, and the keys those see.
  std::vector<std::vector<bool>> queries(static_cast<std::size_t>(shape.heads));
  std::vector<bool> keys(static_cast<std::size_t>(shape.keys));
  for (idx_t h = 0; h < shape.heads; ++h) {
    auto& reached = queries[static_cast<std::size_t>(h)];
    reached.assign(static_cast<std::size_t>(shape.queries), false);
    for (idx_t i = 0; i < shape.queries; ++i) {
      if (poisoned == place::d_out ? h != one || (i != row && !op.queries_mix) : h / group != of_one) continue;
      if (poisoned != place::d_out && !op.sees(shape, item, h, i, row)) continue;
      for (idx_t j = 0; j < shape.keys; ++j)
        if (op.sees(shape, item, h, i, j))
          reached[static_cast<std::size_t>(i)] = keys[static_cast<std::size_t>(j)] = true;
    }
  }
  // Whether the gradient of query i may depend on a row that was reached.
  const auto depends = [&](idx_t h, idx_t i) {
    const auto& reached = queries[static_cast<std::size_t>(h)];
    for (idx_t t = i; t <= std::min(i + op.reach, shape.queries - 1); ++t)
      if (reached[static_cast<std::size_t>(t)]) return true;
    return false;
  };
  bool others_same = true, queries_know = true;
  for (idx_t b = 0; b < shape.batch; ++b) {
    for (idx_t h = 0; h < shape.heads; ++h)
      for (idx_t i = 0; i < shape.queries; ++i)
        if (b != item || !depends(h, i))
          others_same = others_same && same_rows(after.q, before.q, b, h, i);
        else if (queries[static_cast<std::size_t>(h)][static_cast<std::size_t>(i)] && op.reads_queries &&
                 (poisoned != place::d_out || i == row))
          queries_know = queries_know && std::isnan(after.q(b, h, i, 0));
    for (const auto& [now, then] : {std::pair{&after.k, &before.k}, std::pair{&after.v, &before.v}})
      for (idx_t kv = 0; kv < now->heads(); ++kv)
        for (idx_t j = 0; j < now->length(); ++j)
          if (b != item || kv != of_one || !keys[static_cast<std::size_t>(j)])
            others_same = others_same && same_rows(*now, *then, b, kv, j);
  }
  CHECK(others_same);
  CHECK(queries_know);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 5 of gradients: the future has none", "[gradient_causality]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward || !op.causal) continue;
    std::vector<law_shape> shapes = law_shapes({2, 7, 64, 65, 130});
    if (op.cross)
      for (auto [queries, keys] : {std::pair<idx_t, idx_t>{65, 130}, {130, 65}, {1, 40}})
        shapes.push_back({.queries = queries, .keys = keys, .dim = 33, .value_dim = 8});
    for (law_shape shape : shapes) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const tensor<TestType> d_out = random_d_out<TestType>(shape);
      for (idx_t now : {shape.keys / 3, shape.keys / 2 + 1, shape.keys - 1})
        if (!few_shapes || now != shape.keys / 2 + 1) check_future_gradients(op, shape, in, d_out, now);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 10 of gradients: a NaN reaches only what it takes part in", "[gradient_quiet]",
                        exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward || !op.sees || op.tied) continue;
    for (idx_t n = 0; law_shape shape : law_shapes({7, 64, 65, 130})) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const tensor<TestType> d_out = random_d_out<TestType>(shape);
      const law_gradients<TestType> before = differentiate(op, shape, in, d_out);
      for (idx_t row : {idx_t(0), shape.keys / 2, shape.keys - 1})
        for (place poisoned : {place::key, place::value, place::d_out}) {
          ++n;
          if ((by_turns<TestType> || shape.keys > 65) && (n + n / 3) % 3 != 0) continue;  // by turns
          INFO(op.name << ", " << text(shape) << ", NaN in " << int(poisoned) << ", row " << row);
          check_quiet_gradients(op, shape, in, d_out, before, row, poisoned);
        }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 10 of gradients: a NaN stays in its batch item and head", "[gradient_quiet]",
                        exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    if (!op.backward || !op.independent) continue;
    for (law_shape shape : law_shapes({7, 64, 130})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      law_inputs<T> in = random_inputs<T>(shape);
      tensor<T> d_out = random_d_out<T>(shape);
      const law_gradients<T> before = differentiate(op, shape, in, d_out);
      const idx_t b = 1, kv_head = 1, group = shape.heads / shape.kv_heads;
      for (auto* x : {&in.q, &in.k, &in.v, &d_out})
        (*x)(b, x == &in.q || x == &d_out ? kv_head * group : kv_head, shape.keys / 2, 0) =
            std::numeric_limits<T>::quiet_NaN();
      const law_gradients<T> after = differentiate(op, shape, in, d_out);
      bool same = true, reached = false;
      const auto compare = [&](const tensor<T>& now, const tensor<T>& then, idx_t heads_of_one) {
        for (idx_t item = 0; item < now.batch(); ++item)
          for (idx_t h = 0; h < now.heads(); ++h) {
            if (item == b && h / heads_of_one == kv_head)
              reached = reached || !all_finite(head(now, item, h));
            else
              same = same && identical(head(now, item, h), head(then, item, h));
          }
      };
      compare(after.q, before.q, group), compare(after.k, before.k, 1), compare(after.v, before.v, 1);
      CHECK(same);
      CHECK(reached);
    }
  }
}

}  // namespace testing::gradients_causality_tests
