// nystrom_backward against the reverse pass of its reference: every inverse, the convolution, lengths, shapes, types;
// what is not asked for, padding, layouts, threads, batches, memory, refusals.
#include "support/call_low_rank.hpp"
#include "support/low_rank_gradient.hpp"

namespace testing::nystrom_backward_tests {
namespace {

using reference::pinv;

// An inverse with little damping enlarges rounding errors.
constexpr double enlarged_in_full = 10;

template <class S>
struct form {
  using problem = nystrom_problem;
  static constexpr bool has_lse = false;

  static gradient_case case_of(const problem& p) {
    gradient_case c{"nystrom", {"q", "k", "v"}, {p.q, p.k, p.v}, {}};
    if (!p.options.convolution.empty()) c.names.push_back("convolution"), c.inputs.push_back(p.options.convolution);
    c.forward = [o = p.options](const std::vector<tensor<variable>>& x) {
      return std::vector{reference::nystrom<variable>(x[0], x[1], x[2], x.size() > 3 ? x[3] : tensor<variable>(), o)};
    };
    return c;
  }

  struct memory {
    tensor<S> q, k, v;
    tensor<real<S>> convolution;

    memory(const problem& p, double before) {
      q = filled<S>(p.q, before), k = filled<S>(p.k, before), v = filled<S>(p.v, before);
      convolution = filled<real<S>>(p.options.convolution, before);
    }
    attn::nystrom_gradients<S> views() {
      attn::nystrom_gradients<S> g{.q = view(q), .k = view(k), .v = view(v)};
      if (!convolution.empty()) g.convolution = {convolution.data.data(), {convolution.length(), convolution.dim()}};
      return g;
    }
    tensors all() const {
      tensors list{cast<double>(q), cast<double>(k), cast<double>(v)};
      if (!convolution.empty()) list.push_back(cast<double>(convolution));
      return list;
    }
  };
  static void keep(attn::nystrom_gradients<S>& g, std::size_t n) {
    if (n != 0) g.q = {};
    if (n != 1) g.k = {};
    if (n != 2) g.v = {};
    if (n != 3) g.convolution = {};
  }
  static void call(const problem& p, const tensors& d_results, const attn::nystrom_gradients<S>& wanted,
                   attn::execution& execution) {
    const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d = cast<S>(d_results[0]);
    const tensor<real<S>> convolution = cast<real<S>>(p.options.convolution);
    compiled_nystrom<S>::backward(view(q), view(k), view(v), view(d), wanted,
                                  library_options<S>(p.options, convolution, key_mask_bytes(p.options.key_mask)),
                                  execution);
  }
};

template <class S>
void check(const nystrom_problem& p, double factor = 1) {
  check_form<form<S>, S>(p, factor);
}
template <class S>
tensors run_backward(const nystrom_problem& p, const tensor<double>& d_out, attn::execution& execution) {
  return run_gradients<form<S>>(p, {d_out}, execution);
}
tensor<double> random_d_out(const nystrom_problem& p) { return random_d_results<form<float>>(p)[0]; }

nystrom_problem problem_of(const problem_shape& s, idx_t landmarks, pinv inverse = pinv::per_head,
                           std::uint64_t seed = 1) {
  nystrom_problem p = random_problem<nystrom_problem>(s, seed);
  p.options.landmarks = landmarks;
  p.options.inverse = inverse;
  p.options.cutoff = 0.1;
  return p;
}

enum class lengths { none, both, queries_and_keys, keys_only };

nystrom_problem with_lengths(const problem_shape& s, lengths given, idx_t landmarks, pinv inverse) {
  problem_shape shape = s;
  if (given == lengths::both) shape.queries = shape.keys;
  nystrom_problem p = problem_of(shape, landmarks, inverse);
  if (given == lengths::both) p.options.lengths = {23, 37};
  if (given == lengths::queries_and_keys) p.options.query_lengths = {30, 5}, p.options.key_lengths = {7, 34};
  if (given == lengths::keys_only) p.options.key_lengths = {36, 0};
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("nystrom_backward: every inverse, convolution and kind of lengths", "[nystrom_backward]",
                        all_types) {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (idx_t width : {0, 1, 9, 61})
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only}) {
        nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, 7, inverse);
        if (width > 0) p.options.convolution = random_normal(9, 1, 1, 4, width, 0.3);
        if (width == 9) p.options.scale = 0.3;
        CAPTURE(int(inverse), width, int(given));
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: odd lengths, dims and landmarks", "[nystrom_backward]", exact_types) {
  const idx_t sizes[] = {0, 1, 2, 7, 16, 63, 130}, dims[] = {1, 3, 8, 16, 33, 64, 80};
  for (std::size_t n = 0; n < std::size(sizes); ++n)
    for (idx_t landmarks : {1, 2, 6, 13}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = sizes[(3 * n + 1) % 7], .keys = sizes[n]};
      shape.dim = dims[(n + static_cast<std::size_t>(landmarks)) % 7], shape.value_dim = dims[(3 * n) % 7];
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, landmarks);
      check<TestType>(problem_of(shape, landmarks, n % 2 ? pinv::per_head : pinv::exact, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: grouped queries, empty batches and heads", "[nystrom_backward]",
                        exact_types) {
  for (auto [batch, heads, kv_heads] :
       {std::array<idx_t, 3>{0, 4, 2}, {2, 0, 0}, {1, 1, 1}, {2, 6, 1}, {1, 6, 3}, {3, 3, 3}})
    for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact}) {
      CAPTURE(batch, heads, kv_heads, int(inverse));
      check<TestType>(problem_of(
          {.batch = batch, .heads = heads, .kv_heads = kv_heads, .queries = 25, .keys = 31, .dim = 8}, 5, inverse));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: any number of iterations", "[nystrom_backward]", exact_types) {
  for (idx_t iterations : {0, 1, 2, 9}) {
    nystrom_problem p = problem_of({.batch = 1, .heads = 2, .queries = 40, .keys = 40, .dim = 8}, 6);
    p.options.iterations = iterations;
    CAPTURE(iterations);
    check<TestType>(p, iterations > 6 ? enlarged_in_full : 1);
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: blocks and pieces", "[nystrom_backward][long]", exact_types) {
  problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 290, .dim = 16};
  for (pinv inverse : {pinv::per_head, pinv::exact}) check<TestType>(problem_of(shape, 40, inverse));
  shape = {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 4200, .keys = 4400, .dim = 4, .value_dim = 3};
  check<TestType>(problem_of(shape, 8));
  shape.queries = 8;  // all of them landmarks
  check<TestType>(problem_of(shape, 8));
  shape.queries = 4200, shape.keys = 8;
  check<TestType>(problem_of(shape, 8));
}

TEST_CASE("nystrom_backward: the cutoff, and none", "[nystrom_backward]") {
  for (double cutoff : {0.0, 1e-2, 0.05, 0.5, 0.999}) {
    nystrom_problem p =
        problem_of({.batch = 1, .heads = 2, .kv_heads = 2, .queries = 45, .keys = 45, .dim = 8}, 6, pinv::exact);
    for (double& x : p.q.data) x *= 3;
    p.options.cutoff = cutoff;
    CAPTURE(cutoff);
    check<widest_type>(p, cutoff < 0.05 ? enlarged_in_full : 1);
  }
}

TEST_CASE("nystrom_backward: the reference against central differences", "[nystrom_backward]") {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys}) {
      nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 5, .value_dim = 3}, given, 5, inverse);
      p.options.convolution = random_normal(9, 1, 1, 4, 5);
      CAPTURE(int(inverse), int(given));
      check_central_differences(form<double>::case_of(p));
    }
}

TEST_CASE("nystrom_backward: of a singular A", "[nystrom_backward]") {
  // Equal landmarks: the derivative at constant rank, and that of the function smoothed by the cutoff.
  nystrom_problem p =
      problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 60, .keys = 60, .dim = 8}, 6, pinv::exact);
  p.q = p.k = tensor<double>(1, 1, 60, 8, 0.5);
  attn::execution serial;
  for (double cutoff : {0.0, 0.03}) {
    p.options.cutoff = cutoff;
    for (const auto& g : run_backward<widest_type>(p, random_d_out(p), serial)) {
      CHECK(all_finite(g));
      for (double x : g.data) CHECK(std::abs(x) <= 100);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: one gradient alone, and none", "[nystrom_backward]", exact_types) {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys})
    for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact}) {
      nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, 7, inverse);
      p.options.convolution = random_normal(9, 1, 1, 4, 3);
      CAPTURE(int(given), int(inverse));
      check_form_alone<form<TestType>>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: adds to what is there", "[nystrom_backward]", all_types) {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys}) {
    nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, 7, pinv::per_head);
    p.options.convolution = random_normal(9, 1, 1, 4, 3);
    CAPTURE(int(given));
    check_form_accumulates<form<TestType>, TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: padding, threads and batches change no bit", "[nystrom_backward]",
                        exact_types) {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact}) {
    nystrom_problem p = problem_of({.batch = 3, .queries = 150, .keys = 150}, 16, inverse);
    p.options.lengths = {150, 12, 77};
    p.options.convolution = random_normal(9, 1, 1, 4, 5);
    check_form_threads_and_padding<form<TestType>>(p);
    if (inverse == pinv::whole_batch) continue;
    check_form_independent<form<TestType>>(p, [&](nystrom_problem& one, idx_t, idx_t first, idx_t count) {
      one.options.convolution = rows(p.options.convolution, first, count);
    });
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: any strides", "[nystrom_backward]", exact_types) {
  using T = TestType;
  const nystrom_problem p = rounded<T>(problem_of({.queries = 150, .keys = 140, .dim = 20, .value_dim = 9}, 13));
  const tensor<double> d_out = random_d_out(p);
  attn::execution serial;
  const tensors plain = run_backward<T>(p, d_out, serial);
  // [batch, head, dim, length]
  const auto exchanged = [](const tensor<double>& x) {
    tensor<T> to(x.batch(), x.heads(), x.dim(), x.length());
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) to(b, h, d, i) = static_cast<T>(x(b, h, i, d));
    return to;
  };
  const auto back = [](auto& x) {
    const idx_t n = x.length(), m = x.dim();
    return attn::tensor_view<std::remove_reference_t<decltype(*x.data.data())>>(
        x.data.data(), {x.batch(), x.heads(), m, n}, {x.heads() * n * m, n * m, 1, m});
  };
  const tensor<T> q = exchanged(p.q), k = exchanged(p.k), v = exchanged(p.v), d = exchanged(d_out);
  tensor<T> dq = q, dk = k, dv = v;
  compiled_nystrom<T>::backward(back(q), back(k), back(v), back(d), {.q = back(dq), .k = back(dk), .v = back(dv)},
                                library_options<T>(p.options, {}), serial);
  CHECK(dq == exchanged(plain[0]));
  CHECK(dk == exchanged(plain[1]));
  CHECK(dv == exchanged(plain[2]));
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: keys that are hidden", "[nystrom_backward][key_mask]", all_types) {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (idx_t landmarks : {7, 13, 33, 60})  // segments with keys that are seen, segments without, few queries, few keys
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys})
        for (idx_t hidden : {-1, 1}) {
          nystrom_problem p =
              with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, landmarks, inverse);
          if (landmarks == 13) p.options.convolution = random_normal(9, 1, 1, 4, 9, 0.3);
          p.options.key_mask = gapped_key_mask(given == lengths::none && hidden < 0 ? 1 : 2, 37, hidden);
          CAPTURE(int(inverse), landmarks, int(given), hidden);
          check<TestType>(p);
          check_form_hidden<form<TestType>>(p);
        }
  nystrom_problem p = problem_of({.batch = 3, .heads = 4, .kv_heads = 1, .queries = 130, .keys = 300, .dim = 16}, 20);
  p.options.convolution = random_normal(9, 1, 1, 4, 33, 0.3);
  p.options.key_mask = random_key_mask(1, 3, 300);
  check<TestType>(p);
  check_form_accumulates<form<TestType>, TestType>(p);
  check_form_hidden<form<TestType>>(p);
}

TEST_CASE("nystrom_backward: an exact inverse in full, with hidden landmarks", "[nystrom_backward][key_mask]") {
  nystrom_problem p = problem_of({.queries = 30, .keys = 37, .dim = 9}, 5, pinv::exact);
  p.options.key_mask = gapped_key_mask(2, 37);
  for (idx_t t = 7; t < 15; ++t) p.options.key_mask(1, 0, 0, t) = 0;
  p.options.cutoff = 0;
  check<widest_type>(p, 100);
}

TEST_CASE("nystrom_backward: extreme scores", "[nystrom_backward]") {
  nystrom_problem p = problem_of({.batch = 1, .queries = 90, .keys = 90}, 10);
  for (double& x : p.q.data) x *= 100;
  for (double& x : p.k.data) x *= 100;
  attn::execution serial;
  for (pinv inverse : {pinv::per_head, pinv::exact}) {
    p.options.inverse = inverse;
    for (const auto& g : run_backward<float>(p, random_d_out(p), serial)) CHECK(all_finite(g));
  }
}

TEST_CASE("nystrom_backward: scratch does not grow with the square of the length", "[nystrom_backward]") {
  const auto scratch = [](idx_t length) {
    attn::execution execution;
    const nystrom_problem p =
        problem_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = length, .keys = length, .dim = 8}, 16);
    run_backward<float>(p, random_d_out(p), execution);
    return execution.scratch_bytes();
  };
  // Of every query its gradient alone, in rows of whole panels.
  CHECK(scratch(80000) - scratch(40000) == 2 * 40000 * sizeof(float) * attn::detail::sums_stride<float>(8));
}

TEST_CASE("nystrom_backward: on Eigen matrices, as a caller writes it", "[nystrom_backward]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(90, 8), v = Eigen::MatrixXf::Random(90, 5);
  const Eigen::MatrixXf d_out = Eigen::MatrixXf::Random(90, 5);
  Eigen::MatrixXf dq(90, 8), dk(90, 8), more(90, 8), out(90, 5);
  attn::nystrom_backward(q, q, v, d_out, {.q = dq, .k = dk}, {.landmarks = 9});
  attn::execution serial;
  attn::nystrom_options<float> options;
  options.landmarks = 9;
  attn::nystrom_backward(q, q, v, d_out, {.q = more}, options, serial);
  CHECK(dq == more);
  attn::nystrom_backward(q, q, v, d_out, {.k = more});  // 64 landmarks
  attn::nystrom_backward(q, q, v, d_out, {.k = dk}, serial);
  CHECK(dk == more);
}

}  // namespace testing::nystrom_backward_tests
