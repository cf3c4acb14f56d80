// mean_pool and its gradient against plain loops.
#include "layers/layers.hpp"

#include <attn/layers/mean_pool.hpp>
#include <attn/layers/mean_pool_backward.hpp>

namespace testing::mean_pool_tests {
namespace {

struct pool_case {
  idx_t batch, length, dim;
  std::vector<idx_t> lengths;
  std::vector<std::uint8_t> mask;  // [batch or 1, length]; empty for none

  bool takes(idx_t b, idx_t i) const {
    const idx_t row = std::ssize(mask) == batch * length ? b : 0;
    return (lengths.empty() || i < lengths[static_cast<std::size_t>(b)]) &&
           (mask.empty() || mask[static_cast<std::size_t>(row * length + i)] != 0);
  }
  double count(idx_t b) const {
    double n = 0;
    for (idx_t i = 0; i < length; ++i) n += takes(b, i);
    return std::max(n, 1.0);
  }
  attn::mean_pool_options options() const {
    attn::mean_pool_options o{.lengths = lengths};
    const idx_t rows = length > 0 ? std::ssize(mask) / length : 0;
    if (!mask.empty()) o.mask = attn::tensor_view<const std::uint8_t, 2>(mask.data(), {rows, length});
    return o;
  }
};

std::vector<pool_case> cases() {
  std::vector<pool_case> all;
  for (idx_t batch : {1, 3})
    for (idx_t length : {0, 1, 7, 65, 200})
      for (idx_t dim : {0, 1, 33, 300})
        for (int kind = 0; kind < 4; ++kind) {
          pool_case c{batch, length, dim, {}, {}};
          for (idx_t b = 0; kind % 2 == 1 && b < batch; ++b) c.lengths.push_back(std::max<idx_t>(0, length - 64 * b));
          const idx_t flags = kind >= 2 ? (kind == 2 ? batch : 1) * length : 0;
          for (idx_t n = 0; n < flags; ++n) c.mask.push_back(n % 3 != 1);
          all.push_back(c);
        }
  return all;
}

// NaN in every token that is not taken.
template <class S>
tensor<S> poisoned(const pool_case& c) {
  tensor<S> x = cast<S>(random_sequence(3, c.batch, c.length, c.dim));
  for (idx_t b = 0; b < c.batch; ++b)
    for (idx_t i = 0; i < c.length; ++i)
      for (idx_t d = 0; d < c.dim && !c.takes(b, i); ++d) x(b, 0, i, d) = std::numeric_limits<S>::quiet_NaN();
  return x;
}
template <class S>
attn::tensor_view<S, 2> rows(tensor<S>& x) {
  return {x.data.data(), {x.batch(), x.dim()}};
}
template <class S>
attn::tensor_view<const S, 2> rows(const tensor<S>& x) {
  return {x.data.data(), {x.batch(), x.dim()}};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("mean_pool: against the reference", "[mean_pool]", all_types) {
  using S = TestType;
  for (const pool_case& c : cases()) {
    CAPTURE(c.batch, c.length, c.dim, c.lengths, c.mask.size());
    const tensor<S> x = poisoned<S>(c);
    tensor<double> wanted(c.batch, 1, 1, c.dim);
    for (idx_t b = 0; b < c.batch; ++b)
      for (idx_t i = 0; i < c.length; ++i)
        for (idx_t d = 0; d < c.dim && c.takes(b, i); ++d)
          wanted(b, 0, 0, d) += static_cast<double>(x(b, 0, i, d)) / c.count(b);
    tensor<S> out(c.batch, 1, 1, c.dim, S(7)), again = out;
    attn::execution serial, threads(3, 0);
    attn::mean_pool(sequence(x), rows(out), c.options(), serial);
    CHECK(relative_error(out, wanted) <= tolerance<S>::out);
    attn::mean_pool(sequence(x), rows(again), c.options(), threads);
    CHECK(again == out);
    // numbers of a token that are two apart
    tensor<S> apart(c.batch, 1, c.length, 2 * c.dim);
    for (idx_t b = 0; b < c.batch; ++b)
      for (idx_t i = 0; i < c.length; ++i)
        for (idx_t d = 0; d < c.dim; ++d) apart(b, 0, i, 2 * d) = x(b, 0, i, d);
    const in_sequence<S> strided(apart.data.data(), {c.batch, c.length, c.dim},
                                 {2 * c.length * c.dim, 2 * c.dim, 2});
    attn::mean_pool(strided, rows(again), c.options(), serial);
    CHECK(again == out);
  }
}

TEMPLATE_LIST_TEST_CASE("mean_pool_backward: against the reference", "[mean_pool]", all_types) {
  using S = TestType;
  for (const pool_case& c : cases()) {
    CAPTURE(c.batch, c.length, c.dim, c.lengths, c.mask.size());
    const tensor<S> x = poisoned<S>(c), d = cast<S>(random_normal(4, c.batch, 1, 1, c.dim));
    for (bool accumulate : {false, true}) {
      const tensor<S> before = cast<S>(random_sequence(5, c.batch, c.length, c.dim));
      tensor<S> dx = before;
      tensor<double> wanted(c.batch, 1, c.length, c.dim);
      for (idx_t b = 0; b < c.batch; ++b)
        for (idx_t i = 0; i < c.length; ++i)
          for (idx_t n = 0; n < c.dim; ++n)
            wanted(b, 0, i, n) = (accumulate ? static_cast<double>(before(b, 0, i, n)) : 0.0) +
                                 (c.takes(b, i) ? static_cast<double>(d(b, 0, 0, n)) / c.count(b) : 0.0);
      attn::execution threads(2, 0);
      attn::mean_pool_backward(sequence(x), rows(d), {.x = sequence(dx), .accumulate = accumulate}, c.options(),
                               threads);
      CHECK(relative_error(dx, wanted) <= tolerance<S>::out);
    }
  }
}

TEST_CASE("mean_pool: sums of many tokens keep their digits, a vector is a row", "[mean_pool]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Constant(100000, 3, 0.1f);
  Eigen::VectorXf out(3);
  attn::mean_pool(x, out);
  CHECK((out.array() - 0.1f).abs().maxCoeff() <= 1e-7f);
  Eigen::MatrixXf dx(100000, 3);
  attn::mean_pool_backward(x, out, {.x = dx});
  CHECK((dx.array() - 1e-6f).abs().maxCoeff() <= 1e-12f);
}

TEST_CASE("mean_pool refuses what does not fit", "[mean_pool]") {
  tensor<float> x(2, 1, 5, 4), out(2, 1, 1, 4, 7.0f), few(1, 1, 1, 4), narrow(2, 1, 1, 3), dx(2, 1, 4, 4);
  const std::vector<idx_t> three = {1, 2, 3}, long_ones = {5, 6};
  const std::vector<std::uint8_t> flags(8, 1);
  const attn::tensor_view<const std::uint8_t, 2> mask(flags.data(), {2, 4});
  const auto says = [&](const char* message, tensor<float>& to, const attn::mean_pool_options& options) {
    const tensor<float> before = to;
    CHECK(refusal([&] { attn::mean_pool(sequence(x), rows(to), options); }) == message);
    CHECK(to == before);
  };
  says("attn::mean_pool: expected out rows = x batch 2; found 1", few, {});
  says("attn::mean_pool: expected dim of the means = x dim 4; found 3", narrow, {});
  says("attn::mean_pool: expected lengths, one per batch item: 2; found 3", out, {.lengths = three});
  says("attn::mean_pool: expected lengths from 0 to 5; found 6", out, {.lengths = long_ones});
  says("attn::mean_pool: expected mask length = x length 5; found 4", out, {.mask = mask});
  CHECK(refusal([&] { attn::mean_pool(sequence(x), attn::tensor_view<float, 2>(x.data.data(), {2, 4})); }) ==
        "attn::mean_pool: expected out and x in separate memory; found an overlap");
  CHECK(well_formed(
      refusal([&] { attn::mean_pool_backward(sequence(std::as_const(x)), rows(out), {.x = sequence(dx)}); }),
      "mean_pool_backward"));
}

}  // namespace testing::mean_pool_tests
