// The matrix unit's model in the place of AMX, in builds as wide as those with AMX, in others the model of pairs:
// operators with bf16 elements give what they give in float, up to rounding, whatever their lengths and dims. It is
// thousands of times slower: few shapes.
#if !defined(ATTN_BF16_MODEL)
#define ATTN_BF16_MODEL
#endif
#if defined(__AVX512F__)
#define ATTN_AMX_MODEL
#endif
#include <attn/core/threads.hpp>
#include <attn/layers/project_backward.hpp>
#include <attn/low_rank/linformer.hpp>
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/sliding_window.hpp>

#include <cmath>
#include <vector>

#include "support/catch.hpp"

namespace {

using attn::idx_t;
using Eigen::bfloat16;

// The same numbers as bf16 and as float.
struct numbers {
  std::vector<bfloat16> rounded;
  std::vector<float> exact;

  explicit numbers(idx_t count, std::uint64_t seed = 0, float size = 1) {
    attn::random_numbers random(seed, 1);
    for (idx_t n = 0; n < count; ++n) {
      rounded.push_back(bfloat16(size * static_cast<float>(random.normal())));
      exact.push_back(static_cast<float>(rounded.back()));
    }
  }
  template <class S>
  const S* data() const {
    if constexpr (std::same_as<S, float>)
      return exact.data();
    else
      return rounded.data();
  }
};

double difference(const std::vector<bfloat16>& a, const std::vector<float>& b) {
  double wrong = 0, whole = 0;
  for (std::size_t n = 0; n < b.size(); ++n) {
    const double error = static_cast<double>(static_cast<float>(a[n])) - static_cast<double>(b[n]);
    wrong += error * error, whole += static_cast<double>(b[n]) * static_cast<double>(b[n]);
  }
  return std::sqrt(wrong / whole);
}

struct shape {
  idx_t queries, keys, dim, dim_v;
};
const shape shapes[] = {{5, 7, 3, 5}, {13, 40, 32, 32}, {100, 130, 64, 40}, {97, 97, 80, 33}};

// run(element, q, k, v, out) for both types; results are near each other.
template <class Run>
void compare(const shape& s, Run&& run, double tolerance = 0x1p-8) {
  CAPTURE(s.queries, s.keys, s.dim, s.dim_v);
  const numbers q(2 * s.queries * s.dim, 1), k(2 * s.keys * s.dim, 2), v(2 * s.keys * s.dim_v, 3);
  std::vector<bfloat16> rounded(static_cast<std::size_t>(2 * s.queries * s.dim_v));
  std::vector<float> exact(rounded.size());
  const auto call = [&]<class S>(std::vector<S>& out) {
    const auto view = [&](const numbers& x, idx_t length, idx_t dim) {
      return attn::tensor_view<const S>(x.data<S>(), {1, 2, length, dim});
    };
    run(S(), view(q, s.queries, s.dim), view(k, s.keys, s.dim), view(v, s.keys, s.dim_v),
        attn::tensor_view<S>(out.data(), {1, 2, s.queries, s.dim_v}));
  };
  call(rounded), call(exact);
  CHECK(difference(rounded, exact) < tolerance);
}

#if defined(__AVX512F__)
static_assert(attn::detail::matrix_unit_compiled);
#endif

TEST_CASE("The matrix unit: exact softmax", "[matrix_unit]") {
  for (const shape& s : shapes) {
    compare(s, [](auto, auto q, auto k, auto v, auto out) { attn::full_softmax(q, k, v, out); });
    compare(s, [](auto, auto q, auto k, auto v, auto out) { attn::full_softmax(q, k, v, out, {.causal = true}); });
    compare(s, [](auto, auto q, auto k, auto v, auto out) {
      attn::sliding_window(q, k, v, out, {.left = 9, .right = 3}, attn::execution(2));
    });
  }
}

TEST_CASE("The matrix unit: values that are not finite reach only those who see them", "[matrix_unit]") {
  const idx_t length = 70, dim = 32;
  numbers q(length * dim, 1), k(length * dim, 2), v(length * dim, 3);
  std::vector<bfloat16> plain(static_cast<std::size_t>(length * dim)), found = plain;
  const auto run = [&](std::vector<bfloat16>& out) {
    const auto view = [&](const numbers& x) {
      return attn::tensor_view<const bfloat16>(x.rounded.data(), {1, 1, length, dim});
    };
    attn::full_softmax(view(q), view(k), view(v), attn::tensor_view<bfloat16>(out.data(), {1, 1, length, dim}),
                       {.causal = true});
  };
  run(plain);
  const idx_t bad = 41;
  v.rounded[static_cast<std::size_t>(bad * dim + 5)] = std::numeric_limits<bfloat16>::quiet_NaN();
  run(found);
  double worst = 0;
  for (idx_t i = 0; i < length; ++i)
    for (idx_t d = 0; d < dim; ++d) {
      const float a = static_cast<float>(plain[static_cast<std::size_t>(i * dim + d)]),
                  b = static_cast<float>(found[static_cast<std::size_t>(i * dim + d)]);
      if (i >= bad && d == 5)
        CHECK(std::isnan(b));
      else
        worst = std::max(worst, static_cast<double>(std::abs(a - b)));
    }
  CHECK(worst == 0);
}

TEST_CASE("The matrix unit: gradients of exact softmax", "[matrix_unit]") {
  for (const shape& s : shapes) {
    CAPTURE(s.queries, s.keys, s.dim, s.dim_v);
    const numbers q(s.queries * s.dim, 1), k(s.keys * s.dim, 2), v(s.keys * s.dim_v, 3), d(s.queries * s.dim_v, 4);
    const auto gradients = [&]<class S>(S) {
      const auto count = [](idx_t rows, idx_t dim) { return static_cast<std::size_t>(rows * dim); };
      std::vector<S> out(count(s.queries, s.dim_v)), dq(count(s.queries, s.dim)), dk(count(s.keys, s.dim)),
          dv(count(s.keys, s.dim_v));
      const auto in = [](const numbers& x, idx_t rows, idx_t dim) {
        return attn::tensor_view<const S>(x.data<S>(), {1, 1, rows, dim});
      };
      const auto to = [](std::vector<S>& x, idx_t rows, idx_t dim) {
        return attn::tensor_view<S>(x.data(), {1, 1, rows, dim});
      };
      const auto query = in(q, s.queries, s.dim), key = in(k, s.keys, s.dim), value = in(v, s.keys, s.dim_v);
      const auto result = to(out, s.queries, s.dim_v);
      attn::full_softmax(query, key, value, result);
      attn::full_softmax_backward(
          query, key, value, result, in(d, s.queries, s.dim_v),
          {.q = to(dq, s.queries, s.dim), .k = to(dk, s.keys, s.dim), .v = to(dv, s.keys, s.dim_v)});
      dq.insert(dq.end(), dk.begin(), dk.end());
      dq.insert(dq.end(), dv.begin(), dv.end());
      return dq;
    };
    CHECK(difference(gradients(bfloat16()), gradients(float())) < 0x1p-7);
  }
}

TEST_CASE("The matrix unit: linformer, lengths within a pair", "[matrix_unit]") {
  for (idx_t length : {39, 64, 130}) {
    const idx_t rank = 20, dim = 48;
    const numbers e(rank * length, 5, 0.1f);
    compare(
        {30, length, dim, dim},
        [&]<class S>(S, auto q, auto k, auto v, auto out) {
          const attn::tensor_view<const S, 3> by(e.data<S>(), {1, rank, length});
          const idx_t seen[] = {length - 1};
          attn::linformer(q, k, v, out, by, by, {.key_lengths = seen});
        },
        1.5 * 0x1p-8);
  }
}

TEST_CASE("The matrix unit: projections and their gradients", "[matrix_unit]") {
  for (const auto& [length, inputs, outputs] : {std::array<idx_t, 3>{7, 33, 5}, {61, 70, 40}}) {
    CAPTURE(length, inputs, outputs);
    const numbers x(length * inputs, 1), w(outputs * inputs, 2), d(length * outputs, 3);
    const auto run = [&, length = length, inputs = inputs, outputs = outputs]<class S>(S) {
      std::vector<S> out(static_cast<std::size_t>(length * outputs)), dx(static_cast<std::size_t>(length * inputs)),
          dw(static_cast<std::size_t>(outputs * inputs));
      const attn::tensor_view<const S, 3> from(x.data<S>(), {1, length, inputs}),
          d_out(d.data<S>(), {1, length, outputs});
      const attn::tensor_view<const S, 2> weight(w.data<S>(), {outputs, inputs});
      attn::project(from, attn::tensor_view<S, 3>(out.data(), {1, length, outputs}), {.weight = weight});
      attn::project_backward(from, {.weight = weight}, d_out,
                             {.x = {dx.data(), {1, length, inputs}}, .weight = {dw.data(), {outputs, inputs}}});
      out.insert(out.end(), dx.begin(), dx.end());
      out.insert(out.end(), dw.begin(), dw.end());
      return out;
    };
    CHECK(difference(run(bfloat16()), run(float())) < 0x1p-8);
  }
}

// precision::fast: run(element, q, k, v, out, execution) with floats, or halves, against the same in standard
// precision.
#if defined(__AVX512F__)
constexpr double fast_float = 2e-5;
#else  // as precise as without
constexpr double fast_float = 0;
#endif

template <class S, class Run>
void compare_fast(const shape& s, Run&& run, double least, double most) {
  CAPTURE(s.queries, s.keys, s.dim, s.dim_v);
  const auto random = [&](idx_t count, std::uint64_t seed) {
    std::vector<S> x;
    attn::random_numbers draw(seed, 1);
    for (idx_t n = 0; n < count; ++n) x.push_back(static_cast<S>(static_cast<float>(draw.normal())));
    return x;
  };
  const auto q = random(2 * s.queries * s.dim, 1), k = random(2 * s.keys * s.dim, 2),
             v = random(2 * s.keys * s.dim_v, 3);
  std::vector<S> standard(static_cast<std::size_t>(2 * s.queries * s.dim_v)), fast = standard;
  attn::execution exec;
  const auto call = [&](std::vector<S>& out) {
    const auto view = [&](const std::vector<S>& x, idx_t length, idx_t dim) {
      return attn::tensor_view<const S>(x.data(), {1, 2, length, dim});
    };
    run(S(), view(q, s.queries, s.dim), view(k, s.keys, s.dim), view(v, s.keys, s.dim_v),
        attn::tensor_view<S>(out.data(), {1, 2, s.queries, s.dim_v}), exec);
  };
  call(standard);
  exec.set_precision(attn::precision::fast);
  call(fast);
  double wrong = 0, whole = 0;
  for (std::size_t n = 0; n < fast.size(); ++n) {
    const double a = static_cast<double>(static_cast<float>(fast[n])),
                 b = static_cast<double>(static_cast<float>(standard[n]));
    wrong += (a - b) * (a - b), whole += b * b;
  }
  const double error = std::sqrt(wrong / whole);
  CHECK(error >= least);  // it is another product
  CHECK(error <= most);
}
template <class Run>
void compare_fast(const shape& s, Run&& run) {
  compare_fast<float>(s, run, fast_float / 100, fast_float);
  compare_fast<Eigen::half>(s, run, 1e-4, 0x1p-7);
}

TEST_CASE("precision::fast: exact softmax", "[matrix_unit]") {
  for (const shape& s : shapes) {
    compare_fast(s, [](auto, auto q, auto k, auto v, auto out, auto& exec) { attn::full_softmax(q, k, v, out, exec); });
    compare_fast(s, [](auto, auto q, auto k, auto v, auto out, auto& exec) {
      attn::sliding_window(q, k, v, out, {.left = 9, .right = 3}, exec);
    });
  }
}

TEST_CASE("precision::fast: gradients are of standard products, however steep the scores", "[matrix_unit]") {
  const idx_t length = 70, dim = 32;
  std::vector<Eigen::half> x[4];
  for (std::uint64_t seed : {1, 2, 3, 4}) {
    attn::random_numbers draw(seed, 1);
    for (idx_t n = 0; n < length * dim; ++n)
      x[seed - 1].push_back(Eigen::half(static_cast<float>(draw.normal()) * (seed == 1 ? 1000 : 1)));
  }
  const auto view = [&](auto& numbers) {
    return attn::tensor_view<Eigen::half>(numbers.data(), {1, 1, length, dim});
  };
  const auto gradient = [&](attn::precision precision) {
    attn::execution exec;
    exec.set_precision(precision);
    std::vector<Eigen::half> out(x[0].size()), dv = out;
    std::vector<float> lse(static_cast<std::size_t>(length));
    const attn::tensor_view<float, 3> sums(lse.data(), {1, 1, length});
    attn::full_softmax(view(x[0]), view(x[1]), view(x[2]), view(out), {.causal = true, .lse = sums}, exec);
    // With `fast` lse is computed anew, whether it is given or not.
    const bool given = precision == attn::precision::fast;
    attn::full_softmax_backward(view(x[0]), view(x[1]), view(x[2]), view(out), view(x[3]), {.v = view(dv)},
                                {.causal = true, .lse = given ? sums : attn::tensor_view<float, 3>()}, exec);
    CHECK(exec.precision() == precision);
    return dv;
  };
  CHECK(gradient(attn::precision::fast) == gradient(attn::precision::standard));
}

TEST_CASE("precision::fast: linformer and projections", "[matrix_unit]") {
  for (const shape& s : {shape{30, 39, 24, 24}, {30, 130, 48, 48}}) {
    compare_fast(s, [&]<class S>(S, auto q, auto k, auto v, auto out, auto& exec) {
      const numbers e(20 * s.keys, 5, 0.1f);
      const std::vector<S> by(e.exact.begin(), e.exact.end());
      const attn::tensor_view<const S, 3> projection(by.data(), {1, 20, s.keys});
      const idx_t seen[] = {s.keys - 1};
      attn::linformer(q, k, v, out, projection, projection, {.key_lengths = seen}, exec);
    });
    compare_fast(s, [&]<class S>(S, auto q, auto, auto v, auto out, auto& exec) {
      const attn::tensor_view<const S, 3> x(q.data(), {1, s.queries, s.dim});
      const attn::tensor_view<const S, 2> weight(v.data(), {s.dim_v, s.dim});
      for (idx_t item : {0, 1})
        attn::project(x, attn::tensor_view<S, 3>(out.data() + item * s.queries * s.dim_v, {1, s.queries, s.dim_v}),
                      {.weight = weight}, exec);
    });
  }
}

TEST_CASE("precision::fast: values that are not finite reach only those who see them", "[matrix_unit]") {
  const idx_t length = 70, dim = 32;
  const numbers q(length * dim, 1), k(length * dim, 2);
  numbers v(length * dim, 3);
  attn::execution exec;
  exec.set_precision(attn::precision::fast);
  const auto run = [&] {
    std::vector<float> out(static_cast<std::size_t>(length * dim));
    const auto view = [&](const numbers& x) {
      return attn::tensor_view<const float>(x.exact.data(), {1, 1, length, dim});
    };
    attn::full_softmax(view(q), view(k), view(v), attn::tensor_view<float>(out.data(), {1, 1, length, dim}),
                       {.causal = true}, exec);
    return out;
  };
  const std::vector<float> plain = run();
  const idx_t bad = 41;
  for (float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
    v.exact[static_cast<std::size_t>(bad * dim + 5)] = wrong;
    const std::vector<float> found = run();
    for (std::size_t n = 0; n < found.size(); ++n)
      if (static_cast<idx_t>(n) / dim < bad || n % dim != 5) REQUIRE(found[n] == plain[n]);
    if (std::isnan(wrong)) CHECK(std::isnan(found[static_cast<std::size_t>(bad * dim + 5)]));
  }
}

}  // namespace
