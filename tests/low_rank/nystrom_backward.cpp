// nystrom_backward against the reverse pass of its reference: every inverse, the convolution, lengths, shapes, types; what
// is not asked for, padding, layouts, threads, batches, memory, refusals.
#include <array>
#include <map>

#include "support/call_low_rank.hpp"
#include "support/gradient.hpp"
#include "support/refusal.hpp"

namespace testing {
namespace {

using reference::pinv;

// An inverse with little damping enlarges rounding errors.
constexpr double enlarged = 1, enlarged_in_full = 10;

template <class S>
constexpr double bound(double factor) {
  const double real_bound = std::is_same_v<real<S>, double> ? 1e-12 : 5e-6;
  const double rounding = std::is_same_v<S, Eigen::bfloat16> ? 0x1p-8 : std::is_same_v<S, Eigen::half> ? 0x1p-11 : 0;
  return rounding + factor * real_bound;
}

gradient_case case_of(const std::string& name, const nystrom_problem& p) {
  gradient_case c{name, {"q", "k", "v"}, {p.q, p.k, p.v}, {}};
  if (!p.options.convolution.empty()) c.names.push_back("convolution"), c.inputs.push_back(p.options.convolution);
  c.forward = [o = p.options](const std::vector<tensor<variable>>& x) {
    return std::vector{reference::nystrom<variable>(x[0], x[1], x[2], x.size() > 3 ? x[3] : tensor<variable>(), o)};
  };
  return c;
}

// Gradients, and memory for them that starts as `before`.
template <class S>
struct stored_gradients {
  tensor<S> q, k, v;
  tensor<real<S>> convolution;

  stored_gradients(const nystrom_problem& p, double before) : convolution(cast<real<S>>(p.options.convolution)) {
    const auto like = [&](const tensor<double>& x) {
      return tensor<S>(x.batch(), x.heads(), x.length(), x.dim(), static_cast<S>(before));
    };
    q = like(p.q), k = like(p.k), v = like(p.v);
    for (auto& x : convolution.data) x = static_cast<real<S>>(before);
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

template <class S>
void run_backward(const nystrom_problem& p, const tensor<double>& d_out, const attn::nystrom_gradients<S>& wanted,
                  attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d = cast<S>(d_out);
  const tensor<real<S>> convolution = cast<real<S>>(p.options.convolution);
  compiled_nystrom<S>::backward(view(q), view(k), view(v), view(d), wanted, library_options<S>(p.options, convolution),
                                execution);
}
template <class S>
tensors run_backward(const nystrom_problem& p, const tensor<double>& d_out, attn::execution& execution,
                     bool accumulate = false) {
  stored_gradients<S> stored(p, accumulate ? 0.5 : 7);  // rubbish that must be written over
  auto wanted = stored.views();
  wanted.accumulate = accumulate;
  run_backward<S>(p, d_out, wanted, execution);
  return stored.all();
}
tensor<double> random_d_out(const nystrom_problem& p) {
  return random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.v.dim());
}

template <class S>
void check(nystrom_problem p, double factor = enlarged) {
  p = rounded<S>(p);
  check_gradients(
      case_of("nystrom", p), bound<S>(factor),
      [&](const tensors&, const tensors& d) {
        attn::execution serial;
        return run_backward<S>(p, d[0], serial);
      },
      [](tensors& d) { d[0] = rounded<S>(d[0]); });
}

nystrom_problem problem_of(const problem_shape& s, index landmarks, pinv inverse = pinv::per_head,
                           std::uint64_t seed = 1) {
  nystrom_problem p = random_problem<nystrom_problem>(s, seed);
  p.options.landmarks = landmarks;
  p.options.inverse = inverse;
  p.options.cutoff = 0.1;
  return p;
}

enum class lengths { none, both, queries_and_keys, keys_only };

nystrom_problem with_lengths(const problem_shape& s, lengths given, index landmarks, pinv inverse) {
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
    for (index width : {0, 1, 9, 61})
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only}) {
        nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, 7, inverse);
        if (width > 0) p.options.convolution = random_normal(9, 1, 1, 4, width, 0.3);
        if (width == 9) p.options.scale = 0.3;
        CAPTURE(int(inverse), width, int(given));
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: odd lengths, dims and landmarks", "[nystrom_backward]", exact_types) {
  const index sizes[] = {0, 1, 2, 7, 16, 63, 130}, dims[] = {1, 3, 8, 16, 33, 64, 80};
  for (std::size_t n = 0; n < std::size(sizes); ++n)
    for (index landmarks : {1, 2, 6, 13}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = sizes[(3 * n + 1) % 7], .keys = sizes[n]};
      shape.dim = dims[(n + static_cast<std::size_t>(landmarks)) % 7], shape.value_dim = dims[(3 * n) % 7];
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, landmarks);
      check<TestType>(problem_of(shape, landmarks, n % 2 ? pinv::per_head : pinv::exact, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: grouped queries, empty batches and heads", "[nystrom_backward]",
                        exact_types) {
  for (auto [batch, heads, kv_heads] :
       {std::array<index, 3>{0, 4, 2}, {2, 0, 0}, {1, 1, 1}, {2, 6, 1}, {1, 6, 3}, {3, 3, 3}})
    for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact}) {
      CAPTURE(batch, heads, kv_heads, int(inverse));
      check<TestType>(problem_of(
          {.batch = batch, .heads = heads, .kv_heads = kv_heads, .queries = 25, .keys = 31, .dim = 8}, 5, inverse));
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: any number of iterations", "[nystrom_backward]", exact_types) {
  for (index iterations : {0, 1, 2, 9}) {
    nystrom_problem p = problem_of({.batch = 1, .heads = 2, .queries = 40, .keys = 40, .dim = 8}, 6);
    p.options.iterations = iterations;
    CAPTURE(iterations);
    check<TestType>(p, iterations > 6 ? enlarged_in_full : enlarged);
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
    check<widest_type>(p, cutoff < 0.05 ? enlarged_in_full : enlarged);
  }
}

TEST_CASE("nystrom_backward: the reference against central differences", "[nystrom_backward]") {
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact})
    for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys}) {
      nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 5, .value_dim = 3}, given, 5, inverse);
      p.options.convolution = random_normal(9, 1, 1, 4, 5);
      CAPTURE(int(inverse), int(given));
      check_central_differences(case_of("nystrom", p));
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
      const tensor<double> d_out = random_d_out(p);
      attn::execution serial;
      const tensors all = run_backward<TestType>(p, d_out, serial);
      for (std::size_t n = 0; n < 5; ++n) {
        stored_gradients<TestType> stored(p, 7);
        attn::nystrom_gradients<TestType> whole = stored.views(), wanted;
        if (n == 0) wanted.q = whole.q;
        if (n == 1) wanted.k = whole.k;
        if (n == 2) wanted.v = whole.v;
        if (n == 3) wanted.convolution = whole.convolution;
        run_backward<TestType>(p, d_out, wanted, serial);
        const tensors one = stored.all();
        for (std::size_t other = 0; other < 4; ++other) {
          CAPTURE(int(given), int(inverse), n, other);
          if (other == n)
            CHECK(one[other] == all[other]);
          else
            CHECK(std::all_of(one[other].data.begin(), one[other].data.end(), [](double x) { return x == 7; }));
        }
      }
    }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: adds to what is there", "[nystrom_backward]", all_types) {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys}) {
    nystrom_problem p = with_lengths({.queries = 30, .keys = 37, .dim = 9, .value_dim = 12}, given, 7, pinv::per_head);
    p.options.convolution = random_normal(9, 1, 1, 4, 3);
    p = rounded<TestType>(p);
    attn::execution serial;
    const tensor<double> d_out = random_d_out(p);
    tensors written = run_backward<TestType>(p, d_out, serial);
    const tensors added = run_backward<TestType>(p, d_out, serial, true);
    for (std::size_t n = 0; n < written.size(); ++n) {
      for (double& x : written[n].data) x += 0.5;
      CAPTURE(int(given), n);
      CHECK(relative_error(added[n], written[n]) <= bound<TestType>(1) * 2);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom_backward: padding, threads and batches change no bit", "[nystrom_backward]",
                        exact_types) {
  attn::execution serial, two(2, 0), seven(7, 0);
  for (pinv inverse : {pinv::per_head, pinv::whole_batch, pinv::exact}) {
    nystrom_problem p = problem_of({.batch = 3, .queries = 150, .keys = 150}, 16, inverse);
    p.options.lengths = {150, 12, 77};
    p.options.convolution = random_normal(9, 1, 1, 4, 5);
    tensor<double> d_out = random_d_out(p);
    const tensors alone = run_backward<TestType>(p, d_out, serial);
    CHECK(run_backward<TestType>(p, d_out, two) == alone);
    CHECK(run_backward<TestType>(p, d_out, seven) == alone);
    for (index b = 0; b < 3 && inverse != pinv::whole_batch; ++b)
      for (index kv = 0; kv < 2; ++kv) {
        // one item and key head: heads 2 kv and 2 kv + 1
        nystrom_problem one = p;
        const auto pick = [&](const tensor<double>& x, index first, index count) {
          tensor<double> to(1, count, x.length(), x.dim());
          for (index h = 0; h < count; ++h)
            for (index i = 0; i < x.length(); ++i)
              for (index d = 0; d < x.dim(); ++d) to(0, h, i, d) = x(b, first + h, i, d);
          return to;
        };
        one.q = pick(p.q, 2 * kv, 2), one.k = pick(p.k, kv, 1), one.v = pick(p.v, kv, 1);
        one.options.convolution = tensor<double>(1, 1, 2, 5);
        for (index h = 0; h < 2; ++h)
          for (index t = 0; t < 5; ++t)
            one.options.convolution(0, 0, h, t) = p.options.convolution(0, 0, 2 * kv + h, t);
        one.options.lengths = {p.options.lengths[static_cast<std::size_t>(b)]};
        const tensors of_one = run_backward<TestType>(one, pick(d_out, 2 * kv, 2), serial);
        CHECK(of_one[0] == pick(alone[0], 2 * kv, 2));
        CHECK(of_one[1] == pick(alone[1], kv, 1));
        CHECK(of_one[2] == pick(alone[2], kv, 1));
      }
    for (tensor<double>* x : {&p.q, &p.k, &p.v, &d_out})
      for (index b = 0; b < 3; ++b)
        for (index h = 0; h < x->heads(); ++h)
          for (index i = p.options.lengths[static_cast<std::size_t>(b)]; i < 150; ++i)
            for (index d = 0; d < x->dim(); ++d) (*x)(b, h, i, d) = std::numeric_limits<double>::quiet_NaN();
    CHECK(run_backward<TestType>(p, d_out, serial) == alone);
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
    for (index b = 0; b < x.batch(); ++b)
      for (index h = 0; h < x.heads(); ++h)
        for (index i = 0; i < x.length(); ++i)
          for (index d = 0; d < x.dim(); ++d) to(b, h, d, i) = static_cast<T>(x(b, h, i, d));
    return to;
  };
  const auto back = [](auto& x) {
    const index n = x.length(), m = x.dim();
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
  const auto scratch = [](index length) {
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

TEST_CASE("nystrom_backward refuses what does not fit", "[nystrom_backward]") {
  struct call {
    tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, d{2, 4, 6, 5, 1};
    tensor<float> dq{2, 4, 6, 8, 7}, dk{2, 2, 9, 8, 7}, dv{2, 2, 9, 5, 7}, dc{1, 1, 4, 3, 7}, weights{1, 1, 4, 3, 1};
    in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v)),
                   d_view = view(std::as_const(d));
    attn::nystrom_gradients<float> g{
        .q = view(dq), .k = view(dk), .v = view(dv), .convolution = {dc.data.data(), {4, 3}}};
    attn::nystrom_options<float> options;
    std::vector<index> list;
    call() { options.convolution = {weights.data.data(), {4, 3}}; }
  };
  struct bad {
    const char* says;
    std::function<void(call&)> alter;
  };
  const std::vector<bad> list = {
      {"d_out of the shape of the result [2, 4, 6, 5]; found [2, 4, 5, 5]",
       [](call& c) { c.d_view = c.d_view.slice(2, 0, 5); }},
      {"d_out of the shape", [](call& c) { c.d_view = c.d_view.slice(1, 0, 2); }},
      {"value length = key length", [](call& c) { c.v_view = c.v_view.slice(2, 0, 8), c.g.v = c.g.v.slice(2, 0, 8); }},
      {"key dim = query dim", [](call& c) { c.k_view = c.k_view.slice(3, 0, 7), c.g.k = c.g.k.slice(3, 0, 7); }},
      {"the gradient of q of the shape of q", [](call& c) { c.g.q = c.g.q.slice(2, 0, 5); }},
      {"the gradient of k of the shape of k", [](call& c) { c.g.k = c.g.k.slice(3, 0, 7); }},
      {"the gradient of v of the shape of v", [](call& c) { c.g.v = c.g.v.slice(0, 0, 1); }},
      {"the gradient of convolution of the shape of convolution",
       [](call& c) { c.g.convolution = c.g.convolution.slice(1, 0, 1); }},
      {"convolution, since its gradient is asked for; found none", [](call& c) { c.options.convolution = {}; }},
      {"overlap",
       [](call& c) {
         c.g.q = {c.q.data.data(), {2, 4, 6, 8}};
       }},
      {"overlap",
       [](call& c) {
         c.g.v = {c.d.data.data(), {2, 2, 9, 5}, {0, 0, 5, 1}};
       }},
      {"overlap",
       [](call& c) {
         c.g.k = {c.dq.data.data(), {2, 2, 9, 8}};
       }},
      {"overlap",
       [](call& c) {
         c.d_view = {c.dv.data.data(), {2, 4, 6, 5}, {0, 0, 5, 1}};
       }},
      {"overlap",
       [](call& c) {
         c.g.convolution = {c.weights.data.data(), {4, 3}};
       }},
      {"elements do not overlap",
       [](call& c) {
         c.g.q = {c.dq.data.data(), {2, 4, 6, 8}, {0, 48, 8, 1}};
       }},
      {"memory behind",
       [](call& c) {
         c.d_view = {nullptr, {2, 4, 6, 5}};
       }},
      {"landmarks >= 1; found 0", [](call& c) { c.options.landmarks = 0; }},
      {"iterations >= 0", [](call& c) { c.options.iterations = -1; }},
      {"cutoff", [](call& c) { c.options.cutoff = 1; }},
      {"scale", [](call& c) { c.options.scale = HUGE_VALF; }},
      {"odd width",
       [](call& c) {
         c.options.convolution = c.options.convolution.slice(1, 0, 2), c.g.convolution = c.g.convolution.slice(1, 0, 2);
       }},
      {"key_lengths",
       [](call& c) {
         c.list = {10, 0}, c.options.key_lengths = c.list;
       }},
  };
  attn::execution serial;
  const auto message_of = [&](call& c) {
    return refusal(
        [&] { compiled_nystrom<float>::backward(c.q_view, c.k_view, c.v_view, c.d_view, c.g, c.options, serial); });
  };
  call good;
  CHECK(message_of(good) == "");
  for (const bad& b : list) {
    call c;
    b.alter(c);
    const std::string message = message_of(c);
    INFO(b.says << " | " << message);
    CHECK(well_formed(message, "nystrom_backward"));
    CHECK(message.find(b.says) != std::string::npos);
    for (const tensor<float>* x : {&c.dq, &c.dk, &c.dv, &c.dc})
      CHECK(std::all_of(x->data.begin(), x->data.end(), [](float value) { return value == 7; }));
  }
}

}  // namespace testing
