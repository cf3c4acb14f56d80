// The gradients of delta_rule against the reverse pass of its reference; what holds of them bit for bit; bad input.
#include <functional>

#include "support/gradient_delta_rule.hpp"
#include "support/pairwise.hpp"
#include "support/refused.hpp"

namespace testing::delta_rule_backward_tests {

TEST_CASE("delta_rule_backward: the reverse pass agrees with central differences", "[delta_rule_backward]") {
  for (int decays = 0; decays < 3; ++decays) {
    delta_rule_shape shape{.batch = 1, .key_heads = 1, .group = 2, .length = 7, .dim = 4, .value_dim = 3};
    shape.state = true, shape.decays = decays;
    delta_rule_problem p = random_delta_rule(shape);
    for (double& g : p.x.log_decay.data) g = std::max(g, -1.0);  // of minus infinity there is no difference
    if (decays == 2) p.options.unit_norm_eps = 0.1;
    check_central_differences(case_of(p), 1e-5);
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: every combination of options", "[delta_rule_backward]", exact_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (int bits : selected_bits(4)) {
      delta_rule_shape shape{.key_heads = 1, .group = bits & 8 ? 2 : 1, .length = 77, .dim = 9, .value_dim = 5};
      shape.beta = bits & 1, shape.state = bits & 2, shape.decays = decays;
      delta_rule_problem p = random_delta_rule(shape);
      if (bits & 4) p.options.unit_norm_eps = 1e-6, p.options.lengths = {77, 66};
      if (bits & 2) p.options.scale = 0.5;
      CAPTURE(decays, bits);
      check_backward_with_state<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: hidden keys", "[delta_rule_backward]", exact_types) {
  for (int decays = 0; decays < 3; ++decays) {
    delta_rule_problem p =
        random_delta_rule({.length = 150, .dim = 9, .value_dim = 5, .state = true, .decays = decays});
    p.options.key_mask = random_key_mask(3, decays == 1 ? 1 : 2, 150);
    CAPTURE(decays);
    check_backward_with_state<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: 16-bit storage computes in float", "[delta_rule_backward]",
                        storage_types) {
  for (int decays = 0; decays < 3; ++decays) {
    delta_rule_problem p = random_delta_rule(
        {.key_heads = 1, .group = 2, .length = 130, .dim = 33, .value_dim = 7, .state = true, .decays = decays});
    if (decays > 0) p.options.unit_norm_eps = 1e-6;
    check_backward_with_state<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: odd lengths and dims", "[delta_rule_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (int decays = 0; decays < 3; ++decays) {
      if (few_shapes && lengths[n] > 65 && decays != static_cast<int>(n % 3)) continue;
      delta_rule_shape shape{.batch = 1, .key_heads = 1, .length = lengths[n], .state = true, .decays = decays};
      shape.dim = dims[(n + 3) % 8], shape.value_dim = dims[(5 * n) % 8];
      CAPTURE(shape.length, shape.dim, shape.value_dim, decays);
      check_backward_with_state<TestType>(random_delta_rule(shape, n + 1));
    }
  for (idx_t none = 0; none < 5; ++none) {
    delta_rule_shape shape{.length = 5, .dim = 4, .value_dim = 3, .state = true, .decays = 2};
    (none == 0 ? shape.batch : none == 1 ? shape.key_heads : none == 2 ? shape.dim : none == 3 ? shape.value_dim
                                                                                               : shape.length) = 0;
    CAPTURE(none);
    const delta_rule_problem p = random_delta_rule(shape);
    const tensors all = gradients_by<TestType>(p, random_d_results(p));
    const auto zeros = [](const tensor<double>& x) {
      return std::all_of(x.data.begin(), x.data.end(), [](double each) { return each == 0; });
    };
    if (none == 3) CHECK((zeros(all[0]) && zeros(all[1])));
    if (none == 2)
      CHECK(zeros(all[2]));
    if (none == 4) CHECK(relative_error(all[5], random_d_results(p)[1]) <= gradient_tolerance<TestType>::value);
  }
}

TEST_CASE("delta_rule_backward: no value heads, no gradients", "[delta_rule_backward]") {
  const tensor<float> q(1, 2, 9, 4, 1), none(1, 0, 9, 3);
  tensor<float> dq(1, 2, 9, 4, 7), dk = dq;
  attn::delta_rule_backward(view(q), view(q), view(none), view(none), {.q = view(dq), .k = view(dk)});
  CHECK(dq == tensor<float>(1, 2, 9, 4, 0));
  CHECK(dk == dq);
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: several segments, on any number of threads", "[delta_rule_backward]",
                        exact_types) {
  for (int decays = 0; decays < 3; ++decays) {
    delta_rule_problem p = random_delta_rule({.batch = 1,
                                              .key_heads = 1,
                                              .group = 2,
                                              .length = decays == 1 ? 2 * 16384 + 70 : 16384 + 70,
                                              .dim = 2,
                                              .value_dim = 1,
                                              .state = true,
                                              .decays = decays});
    // What reaches over segments, and its gradients do.
    for (double& g : p.x.log_decay.data) g = std::max(1e-3 * g, -1e-3);
    for (double& b : p.x.beta.data) b *= 1e-3;
    check_backward_with_state<TestType>(p);
    attn::execution threads(3, 0);
    const tensors d = random_d_results(p);
    CHECK(gradients_by<TestType>(p, d, threads) == gradients_by<TestType>(p, d));
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: alone, added, head by head, padded", "[delta_rule_backward]", all_types) {
  using S = TestType;
  for (int decays = 0; decays < 3; ++decays) {
    delta_rule_problem p = random_delta_rule(
        {.key_heads = 2, .group = 2, .length = 100, .dim = 9, .value_dim = 6, .state = true, .decays = decays});
    p.options.lengths = {90, 100};
    p.options.unit_norm_eps = 1e-6;
    p = rounded<S>(p);
    tensors d = random_d_results(p);
    d = {rounded<S>(d[0]), rounded<real<S>>(d[1])};
    const tensors all = gradients_by<S>(p, d);

    check_alone_and_added<delta_rule_count>([&](const auto& asked) { return gradients_by<S>(p, d, asked); }, all,
                                            delta_rule_names, 2 * gradient_tolerance<S>::value);

    const auto part = [](const tensor<double>& x, idx_t b, idx_t h, idx_t heads) {
      tensor<double> y(x.batch() ? 1 : 0, x.batch() ? heads : 0, x.length(), x.dim());
      for (idx_t g = 0; g < y.heads(); ++g)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t c = 0; c < x.dim(); ++c) y(0, g, i, c) = x(b, h * heads + g, i, c);
      return y;
    };
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 2; ++h) {
        delta_rule_problem one = p;
        one.x = {part(p.x.q, b, h, 1),    part(p.x.k, b, h, 1),         part(p.x.v, b, h, 2),
                 part(p.x.beta, b, h, 2), part(p.x.log_decay, b, h, 2), part(p.x.initial_state, b, h, 2)};
        one.options.lengths = {p.options.lengths[static_cast<std::size_t>(b)]};
        const tensors single = gradients_by<S>(one, {part(d[0], b, h, 2), part(d[1], b, h, 2)});
        for (std::size_t n = 0; n < delta_rule_count; ++n) CHECK(single[n] == part(all[n], b, h, n < 2 ? 1 : 2));
      }

    delta_rule_problem padded = p;
    tensors d_padded = d;
    for (tensor<double>* x : rows_of(padded)) poison_padding(*x, p.options.lengths);
    poison_padding(d_padded[0], p.options.lengths);
    CHECK(gradients_by<S>(padded, d_padded) == all);
    bool zeros = true;
    for (std::size_t n = 0; n < 5; ++n)
      for (idx_t h = 0; h < all[n].heads(); ++h)
        for (idx_t i = 90; i < all[n].length(); ++i)
          for (idx_t c = 0; c < all[n].dim(); ++c) zeros = zeros && all[n](0, h, i, c) == 0;
    CHECK(zeros);
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule_backward: decays of which nothing is left", "[delta_rule_backward]", exact_types) {
  for (int decays : {1, 2})
    for (double g : {-reference::infinity, -200.0, -30.0, 0.0}) {
      delta_rule_problem p = random_delta_rule(
          {.batch = 1, .key_heads = 1, .length = 70, .dim = 8, .value_dim = 5, .state = true, .decays = decays});
      std::fill(p.x.log_decay.data.begin(), p.x.log_decay.data.end(), g);
      const tensors d = random_d_results(p);
      const tensors actual = gradients_by<TestType>(rounded<TestType>(p), d);
      CAPTURE(decays, g);
      for (const tensor<double>& x : actual) CHECK(all_finite(x));
      if (std::isinf(g))
        CHECK(std::all_of(actual[4].data.begin(), actual[4].data.end(), [](double x) { return x == 0; }));
      if (g == 0 || g == -30) {
        // The gradient of a decay of e^-30 is as small, beside roundings of the terms whose difference it is.
        const delta_rule_problem given = rounded<TestType>(p);
        const reference_gradients wanted = gradients_of(
            case_of(given), [](tensors& x) { x = {rounded<TestType>(x[0]), rounded<TestType>(x[1])}; });
        const tensors library = gradients_by<TestType>(given, wanted.d_results);
        for (std::size_t n = 0; n < delta_rule_count; ++n) {
          if (n == 4 && g != 0) continue;
          CHECK(relative_error(library[n], wanted.gradients[n]) <= gradient_tolerance<TestType>::value);
        }
      }
    }
}

TEST_CASE("delta_rule_backward: beyond a segment, scratch grows by a state for each", "[delta_rule_backward]") {
  const auto scratch = [](idx_t length) {
    attn::execution serial;
    const delta_rule_problem p = random_delta_rule({.batch = 1, .key_heads = 1, .length = length, .dim = 3});
    gradients_by<float>(p, random_d_results(p), serial);
    return serial.scratch_bytes();
  };
  constexpr idx_t segment = 16384;
  CHECK(scratch(3 * segment) - scratch(segment) <= 2 * (32 * 32 * sizeof(float) + 64));
}

namespace {

// A good call, to be spoilt in one place.
struct delta_rule_backward_inputs {
  tensor<float> q{2, 2, 9, 8, 0.1f}, k{2, 2, 9, 8, 0.1f}, v{2, 4, 9, 5, 1}, d_out{2, 4, 9, 5, 1};
  tensor<float> beta{2, 4, 9, 1, 0.5f}, log_decay{2, 4, 9, 8, -0.5f}, state{2, 4, 8, 5, 1}, other{2, 4, 30, 30, 1};
  tensor<float> dq = like(q), dk = like(k), dv = like(v), d_beta = like(beta), d_log = like(log_decay),
                d_state = like(state);
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v)),
                 d_view = view(std::as_const(d_out));
  attn::delta_rule_options<float> options;
  attn::delta_rule_gradients<float> gradients;
  std::vector<idx_t> lengths;

  delta_rule_backward_inputs() {
    options.beta = optional_rows(beta), options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(state);
    gradients = {.q = view(dq), .k = view(dk), .v = view(dv), .beta = row_view(d_beta), .log_decay = view(d_log),
                 .initial_state = view(d_state)};
  }
  delta_rule_backward_inputs(const delta_rule_backward_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &d_beta, &d_log, &d_state}; }

  static tensor<float> like(const tensor<float>& x) { return {x.batch(), x.heads(), x.length(), x.dim(), 7}; }
  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
};

}  // namespace

TEST_CASE("delta_rule_backward refuses what does not fit", "[refusals][delta_rule_backward]") {
  using inputs = delta_rule_backward_inputs;
  const std::vector<refused<inputs>> list = {
      {"another batch of v", "value batch", [](inputs& d) { d.v_view = d.shaped(1, 4, 9, 5), d.gradients.v = {}; }},
      {"key heads that do not divide", "key heads", [](inputs& d) {
         d.k_view = d.q_view = d.shaped(2, 3, 9, 8), d.gradients.q = d.gradients.k = {};
       }},
      {"another dim of q", "query dim = key dim 8; found 7",
       [](inputs& d) { d.q_view = d.shaped(2, 2, 9, 7), d.gradients.q = {}; }},
      {"another length of q", "query length", [](inputs& d) { d.q_view = d.shaped(2, 2, 8, 8), d.gradients.q = {}; }},
      {"another length of v", "value length", [](inputs& d) { d.v_view = d.shaped(2, 4, 8, 5), d.gradients.v = {}; }},
      {"another dim of d_out", "d_out dim = value dim 5; found 4",
       [](inputs& d) { d.d_view = d.d_view.slice(3, 0, 4); }},
      {"other heads of d_out", "d_out heads", [](inputs& d) { d.d_view = d.shaped(2, 2, 9, 5); }},
      {"another length of d_out", "d_out length", [](inputs& d) { d.d_view = d.shaped(2, 4, 10, 5); }},
      {"another batch of d_out", "d_out batch", [](inputs& d) { d.d_view = d.shaped(1, 4, 9, 5); }},
      {"a null d_out", "null", [](inputs& d) { d.d_view = null_view(2, 4, 9, 5); }},
      {"a null gradient with extents", "null", [](inputs& d) { d.gradients.q = null_view(2, 2, 9, 8); }},
      {"a gradient of q of another shape", "the gradient of q of the shape of q",
       [](inputs& d) { d.gradients.q = d.gradients.q.slice(2, 0, 8); }},
      {"a gradient of log_decay of another shape", "the gradient of log_decay",
       [](inputs& d) { d.gradients.log_decay = d.gradients.log_decay.slice(3, 0, 1); }},
      {"a gradient of beta, which is not given", "beta", [](inputs& d) { d.options.beta = {}; }},
      {"a gradient of log_decay, which is not given", "log_decay", [](inputs& d) { d.options.log_decay = {}; }},
      {"a gradient of the initial state, which is not given", "initial_state",
       [](inputs& d) { d.options.initial_state = {}; }},
      {"a d_final_state of another shape", "d_final_state",
       [](inputs& d) { d.gradients.d_final_state = d.shaped(2, 4, 5, 8); }},
      {"an initial state of another shape", "initial_state",
       [](inputs& d) { d.options.initial_state = d.shaped(2, 2, 8, 5), d.gradients.initial_state = {}; }},
      {"a gradient that is an input", "overlap", [](inputs& d) { d.q_view = view(std::as_const(d.dq)); }},
      {"a gradient that is d_final_state", "overlap",
       [](inputs& d) { d.gradients.d_final_state = view(std::as_const(d.d_state)); }},
      {"two gradients in one place", "overlap", [](inputs& d) { d.gradients.k = d.gradients.q; }},
      {"beta of another length", "beta length", [](inputs& d) {
         d.options.beta = d.options.beta.slice(2, 0, 8), d.gradients.beta = {};
       }},
      {"a log decay above 0", "log_decay", [](inputs& d) { d.log_decay.data[3] = 0.5f; }},
      {"a log decay that is NaN", "log_decay",
       [](inputs& d) { d.log_decay.data[3] = std::numeric_limits<float>::quiet_NaN(); }},
      {"a length beyond the extent", "lengths", [](inputs& d) { d.lengths = {9, 10}, d.options.lengths = d.lengths; }},
      {"a negative unit_norm_eps", "unit_norm_eps", [](inputs& d) { d.options.unit_norm_eps = -1.0f; }},
      {"a scale that is not finite", "scale",
       [](inputs& d) { d.options.scale = std::numeric_limits<float>::infinity(); }}};
  check_refused("delta_rule_backward", list, [](inputs& d) {
    attn::execution serial;
    compiled_delta_rule<float>::backward(d.q_view, d.k_view, d.v_view, d.d_view, d.gradients, d.options, serial);
  });
}

TEST_CASE("delta_rule_backward: on Eigen matrices and any strides; arguments that are left out",
          "[delta_rule_backward]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(70, 8), k = 0.3f * Eigen::MatrixXf::Random(70, 8);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(70, 5), d_out = Eigen::MatrixXf::Random(70, 5);
  const row_major q_rows = q, k_rows = k, v_rows = v, d_rows = d_out;
  row_major dq(70, 8), dk(70, 8), dv(70, 5);
  attn::delta_rule_backward(q_rows, k_rows, v_rows, d_rows,
                            {.q = attn::as_view(dq), .k = attn::as_view(dk), .v = attn::as_view(dv)});
  const auto forms = std::initializer_list<std::function<void(const attn::delta_rule_gradients<float>&)>>{
      [&](const auto& g) { attn::delta_rule_backward(q, k, v, d_out, g); },
      [&](const auto& g) { attn::delta_rule_backward(q, k, v, d_out, g, attn::execution(2)); },
      [&](const auto& g) { attn::delta_rule_backward(q, k, v, d_out, g, {}, attn::execution(2)); },
      [&](const auto& g) { attn::delta_rule_backward(q, k, v, d_out, g, {.scale = 1 / std::sqrt(8.0f)}); }};
  for (const auto& form : forms) {
    Eigen::MatrixXf q_wide = Eigen::MatrixXf::Constant(72, 9, 7), k_other(70, 8), v_other(70, 5);
    auto q_block = q_wide.block(1, 1, 70, 8);
    form({.q = attn::as_view(q_block), .k = attn::as_view(k_other), .v = attn::as_view(v_other)});
    CHECK(q_block == dq);
    CHECK(k_other == dk);
    CHECK(v_other == dv);
    CHECK((q_wide.array() == 7).count() == 72 * 9 - 70 * 8);
  }
}

}  // namespace testing::delta_rule_backward_tests
