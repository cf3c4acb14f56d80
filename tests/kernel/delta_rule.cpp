// delta_rule against its reference: every option alone and in combination, odd lengths and dims, all types; its steps.
#include "kernel/recurrence.hpp"

#include "support/pairwise.hpp"
#include "support/refused.hpp"

namespace testing::delta_rule_tests {

using recurrences::check;

TEMPLATE_LIST_TEST_CASE("delta_rule: every combination of options", "[delta_rule]", exact_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (int bits : selected_bits(5)) {
      delta_rule_shape shape{.key_heads = 2, .group = bits & 8 ? 2 : 1, .length = 77, .dim = 9, .value_dim = 5};
      shape.beta = bits & 1, shape.state = bits & 2, shape.decays = decays;
      delta_rule_problem p = random_delta_rule(shape);
      if (bits & 4) p.options.unit_norm_eps = 1e-6;
      if (bits & 16) p.options.lengths = {77, 66}, p.options.scale = 0.5;
      CAPTURE(decays, bits);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("delta_rule: hidden keys write nothing, whatever they are", "[delta_rule]", all_types) {
  using inputs = reference::delta_rule_inputs<double>;
  for (int decays = 0; decays < 3; ++decays)
    for (idx_t masks : {1, 2}) {
      delta_rule_problem p = random_delta_rule({.group = 2, .length = 150, .dim = 9, .value_dim = 5, .decays = decays});
      p.options.key_mask = random_key_mask(3, masks, 150);
      if (masks == 1) p.options.unit_norm_eps = 1e-6;
      CAPTURE(decays, masks);
      recurrences::check_hidden_keys<TestType>(p, std::array{&inputs::k, &inputs::v});
    }
}

TEMPLATE_LIST_TEST_CASE("delta_rule: 16-bit storage computes in float", "[delta_rule]", storage_types) {
  for (int decays = 0; decays < 3; ++decays)
    check<TestType>(random_delta_rule({.group = 2, .length = 130, .dim = 33, .value_dim = 7, .decays = decays}));
}

TEMPLATE_LIST_TEST_CASE("delta_rule: odd lengths and dims", "[delta_rule]", exact_types) {
  recurrences::check_odd_shapes<TestType, delta_rule_shape>(random_delta_rule);
  check<TestType>(random_delta_rule({.batch = 0}));
  check<TestType>(random_delta_rule({.key_heads = 0}));
  check<TestType>(random_delta_rule({.value_dim = 0}));
}

TEMPLATE_LIST_TEST_CASE("delta_rule: heads of no width give zeros", "[delta_rule]", exact_types) {
  const delta_rule_problem p = random_delta_rule({.dim = 0});
  for (double x : run_serially<TestType>(p).out.data) CHECK(x == 0);
}

TEMPLATE_LIST_TEST_CASE("delta_rule: decays of which nothing is left", "[delta_rule]", exact_types) {
  for (int decays : {1, 2}) {
    CAPTURE(decays);
    recurrences::check_decays_of<TestType>(
        random_delta_rule({.batch = 1, .length = 130, .dim = 12, .value_dim = 5, .state = true, .decays = decays}));
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule: what one decay says, a decay for each channel says too", "[delta_rule]",
                        exact_types) {
  delta_rule_problem p = random_delta_rule({.length = 150, .dim = 20, .state = true, .decays = 1});
  const reference::result one = run_serially<TestType>(p);
  tensor<double> all(2, 2, 150, 20);
  for (idx_t row = 0; row < 2 * 2 * 150; ++row)
    std::fill_n(all.data.begin() + row * 20, 20, p.x.log_decay.data[static_cast<std::size_t>(row)]);
  p.x.log_decay = all;
  const reference::result each = run_serially<TestType>(p);
  CHECK(relative_error(each.out, one.out) <= 2 * tolerance<TestType>::out);
  CHECK(relative_error(each.final_state, one.final_state) <= 2 * tolerance<TestType>::out);
}

TEMPLATE_LIST_TEST_CASE("delta_rule: a sequence in two parts, by its state", "[delta_rule]", exact_types) {
  for (int decays = 0; decays < 3; ++decays) {
    const delta_rule_problem p =
        rounded<TestType>(random_delta_rule({.length = 200, .state = true, .decays = decays}));
    const reference::result whole = run_serially<TestType>(p);
    delta_rule_problem first = p, second = p;
    const auto split = [](const tensor<double>& x, idx_t begin, idx_t count) {
      return given(x) ? rows(x, begin, count) : x;
    };
    for (auto field : {&reference::delta_rule_inputs<double>::q, &reference::delta_rule_inputs<double>::k,
                       &reference::delta_rule_inputs<double>::v, &reference::delta_rule_inputs<double>::beta,
                       &reference::delta_rule_inputs<double>::log_decay}) {
      first.x.*field = split(p.x.*field, 0, 90);
      second.x.*field = split(p.x.*field, 90, 110);
    }
    const reference::result before = run_serially<TestType>(first);
    second.x.initial_state = before.final_state;
    const reference::result after = run_serially<TestType>(second);
    CHECK(relative_error(before.out, rows(whole.out, 0, 90)) <= 2 * tolerance<TestType>::out);
    CHECK(relative_error(after.out, rows(whole.out, 90, 110)) <= 2 * tolerance<TestType>::out);
    CHECK(relative_error(after.final_state, whole.final_state) <= 2 * tolerance<TestType>::out);
  }
}

TEMPLATE_LIST_TEST_CASE("delta_rule: padding changes no bit", "[delta_rule]", all_types) {
  for (int decays = 0; decays < 3; ++decays)
    recurrences::check_padding<TestType>(random_delta_rule({.group = 2, .length = 100, .state = true, .decays = decays}));
}

TEMPLATE_LIST_TEST_CASE("delta_rule: a long head and many, on any number of threads", "[delta_rule]", exact_types) {
  for (idx_t heads : {1, 3})
    for (int decays = 0; decays < 3; ++decays) {
      delta_rule_shape shape{.batch = 1, .key_heads = heads, .length = 9000, .dim = 24, .value_dim = 20, .state = true};
      shape.decays = decays;
      recurrences::check_threads<TestType>(random_delta_rule(shape));
    }
}

TEMPLATE_LIST_TEST_CASE("delta_rule: token by token, in chunks and at once agree", "[delta_rule]", all_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (idx_t length : {1, 5, 70, 200}) {
      delta_rule_problem p = random_delta_rule({.group = 2, .length = length, .dim = 20, .value_dim = 33, .decays = decays});
      if (decays == 1) p.options.scale = 0.7, p.options.unit_norm_eps = 1e-6;
      CAPTURE(decays);
      recurrences::check_streams<TestType>(p);
    }
}

TEST_CASE("delta_rule: on Eigen matrices of either order", "[delta_rule]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(70, 8), k = 0.3f * Eigen::MatrixXf::Random(70, 8);
  const row_major v = row_major::Random(70, 5);
  Eigen::MatrixXf state = Eigen::MatrixXf::Zero(8, 5), wanted(70, 5);
  for (idx_t t = 0; t < 70; ++t) {
    state += k.row(t).transpose() * (v.row(t) - k.row(t) * state);
    wanted.row(t) = 0.5f * q.row(t) * state;
  }
  row_major out(70, 5), other(70, 5);
  attn::execution threads(2, 0);
  attn::delta_rule(q, k, v, out, {.scale = 0.5f});
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());
  attn::delta_rule(q, k, v, other, {.scale = 0.5f}, threads);
  CHECK(other == out);
  attn::delta_rule(q, k, v, out);
  attn::delta_rule(q, k, v, other, threads);
  CHECK(other == out);
  Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(72, 9, 7);
  attn::delta_rule(q, k, v, wide.block(1, 2, 70, 5));
  CHECK(wide.block(1, 2, 70, 5) == out);
  CHECK((wide.array() == 7).count() == 72 * 9 - 70 * 5);
}

namespace {

// A good call, to be spoilt in one place.
struct delta_rule_call {
  tensor<float> q{2, 2, 9, 8, 0.1f}, k{2, 2, 9, 8, 0.1f}, v{2, 4, 9, 5, 1}, out{2, 4, 9, 5, 7}, beta{2, 4, 9, 1, 0.5f};
  tensor<float> log_decay{2, 4, 9, 8, -0.5f}, state{2, 4, 8, 5, 1}, after{2, 4, 8, 5, 7}, other{2, 4, 30, 30, 1};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> to = view(out);
  attn::delta_rule_options<float> options;
  std::vector<idx_t> lengths;

  delta_rule_call() {
    options.beta = optional_rows(beta), options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(state), options.final_state = view(after);
  }
  delta_rule_call(const delta_rule_call&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out, &after}; }
  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
};

}  // namespace

TEST_CASE("delta_rule refuses what does not fit", "[refusals][delta_rule]") {
  using inputs = delta_rule_call;
  const std::vector<refused<inputs>> list = {
      {"another batch of v", "value batch", [](inputs& d) { d.v_view = d.shaped(1, 4, 9, 5); }},
      {"key heads that do not divide", "key heads", [](inputs& d) { d.k_view = d.q_view = d.shaped(2, 3, 9, 8); }},
      {"other heads of q", "query heads", [](inputs& d) { d.q_view = d.shaped(2, 4, 9, 8); }},
      {"another dim of q", "query dim = key dim 8; found 7", [](inputs& d) { d.q_view = d.shaped(2, 2, 9, 7); }},
      {"another length of v", "value length", [](inputs& d) { d.v_view = d.shaped(2, 4, 8, 5); }},
      {"another dim of out", "out dim", [](inputs& d) { d.to = d.to.slice(3, 0, 4); }},
      {"a null q", "null", [](inputs& d) { d.q_view = null_view(2, 2, 9, 8); }},
      {"a null out", "null", [](inputs& d) { d.to = null_view(2, 4, 9, 5); }},
      {"out that is v", "overlap", [](inputs& d) { d.v_view = view(std::as_const(d.out)); }},
      {"a final state that is out", "overlap",
       [](inputs& d) { d.options.final_state = {d.out.data.data(), {2, 4, 8, 5}}; }},
      {"out whose rows are one", "overlap",
       [](inputs& d) { d.to = {d.out.data.data(), {2, 4, 9, 5}, {180, 45, 0, 1}}; }},
      {"beta of another length", "beta length", [](inputs& d) { d.options.beta = d.options.beta.slice(2, 0, 8); }},
      {"beta of other heads", "beta heads", [](inputs& d) { d.options.beta = d.options.beta.slice(1, 0, 2); }},
      {"a beta that is not finite", "beta", [](inputs& d) { d.beta.data[5] = std::numeric_limits<float>::infinity(); }},
      {"a key_mask of another length", "key_mask length = key length 9; found 8",
       [](inputs& d) {
         static const std::uint8_t seen[16] = {};
         d.options.key_mask = attn::tensor_view<const std::uint8_t, 2>(seen, {2, 8});
       }},
      {"log decays of other channels", "log_decay channels",
       [](inputs& d) { d.options.log_decay = d.options.log_decay.slice(3, 0, 7); }},
      {"a log decay above 0", "log_decay <= 0", [](inputs& d) { d.log_decay.data[3] = 0.5f; }},
      {"a log decay that is NaN", "log_decay",
       [](inputs& d) { d.log_decay.data[3] = std::numeric_limits<float>::quiet_NaN(); }},
      {"an initial state of another shape", "initial_state",
       [](inputs& d) { d.options.initial_state = d.shaped(2, 4, 5, 8); }},
      {"a final state of another shape", "final_state",
       [](inputs& d) { d.options.final_state = d.options.final_state.slice(1, 0, 2); }},
      {"a length beyond the extent", "lengths", [](inputs& d) { d.lengths = {9, 10}, d.options.lengths = d.lengths; }},
      {"another number of lengths", "lengths", [](inputs& d) { d.lengths = {9}, d.options.lengths = d.lengths; }},
      {"a negative unit_norm_eps", "unit_norm_eps > 0", [](inputs& d) { d.options.unit_norm_eps = -1.0f; }},
      {"a unit_norm_eps of 0", "unit_norm_eps > 0", [](inputs& d) { d.options.unit_norm_eps = 0.0f; }},
      {"a scale that is not finite", "scale",
       [](inputs& d) { d.options.scale = std::numeric_limits<float>::infinity(); }}};
  check_refused("delta_rule", list, [](inputs& d) {
    attn::execution serial;
    compiled_delta_rule<float>::call(d.q_view, d.k_view, d.v_view, d.to, d.options, serial);
  });
}

}  // namespace testing::delta_rule_tests
