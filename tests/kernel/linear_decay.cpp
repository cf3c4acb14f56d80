// linear with decays per token and channel, bonus, scale and states, against its reference and against the recurrences
// of the models that are made of it; in one call and in steps.
#include "support/linear_decay.hpp"
#include "support/pairwise.hpp"

namespace testing::linear_decay_tests {
namespace {

using reference::linear_feature;

linear_decay_result expected(const linear_decay_problem& p) {
  auto r = reference::linear(p.x, p.options);
  return {std::move(r.out), std::move(r.final_state), std::move(r.final_weights)};
}

template <class S>
void check(const linear_decay_problem& problem) {
  const linear_decay_problem p = rounded<S>(problem);
  const linear_decay_result actual = run_serially<S>(p), wanted = expected(p);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  if (wanted.final_state.empty()) return;  // no heads or no features
  CHECK(relative_error(actual.final_state, wanted.final_state) <= tolerance<real<S>>::out);
  CHECK(relative_error(actual.final_weights, wanted.final_weights) <= tolerance<real<S>>::out);
}

// The tokens of p in the chunks given.
template <class S>
tensor<double> streamed(const linear_decay_problem& p, const std::vector<idx_t>& chunks) {
  const linear_decay_memory<S> m(p);
  attn::linear_state<S> state({.batch = p.x.q.batch(),
                               .heads = p.x.sums_heads(),
                               .features = p.x.q.dim(),
                               .value_dim = p.x.v.dim()});
  tensor<S> out(p.x.q.batch(), p.x.q.heads(), p.x.q.length(), p.x.v.dim(), S(7));
  attn::execution serial;
  idx_t begin = 0;
  for (idx_t count : chunks) {
    const auto part = [&](auto x) { return x.slice(2, begin, count); };
    compiled_linear<S>::step(state, part(view(m.q)), part(view(m.k)), part(view(m.v)), part(view(out)),
                             m.step_options(begin, count), p.options.feature, serial);
    begin += count;
  }
  CHECK(state.tokens() == begin);
  return cast<double>(out);
}

constexpr decays all_decays[] = {decays::none, decays::token, decays::channel, decays::factor};

}  // namespace

TEMPLATE_LIST_TEST_CASE("linear_decay: every combination of options", "[linear_decay]", exact_types) {
  for (decays kind : all_decays)
    for (auto feature : {linear_feature::identity, linear_feature::elu_plus_one, linear_feature::products})
      for (int bits : selected_bits(5)) {
        linear_decay_shape shape{.kind = kind, .feature = feature};
        shape.bonus = bits & 1, shape.states = bits & 2;
        if (bits & 4) shape.heads = 4, shape.decay_heads = 4;
        if (bits & 8) shape.queries = 90;
        linear_decay_problem p = random_linear_decay(shape);
        if (bits & 16)
          p.options.query_lengths = {shape.queries, 60}, p.options.key_lengths = {77, 66}, p.options.scale = 0.5;
        CAPTURE(int(kind), int(feature), bits);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: hidden keys add nothing, whatever they are", "[linear_decay]",
                        exact_types) {
  for (decays kind : all_decays)
    for (int bits = 0; bits < 8; ++bits) {
      linear_decay_shape shape{.heads = 4, .queries = 150, .keys = 150, .kind = kind};
      shape.bonus = bits & 1, shape.states = bits & 2;
      if (bits & 4) shape.feature = linear_feature::elu_plus_one;
      linear_decay_problem p = random_linear_decay(shape);
      p.options.key_mask = random_key_mask(3, bits & 4 ? 1 : 2, 150);
      if (kind == decays::none && bits == 4) p.options.causal = false;
      p = rounded<TestType>(p);
      const linear_decay_result wanted = expected(p);
      for (tensor<double>* x : {&p.x.k, &p.x.v})
        for (idx_t b = 0; b < 2; ++b)
          for (idx_t h = 0; h < x->heads(); ++h)
            for (idx_t t = 0; t < 150; ++t)
              for (idx_t d = 0; d < x->dim() && reference::key_hidden(p.options.key_mask, b, t); ++d)
                (*x)(b, h, t, d) = std::numeric_limits<double>::quiet_NaN();
      CAPTURE(int(kind), bits);
      const linear_decay_result actual = run_serially<TestType>(p);
      CHECK(relative_error(actual.out, wanted.out) <= tolerance<TestType>::out);
      CHECK(relative_error(actual.final_state, wanted.final_state) <= tolerance<real<TestType>>::out);
      CHECK(relative_error(actual.final_weights, wanted.final_weights) <= tolerance<real<TestType>>::out);
      if (!p.options.causal || shape.states) continue;
      for (const auto& chunks : {std::vector<idx_t>(150, 1), {70, 2, 78}})
        CHECK(relative_error(streamed<TestType>(p, chunks), wanted.out) <= tolerance<TestType>::out);
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: without the final sums", "[linear_decay]", exact_types) {
  for (decays kind : all_decays)  // decays per token alone need nothing beyond the sums of features
    for (int bits = 0; bits < 8; ++bits) {
      linear_decay_problem p = random_linear_decay(
          {.heads = 4, .kind = kind, .decay_heads = bits & 1 ? 4 : 2, .feature = linear_feature::elu_plus_one});
      if (bits & 2) p.options.scale = 0.5;
      if (bits & 4) p.options.lengths = {77, 66};
      p = rounded<TestType>(p);
      const linear_decay_memory<TestType> m(p);
      tensor<TestType> out(2, 4, 77, 5, TestType(7));
      attn::execution serial;
      compiled_linear<TestType>::call(view(m.q), view(m.k), view(m.v), view(out), m.options, p.options.feature, serial);
      CAPTURE(int(kind), bits);
      CHECK(relative_error(cast<double>(out), expected(p).out) <= tolerance<TestType>::out);
    }
}

TEST_CASE("linear_decay: queries that see no key give zeros, whatever they are", "[linear_decay]") {
  for (bool causal : {true, false}) {
    linear_decay_problem p = random_linear_decay(
        {.queries = 9, .keys = causal ? 4 : 0, .kind = causal ? decays::channel : decays::none});
    p.options.causal = causal, p.options.scale = 0.5;
    const idx_t alone = causal ? 5 : 9;
    for (idx_t h : {0, 1})
      for (idx_t i = 0; i < alone; ++i) p.x.q(0, h, i, 1) = std::numeric_limits<double>::quiet_NaN();
    CAPTURE(causal);
    const tensor<double> out = run_serially<float>(p).out;
    const tensors d_results = {random_normal(5, 2, 2, 9, 5)};
    const tensor<double> dq = decay_gradients_by<float>(p, d_results)[0];
    for (idx_t b : {0, 1})
      for (idx_t h : {0, 1})
        for (idx_t i = 0; i < alone; ++i) {
          for (idx_t c = 0; c < 5; ++c) CHECK(out(b, h, i, c) == 0);
          for (idx_t c = 0; c < 9; ++c) CHECK(dq(b, h, i, c) == 0);
        }
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: decays for key heads, states for query heads", "[linear_decay]", exact_types) {
  for (decays kind : all_decays)
    check<TestType>(random_linear_decay({.heads = 4, .kind = kind, .state_heads = 4, .bonus = true, .states = true}));
}

TEMPLATE_LIST_TEST_CASE("linear_decay: not causal, with states", "[linear_decay]", exact_types) {
  for (auto feature : {linear_feature::identity, linear_feature::elu_plus_one}) {
    linear_decay_problem p = random_linear_decay(
        {.heads = 4, .queries = 70, .keys = 131, .kind = decays::none, .states = true, .feature = feature});
    p.options.causal = false, p.options.scale = 0.5;
    p.options.query_lengths = {70, 65}, p.options.key_lengths = {64, 131};
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: 16-bit storage computes in float", "[linear_decay]", storage_types) {
  linear_decay_shape shape{.queries = 130, .keys = 130, .dim = 33, .value_dim = 7, .bonus = true, .states = true};
  shape.feature = linear_feature::elu_plus_one;
  check<TestType>(random_linear_decay(shape));
}

TEMPLATE_LIST_TEST_CASE("linear_decay: odd lengths and dims", "[linear_decay]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (bool bonus : {false, true}) {
      linear_decay_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + 3) % 8], shape.value_dim = dims[(5 * n) % 8], shape.bonus = bonus, shape.states = true;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, bonus);
      check<TestType>(random_linear_decay(shape, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: queries and keys of different lengths", "[linear_decay]", exact_types) {
  for (auto [queries, keys] : {std::pair<idx_t, idx_t>{1, 150}, {48, 49}, {65, 1}, {150, 1}, {129, 60}, {9, 0}, {0, 9}})
    for (bool bonus : {false, true}) {
      CAPTURE(queries, keys, bonus);
      check<TestType>(random_linear_decay({.queries = queries, .keys = keys, .bonus = bonus, .states = true}));
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: several segments, on any number of threads", "[linear_decay]", exact_types) {
  for (decays kind : all_decays) {
    linear_decay_problem p = random_linear_decay({.batch = 1,
                                                  .heads = 1,
                                                  .kv_heads = 1,
                                                  .queries = 2600,
                                                  .keys = 2600,
                                                  .dim = 20,
                                                  .value_dim = 24,
                                                  .kind = kind,
                                                  .decay_heads = 1,
                                                  .states = true,
                                                  .feature = linear_feature::elu_plus_one});
    for (double& g : p.x.log_decay.data) g = std::max(0.01 * g, -0.01);  // reaches over segments
    for (double& g : p.x.decay.data) g = 1 - 0.01 * g;
    if (kind == decays::none) p.options.scale = 0.5;
    check<TestType>(p);
    attn::execution threads(3, 0);
    p = rounded<TestType>(p);
    CHECK(run<TestType>(p, threads) == run_serially<TestType>(p));
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay: token by token, in chunks and at once", "[linear_decay]", all_types) {
  using S = TestType;
  for (decays kind : all_decays)
    for (bool bonus : {false, true}) {
      linear_decay_shape shape{.heads = 4, .queries = 200, .keys = 200, .kind = kind, .decay_heads = 4, .bonus = bonus};
      shape.feature = linear_feature::elu_plus_one;
      linear_decay_problem p = random_linear_decay(shape);
      p.options.scale = 0.5;
      p = rounded<S>(p);
      const tensor<double> wanted = expected(p).out;
      CAPTURE(int(kind), bonus);
      CHECK(relative_error(streamed<S>(p, std::vector<idx_t>(200, 1)), wanted) <= tolerance<S>::out);
      CHECK(relative_error(streamed<S>(p, {3, 64, 0, 2, 100, 1, 30}), wanted) <= tolerance<S>::out);
    }
}

// The models of include/attn/README.md, each by its own recurrence.
TEST_CASE("linear_decay: RetNet, Lightning, Mamba-2, GLA, HGRN2 and RWKV-6", "[linear_decay]") {
  constexpr idx_t heads = 2, length = 100, dim = 8, dim_v = 6;
  linear_decay_shape shape{.batch = 1, .queries = length, .keys = length, .dim = dim, .value_dim = dim_v};
  random_source random(3);
  // out_t = s q_t^T S_t, S_t = diag(a_t) S_(t-1) + k_t v_t^T; `before`: out_t = q_t^T (S_(t-1) + diag(u) k_t v_t^T).
  const auto recurrence = [&](const tensor<double>& q, const tensor<double>& k, const tensor<double>& v, auto&& decay,
                              double scale, const tensor<double>* bonus) {
    tensor<double> out(1, heads, length, dim_v);
    for (idx_t h = 0; h < heads; ++h) {
      double state[dim][dim_v] = {};
      for (idx_t t = 0; t < length; ++t)
        for (idx_t e = 0; e < dim_v; ++e) {
          double sum = 0;
          for (idx_t d = 0; d < dim; ++d) {
            const double key = k(0, h, t, d) * v(0, h, t, e), before = state[d][e];
            state[d][e] = decay(h, t, d) * before + key;
            sum += q(0, h, t, d) * (bonus ? before + (*bonus)(0, h, 0, d) * key : state[d][e]);
          }
          out(0, h, t, e) = scale * sum;
        }
    }
    return out;
  };
  const auto agree = [&](const char* model, const linear_decay_problem& p, const tensor<double>& wanted) {
    INFO(model);
    CHECK(relative_error(run_serially<float>(p).out, wanted) <= 2e-6);
  };

  {  // one decay per head, for all tokens; Lightning Attention alike
    shape.kind = decays::token;
    linear_decay_problem p = random_linear_decay(shape);
    const double gamma[heads] = {1 - 1 / 32.0, 1 - 1 / 64.0};
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < length; ++t) p.x.log_decay(0, h, t, 0) = std::log(gamma[h]);
    p.options.scale = 1 / std::sqrt(8.0);
    agree("RetNet", p,
          recurrence(p.x.q, p.x.k, p.x.v, [&](idx_t h, idx_t, idx_t) { return gamma[h]; }, p.options.scale, nullptr));
  }
  {  // h_t = e^(A dt_t) h_(t-1) + dt_t B_t x_t^T, y_t = C_t^T h_t
    linear_decay_problem p = random_linear_decay(shape);
    const tensor<double> x = p.x.v;
    tensor<double> dt(1, heads, length, 1);
    const double a[heads] = {-0.5, -2};
    for (double& each : dt.data) each = 0.5 * random.uniform();
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < length; ++t) {
        p.x.log_decay(0, h, t, 0) = a[h] * dt(0, h, t, 0);
        for (idx_t e = 0; e < dim_v; ++e) p.x.v(0, h, t, e) = dt(0, h, t, 0) * x(0, h, t, e);
      }
    tensor<double> b_dt = p.x.k;
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < length; ++t)
        for (idx_t d = 0; d < dim; ++d) b_dt(0, h, t, d) *= dt(0, h, t, 0);
    agree("Mamba-2", p,
          recurrence(p.x.q, b_dt, x, [&](idx_t h, idx_t t, idx_t) { return std::exp(a[h] * dt(0, h, t, 0)); }, 1,
                     nullptr));
  }
  shape.kind = decays::channel;
  {  // alpha_t per channel, a sigmoid to the power 1 / 16
    linear_decay_problem p = random_linear_decay(shape);
    const tensor<double> logits = random_normal(40, 1, heads, length, dim);
    const auto alpha = [&](idx_t h, idx_t t, idx_t d) {
      return std::pow(1 / (1 + std::exp(-logits(0, h, t, d))), 1 / 16.0);
    };
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < length; ++t)
        for (idx_t d = 0; d < dim; ++d) p.x.log_decay(0, h, t, d) = std::log(alpha(h, t, d));
    p.options.scale = 1 / std::sqrt(8.0);
    agree("GLA", p, recurrence(p.x.q, p.x.k, p.x.v, alpha, p.options.scale, nullptr));
  }
  {  // the key is what the forget gate f leaves: k = 1 - f
    linear_decay_problem p = random_linear_decay(shape);
    tensor<double> f = p.x.k;
    for (double& each : f.data) each = 1 / (1 + std::exp(-each));
    for (std::size_t n = 0; n < f.data.size(); ++n)
      p.x.log_decay.data[n] = std::log(f.data[n]), p.x.k.data[n] = 1 - f.data[n];
    agree("HGRN2", p,
          recurrence(p.x.q, p.x.k, p.x.v, [&](idx_t h, idx_t t, idx_t d) { return f(0, h, t, d); }, 1, nullptr));
  }
  {  // receptance r = q, w_t = exp(-exp(x_t)), bonus u
    shape.bonus = true;
    linear_decay_problem p = random_linear_decay(shape);
    const tensor<double> x = random_normal(41, 1, heads, length, dim);
    for (std::size_t n = 0; n < x.data.size(); ++n) p.x.log_decay.data[n] = -std::exp(x.data[n]);
    agree("RWKV-6", p,
          recurrence(p.x.q, p.x.k, p.x.v,
                     [&](idx_t h, idx_t t, idx_t d) { return std::exp(-std::exp(x(0, h, t, d))); }, 1, &p.x.bonus));
  }
}

}  // namespace testing::linear_decay_tests
