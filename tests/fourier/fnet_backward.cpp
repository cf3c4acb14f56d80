// fnet_backward against the reverse pass of its reference: lengths, types, layouts, adding; what it refuses.
#include "reference/fnet.hpp"

#include <array>
#include <functional>
#include <limits>

#include "support/call_fourier.hpp"
#include "support/refused.hpp"
#include "support/run_backward.hpp"

namespace testing::fnet_backward_tests {
namespace {

gradient_case case_of(idx_t batch, idx_t heads, idx_t length, idx_t dim, const std::vector<idx_t>& lengths = {}) {
  gradient_case c;
  c.name = "length " + std::to_string(length) + ", dim " + std::to_string(dim);
  c.names = {"x"};
  c.inputs = {random_normal(1, batch, heads, length, dim)};
  c.forward = [lengths](const std::vector<tensor<variable>>& in) {
    return std::vector{reference::fnet(in[0], {lengths})};
  };
  return c;
}

template <class S>
tensor<S> gradient(const tensor<S>& d_out, const std::vector<idx_t>& lengths, attn::execution& exec) {
  tensor<S> dx(d_out.batch(), d_out.heads(), d_out.length(), d_out.dim(), S(7));
  compiled_fnet<S>::backward(view(d_out), {.x = view(dx)}, {.lengths = lengths}, exec);
  return dx;
}

template <class S>
void check(idx_t batch, idx_t heads, idx_t length, idx_t dim, const std::vector<idx_t>& lengths = {}) {
  attn::execution serial;
  check_gradients(
      case_of(batch, heads, length, dim, lengths), gradient_tolerance<S>::value,
      [&](const tensors&, const tensors& d_results) {
        return tensors{cast<double>(gradient(cast<S>(d_results[0]), lengths, serial))};
      },
      [](tensors& d) {
        for (auto& x : d) x = rounded<S>(x);
      });
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("fnet_backward: against the reverse pass", "[fnet_backward]", all_types) {
  for (idx_t length : {0, 1, 2, 7, 16, 31, 47})
    for (idx_t dim : {1, 3, 8, 16, 33}) check<TestType>(2, 2, length, dim);
}

TEMPLATE_LIST_TEST_CASE("fnet_backward: true lengths", "[fnet_backward]", all_types) {
  check<TestType>(4, 2, 30, 12, {30, 0, 17, 17});
  check<TestType>(3, 1, 20, 7, {1, 20, 19});
}

TEMPLATE_LIST_TEST_CASE("fnet_backward: added to what is there; padding is neither read nor written then",
                        "[fnet_backward]", all_types) {
  using S = TestType;
  const std::vector<idx_t> lengths = {35, 20};
  for (idx_t dim : {5, 32, 41}) {
    tensor<S> d = cast<S>(random_normal(1, 2, 2, 35, dim)), sum = cast<S>(random_normal(2, 2, 2, 35, dim, 10));
    attn::execution serial, three(3, 0);
    const tensor<S> alone = gradient(d, lengths, serial), before = sum;
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t i = 20; i < 35; ++i)
        for (idx_t e = 0; e < dim; ++e) d(1, h, i, e) = std::numeric_limits<S>::quiet_NaN();
    CHECK(gradient(d, lengths, serial) == alone);
    CHECK(gradient(d, lengths, three) == alone);
    tensor<double> wanted = cast<double>(before);
    for (std::size_t n = 0; n < wanted.data.size(); ++n) wanted.data[n] += static_cast<double>(alone.data[n]);
    compiled_fnet<S>::backward(view(std::as_const(d)), {.x = view(sum), .accumulate = true}, {.lengths = lengths},
                               serial);
    CHECK(relative_error(sum, wanted) <= 2 * gradient_tolerance<S>::value);  // the gradient alone is rounded too
    for (idx_t i = 20; i < 35; ++i)
      for (idx_t e = 0; e < dim; ++e) CHECK(sum(1, 1, i, e) == before(1, 1, i, e));
    if (sizeof(S) > 2)
      for (std::size_t n = 0; n < sum.data.size(); ++n) CHECK(sum.data[n] == before.data[n] + alone.data[n]);
  }
}

TEMPLATE_LIST_TEST_CASE("fnet_backward: layouts", "[fnet_backward]", exact_types) {
  using S = TestType;
  const idx_t length = 37, dim = 29;
  const tensor<S> d = cast<S>(random_normal(9, 2, 3, length, dim));
  attn::execution serial;
  const tensor<S> wanted = gradient(d, {}, serial);
  const std::array<idx_t, 4> extents{2, 3, length, dim};
  for (const std::array<idx_t, 4>& strides :
       {std::array<idx_t, 4>{3 * length * dim, dim, 3 * dim, 1}, {3 * length * dim, length * dim, 1, length}})
    for (bool adds : {false, true}) {
      std::vector<S> from(d.data.size()), to(d.data.size(), adds ? S(0) : S(7));
      const attn::tensor_view<S> from_view(from.data(), extents, strides), to_view(to.data(), extents, strides);
      const auto each = [&](auto&& body) {
        for (idx_t b = 0; b < 2; ++b)
          for (idx_t h = 0; h < 3; ++h)
            for (idx_t i = 0; i < length; ++i)
              for (idx_t e = 0; e < dim; ++e) body(b, h, i, e);
      };
      each([&](auto... i) { from_view(i...) = d(i...); });
      compiled_fnet<S>::backward(from_view, {.x = to_view, .accumulate = adds}, {}, serial);
      int different = 0;
      each([&](auto... i) { different += to_view(i...) != wanted(i...); });
      CHECK(different == 0);
    }
}

TEST_CASE("fnet_backward: the reverse pass against central differences", "[fnet_backward]") {
  check_central_differences(case_of(2, 1, 9, 6, {9, 5}));
}

TEST_CASE("fnet_backward: Eigen matrices and default arguments", "[fnet_backward]") {
  const Eigen::MatrixXf d = Eigen::MatrixXf::Random(9, 6);
  Eigen::MatrixXf dx(9, 6), out(9, 6);
  attn::fnet(d, out);
  attn::fnet_backward(d, {.x = dx});
  CHECK(dx == out);
  attn::fnet_backward(d, {.x = dx, .accumulate = true}, attn::execution(2, 0));
  CHECK(dx == 2 * out);
  attn::fnet_backward(d, {});  // nothing is asked for
}

TEST_CASE("fnet_backward refuses what does not fit", "[fnet_backward]") {
  struct call_inputs {
    tensor<float> d{2, 3, 6, 8, 0.5f}, dx{2, 3, 6, 8, 7};
    in_view<float> from = view(std::as_const(d));
    out_view<float> to = view(dx);
    std::vector<idx_t> list;
    call_inputs() = default;
    call_inputs(const call_inputs&) = delete;
    std::vector<const tensor<float>*> written() const { return {&dx}; }
  };
  const std::vector<refused<call_inputs>> list = {
      {"another batch", "the gradient of x of the shape of d_out [2, 3, 6, 8]; found [1, 3, 6, 8]",
       [](call_inputs& d) { d.to = d.to.slice(0, 0, 1); }},
      {"another length", "shape of d_out", [](call_inputs& d) { d.to = d.to.slice(2, 0, 5); }},
      {"a null d_out", "null", [](call_inputs& d) { d.from = null_view(2, 3, 6, 8); }},
      {"a null gradient with extents", "null", [](call_inputs& d) { d.to = null_view(2, 3, 6, 8); }},
      {"a gradient that is d_out", "overlap", [](call_inputs& d) { d.from = reshaped(d.dx, 2, 3, 6, 8); }},
      {"a gradient whose rows are one", "overlap",
       [](call_inputs& d) { d.to = reshaped(d.dx, 2, 3, 6, 8).strided(144, 48, 0, 1); }},
      {"too few lengths", "one per batch item: 2; found 1", [](call_inputs& d) { d.list = {6}; }},
      {"a length beyond the buffer", "lengths from 0 to 6; found 7",
       [](call_inputs& d) {
         d.list = {6, 7};
       }},
  };
  check_refused("fnet_backward", list, [](call_inputs& d) {
    attn::execution serial;
    compiled_fnet<float>::backward(d.from, {.x = d.to}, {.lengths = d.list}, serial);
  });
}

}  // namespace testing::fnet_backward_tests
