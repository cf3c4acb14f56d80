// The gradients of linear with decays per token and channel, bonus, scale and states, against the reverse pass of the
// reference; what holds of them bit for bit.
#include "support/linear_decay.hpp"
#include "support/pairwise.hpp"

namespace testing::linear_decay_backward_tests {
namespace {

using reference::linear_feature;

template <class S>
void check_backward(const linear_decay_problem& problem) {
  const linear_decay_problem p = rounded<S>(problem);
  check_gradients(
      case_of(p), 2 * gradient_tolerance<S>::value,
      [&](const tensors&, const tensors& d_results) { return decay_gradients_by<S>(p, d_results); },
      [](tensors& d) { d = {rounded<S>(d[0]), rounded<real<S>>(d[1]), rounded<real<S>>(d[2])}; });
}

template <class S>
tensors random_d_results(const linear_decay_problem& p) {
  const auto &q = p.x.q, &v = p.x.v;
  const idx_t features = p.options.feature == linear_feature::products ? 2 * q.dim() : q.dim();
  return {rounded<S>(random_normal(97, q.batch(), q.heads(), q.length(), v.dim())),
          rounded<real<S>>(random_normal(98, q.batch(), p.x.sums_heads(), features, v.dim())),
          rounded<real<S>>(random_normal(99, q.batch(), p.x.sums_heads(), 1, features))};
}

constexpr decays all_decays[] = {decays::none, decays::token, decays::channel, decays::factor};

}  // namespace

TEST_CASE("linear_decay_backward: the reverse pass agrees with central differences", "[linear_decay_backward]") {
  for (decays kind : all_decays) {
    linear_decay_problem p = random_linear_decay(
        {.batch = 1, .queries = 7, .keys = 7, .dim = 4, .value_dim = 3, .kind = kind, .bonus = true, .states = true});
    for (double& g : p.x.log_decay.data) g = std::max(g, -1.0);  // of minus infinity there is no difference
    check_central_differences(case_of(p), 1e-5);
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: every combination of options", "[linear_decay_backward]", exact_types) {
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
        check_backward<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: hidden keys", "[linear_decay_backward]", exact_types) {
  for (decays kind : all_decays)
    for (auto feature : {linear_feature::identity, linear_feature::elu_plus_one, linear_feature::products}) {
      linear_decay_shape shape{.queries = 150, .keys = 150, .kind = kind, .feature = feature};
      shape.bonus = kind == decays::channel;
      linear_decay_problem p = random_linear_decay(shape);
      p.options.key_mask = random_key_mask(3, kind == decays::token ? 1 : 2, 150);
      p.options.causal = kind != decays::none;
      CAPTURE(int(kind), int(feature));
      check_backward<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: without gradients of the final sums", "[linear_decay_backward]",
                        exact_types) {
  for (decays kind : all_decays)
    for (int bits = 0; bits < 8; ++bits) {
      linear_decay_problem p = random_linear_decay(
          {.heads = 4, .kind = kind, .decay_heads = bits & 1 ? 4 : 2, .feature = linear_feature::elu_plus_one});
      if (bits & 2) p.options.scale = 0.5;
      if (bits & 4) p.options.lengths = {77, 66};
      p = rounded<TestType>(p);
      tensors d = random_d_results<TestType>(p);
      for (std::size_t n : {1u, 2u}) std::fill(d[n].data.begin(), d[n].data.end(), 0.0);
      const tensors with = decay_gradients_by<TestType>(p, d), without = decay_gradients_by<TestType>(p, {d[0]});
      CAPTURE(int(kind), bits);
      for (std::size_t n = 0; n < linear_decay_count; ++n) {
        CAPTURE(linear_decay_names[n]);
        CHECK(relative_error(without[n], with[n]) <= 2 * gradient_tolerance<TestType>::value);
      }
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: decays for key heads, states for query heads",
                        "[linear_decay_backward]", exact_types) {
  for (decays kind : all_decays)
    check_backward<TestType>(
        random_linear_decay({.heads = 4, .kind = kind, .state_heads = 4, .bonus = true, .states = true}));
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: not causal, with states", "[linear_decay_backward]", exact_types) {
  for (auto feature : {linear_feature::identity, linear_feature::elu_plus_one}) {
    linear_decay_problem p = random_linear_decay(
        {.heads = 4, .queries = 70, .keys = 131, .kind = decays::none, .states = true, .feature = feature});
    p.options.causal = false, p.options.scale = 0.5;
    p.options.query_lengths = {70, 65}, p.options.key_lengths = {64, 131};
    check_backward<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: 16-bit storage computes in float", "[linear_decay_backward]",
                        storage_types) {
  check_backward<TestType>(random_linear_decay({.queries = 130,
                                                .keys = 130,
                                                .dim = 33,
                                                .value_dim = 7,
                                                .bonus = true,
                                                .states = true,
                                                .feature = linear_feature::elu_plus_one}));
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: odd lengths and dims", "[linear_decay_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (bool bonus : {false, true}) {
      if (few_shapes && lengths[n] > 65 && bonus != (n % 2 == 0)) continue;
      linear_decay_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + 3) % 8], shape.value_dim = dims[(5 * n) % 8], shape.bonus = bonus, shape.states = true;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, bonus);
      check_backward<TestType>(random_linear_decay(shape, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: queries and keys of different lengths", "[linear_decay_backward]",
                        exact_types) {
  for (auto [queries, keys] : {std::pair<idx_t, idx_t>{1, 150}, {48, 49}, {65, 1}, {150, 1}, {129, 60}, {9, 0}, {0, 9}})
    for (bool bonus : {false, true}) {
      CAPTURE(queries, keys, bonus);
      check_backward<TestType>(random_linear_decay({.queries = queries, .keys = keys, .bonus = bonus, .states = true}));
    }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: several segments, on any number of threads", "[linear_decay_backward]",
                        exact_types) {
  for (decays kind : all_decays) {
    linear_decay_problem p = random_linear_decay({.batch = 1,
                                                  .heads = 2,
                                                  .kv_heads = 1,
                                                  .queries = 2200,
                                                  .keys = 2200,
                                                  .dim = 3,
                                                  .value_dim = 2,
                                                  .kind = kind,
                                                  .decay_heads = 1,
                                                  .bonus = true,
                                                  .states = true});
    for (double& g : p.x.log_decay.data) g = std::max(0.01 * g, -0.01);  // reaches over segments
    for (double& g : p.x.decay.data) g = 1 - 0.01 * g;
    if (kind == decays::none) p.options.scale = 0.01;
    check_backward<TestType>(p);
    p = rounded<TestType>(p);
    attn::execution threads(3, 0);
    const tensors d = random_d_results<TestType>(p);
    CHECK(decay_gradients_by<TestType>(p, d, threads) == decay_gradients_by<TestType>(p, d));
  }
}

TEMPLATE_LIST_TEST_CASE("linear_decay_backward: alone, added, padded", "[linear_decay_backward]", all_types) {
  using S = TestType;
  for (decays kind : all_decays) {
    linear_decay_problem p = random_linear_decay({.heads = 4,
                                                  .queries = 100,
                                                  .keys = 100,
                                                  .kind = kind,
                                                  .decay_heads = 4,
                                                  .bonus = true,
                                                  .states = true,
                                                  .feature = linear_feature::elu_plus_one});
    p.options.lengths = {90, 100};
    p = rounded<S>(p);
    const tensors d = random_d_results<S>(p), all = decay_gradients_by<S>(p, d);

    check_alone_and_added<linear_decay_count>([&](const auto& asked) { return decay_gradients_by<S>(p, d, asked); },
                                              all, linear_decay_names, gradient_tolerance<S>::value);

    linear_decay_problem padded = p;
    tensors d_padded = d;
    auto& x_in = padded.x;
    for (tensor<double>* x : {&x_in.q, &x_in.k, &x_in.v, &x_in.decay, &x_in.log_decay, &d_padded[0]})
      poison_padding(*x, p.options.lengths);
    CHECK(decay_gradients_by<S>(padded, d_padded) == all);
  }
}

}  // namespace testing::linear_decay_backward_tests
