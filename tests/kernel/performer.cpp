// performer against its reference: every kernel and option alone and in combination, extremes, all types.
#include <attn/kernel/performer.hpp>

#include "support/call_kernel.hpp"
#include "support/catch.hpp"
#include "support/pairwise.hpp"

namespace testing::performer_tests {
namespace {

using kernel = reference::performer_kernel;
constexpr kernel kernels[] = {kernel::positive, kernel::hyperbolic, kernel::trigonometric, kernel::relu};

performer_problem problem_of(const problem_shape& shape, idx_t feature_heads = 1, idx_t count = 24,
                             std::uint64_t seed = 1) {
  auto p = random_problem<performer_problem>(shape, seed);
  const auto w =
      attn::draw_features<double>(count, std::max<idx_t>(shape.dim, 1), {.seed = seed, .heads = feature_heads});
  p.options.features = tensor<double>(1, feature_heads, count, shape.dim);
  std::copy_n(w.data(), p.options.features.data.size(), p.options.features.data.begin());
  return p;
}

// Exponents of features reach about |q|^2, whose rounding is that of weights: a few times that of a softmax, whose
// scores are smaller. Sines and cosines cancel: their error is that of their terms.
template <class S>
void check(const performer_problem& p, double factor = 2) {
  const bool cancels = p.options.kernel == kernel::trigonometric;
  CHECK((cancels ? error_over_terms<S>(p) : error_of<S>(p)) <= factor * tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("performer: every combination of options", "[performer]", exact_types) {
  for (kernel chosen : kernels)
    for (int bits : selected_bits(4))
      for (int lengths = 0; lengths < 4; ++lengths) {
        const idx_t feature_heads = bits & 8 ? 4 : 1;
        performer_problem p = problem_of(
            {.heads = 4, .queries = lengths == 1 ? 90 : 77, .keys = 90, .dim = 5, .value_dim = 3}, feature_heads, 10);
        p.options.kernel = chosen;
        p.options.causal = bits & 1;
        if (bits & 2) p.options.eps = 0.25;
        if (bits & 4) p.options.scale = 0.5;
        if (chosen == kernel::trigonometric) p.options.scale = bits & 4 ? 0.05 : 0.1;  // denominators well above 0
        if (bits & 4 && chosen == kernel::relu) p.options.feature_eps = 0.1;
        if (bits & 4 && !(bits & 1)) p.options.center_keys = true;
        if (lengths == 1) p.options.lengths = {71, 90};
        if (lengths == 2) p.options.query_lengths = {77, 40}, p.options.key_lengths = {50, 89};
        if (lengths == 3) p.options.key_lengths = {90, 70};
        CAPTURE(int(chosen), bits, lengths);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("performer: feature_eps as published", "[performer]", exact_types) {
  for (double eps : {0.0, 0.3})
    for (idx_t feature_heads : {1, 2, 4})
      for (bool centred : {false, true}) {
        performer_problem p = problem_of({.queries = 10, .keys = 70, .dim = 5, .value_dim = 3}, feature_heads);
        p.options.feature_eps = 0.01;
        p.options.eps = eps;
        p.options.center_keys = centred;
        p.options.key_lengths = {70, 65};
        CAPTURE(eps, feature_heads, centred);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("performer: 16-bit storage computes in float", "[performer]", storage_types) {
  for (bool causal : {false, true})
    for (kernel chosen : {kernel::positive, kernel::relu}) {
      performer_problem p = problem_of({.queries = 130, .keys = 130, .dim = 33, .value_dim = 7});
      p.options.causal = causal;
      p.options.kernel = chosen;
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("performer: odd lengths and dims", "[performer]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t counts[] = {7, 5, 16, 33, 100};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u, 5u})
      for (bool causal : {false, true}) {
        problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + step) % 8], shape.value_dim = dims[(n + 3 * step) % 8];
        performer_problem p = problem_of(shape, 1, counts[(n + step) % 5], n + 1);
        p.options.causal = causal;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, causal);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("performer: queries and keys of different lengths, grouped", "[performer]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300}, {2, 129}, {5, 1},    {129, 60},
                                               {0, 9},   {9, 0},   {64, 128}, {1, 1100}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true})
      for (idx_t feature_heads : {1, 2, 6}) {
        performer_problem p = problem_of(
            {.batch = 1, .heads = 6, .kv_heads = 2, .queries = queries, .keys = keys, .dim = 8}, feature_heads);
        p.options.causal = causal;
        CAPTURE(queries, keys, causal, feature_heads);
        check<TestType>(p);
      }
  check<TestType>(problem_of({.batch = 0}));
  check<TestType>(problem_of({.value_dim = 0}));
  check<TestType>(problem_of({.queries = 20, .keys = 20}, 1, 1), 10);  // one feature: a mean that hardly differs by row
}

TEMPLATE_LIST_TEST_CASE("performer: several segments, on any number of threads", "[performer]", exact_types) {
  for (bool causal : {false, true}) {
    performer_problem p = rounded<TestType>(problem_of(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 40, .keys = 2300, .dim = 16, .value_dim = 5}, 1, 40));
    p.options.causal = causal;
    const auto wanted = expected(p).out, serial = run_serially<TestType>(p).out;
    CHECK(relative_error(serial, wanted) <= 2 * tolerance<TestType>::out);
    attn::execution threads(3, 0);
    CHECK(run<TestType>(p, threads).out == serial);
  }
}

TEST_CASE("performer: waves beyond the first, on any number of threads", "[performer]") {
  CHECK(threads_agree_beyond_one_wave<float, performer_problem>(
      [](const problem_shape& shape) { return problem_of(shape, 1, 12); }));
}

// At norm 100 exponents are about 1000 (base 2), and are known to 1000 units in the last place of 1: so are weights.
TEMPLATE_LIST_TEST_CASE("performer: queries and keys of norm 100 lose digits, nothing else", "[performer]",
                        exact_types) {
  for (kernel chosen : {kernel::positive, kernel::hyperbolic})
    for (bool causal : {false, true})
      for (int kind = 0; kind < 3; ++kind) {
        performer_problem p = problem_of(
            {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 150, .dim = 64, .value_dim = 12}, 1, 64);
        p.options.kernel = chosen;
        p.options.causal = causal;
        for (auto* x : {&p.q, &p.k})
          for (idx_t row = 0; row < x->batch() * x->heads() * x->length(); ++row) {
            double* const numbers = x->data.data() + row * 64;
            double square = 0;
            for (idx_t d = 0; d < 64; ++d) square += numbers[d] * numbers[d];
            for (idx_t d = 0; d < 64; ++d) numbers[d] *= 100 / std::sqrt(square);
          }
        if (kind > 0)  // every key against every query: no feature is large in both
          for (idx_t h = 0; h < 2; ++h)
            for (idx_t i = 0; i < 150; ++i)
              for (idx_t d = 0; d < 64; ++d) p.q(0, h, i, d) = (kind == 1 ? -1 : 1) * p.k(0, 0, i, d);
        CAPTURE(int(chosen), causal, kind);
        CHECK(error_of<TestType>(p) <= 1000 * static_cast<double>(std::numeric_limits<TestType>::epsilon()));
      }
}

// From norm 1e5 on logarithms in float round to steps of hundreds: of the weights nothing is right, but they are
// weights, and sum to 1 (the first value is 1). From norm 1e19 on squares overflow, and keys count as 0. So it is with
// queries, and they may have any norm.
TEMPLATE_LIST_TEST_CASE("performer: keys of any norm give a mean of the values", "[performer]", exact_types) {
  for (kernel chosen : {kernel::positive, kernel::hyperbolic})
    for (bool causal : {false, true})
      for (int long_queries : {0, 1, 2})
        for (double norm : {1e4, 1e5, 1e6, 1e7, 1e9, 1e12, 1e16, 1e18}) {
          performer_problem p = problem_of({.batch = 1, .queries = 40, .keys = 40, .dim = 8, .value_dim = 3});
          p.options.kernel = chosen;
          p.options.causal = causal;
          for (double& x : p.k.data) x *= norm;
          for (idx_t h = 0; h < p.v.heads(); ++h)
            for (idx_t j = 0; j < 40; ++j) p.v(0, h, j, 0) = 1;
          const double largest_number = static_cast<double>(std::numeric_limits<TestType>::max()) / 10;
          for (double& x : p.q.data) x *= long_queries == 2 ? largest_number : long_queries ? norm : 1;
          double largest = 0;
          for (double x : p.v.data) largest = std::max(largest, std::abs(x));
          const double rounding = 100 * static_cast<double>(std::numeric_limits<TestType>::epsilon());
          const auto within = [&](const auto& out) {
            bool all = true;  // not so for NaN
            for (std::size_t n = 0; n < out.data.size(); ++n) {
              const auto x = static_cast<double>(out.data[n]);
              all = all && (n % 3 == 0 ? std::abs(x - 1) <= rounding : std::abs(x) <= largest * (1 + rounding));
            }
            return all;
          };
          CAPTURE(int(chosen), causal, long_queries, norm);
          CHECK(within(run_serially<TestType>(p).out));
          if (!causal) continue;
          const auto q = cast<TestType>(p.q), k = cast<TestType>(p.k), v = cast<TestType>(p.v);
          const auto w = cast<TestType>(p.options.features);
          tensor<TestType> out(1, q.heads(), 40, 3, 7);
          attn::performer_state<TestType> state({.heads = k.heads(), .features = 24, .value_dim = 3},
                                                {.kernel = static_cast<attn::performer_kernel>(chosen)});
          attn::execution serial;
          for (idx_t t = 0; t < 40; ++t) {
            const auto at = [&](auto x) { return x.slice(2, t, 1); };
            compiled_performer<TestType>::step(state, at(view(q)), at(view(k)), at(view(v)), at(view(out)),
                                               features_of(w), {}, serial);
          }
          CHECK(within(out));
        }
}

TEMPLATE_LIST_TEST_CASE("performer: keys whose squares overflow count as 0; relu features are plain numbers",
                        "[performer]", exact_types) {
  const double edge = std::sqrt(static_cast<double>(std::numeric_limits<TestType>::max()));
  for (bool causal : {false, true}) {
    performer_problem p = problem_of({.batch = 1, .queries = 40, .keys = 40, .dim = 8, .value_dim = 3});
    p.options.causal = causal;
    performer_problem longer = p;
    for (double& x : longer.k.data) x *= 4 * edge;
    const auto zero = run_serially<TestType>(longer).out;
    CHECK(std::all_of(zero.data.begin(), zero.data.end(), [](double x) { return x == 0; }));
    p.options.kernel = kernel::relu;
    for (auto* x : {&p.q, &p.k})
      for (double& number : x->data) number *= edge / 1e4;
    check<TestType>(p);
  }
}

TEST_CASE("performer: takes drawn features, or a matrix", "[performer]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(40, 8),
                        v = Eigen::MatrixXf::Random(40, 5);
  auto drawn = attn::draw_features<float>(32, 8, {.seed = 3});
  Eigen::MatrixXf w(32, 8), out(30, 5), other(30, 5);
  for (idx_t r = 0; r < 32; ++r)
    for (idx_t d = 0; d < 8; ++d) w(r, d) = drawn(0, r, d);
  attn::performer(q, k, v, out, drawn);
  attn::performer(q, k, v, other, w);
  CHECK(out == other);
  attn::execution threads(2, 0);
  for (const auto& call : std::initializer_list<std::function<void()>>{
           [&] { attn::performer(q, k, v, other, drawn.view(), threads); },
           [&] { attn::performer(q, k, v, other, drawn, {}, attn::execution(2)); },
           [&] { attn::performer(q, k, v, other, std::as_const(drawn), attn::performer_options<float>{}, threads); }}) {
    other.setZero();
    call();
    CHECK(out == other);
  }
  using stored = std::tuple_element_t<0, storage_types>;
  attn::performer(q.cast<stored>().eval(), k.cast<stored>().eval(), v.cast<stored>().eval(),
                  Eigen::Matrix<stored, -1, -1>(30, 5), attn::draw_features<stored>(32, 8),
                  {.kernel = attn::performer_kernel::relu});
}

}  // namespace testing::performer_tests
