// Law 0. Agreement: every operator, and its streaming form, gives what the naive reference gives in double, with every
// option its entries have. Gradients agree with differences of the reference.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::reference_tests {
namespace {

struct law_case {
  law_shape shape;
  std::vector<idx_t> lengths{}, query_lengths{}, key_lengths{};
};

template <class T>
law_reference_call in_double(const law_inputs<T>& in, const law_case& c) {
  return {cast<double>(in.q), cast<double>(in.k), cast<double>(in.v), c.lengths, c.query_lengths, c.key_lengths};
}

template <class T>
law_result<T> attend(const law_operator<T>& op, const law_case& c, const law_inputs<T>& in) {
  law_result<T> r = fresh_result(op, c.shape);
  attn::execution serial;
  law_call<T> call = call_of(in, r, serial, c.lengths);
  call.query_lengths = c.query_lengths, call.key_lengths = c.key_lengths;
  op.bind(c.shape)(call);
  return r;
}

// Shapes with and without lengths by turns; lengths of both, of each, and fewer and more keys than queries.
template <class T>
std::vector<law_case> cases(const law_operator<T>& op) {
  std::vector<law_case> all;
  for (law_shape shape : law_shapes({0, 1, 2, 7, 16, 33, 65, 130})) {
    law_case c{fitted(op, shape)};
    const idx_t n = shape.keys;
    if (op.padding && all.size() % 2 == 1) c.lengths = {n * 3 / 4, n};
    if (n > 65) c.shape.batch = 1, c.lengths.resize(std::min<std::size_t>(1, c.lengths.size()));  // they take long
    all.push_back(c);
  }
  if (!op.cross) return all;
  const law_shape more{.queries = 20, .keys = 47, .dim = 33, .value_dim = 3},
      fewer{.queries = 47, .keys = 20, .dim = 8, .value_dim = 16};
  for (const law_shape& shape : {more, fewer}) {
    all.push_back({fitted(op, shape)});
    if (op.padding)
      all.push_back({fitted(op, shape), {}, {shape.queries, shape.queries / 2}, {shape.keys - 5, shape.keys}});
  }
  return all;
}

template <class T>
void check_agreement(const law_operator<T>& op, const law_result<T>& actual, const reference::result& wanted) {
  CHECK(relative_error(actual.out, wanted.out) <= op.error_factor * tolerance<T>::out);
  if (op.lse) CHECK(relative_error(actual.lse, wanted.lse) <= op.error_factor * tolerance<T>::lse);
}

using numbers = std::vector<double>;

double inner(const numbers& x, const numbers& y) {
  double sum = 0;
  for (std::size_t n = 0; n < x.size(); ++n) sum += x[n] * y[n];
  return sum;
}
numbers moved(numbers x, const numbers& direction, double by) {
  for (std::size_t n = 0; n < x.size(); ++n) x[n] += by * direction[n];
  return x;
}

// <gradient, t> along a random direction t is the derivative of <d_out, out>, which the reference gives by a central
// difference. outputs(t, by): those of the reference, with by * t added to what is differentiated.
template <class T>
void check_direction(const law_operator<T>& op, const std::vector<T>& gradient, const numbers& d_out, auto&& outputs) {
  const numbers g = cast<double>(gradient), t = random_values(55, std::ssize(g));
  // The difference errs by step^2 of the third derivative, which is nothing, and by the rounding of outputs over the
  // step: where an inverse enlarges it, ten times that of a number (measured: 1e-9 where it is largest, in nystrom).
  constexpr double step = 1e-6, of_difference = 20 * std::numeric_limits<double>::epsilon() / step;
  const numbers high = outputs(t, step), low = outputs(t, -step);
  const double wanted = inner(d_out, moved(high, low, -1)) / (2 * step);
  const double size = std::sqrt(inner(g, g)), values = std::sqrt(inner(high, high));
  // t has nothing to do with the rounding errors e of the gradient, so that <e, t> is normal with deviation |e|.
  // Gradients of scores are differences of numbers of the size of the result, whose rounding stays where they are 0.
  const double rounding = 5 * op.error_factor * gradient_tolerance<T>::value * size +
                          static_cast<double>(std::numeric_limits<T>::epsilon()) * values;
  CHECK(std::abs(inner(g, t) - wanted) <= rounding + of_difference * (size + values));
}

template <class T>
void check_gradients(const law_operator<T>& op, const law_case& c) {
  const law_inputs<T> in = random_inputs<T>(c.shape);
  const tensor<T> d_out = random_d_out<T>(c.shape);
  const law_gradients<T> g = differentiate(op, c.shape, in, d_out, c.lengths);
  const law_reference_call at = in_double(in, c);
  const auto reference = op.reference(c.shape);
  const auto check = [&](const char* name, const tensor<T>& gradient, tensor<double> law_reference_call::*input) {
    INFO("gradient of " << name);
    if (gradient.empty()) return;
    check_direction(op, gradient.data, cast<double>(d_out.data), [&](const numbers& t, double by) {
      law_reference_call call = at;
      (call.*input).data = moved((at.*input).data, t, by);
      return reference(call).out.data;
    });
  };
  check("q", g.q, &law_reference_call::q);
  check("k", g.k, &law_reference_call::k);
  check("v", g.v, &law_reference_call::v);
  INFO("gradients of parameters");
  check_direction(op, g.parameters, cast<double>(d_out.data), [&](const numbers& t, double by) {
    law_reference_call call = at;
    call.moves = moved(numbers(t.size()), t, by);
    const numbers out = reference(call).out.data;
    CHECK(call.next_move == t.size());  // each gradient is of a parameter of the reference
    return out;
  });
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 0: operators agree with their references", "[agreement]", exact_types) {
  for (const auto& op : operators<TestType>())
    for (const law_case& c : cases(op)) {
      INFO(op.name << ", " << text(c.shape) << (c.lengths.empty() && c.key_lengths.empty() ? "" : ", with lengths"));
      const law_inputs<TestType> in = random_inputs<TestType>(c.shape);
      const reference::result wanted = op.reference(c.shape)(in_double(in, c));
      check_agreement(op, attend(op, c, in), wanted);
      if (op.stream && c.lengths.empty() && c.shape.queries == c.shape.keys && c.shape.queries > 2) {
        const idx_t n = c.shape.queries;
        INFO("in chunks");
        check_agreement(op, attend_in_chunks(op, c.shape, in, {1, n / 2, 1, n - n / 2 - 2}), wanted);
      }
    }
}

TEMPLATE_LIST_TEST_CASE("law 0: gradients agree with those of the references", "[gradient_agreement]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward) continue;
    std::vector<law_case> some = {{{.queries = 5, .keys = 5, .dim = 3, .value_dim = 2}},
                                  {{.queries = 33, .keys = 33, .dim = 8, .value_dim = 5}}};
    if (op.padding) some.push_back({{.queries = 21, .keys = 21, .dim = 5, .value_dim = 9}, {21, 13}});
    if (op.cross) some.push_back({{.queries = 9, .keys = 30, .dim = 4, .value_dim = 3}});
    for (law_case& c : some) {
      c.shape = fitted(op, c.shape);
      INFO(op.name << ", " << text(c.shape));
      check_gradients(op, c);
    }
  }
}

}  // namespace testing::reference_tests
