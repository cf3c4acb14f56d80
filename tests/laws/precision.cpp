// Accuracy: float gives what double gives, but for its rounding, at every shape, and so do gradients. The two have
// vectors of different widths and tiles of different shapes, so that what goes wrong at the edge of one does not in the
// other; and double reproduces the golden cases and the references.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::precision_tests {
namespace {

// f(entry in float, entry in double, shape, inputs in float)
template <class F>
void in_both(const std::vector<law_shape>& shapes, F&& f) {
  const auto& single = operators<float>();
  const auto& twice = operators<double>();
  REQUIRE(single.size() == twice.size());
  for (std::size_t n = 0; n < single.size(); ++n)
    for (law_shape shape : shapes) {
      shape = fitted(single[n], shape);
      INFO(single[n].name << ", " << text(shape));
      f(single[n], twice[n], shape, random_inputs<float>(shape));
    }
}

tensor<double> in_double(const std::vector<float>& list) {
  tensor<double> x(1, 1, 1, std::ssize(list));
  x.data = cast<double>(list);
  return x;
}
law_inputs<double> in_double(const law_inputs<float>& in) {
  return {cast<double>(in.q), cast<double>(in.k), cast<double>(in.v)};
}

}  // namespace

TEST_CASE("accuracy: float agrees with double", "[precision]") {
  in_both(law_shapes(), [](const auto& single, const auto& twice, const law_shape& shape, const auto& in) {
    const law_result<float> a = attend(single, shape, in);
    const law_result<double> b = attend(twice, shape, in_double(in));
    CHECK(relative_error(cast<double>(a.out), b.out) <= single.error_factor * tolerance<float>::out);
    CHECK(relative_error(cast<double>(a.lse), b.lse) <= single.error_factor * tolerance<float>::lse);
  });
}

TEST_CASE("accuracy: gradients in float agree with those in double", "[precision]") {
  std::vector<law_shape> shapes = law_shapes({7, 16, 65, 130});
  shapes.push_back({.queries = 33, .keys = 33, .dim = 33, .value_dim = 3});
  in_both(shapes, [](const auto& single, const auto& twice, const law_shape& shape, const auto& in) {
    // A key seen alone, and a vector of dim 1 made a unit vector, have gradients of zero, of which rounding is all.
    if (!single.backward || shape.dim == 1) return;
    const tensor<float> d_out = random_d_out<float>(shape);
    const law_gradients<float> a = differentiate(single, shape, in, d_out);
    const law_gradients<double> b = differentiate(twice, shape, in_double(in), cast<double>(d_out));
    const double allowed = single.error_factor * gradient_tolerance<float>::value;
    CHECK(relative_error(cast<double>(a.q), b.q) <= allowed);
    CHECK(relative_error(cast<double>(a.k), b.k) <= allowed);
    CHECK(relative_error(cast<double>(a.v), b.v) <= allowed);
    tensor<double> parameters(1, 1, 1, std::ssize(b.parameters));
    parameters.data = b.parameters;
    CHECK(relative_error(in_double(a.parameters), parameters) <= allowed);
  });
}

}  // namespace testing::precision_tests
