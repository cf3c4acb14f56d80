// The gradients of dplr against the reverse pass of its reference; what holds of them bit for bit; bad input.
#include "support/gradient_dplr.hpp"
#include "support/pairwise.hpp"
#include "support/refused.hpp"

namespace testing::dplr_backward_tests {

TEST_CASE("dplr_backward: the reverse pass agrees with central differences", "[dplr_backward]") {
  for (int decays = 0; decays < 3; ++decays) {
    dplr_problem p = random_dplr(
        {.batch = 1, .heads = 2, .length = 7, .dim = 4, .value_dim = 3, .state = true, .decays = decays});
    for (double& g : p.x.log_decay.data) g = std::max(g, -1.0);  // of minus infinity there is no difference
    check_central_differences(case_of(p), 1e-5);
  }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: every combination of options", "[dplr_backward]", exact_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (int bits : selected_bits(2)) {
      dplr_shape shape{.length = 77, .dim = 9, .value_dim = 5, .decays = decays};
      shape.state = bits & 1;
      dplr_problem p = random_dplr(shape);
      if (bits & 2) p.options.lengths = {77, 66}, p.options.scale = 0.5;
      CAPTURE(decays, bits);
      check_backward_with_state<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: hidden keys", "[dplr_backward]", exact_types) {
  for (int decays = 0; decays < 3; ++decays) {
    dplr_problem p = random_dplr({.length = 150, .dim = 9, .value_dim = 5, .state = true, .decays = decays});
    p.options.key_mask = random_key_mask(3, decays == 1 ? 1 : 2, 150);
    CAPTURE(decays);
    check_backward_with_state<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: 16-bit storage computes in float", "[dplr_backward]", storage_types) {
  for (int decays = 0; decays < 3; ++decays)
    check_backward_with_state<TestType>(
        random_dplr({.heads = 1, .length = 130, .dim = 33, .value_dim = 7, .state = true, .decays = decays}));
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: odd lengths and dims", "[dplr_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (int decays = 0; decays < 3; ++decays) {
      if (few_shapes && lengths[n] > 65 && decays != static_cast<int>(n % 3)) continue;
      dplr_shape shape{.batch = 1, .heads = 1, .length = lengths[n], .state = true, .decays = decays};
      shape.dim = dims[(n + 3) % 8], shape.value_dim = dims[(5 * n) % 8];
      CAPTURE(shape.length, shape.dim, shape.value_dim, decays);
      check_backward_with_state<TestType>(random_dplr(shape, n + 1));
    }
  for (idx_t none = 0; none < 5; ++none) {
    dplr_shape shape{.length = 5, .dim = 4, .value_dim = 3, .state = true, .decays = 2};
    (none == 0 ? shape.batch : none == 1 ? shape.heads : none == 2 ? shape.dim : none == 3 ? shape.value_dim
                                                                                           : shape.length) = 0;
    CAPTURE(none);
    const dplr_problem p = random_dplr(shape);
    const tensors all = gradients_by<TestType>(p, random_d_results(p));
    const auto zeros = [](const tensor<double>& x) {
      return std::all_of(x.data.begin(), x.data.end(), [](double each) { return each == 0; });
    };
    if (none == 2) CHECK(zeros(all[2]));
    if (none == 3) CHECK((zeros(all[0]) && zeros(all[1]) && zeros(all[3]) && zeros(all[4])));
    if (none == 4) CHECK(relative_error(all[6], random_d_results(p)[1]) <= gradient_tolerance<TestType>::value);
  }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: several segments, on any number of threads", "[dplr_backward]", exact_types) {
  for (int decays = 0; decays < 3; ++decays) {
    dplr_problem p = random_dplr({.batch = 1,
                                  .heads = decays == 1 ? 1 : 2,
                                  .length = decays == 1 ? 2 * 16384 + 70 : 16384 + 70,
                                  .dim = 2,
                                  .value_dim = 1,
                                  .state = true,
                                  .decays = decays});
    // What reaches over segments, and its gradients do.
    for (double& g : p.x.log_decay.data) g = std::max(1e-3 * g, -1e-3);
    for (double& b : p.x.b.data) b *= 1e-3;
    check_backward_with_state<TestType>(p);
    attn::execution threads(3, 0);
    const tensors d = random_d_results(p);
    CHECK(gradients_by<TestType>(p, d, threads) == gradients_by<TestType>(p, d));
  }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: alone, added, head by head, padded", "[dplr_backward]", all_types) {
  using S = TestType;
  for (int decays = 0; decays < 3; ++decays) {
    dplr_problem p = random_dplr({.length = 100, .dim = 9, .value_dim = 6, .state = true, .decays = decays});
    p.options.lengths = {90, 100};
    p = rounded<S>(p);
    tensors d = random_d_results(p);
    d = {rounded<S>(d[0]), rounded<real<S>>(d[1])};
    const tensors all = gradients_by<S>(p, d);

    check_alone_and_added<dplr_count>([&](const auto& asked) { return gradients_by<S>(p, d, asked); }, all, dplr_names,
                                      2 * gradient_tolerance<S>::value);

    const auto part = [](const tensor<double>& x, idx_t b, idx_t h) {
      tensor<double> y(x.batch() ? 1 : 0, x.batch() ? 1 : 0, x.length(), x.dim());
      for (idx_t i = 0; y.heads() && i < x.length(); ++i)
        for (idx_t c = 0; c < x.dim(); ++c) y(0, 0, i, c) = x(b, h, i, c);
      return y;
    };
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 2; ++h) {
        dplr_problem one = p;
        for (tensor<double>* x :
             {&one.x.q, &one.x.k, &one.x.v, &one.x.a, &one.x.b, &one.x.log_decay, &one.x.initial_state})
          *x = part(*x, b, h);
        one.options.lengths = {p.options.lengths[static_cast<std::size_t>(b)]};
        const tensors single = gradients_by<S>(one, {part(d[0], b, h), part(d[1], b, h)});
        for (std::size_t n = 0; n < dplr_count; ++n) CHECK(single[n] == part(all[n], b, h));
      }

    dplr_problem padded = p;
    tensors d_padded = d;
    for (tensor<double>* x : rows_of(padded)) poison_padding(*x, p.options.lengths);
    poison_padding(d_padded[0], p.options.lengths);
    CHECK(gradients_by<S>(padded, d_padded) == all);
    bool zeros = true;
    for (std::size_t n = 0; n < 6; ++n)
      for (idx_t h = 0; h < all[n].heads(); ++h)
        for (idx_t i = 90; i < all[n].length(); ++i)
          for (idx_t c = 0; c < all[n].dim(); ++c) zeros = zeros && all[n](0, h, i, c) == 0;
    CHECK(zeros);
  }
}

TEMPLATE_LIST_TEST_CASE("dplr_backward: decays of which nothing is left", "[dplr_backward]", exact_types) {
  for (int decays : {1, 2})
    for (double g : {-reference::infinity, -200.0, 0.0}) {
      dplr_problem p = random_dplr(
          {.batch = 1, .heads = 1, .length = 70, .dim = 8, .value_dim = 5, .state = true, .decays = decays});
      std::fill(p.x.log_decay.data.begin(), p.x.log_decay.data.end(), g);
      CAPTURE(decays, g);
      if (g == 0) {
        check_backward_with_state<TestType>(p);
        continue;
      }
      const tensors actual = gradients_by<TestType>(rounded<TestType>(p), random_d_results(p));
      for (const tensor<double>& x : actual) CHECK(all_finite(x));
      if (std::isinf(g))
        CHECK(std::all_of(actual[5].data.begin(), actual[5].data.end(), [](double x) { return x == 0; }));
    }
}

TEST_CASE("dplr_backward: beyond a segment, scratch grows by a state for each", "[dplr_backward]") {
  const auto scratch = [](idx_t length) {
    attn::execution serial;
    const dplr_problem p = random_dplr({.batch = 1, .heads = 1, .length = length, .dim = 3});
    gradients_by<float>(p, random_d_results(p), serial);
    return serial.scratch_bytes();
  };
  constexpr idx_t segment = 16384;
  CHECK(scratch(3 * segment) - scratch(segment) <= 2 * (32 * 32 * sizeof(float) + 64));
}

namespace {

// A good call, to be spoilt in one place.
struct dplr_backward_inputs {
  tensor<float> q{2, 2, 9, 8, 0.1f}, k{2, 2, 9, 8, 0.1f}, v{2, 2, 9, 5, 1}, d_out{2, 2, 9, 5, 1};
  tensor<float> a{2, 2, 9, 8, -0.1f}, b{2, 2, 9, 8, 0.1f};
  tensor<float> log_decay{2, 2, 9, 8, -0.5f}, state{2, 2, 8, 5, 1}, other{2, 4, 30, 30, 1};
  tensor<float> dq = like(q), dk = like(k), dv = like(v), da = like(a), db = like(b), d_log = like(log_decay),
                d_state = like(state);
  dplr_views<float> x{view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(std::as_const(a)),
                      view(std::as_const(b))};
  in_view<float> d_view = view(std::as_const(d_out));
  attn::dplr_options<float> options;
  attn::dplr_gradients<float> gradients;
  std::vector<idx_t> lengths;

  dplr_backward_inputs() {
    options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(state);
    gradients = {.q = view(dq), .k = view(dk), .v = view(dv), .a = view(da), .b = view(db), .log_decay = view(d_log),
                 .initial_state = view(d_state)};
  }
  dplr_backward_inputs(const dplr_backward_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &da, &db, &d_log, &d_state}; }

  static tensor<float> like(const tensor<float>& x) { return {x.batch(), x.heads(), x.length(), x.dim(), 7}; }
  in_view<float> shaped(idx_t n, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {n, h, i, d}}; }
};

}  // namespace

TEST_CASE("dplr_backward refuses what does not fit", "[refusals][dplr_backward]") {
  using inputs = dplr_backward_inputs;
  const std::vector<refused<inputs>> list = {
      {"fewer key heads", "key heads = value heads 2; found 1",
       [](inputs& d) { d.x.k = d.shaped(2, 1, 9, 8), d.gradients.k = {}; }},
      {"another dim of q", "query dim = key dim 8; found 7",
       [](inputs& d) { d.x.q = d.shaped(2, 2, 9, 7), d.gradients.q = {}; }},
      {"another length of a", "a of the shape of k",
       [](inputs& d) { d.x.a = d.shaped(2, 2, 8, 8), d.gradients.a = {}; }},
      {"another dim of d_out", "d_out dim = value dim 5; found 4",
       [](inputs& d) { d.d_view = d.d_view.slice(3, 0, 4); }},
      {"other heads of d_out", "d_out heads", [](inputs& d) { d.d_view = d.shaped(2, 1, 9, 5); }},
      {"a null d_out", "null", [](inputs& d) { d.d_view = null_view(2, 2, 9, 5); }},
      {"a null gradient with extents", "null", [](inputs& d) { d.gradients.a = null_view(2, 2, 9, 8); }},
      {"a gradient of b of another shape", "the gradient of b of the shape of b",
       [](inputs& d) { d.gradients.b = d.gradients.b.slice(2, 0, 8); }},
      {"a gradient of log_decay, which is not given", "log_decay", [](inputs& d) { d.options.log_decay = {}; }},
      {"a gradient of the initial state, which is not given", "initial_state",
       [](inputs& d) { d.options.initial_state = {}; }},
      {"a d_final_state of another shape", "d_final_state",
       [](inputs& d) { d.gradients.d_final_state = d.shaped(2, 2, 5, 8); }},
      {"a gradient that is an input", "overlap", [](inputs& d) { d.x.a = view(std::as_const(d.dq)); }},
      {"two gradients in one place", "overlap", [](inputs& d) { d.gradients.b = d.gradients.a; }},
      {"a log decay above 0", "log_decay", [](inputs& d) { d.log_decay.data[3] = 0.5f; }},
      {"a length beyond the extent", "lengths", [](inputs& d) { d.lengths = {9, 10}, d.options.lengths = d.lengths; }},
      {"a scale that is not finite", "scale",
       [](inputs& d) { d.options.scale = std::numeric_limits<float>::infinity(); }}};
  check_refused("dplr_backward", list, [](inputs& d) {
    attn::execution serial;
    compiled_dplr<float>::backward(d.x, d.d_view, d.gradients, d.options, serial);
  });
}

TEST_CASE("dplr_backward: on Eigen matrices and any strides; arguments that are left out", "[dplr_backward]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(70, 8), k = Eigen::MatrixXf::Random(70, 8);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(70, 5), d_out = Eigen::MatrixXf::Random(70, 5);
  const Eigen::MatrixXf a = 0.3f * Eigen::MatrixXf::Random(70, 8), b = -a;
  const row_major a_rows = a, b_rows = b, d_rows = d_out;
  row_major da(70, 8), db(70, 8);
  attn::dplr_backward(q, k, v, a_rows, b_rows, d_rows, {.a = attn::as_view(da), .b = attn::as_view(db)});
  for (int threads : {1, 2}) {
    Eigen::MatrixXf a_wide = Eigen::MatrixXf::Constant(72, 9, 7), b_other(70, 8);
    auto a_block = a_wide.block(1, 1, 70, 8);
    attn::dplr_backward(q, k, v, a, b, d_out, {.a = attn::as_view(a_block), .b = attn::as_view(b_other)},
                        {.scale = 1 / std::sqrt(8.0f)}, attn::execution(threads));
    CHECK(a_block == da);
    CHECK(b_other == db);
    CHECK((a_wide.array() == 7).count() == 72 * 9 - 70 * 8);
  }
}

}  // namespace testing::dplr_backward_tests
