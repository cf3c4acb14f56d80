// fnet against its reference: any length and dim, all types, lengths, layouts; what it refuses.
#include "reference/fnet.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include "support/call_fourier.hpp"
#include "support/refused.hpp"
#include "support/run.hpp"

namespace testing::fnet_tests {
namespace {

struct fnet_shape {
  idx_t batch = 1, heads = 1, length = 64, dim = 16;
};

template <class S>
tensor<S> mixed(const tensor<S>& x, const std::vector<idx_t>& lengths, attn::execution& execution) {
  tensor<S> out(x.batch(), x.heads(), x.length(), x.dim(), S(7));
  compiled_fnet<S>::call(view(x), view(out), {.lengths = lengths}, execution);
  return out;
}

// Against the reference on the same rounded input.
template <class S>
void check(const fnet_shape& s, const std::vector<idx_t>& lengths = {}) {
  CAPTURE(s.batch, s.heads, s.length, s.dim);
  const tensor<double> x =
      rounded<S>(random_normal(static_cast<std::uint64_t>(s.length * 1000 + s.dim), s.batch, s.heads, s.length, s.dim));
  attn::execution serial;
  CHECK(relative_error(cast<double>(mixed(cast<S>(x), lengths, serial)), reference::fnet(x, {lengths})) <=
        tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("fnet: every small length with every small dim", "[fnet]", exact_types) {
  for (idx_t length = 0; length <= 40; ++length)
    for (idx_t dim = 0; dim <= 40; ++dim) check<TestType>({.length = length, .dim = dim});
}

TEMPLATE_LIST_TEST_CASE("fnet: dims about the edges of packets, primes and products", "[fnet]", exact_types) {
  for (idx_t dim : {47, 48, 49, 61, 62, 63, 64, 65, 66, 67, 96, 97, 127, 128, 129, 191, 257, 509, 512})
    for (idx_t length : {1, 2, 7, 61, 64, 67, 130}) check<TestType>({.length = length, .dim = dim});
}

TEMPLATE_LIST_TEST_CASE("fnet: long sequences", "[fnet]", exact_types) {
  for (idx_t length : {1000, 1024, 1147, 2048, 2187, 3125}) check<TestType>({.length = length, .dim = 5});
}

TEMPLATE_LIST_TEST_CASE("fnet: longer sequences", "[fnet][long]", exact_types) {
  check<TestType>({.length = 4096, .dim = 33});
  for (idx_t length : {4099, 6000}) check<TestType>({.length = length, .dim = 7});
  for (idx_t length : {8192, 8194, 10125}) check<TestType>({.length = length, .dim = 2});
  check<TestType>({.length = 16384, .dim = 1});
}

TEMPLATE_LIST_TEST_CASE("fnet: 16-bit storage computes in float", "[fnet]", storage_types) {
  for (idx_t length : {1, 2, 31, 64, 101, 257})
    for (idx_t dim : {1, 7, 16, 33, 64, 96}) check<TestType>({.batch = 2, .heads = 2, .length = length, .dim = dim});
}

TEMPLATE_LIST_TEST_CASE("fnet: true lengths", "[fnet]", all_types) {
  for (idx_t dim : {6, 40}) {
    check<TestType>({.batch = 4, .heads = 2, .length = 50, .dim = dim}, {50, 0, 37, 37});
    check<TestType>({.batch = 3, .heads = 1, .length = 74, .dim = dim}, {1, 74, 73});
    check<TestType>({.batch = 2, .heads = 3, .length = 9, .dim = dim}, {0, 0});
  }
}

TEMPLATE_LIST_TEST_CASE("fnet: many slices on many threads", "[fnet]", exact_types) {
  const std::vector<idx_t> lengths = {33, 33, 70, 70, 12, 0, 70, 67};
  const tensor<TestType> x = cast<TestType>(random_normal(5, 8, 3, 70, 40));
  attn::execution serial, five(5);
  const auto wanted = mixed(x, lengths, serial);
  CHECK(relative_error(wanted, reference::fnet(cast<double>(x), {lengths})) <= tolerance<TestType>::out);
  CHECK(mixed(x, lengths, five) == wanted);
}

TEMPLATE_LIST_TEST_CASE("fnet: later waves, by threads as by one", "[fnet]", exact_types) {
  // Slices of 1 MiB, of which 4 MiB go together; lengths change within a wave and between waves.
  const std::vector<idx_t> lengths = {1000, 1000, 64, 1000, 999, 0, 1000, 1000};
  const tensor<TestType> x = cast<TestType>(random_normal(8, 8, 2, 1000, 256));
  attn::execution serial, two(2), three(3);
  const auto wanted = mixed(x, lengths, serial);
  CHECK(mixed(x, lengths, two) == wanted);
  CHECK(mixed(x, lengths, three) == wanted);
}

TEMPLATE_LIST_TEST_CASE("fnet: x and out of different layouts", "[fnet]", exact_types) {
  using T = TestType;
  const idx_t batch = 2, heads = 3, length = 37, dim = 29;
  const tensor<T> x = cast<T>(random_normal(9, batch, heads, length, dim));
  attn::execution serial;
  const tensor<T> wanted = mixed(x, {}, serial);
  const std::array<idx_t, 4> extents{batch, heads, length, dim};
  const std::array<idx_t, 4> layouts[] = {{heads * length * dim, length * dim, dim, 1},
                                          {heads * length * dim, dim, heads * dim, 1},
                                          {heads * length * dim, length * dim, 1, length}};
  for (const auto& from : layouts)
    for (const auto& to : layouts) {
      std::vector<T> in(x.data.size()), out(x.data.size(), T(7));
      const attn::tensor_view<T> in_view(in.data(), extents, from), out_view(out.data(), extents, to);
      const auto each = [&](auto&& body) {
        for (idx_t b = 0; b < batch; ++b)
          for (idx_t h = 0; h < heads; ++h)
            for (idx_t t = 0; t < length; ++t)
              for (idx_t d = 0; d < dim; ++d) body(b, h, t, d);
      };
      each([&](auto... i) { in_view(i...) = x(i...); });
      compiled_fnet<T>::call(in_view, out_view, {}, serial);
      idx_t different = 0;
      each([&](auto... i) { different += out_view(i...) != wanted(i...); });
      CHECK(different == 0);
    }
}

TEMPLATE_LIST_TEST_CASE("fnet: twice gives the even part of the sequence", "[fnet]", exact_types) {
  // Only that part of x counts; it comes back L D times as large.
  const idx_t length = 48, dim = 40;
  const tensor<TestType> x = cast<TestType>(random_normal(6, 1, 1, length, dim));
  attn::execution serial;
  const tensor<TestType> twice = mixed(mixed(x, {}, serial), {}, serial);
  tensor<double> even(1, 1, length, dim);
  for (idx_t t = 0; t < length; ++t)
    for (idx_t d = 0; d < dim; ++d)
      even(0, 0, t, d) =
          static_cast<double>(length * dim) / 2 *
          (static_cast<double>(x(0, 0, t, d)) + static_cast<double>(x(0, 0, (length - t) % length, (dim - d) % dim)));
  CHECK(relative_error(twice, even) <= tolerance<TestType>::out);
}

TEST_CASE("fnet: scratch is what the header says", "[fnet]") {
  constexpr idx_t wide = 2 * attn::detail::width<float>;
  const auto convolves = [](idx_t n) { return !attn::detail::fourier_plan<float>::is_smooth(n); };
  for (auto [length, dim] : {std::array<idx_t, 2>{4096, 64}, {4099, 64}, {64, 4099}, {1000, 1}, {1009, 250}}) {
    attn::execution serial;
    mixed(tensor<float>(1, 1, length, dim, 1), {}, serial);
    const idx_t rows = length * ((dim / 2 + wide) / wide);
    // A convolution takes a size of factors 2, 3 and 5 from 2 n - 1 on.
    const double spare = 2.2 * static_cast<double>(std::max(length * convolves(length), dim * convolves(dim)));
    const double tables = static_cast<double>(8 * length * (1 + convolves(length)) + 6 * dim * (1 + convolves(dim)));
    CAPTURE(length, dim);
    CHECK(static_cast<double>(serial.scratch_bytes()) <=
          4 * (static_cast<double>(wide) * (static_cast<double>(rows + dim) + spare) + tables) + 20000);
  }
}

TEST_CASE("fnet: large numbers do not overflow on the way", "[fnet]") {
  tensor<float> x(1, 1, 6, 10, 0x1p120f);
  attn::execution serial;
  const tensor<float> out = mixed(x, {}, serial);
  CHECK(out(0, 0, 0, 0) == 60 * 0x1p120f);
}

TEST_CASE("fnet refuses what does not fit", "[fnet]") {
  struct call_inputs {
    tensor<float> x{2, 3, 6, 8, 0.5f}, out{2, 3, 6, 8, 7};
    in_view<float> from = view(std::as_const(x));
    out_view<float> to = view(out);
    std::vector<idx_t> list;
    attn::fnet_options<float> options;

    call_inputs() = default;
    call_inputs(const call_inputs&) = delete;
    std::vector<const tensor<float>*> written() const { return {&out}; }
    void lengths(std::vector<idx_t> values) { list = std::move(values), options.lengths = list; }
  };
  const std::vector<refused<call_inputs>> list = {
      {"another batch of out", "batch", [](call_inputs& d) { d.to = d.to.slice(0, 0, 1); }},
      {"other heads of out", "heads", [](call_inputs& d) { d.to = d.to.slice(1, 0, 2); }},
      {"another length of out", "out length = x length 6; found 5", [](call_inputs& d) { d.to = d.to.slice(2, 0, 5); }},
      {"another dim of out", "out dim = x dim 8; found 7", [](call_inputs& d) { d.to = d.to.slice(3, 0, 7); }},
      {"a negative extent", "extents", [](call_inputs& d) { d.from = reshaped(d.x, 2, 3, -6, 8); }},
      {"a null x", "null", [](call_inputs& d) { d.from = null_view(2, 3, 6, 8); }},
      {"a null out", "null", [](call_inputs& d) { d.to = null_view(2, 3, 6, 8); }},
      {"out that is x", "overlap", [](call_inputs& d) { d.from = reshaped(d.out, 2, 3, 6, 8); }},
      {"out whose rows are one", "overlap",
       [](call_inputs& d) { d.to = reshaped(d.out, 2, 3, 6, 8).strided(144, 48, 0, 1); }},
      {"too few lengths", "one per batch item: 2; found 1", [](call_inputs& d) { d.lengths({6}); }},
      {"a length beyond the buffer", "lengths from 0 to 6; found 7",
       [](call_inputs& d) {
         d.lengths({6, 7});
       }},
      {"a negative length", "lengths from 0 to 6; found -1",
       [](call_inputs& d) {
         d.lengths({-1, 6});
       }},
  };
  check_refused("fnet", list, [](call_inputs& d) {
    attn::execution serial;
    compiled_fnet<float>::call(d.from, d.to, d.options, serial);
  });
}

}  // namespace testing::fnet_tests
