// rotary against its formula in long double: layouts of pairs, parts of the dims, positions, tables, types, memory;
// frequencies of the scalings; the backward pass.
#include <attn/core/rotary.hpp>

#include <algorithm>
#include <cmath>
#include <functional>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::rotary_tests {
namespace {

struct rotation {
  idx_t dims;
  bool interleaved = false;
  long double magnitude = 1;
  std::vector<double> frequencies{};
  std::function<long double(idx_t b, idx_t i)> position;
};

template <class S>
tensor<double> expected(const tensor<S>& x, const rotation& r, bool back = false) {
  tensor<double> y = cast<double>(x);
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t n = 0; n < r.dims / 2; ++n) {
          const auto pair = static_cast<long double>(n);
          const long double frequency = r.frequencies.empty()
                                            ? std::pow(10000.0L, -2 * pair / static_cast<long double>(r.dims))
                                            : r.frequencies[static_cast<std::size_t>(n)];
          const long double angle = r.position(b, i) * frequency, c = r.magnitude * std::cos(angle),
                            s = (back ? -1 : 1) * r.magnitude * std::sin(angle);
          const idx_t first = r.interleaved ? 2 * n : n, second = r.interleaved ? 2 * n + 1 : n + r.dims / 2;
          const auto a = static_cast<long double>(static_cast<double>(x(b, h, i, first))),
                     d = static_cast<long double>(static_cast<double>(x(b, h, i, second)));
          y(b, h, i, first) = static_cast<double>(a * c - d * s);
          y(b, h, i, second) = static_cast<double>(d * c + a * s);
        }
  return y;
}

// The rounding of a product or two, and of the frequencies and angles in double.
template <class S>
double bound(double position) {
  const double storage = sizeof(S) == 2 ? tolerance<S>::out : 0;
  return storage + (std::is_same_v<S, double> ? 4e-16 : 4e-7) + 4e-16 * position;
}

template <class S>
void check(const rotation& r, const attn::rotary_options<S>& o, const problem_shape& shape, double furthest) {
  const tensor<S> x = cast<S>(random_normal(1, shape.batch, shape.heads, shape.queries, shape.dim));
  const tensor<double> wanted = expected(x, r);
  tensor<S> out(shape.batch, shape.heads, shape.queries, shape.dim, S(7)), in_place = x;
  attn::execution serial, three(3, 0);
  attn::rotary(view(x), view(out), o, serial);
  CHECK(relative_error(cast<double>(out), wanted) <= bound<S>(furthest));
  attn::rotary(view(in_place), view(in_place), o, three);
  CHECK(in_place == out);

  const tensor<double> back = expected(x, r, true);
  tensor<S> dx(shape.batch, shape.heads, shape.queries, shape.dim, S(7)), added(dx);
  attn::rotary_backward(view(x), {.x = view(dx)}, o, three);
  CHECK(relative_error(cast<double>(dx), back) <= bound<S>(furthest));
  attn::rotary_backward(view(x), {.x = view(added), .accumulate = true}, o, serial);
  tensor<double> sum = back;
  for (double& each : sum.data) each += 7;
  CHECK(relative_error(cast<double>(added), sum) <= bound<S>(furthest));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("rotary: pairs, parts of the dims, positions", "[rotary]", all_types) {
  for (bool interleaved : {false, true})
    for (auto [dim, dims] : {std::array<idx_t, 2>{2, 2}, {6, 6}, {64, 64}, {80, 80}, {128, 32}, {33, 20}, {5, 0}})
      for (idx_t first : {idx_t(0), idx_t(37), idx_t(-20), idx_t(1000000)}) {
        attn::rotary_options<TestType> o{.first_position = first, .interleaved = interleaved};
        if (dims != dim) o.dims = dims;
        CAPTURE(interleaved, dim, dims, first);
        const rotation r{
            .dims = dims, .interleaved = interleaved, .position = [=](idx_t, idx_t i) { return first + i; }};
        check<TestType>(r, o, {.batch = 2, .heads = 3, .queries = 37, .dim = dim}, std::abs(double(first)) + 37);
      }
}

TEMPLATE_LIST_TEST_CASE("rotary: positions of every token, frequencies, magnitude, tables", "[rotary]", exact_types) {
  using T = TestType;
  const problem_shape shape{.batch = 2, .heads = 2, .queries = 21, .dim = 24};
  std::vector<idx_t> positions(42);
  random_source random(3);
  for (idx_t& p : positions) p = random.below(500) - 100;
  const auto at = [&](idx_t b, idx_t i) {
    return static_cast<long double>(positions[static_cast<std::size_t>(b * 21 + i)]);
  };
  const std::vector<double> frequencies = attn::rotary_llama3(24, {.base = 500, .factor = 8, .original_length = 64});
  for (bool interleaved : {false, true}) {
    attn::rotary_options<T> o{.positions = {positions.data(), {2, 21}}, .interleaved = interleaved};
    check<T>({.dims = 24, .interleaved = interleaved, .position = at}, o, shape, 500);
    o.frequencies = frequencies, o.magnitude = 1.25;
    const rotation r{.dims = 24,
                     .interleaved = interleaved,
                     .magnitude = 1.25L,
                     .frequencies = frequencies,
                     .position = at};
    check<T>(r, o, shape, 500);
    o.positions = {positions.data(), {1, 21}};
    rotation shared = r;
    shared.position = [&](idx_t, idx_t i) { return at(0, i); };
    check<T>(shared, o, shape, 500);

    tensor<T> cos(1, 1, 30, 12), sin = cos;
    for (idx_t p = 0; p < 30; ++p)
      for (idx_t n = 0; n < 12; ++n) {
        const double angle = static_cast<double>(p) * frequencies[static_cast<std::size_t>(n)];
        cos(0, 0, p, n) = static_cast<T>(1.25 * std::cos(angle));
        sin(0, 0, p, n) = static_cast<T>(1.25 * std::sin(angle));
      }
    rotation listed = r;
    listed.position = [](idx_t, idx_t i) { return static_cast<long double>(i + 5); };
    check<T>(listed,
             {.first_position = 5, .interleaved = interleaved, .cos = {cos.data.data(), {30, 12}},
              .sin = {sin.data.data(), {30, 12}}},
             shape, 30);
  }
}

TEST_CASE("rotary: any strides, and no tokens", "[rotary]") {
  const tensor<float> x = cast<float>(random_normal(1, 2, 3, 9, 16));
  tensor<float> plain(2, 3, 9, 16);
  attn::rotary(view(x), view(plain));
  std::vector<float> from(2 * 3 * 9 * 16 * 2), to(from.size(), 7);  // [length, head, batch, dim], every other number
  const attn::tensor_view<float> strided(from.data(), {2, 3, 9, 16}, {32, 64, 192, 2}),
      out(to.data(), {2, 3, 9, 16}, {32, 64, 192, 2});
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 3; ++h)
      for (idx_t i = 0; i < 9; ++i)
        for (idx_t d = 0; d < 16; ++d) strided(b, h, i, d) = x(b, h, i, d);
  attn::rotary(strided, out);
  bool same = true;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 3; ++h)
      for (idx_t i = 0; i < 9; ++i)
        for (idx_t d = 0; d < 16; ++d) same = same && out(b, h, i, d) == plain(b, h, i, d);
  CHECK(same);
  CHECK(std::count(to.begin(), to.end(), 7.0f) == 2 * 3 * 9 * 16);
  tensor<float> none(2, 3, 0, 16);
  attn::rotary(view(none), view(none));
}

TEST_CASE("rotary: frequencies of the scalings", "[rotary]") {
  const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    for (std::size_t n = 0; n < a.size(); ++n) CHECK(std::abs(a[n] - b[n]) <= 1e-7 * b[n]);
  };
  const attn::rotary_scaling s{.factor = 4, .original_length = 32};
  close(attn::rotary_frequencies(8), {1, 0.1, 0.01, 0.001});
  close(attn::rotary_linear(8, s), {0.25, 0.025, 0.0025, 0.00025});
  const double base = 10000 * std::pow(4.0, 8.0 / 6);
  close(attn::rotary_ntk(8, s), {1, std::pow(base, -0.25), std::pow(base, -0.5), 0.001 / 4});
  // Turns within 32 positions: 5.1, 0.51, 0.051, 0.0051. Pairs from low = 0 to high = 1 are on the ramp.
  close(attn::rotary_yarn(8, s), {1, 0.025, 0.0025, 0.00025});
  // Wavelengths 6.3, 62.8, ...: below 8 they stay, above 32 they are multiplied.
  close(attn::rotary_llama3(8, s), {1, 0.025, 0.0025, 0.00025});
  const double turns = 12 / 6.283185307179586;  // on the ramp from 1 to 4
  close(attn::rotary_llama3(2, {.factor = 4, .original_length = 12}), {1 - (1 - (turns - 1) / 3) * 0.75});
  // fast_turns is what is given, 32 too: then 12 / 2 pi turns are on a longer ramp
  close(attn::rotary_llama3(2, {.factor = 4, .original_length = 12, .fast_turns = 32}),
        {1 - (1 - (turns - 1) / 31) * 0.75});
  CHECK(attn::rotary_yarn(64, s) == attn::rotary_yarn(64, {.factor = 4, .original_length = 32, .fast_turns = 32}));
  CHECK(std::abs(attn::rotary_magnitude(4) - 1.138629436) < 1e-9);
  CHECK(attn::rotary_magnitude(0.5) == 1);
  CHECK(std::abs(attn::rotary_magnitude(4, 0.707) - (0.0707 * std::log(4.0) + 1)) < 1e-12);
}

TEST_CASE("rotary: the ramp of YaRN in whole pairs of dims and without rounding", "[rotary]") {
  // gpt-oss: from pair 64 ln(4096 / 64 pi) / (2 ln 150000) = 8.093 to 64 ln(4096 / 2 pi) / (2 ln 150000) = 17.398; in
  // whole pairs from 8 to 18.
  const auto on_ramp = [](bool whole, std::size_t n) {
    const auto scaled = attn::rotary_yarn(
        64, {.base = 150000, .factor = 32, .original_length = 4096, .whole_pairs = whole});
    const double f = std::pow(150000.0, -2.0 * static_cast<double>(n) / 64);
    return (1 - scaled[n] / f) / (1 - 1 / 32.0);
  };
  const double low = 64 * std::log(4096 / (64 * std::acos(-1.0))) / (2 * std::log(150000.0)),
               high = 64 * std::log(4096 / (2 * std::acos(-1.0))) / (2 * std::log(150000.0));
  CHECK(std::abs(low - 8.093) < 1e-3);
  CHECK(std::abs(high - 17.398) < 1e-3);
  for (std::size_t n = 0; n < 32; ++n) {
    const double pair = static_cast<double>(n);
    CHECK(std::abs(on_ramp(false, n) - std::clamp((pair - low) / (high - low), 0.0, 1.0)) < 1e-12);
    CHECK(std::abs(on_ramp(true, n) - std::clamp((pair - 8) / 10, 0.0, 1.0)) < 1e-12);
  }
}

TEST_CASE("rotary refuses what does not fit", "[rotary]") {
  const tensor<float> x(2, 3, 9, 16, 1);
  tensor<float> out(2, 3, 9, 16, 7);
  std::vector<idx_t> positions(18, 3);
  const tensor<float> table(1, 1, 10, 8, 1);
  const attn::tensor_view<const float, 2> ten(table.data.data(), {10, 8}), nine(table.data.data(), {9, 8});
  const auto check = [&](const char* says, const attn::rotary_options<float>& o, auto from, auto to) {
    const std::string message = refusal([&] { attn::rotary(from, to, o); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "rotary"));
    CHECK(message.find(says) != std::string::npos);
    CHECK(out == tensor<float>(2, 3, 9, 16, 7));
  };
  const auto wrong = [&](const char* says, const attn::rotary_options<float>& o) {
    check(says, o, view(x), view(out));
  };
  wrong("an even number of dims up to 16; found 7", {.dims = 7});
  wrong("an even number of dims up to 16; found 18", {.dims = 18});
  wrong("an even number of dims up to 16; found -2", {.dims = -2});
  check("found 15", {}, view(x).slice(3, 0, 15), view(out).slice(3, 0, 15));
  wrong("base > 0", {.base = 0});
  wrong("base > 0", {.base = HUGE_VAL});
  wrong("finite magnitude", {.magnitude = std::nan("")});
  const std::vector<double> seven(7, 1.0), infinite(8, HUGE_VAL);
  wrong("frequencies = dims / 2 = 8; found 7", {.frequencies = seven});
  wrong("finite frequencies", {.frequencies = infinite});
  wrong("positions length = x length 9; found 8", {.positions = {positions.data(), {2, 8}}});
  wrong("positions batch", {.positions = {positions.data(), {3, 6}}});
  wrong("positions from", {.first_position = std::numeric_limits<idx_t>::max()});
  wrong("positions from", {.first_position = (idx_t(1) << 40) - 3});
  wrong("positions from 0 to 9; found 10", {.first_position = 2, .cos = ten, .sin = ten});
  wrong("positions from 0 to 9; found -1", {.first_position = -1, .cos = ten, .sin = ten});
  wrong("sin positions = cos positions 10; found 9", {.cos = ten, .sin = nine});
  wrong("sin positions", {.cos = ten});
  wrong("cos columns = dims / 2 = 4; found 8", {.dims = 8, .cos = ten, .sin = ten});
  wrong("either frequencies or a table", {.frequencies = std::vector<double>(8, 1.0), .cos = ten, .sin = ten});
  check("out length = x length = 9; found 8", {}, view(x), view(out).slice(2, 0, 8));
  check("overlap", {}, view(std::as_const(out)).slice(2, 0, 8), view(out).slice(2, 1, 8));
  check("null", {}, attn::tensor_view<const float>(nullptr, {2, 3, 9, 16}), view(out));
  CHECK(well_formed(refusal([] { attn::rotary_frequencies(7); }), "rotary_frequencies"));
  CHECK(well_formed(refusal([] { attn::rotary_linear(8, {.factor = 0}); }), "rotary_linear"));
  for (const attn::rotary_scaling& s :
       {attn::rotary_scaling{.base = -1}, {.base = 1}, {.factor = HUGE_VAL}, {.original_length = 0},
        {.original_length = -8192}, {.fast_turns = 0, .slow_turns = 0}, {.fast_turns = -3, .slow_turns = -1},
        {.fast_turns = std::nan("")}, {.fast_turns = 1, .slow_turns = 1}, {.slow_turns = std::nan("")}}) {
    CHECK(well_formed(refusal([&] { attn::rotary_yarn(8, s); }), "rotary_yarn"));
    if (s.base != 1) CHECK(well_formed(refusal([&] { attn::rotary_llama3(8, s); }), "rotary_llama3"));
  }
  wrong("a magnitude of 1 beside a table", {.magnitude = 2, .cos = ten, .sin = ten});
  wrong("finite frequencies", {.frequencies = std::vector<double>(8, 1e308)});
  const std::string message = refusal([&] { attn::rotary_backward(view(x), {.x = view(out)}, {.dims = 3}); });
  CHECK(well_formed(message, "rotary_backward"));
}

}  // namespace testing::rotary_tests
