// Law 1. Padding: item b with length n gives what the unpadded sequence of length n gives; rows beyond n are
// zero. Whatever lies in the padding changes nothing.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing {

TEMPLATE_LIST_TEST_CASE("law 1: padding changes nothing", "[padding]", exact_types) {
  for (const auto& op : operators<TestType>())
    for (law_shape shape : law_shapes()) {
      shape = fitted(op, shape);
      shape.batch = 3;
      INFO(op.name << ", " << text(shape));
      const std::vector<index> lengths = {shape.queries / 2, shape.queries, shape.queries > 3 ? 3 : 0};
      const law_inputs<TestType> clean = random_inputs<TestType>(shape);
      law_inputs<TestType> in = clean;
      for (index b = 0; b < 3; ++b) {
        const index n = lengths[static_cast<std::size_t>(b)];
        spoil(in.q, b, n, shape.queries);
        spoil(in.k, b, n, shape.keys);
        spoil(in.v, b, n, shape.keys);
      }
      const law_result<TestType> padded = attend(op, shape, in, lengths);

      for (index b = 0; b < 3; ++b) {
        const index n = lengths[static_cast<std::size_t>(b)];
        law_shape alone = shape;
        alone.batch = 1, alone.first_batch = b, alone.queries = alone.keys = n;
        const auto item = [&](const tensor<TestType>& x) {
          tensor<TestType> part(1, x.heads(), n, x.dim());
          for (index h = 0; h < x.heads(); ++h)
            for (index i = 0; i < n; ++i)
              for (index d = 0; d < x.dim(); ++d) part(0, h, i, d) = x(b, h, i, d);
          return part;
        };
        const law_result<TestType> wanted = attend(op, alone, {item(clean.q), item(clean.k), item(clean.v)});
        INFO("item " << b << " of length " << n);
        CHECK(relative_error(item(padded.out), wanted.out) <= op.error_factor * tolerance<TestType>::out);
        if (op.lse) CHECK(relative_error(item(padded.lse), wanted.lse) <= op.error_factor * tolerance<TestType>::lse);

        bool blank = true;
        for (index h = 0; h < shape.heads; ++h)
          for (index i = n; i < shape.queries; ++i) {
            for (index d = 0; d < shape.value_dim; ++d) blank = blank && padded.out(b, h, i, d) == 0;
            if (op.lse) blank = blank && padded.lse(b, h, i, 0) == -std::numeric_limits<TestType>::infinity();
          }
        CHECK(blank);
      }
    }
}

}  // namespace testing
