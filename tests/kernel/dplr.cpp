// dplr against its reference: every option alone and in combination, odd lengths and dims, all types; its steps; the
// models that are special cases, and delta products.
#include "kernel/recurrence.hpp"

#include "support/pairwise.hpp"
#include "support/refused.hpp"

namespace testing::dplr_tests {

using recurrences::check;

TEMPLATE_LIST_TEST_CASE("dplr: every combination of options", "[dplr]", exact_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (int bits : selected_bits(3)) {
      dplr_shape shape{.length = 77, .dim = 9, .value_dim = 5, .decays = decays};
      shape.state = bits & 1;
      dplr_problem p = random_dplr(shape);
      if (bits & 2) p.options.scale = 0.5;
      if (bits & 4) p.options.lengths = {77, 66};
      CAPTURE(decays, bits);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("dplr: hidden keys write nothing, whatever they are", "[dplr]", all_types) {
  using inputs = reference::dplr_inputs<double>;
  for (int decays = 0; decays < 3; ++decays)
    for (idx_t masks : {1, 2}) {
      dplr_problem p = random_dplr({.length = 150, .dim = 9, .value_dim = 5, .decays = decays});
      p.options.key_mask = random_key_mask(3, masks, 150);
      CAPTURE(decays, masks);
      recurrences::check_hidden_keys<TestType>(p, std::array{&inputs::k, &inputs::v, &inputs::a, &inputs::b});
    }
}

TEMPLATE_LIST_TEST_CASE("dplr: 16-bit storage computes in float", "[dplr]", storage_types) {
  for (int decays = 0; decays < 3; ++decays)
    check<TestType>(random_dplr({.length = 130, .dim = 33, .value_dim = 7, .decays = decays}));
}

TEMPLATE_LIST_TEST_CASE("dplr: odd lengths and dims", "[dplr]", exact_types) {
  recurrences::check_odd_shapes<TestType, dplr_shape>(random_dplr);
  check<TestType>(random_dplr({.batch = 0}));
  check<TestType>(random_dplr({.heads = 0}));
  check<TestType>(random_dplr({.value_dim = 0}));
  for (double x : run_serially<TestType>(random_dplr({.dim = 0})).out.data) CHECK(x == 0);
}

TEMPLATE_LIST_TEST_CASE("dplr: decays of which nothing is left", "[dplr]", exact_types) {
  for (int decays : {1, 2}) {
    CAPTURE(decays);
    recurrences::check_decays_of<TestType>(
        random_dplr({.batch = 1, .length = 130, .dim = 12, .value_dim = 5, .state = true, .decays = decays}));
  }
}

TEMPLATE_LIST_TEST_CASE("dplr: padding changes no bit", "[dplr]", all_types) {
  for (int decays = 0; decays < 3; ++decays)
    recurrences::check_padding<TestType>(random_dplr({.length = 100, .state = true, .decays = decays}));
}

TEMPLATE_LIST_TEST_CASE("dplr: a long head and many, on any number of threads", "[dplr]", exact_types) {
  for (idx_t heads : {1, 3})
    for (int decays = 0; decays < 3; ++decays) {
      dplr_shape shape{.batch = 1, .heads = heads, .length = 9000, .dim = 24, .value_dim = 20, .state = true};
      shape.decays = decays;
      recurrences::check_threads<TestType>(random_dplr(shape));
    }
}

TEMPLATE_LIST_TEST_CASE("dplr: token by token, in chunks and at once agree", "[dplr]", all_types) {
  for (int decays = 0; decays < 3; ++decays)
    for (idx_t length : {1, 5, 70, 200}) {
      dplr_problem p = random_dplr({.length = length, .dim = 20, .value_dim = 33, .decays = decays});
      if (decays == 1) p.options.scale = 0.7;
      CAPTURE(decays);
      recurrences::check_streams<TestType>(p);
    }
}

// The models of the table in dplr.hpp ---------------------------------------------------------------------------------

namespace {

// k of unit norm, gates from 0 to 1 for channels of k and of v.
struct model_inputs {
  dplr_problem p;
  tensor<double> k, v, beta, k_gate, v_gate;

  explicit model_inputs(int decays)
      : p(random_dplr({.batch = 1, .length = 90, .dim = 12, .value_dim = 10, .state = true, .decays = decays}, 7)),
        k(p.x.a), v(p.x.v), beta(1, 2, 90, 1), k_gate(1, 2, 90, 12), v_gate(1, 2, 90, 10) {
    random_source random(5);
    for (tensor<double>* x : {&beta, &k_gate, &v_gate})
      for (double& each : x->data) each = random.uniform();
  }
  // The rows of dplr by f(b, h, t, d).
  template <class F>
  static void fill(tensor<double>& x, F&& f) {
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t t = 0; t < x.length(); ++t)
        for (idx_t d = 0; d < x.dim(); ++d) x(0, h, t, d) = f(h, t, d);
  }
  double decay(idx_t h, idx_t t, idx_t d) const {
    return std::exp(p.x.log_decay(0, h, t, p.x.log_decay.dim() == 1 ? 0 : d));
  }
  // The result by the model's own formula: update(S, h, t) is that of the state of a head after its decay.
  template <class Update>
  reference::result by_formula(Update&& update) const {
    reference::result r{tensor<double>(1, 2, 90, 10), {}, p.x.initial_state};
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t t = 0; t < 90; ++t) {
        for (idx_t d = 0; d < 12; ++d)
          for (idx_t e = 0; e < 10; ++e) r.final_state(0, h, d, e) *= decay(h, t, d);
        for (idx_t e = 0; e < 10; ++e) {
          update(r.final_state, h, t, e);
          for (idx_t d = 0; d < 12; ++d)
            r.out(0, h, t, e) += r.final_state(0, h, d, e) * p.x.q(0, h, t, d) / std::sqrt(12.0);
        }
      }
    return r;
  }
};

void check_equal(const dplr_problem& p, const reference::result& wanted) {
  const reference::result actual = run_serially<widest_type>(p);
  CHECK(relative_error(actual.out, wanted.out) <= 2 * tolerance<widest_type>::out);
  CHECK(relative_error(actual.final_state, wanted.final_state) <= 2 * tolerance<widest_type>::out);
}

}  // namespace

TEST_CASE("dplr: KDA and Gated DeltaNet are delta_rule", "[dplr]") {
  for (int decays : {1, 2}) {
    model_inputs m(decays);
    auto& x = m.p.x;
    model_inputs::fill(x.a, [&](idx_t h, idx_t t, idx_t d) { return m.decay(h, t, d) * m.k(0, h, t, d); });
    model_inputs::fill(x.b, [&](idx_t h, idx_t t, idx_t d) { return -m.beta(0, h, t, 0) * m.k(0, h, t, d); });
    model_inputs::fill(x.v, [&](idx_t h, idx_t t, idx_t e) { return m.beta(0, h, t, 0) * m.v(0, h, t, e); });
    x.k = m.k;
    delta_rule_problem delta;
    delta.x = {x.q, m.k, m.v, m.beta, x.log_decay, x.initial_state};
    check_equal(m.p, run_serially<widest_type>(delta));
  }
}

TEST_CASE("dplr: Comba reads with other keys than it writes", "[dplr]") {
  model_inputs m(1);
  auto& x = m.p.x;
  const tensor<double> keys = x.b;  // p
  model_inputs::fill(x.a, [&](idx_t h, idx_t t, idx_t d) { return m.decay(h, t, d) * keys(0, h, t, d); });
  model_inputs::fill(x.b, [&](idx_t h, idx_t t, idx_t d) { return -m.beta(0, h, t, 0) * m.k(0, h, t, d); });
  model_inputs::fill(x.v, [&](idx_t h, idx_t t, idx_t e) { return m.beta(0, h, t, 0) * m.v(0, h, t, e); });
  x.k = m.k;
  check_equal(m.p, m.by_formula([&](tensor<double>& s, idx_t h, idx_t t, idx_t e) {
    double difference = m.v(0, h, t, e);
    for (idx_t d = 0; d < 12; ++d) difference -= s(0, h, d, e) * keys(0, h, t, d);
    for (idx_t d = 0; d < 12; ++d) s(0, h, d, e) += m.beta(0, h, t, 0) * m.k(0, h, t, d) * difference;
  }));
}

TEST_CASE("dplr: GDN-2 has gates for channels of keys and of values", "[dplr]") {
  model_inputs m(2);
  auto& x = m.p.x;
  model_inputs::fill(x.a, [&](idx_t h, idx_t t, idx_t d) {
    return m.decay(h, t, d) * m.k_gate(0, h, t, d) * m.k(0, h, t, d);
  });
  model_inputs::fill(x.b, [&](idx_t h, idx_t t, idx_t d) { return -m.k(0, h, t, d); });
  model_inputs::fill(x.v, [&](idx_t h, idx_t t, idx_t e) { return m.v_gate(0, h, t, e) * m.v(0, h, t, e); });
  x.k = m.k;
  check_equal(m.p, m.by_formula([&](tensor<double>& s, idx_t h, idx_t t, idx_t e) {
    double written = m.v_gate(0, h, t, e) * m.v(0, h, t, e);
    for (idx_t d = 0; d < 12; ++d) written -= s(0, h, d, e) * m.k_gate(0, h, t, d) * m.k(0, h, t, d);
    for (idx_t d = 0; d < 12; ++d) s(0, h, d, e) += m.k(0, h, t, d) * written;
  }));
}

// Every token is three rows, of which the first has its decay, and the last its query.
TEST_CASE("dplr: delta products are sub-tokens without decay", "[dplr]") {
  constexpr idx_t tokens = 30, products = 3;
  dplr_problem p =
      random_dplr({.batch = 1, .heads = 1, .length = tokens * products, .dim = 8, .value_dim = 5, .decays = 1});
  for (idx_t i = 0; i < tokens * products; ++i)
    if (i % products > 0) p.x.log_decay(0, 0, i, 0) = 0;
  tensor<double> state(1, 1, 8, 5), wanted(1, 1, tokens, 5);
  for (idx_t t = 0; t < tokens; ++t)
    for (idx_t e = 0; e < 5; ++e) {
      const double decay = std::exp(p.x.log_decay(0, 0, t * products, 0));
      for (idx_t n = 0; n < products; ++n) {
        const idx_t row = t * products + n;
        double read = 0;
        for (idx_t d = 0; d < 8; ++d) read += p.x.a(0, 0, row, d) * state(0, 0, d, e);
        for (idx_t d = 0; d < 8; ++d)
          state(0, 0, d, e) = (n == 0 ? decay : 1) * state(0, 0, d, e) + p.x.b(0, 0, row, d) * read +
                              p.x.k(0, 0, row, d) * p.x.v(0, 0, row, e);
      }
      for (idx_t d = 0; d < 8; ++d)
        wanted(0, 0, t, e) += state(0, 0, d, e) * p.x.q(0, 0, t * products + products - 1, d) / std::sqrt(8.0);
    }
  const tensor<double> all = run_serially<widest_type>(p).out;
  tensor<double> last(1, 1, tokens, 5);
  for (idx_t t = 0; t < tokens; ++t)
    for (idx_t e = 0; e < 5; ++e) last(0, 0, t, e) = all(0, 0, t * products + products - 1, e);
  CHECK(relative_error(last, wanted) <= 2 * tolerance<widest_type>::out);
}

TEST_CASE("dplr: on Eigen matrices of either order", "[dplr]") {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(70, 8), k = Eigen::MatrixXf::Random(70, 8);
  const Eigen::MatrixXf a = 0.3f * Eigen::MatrixXf::Random(70, 8), b = -a;
  const row_major v = row_major::Random(70, 5);
  Eigen::MatrixXf state = Eigen::MatrixXf::Zero(8, 5), wanted(70, 5);
  for (idx_t t = 0; t < 70; ++t) {
    const Eigen::RowVectorXf read = a.row(t) * state;
    state += b.row(t).transpose() * read + k.row(t).transpose() * v.row(t);
    wanted.row(t) = 0.5f * q.row(t) * state;
  }
  row_major out(70, 5), other(70, 5);
  attn::execution threads(2, 0);
  attn::dplr(q, k, v, a, b, out, {.scale = 0.5f});
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());
  attn::dplr(q, k, v, a, b, other, {.scale = 0.5f}, threads);
  CHECK(other == out);
  attn::dplr(q, k, v, a, b, out);
  attn::dplr(q, k, v, a, b, other, threads);
  CHECK(other == out);
  Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(72, 9, 7);
  attn::dplr(q, k, v, a, b, wide.block(1, 2, 70, 5));
  CHECK(wide.block(1, 2, 70, 5) == out);
  CHECK((wide.array() == 7).count() == 72 * 9 - 70 * 5);
}

namespace {

// A good call, to be spoilt in one place.
struct dplr_call {
  tensor<float> q{2, 2, 9, 8, 0.1f}, k{2, 2, 9, 8, 0.1f}, v{2, 2, 9, 5, 1}, out{2, 2, 9, 5, 7};
  tensor<float> a{2, 2, 9, 8, -0.1f}, b{2, 2, 9, 8, 0.1f};
  tensor<float> log_decay{2, 2, 9, 8, -0.5f}, state{2, 2, 8, 5, 1}, after{2, 2, 8, 5, 7}, other{2, 4, 30, 30, 1};
  dplr_views<float> x{view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(std::as_const(a)),
                      view(std::as_const(b))};
  out_view<float> to = view(out);
  attn::dplr_options<float> options;
  std::vector<idx_t> lengths;

  dplr_call() {
    options.log_decay = optional_view(log_decay);
    options.initial_state = optional_view(state), options.final_state = view(after);
  }
  dplr_call(const dplr_call&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out, &after}; }
  in_view<float> shaped(idx_t n, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {n, h, i, d}}; }
};

}  // namespace

TEST_CASE("dplr refuses what does not fit", "[refusals][dplr]") {
  using inputs = dplr_call;
  const std::vector<refused<inputs>> list = {
      {"another batch of v", "value batch", [](inputs& d) { d.x.v = d.shaped(1, 2, 9, 5); }},
      {"fewer key heads", "key heads = value heads 2; found 1", [](inputs& d) { d.x.k = d.shaped(2, 1, 9, 8); }},
      {"other heads of q", "query heads", [](inputs& d) { d.x.q = d.shaped(2, 4, 9, 8); }},
      {"another dim of q", "query dim = key dim 8; found 7", [](inputs& d) { d.x.q = d.shaped(2, 2, 9, 7); }},
      {"another length of v", "value length", [](inputs& d) { d.x.v = d.shaped(2, 2, 8, 5); }},
      {"another length of a", "a of the shape of k", [](inputs& d) { d.x.a = d.shaped(2, 2, 8, 8); }},
      {"other heads of a", "a of the shape of k", [](inputs& d) { d.x.a = d.shaped(2, 1, 9, 8); }},
      {"another dim of b", "b of the shape of k", [](inputs& d) { d.x.b = d.shaped(2, 2, 9, 7); }},
      {"another dim of out", "out dim", [](inputs& d) { d.to = d.to.slice(3, 0, 4); }},
      {"a null q", "null", [](inputs& d) { d.x.q = null_view(2, 2, 9, 8); }},
      {"a null a", "null", [](inputs& d) { d.x.a = null_view(2, 2, 9, 8); }},
      {"a null b", "null", [](inputs& d) { d.x.b = null_view(2, 2, 9, 8); }},
      {"a null out", "null", [](inputs& d) { d.to = null_view(2, 2, 9, 5); }},
      {"out that is v", "overlap", [](inputs& d) { d.x.v = view(std::as_const(d.out)); }},
      {"out that is b", "overlap", [](inputs& d) { d.x.b = {d.out.data.data(), {2, 2, 9, 8}, {0, 0, 0, 1}}; }},
      {"a final state that is out", "overlap",
       [](inputs& d) { d.options.final_state = {d.out.data.data(), {2, 2, 8, 5}}; }},
      {"a key_mask of another batch", "key_mask batch",
       [](inputs& d) {
         static const std::uint8_t seen[27] = {};
         d.options.key_mask = attn::tensor_view<const std::uint8_t, 2>(seen, {3, 9});
       }},
      {"log decays of other channels", "log_decay channels",
       [](inputs& d) { d.options.log_decay = d.options.log_decay.slice(3, 0, 7); }},
      {"a log decay above 0", "log_decay <= 0", [](inputs& d) { d.log_decay.data[3] = 0.5f; }},
      {"a log decay that is NaN", "log_decay",
       [](inputs& d) { d.log_decay.data[3] = std::numeric_limits<float>::quiet_NaN(); }},
      {"an initial state of another shape", "initial_state",
       [](inputs& d) { d.options.initial_state = d.shaped(2, 2, 5, 8); }},
      {"a final state of another shape", "final_state",
       [](inputs& d) { d.options.final_state = d.options.final_state.slice(1, 0, 1); }},
      {"a length beyond the extent", "lengths", [](inputs& d) { d.lengths = {9, 10}, d.options.lengths = d.lengths; }},
      {"another number of lengths", "lengths", [](inputs& d) { d.lengths = {9}, d.options.lengths = d.lengths; }},
      {"a scale that is not finite", "scale",
       [](inputs& d) { d.options.scale = std::numeric_limits<float>::infinity(); }}};
  check_refused("dplr", list, [](inputs& d) {
    attn::execution serial;
    compiled_dplr<float>::call(d.x, d.to, d.options, serial);
  });
}

}  // namespace testing::dplr_tests
