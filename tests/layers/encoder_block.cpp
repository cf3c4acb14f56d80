// encoder_block against its reference, around attention and around a mixer without weights.
#include "layers/layers.hpp"

namespace testing::encoder_block_tests {
namespace {

reference::encoder_block_weights random_weights(idx_t dim, idx_t hidden, bool all, bool gated = false) {
  reference::encoder_block_weights w;
  w.feed = random_feed_forward(dim, hidden, dim, all, gated);
  if (!all) return w;
  w.gamma_1 = random_vector(1, dim, 1), w.beta_1 = random_vector(2, dim);
  w.gamma_2 = random_vector(3, dim, 1), w.beta_2 = random_vector(4, dim);
  return w;
}

// Every token takes half of the one before it.
template <class S>
void shift(in_sequence<S> x, out_sequence<S> out, attn::execution&) {
  for (idx_t b = 0; b < x.extent(0); ++b)
    for (idx_t i = 0; i < x.extent(1); ++i)
      for (idx_t d = 0; d < x.extent(2); ++d)
        out(b, i, d) = i > 0 ? static_cast<S>(static_cast<real<S>>(x(b, i - 1, d)) / 2) : S(0);
}

template <class S>
double error_of(idx_t batch, idx_t length, idx_t dim, idx_t hidden, bool all, bool norm_first, attn::activation f,
                bool in_place, bool llama = false) {
  const auto x = rounded<S>(random_sequence(5, batch, length, dim));
  const auto w = rounded<S>(random_weights(dim, hidden, all, llama));
  const encoder_store<S> stored(w);
  tensor<S> sx = cast<S>(x), out(batch, 1, length, dim, S(7));
  attn::execution serial;
  compiled_layers<S>::encoder_block(sequence(std::as_const(sx)), in_place ? sequence(sx) : sequence(out),
                                    stored.views(), shift<S>,
                                    {.norm_first = norm_first, .rms = llama, .activation = f}, serial);
  const auto mix = [](const tensor<double>& s) {
    tensor<double> to = s;
    shift<double>(sequence(s), sequence(to), *std::make_unique<attn::execution>());
    return to;
  };
  const auto formula = f == attn::activation::relu   ? reference::relu
                       : f == attn::activation::gelu ? reference::gelu
                       : f == attn::activation::silu ? reference::silu
                                                     : reference::gelu_tanh;
  const double eps = static_cast<double>(attn::encoder_block_options<S>{}.eps);
  return relative_error(in_place ? sx : out, reference::encoder_block(x, mix, w, norm_first, formula, eps, llama));
}

// Norm, mixing and two products in a row, each within the tolerance.
template <class S>
constexpr double allowed = 4 * tolerance<S>::out;

}  // namespace

TEMPLATE_LIST_TEST_CASE("encoder_block: against the reference", "[encoder_block]", all_types) {
  for (bool norm_first : {true, false})
    for (bool all : {false, true})
      for (bool in_place : {false, true})
        for (idx_t length : {0, 1, 47, 130}) {
          CAPTURE(norm_first, all, in_place, length);
          const auto f = static_cast<attn::activation>(length % 3);
          CHECK(error_of<TestType>(2, length, 24, 70, all, norm_first, f, in_place) <= allowed<TestType>);
        }
}

TEMPLATE_LIST_TEST_CASE("encoder_block: RMS norm and a gate", "[encoder_block]", exact_types) {
  for (bool norm_first : {true, false})
    for (idx_t length : {1, 47})
      CHECK(error_of<TestType>(2, length, 24, 70, length == 47, norm_first, attn::activation::silu, false, true) <=
            allowed<TestType>);
}

TEMPLATE_LIST_TEST_CASE("encoder_block: odd sizes", "[encoder_block]", exact_types) {
  for (bool norm_first : {true, false})
    for (idx_t dim : {0, 1, 33, 530})
      for (idx_t hidden : {0, 5, 600}) {
        if (dim == 1) continue;  // a norm of one feature keeps nothing but beta: there is nothing to compare
        CAPTURE(norm_first, dim, hidden);
        CHECK(error_of<TestType>(1, 10, dim, hidden, true, norm_first, attn::activation::gelu, false) <=
              allowed<TestType>);
      }
}

// The mixer repeats the numbers of the token before to fill the width of out.
TEMPLATE_LIST_TEST_CASE("encoder_block: a projected residual", "[encoder_block]", all_types) {
  using S = TestType;
  const mixer_of<S> widen = [](in_sequence<S> x, out_sequence<S> out, attn::execution&) {
    for (idx_t b = 0; b < x.extent(0); ++b)
      for (idx_t i = 0; i < x.extent(1); ++i)
        for (idx_t d = 0; d < out.extent(2); ++d)
          out(b, i, d) = x(b, i > 0 ? i - 1 : 0, d % x.extent(2));
  };
  for (bool norm_first : {true, false})
    for (idx_t length : {0, 1, 4, 47, 130})
      for (const auto& widths : {std::pair<idx_t, idx_t>{24, 48}, {33, 7}, {24, 24}, {3, 5}}) {
        const idx_t from = widths.first, to = widths.second;  // Clang 14 captures no structured binding
        CAPTURE(norm_first, length, from, to);
        const bool all = length % 2 != 0;
        const auto x = rounded<S>(random_sequence(5, 2, length, from));
        auto w = random_weights(to, 70, all);
        if (all && norm_first) w.gamma_1 = random_vector(1, from, 1), w.beta_1 = random_vector(2, from);
        w.residual = random_weight(8, to, from);
        if (all) w.residual_bias = random_vector(9, to);
        w = rounded<S>(w);
        const encoder_store<S> stored(w);
        tensor<S> sx = cast<S>(x), out(2, 1, length, to, S(7)), mixed = out;
        attn::execution threads(2, 0);
        compiled_layers<S>::encoder_block(sequence(std::as_const(sx)), sequence(out), stored.views(), widen,
                                          {.norm_first = norm_first, .mixed = sequence(mixed)}, threads);
        const auto mix = [&](const tensor<double>& s) {
          tensor<double> wide(2, 1, length, to);
          for (idx_t b = 0; b < 2; ++b)
            for (idx_t i = 0; i < length; ++i)
              for (idx_t d = 0; d < to; ++d) wide(b, 0, i, d) = s(b, 0, i > 0 ? i - 1 : 0, d % from);
          return wide;
        };
        const double eps = static_cast<double>(attn::encoder_block_options<S>{}.eps);
        CHECK(relative_error(out, reference::encoder_block(x, mix, w, norm_first, reference::gelu, eps)) <= allowed<S>);
        if (from != to) continue;
        compiled_layers<S>::encoder_block(sequence(std::as_const(sx)), sequence(sx), stored.views(), widen,
                                          {.norm_first = norm_first}, threads);
        CHECK(sx == out);  // in place
      }
}

TEST_CASE("encoder_block: refusals of residual weights and widths", "[encoder_block]") {
  const encoder_store<float> stored(random_weights(6, 16, false));
  const tensor<float> weight = cast<float>(random_weight(1, 6, 4)), bias = cast<float>(random_vector(1, 6));
  const tensor<float> x = cast<float>(random_sequence(1, 1, 5, 4));
  tensor<float> out(1, 1, 5, 6, 7.0f);
  const tensor<float> before = out;
  attn::execution serial;
  const auto call = [&](in_matrix<float> w, in_vector<float> b) {
    auto weights = stored.views();
    weights.residual = {.weight = w, .bias = b};
    compiled_layers<float>::encoder_block(sequence(x), sequence(out), weights, shift<float>, {}, serial);
  };
  const auto says = [&](in_matrix<float> w, in_vector<float> b, const char* message) {
    CHECK(refusal([&] { call(w, b); }) == message);
    CHECK(out == before);
  };
  says({}, {}, "attn::encoder_block: expected out dim 4; found 6");
  says({}, vector(bias), "attn::encoder_block: expected out dim 4; found 6");
  says({weight.data.data(), {6, 3}}, {},
       "attn::encoder_block: expected residual weight [outputs, inputs] with columns = dim of its input 4; "
       "found [6, 3]");
  says({weight.data.data(), {4, 4}}, {}, "attn::encoder_block: expected out dim 4; found 6");
  says(matrix(weight), {bias.data.data(), {5}},
       "attn::encoder_block: expected residual bias, one per row of its weight: 6; found 5");
}

TEMPLATE_LIST_TEST_CASE("encoder_block: two blocks with attention", "[encoder_block]", exact_types) {
  const auto x = rounded<TestType>(random_sequence(5, 2, 50, 32));
  const auto w = rounded<TestType>(random_weights(32, 128, true));
  reference::multi_head_weights heads;
  heads.query = heads.key = rounded<TestType>(random_weight(6, 32, 32));
  heads.value = heads.output = rounded<TestType>(random_weight(7, 32, 32));
  const encoder_store<TestType> stored(w);
  const multi_head_store<TestType> stored_heads(heads);
  const mixer_of<TestType> mix = [&](auto s, auto out, attn::execution& exec) {
    compiled_layers<TestType>::multi_head(s, out, stored_heads.views(), full_attention<TestType>(), {.heads = 4}, exec);
  };
  tensor<TestType> out = cast<TestType>(x);
  tensor<double> wanted = x;
  attn::execution serial;
  for (int block = 0; block < 2; ++block) {
    compiled_layers<TestType>::encoder_block(sequence(std::as_const(out)), sequence(out), stored.views(), mix, {},
                                             serial);
    wanted = reference::encoder_block(
        wanted, [&](const auto& s) { return reference::multi_head(s, s, heads, 4, 4); }, w, true, reference::gelu,
        static_cast<double>(attn::encoder_block_options<TestType>{}.eps));
  }
  CHECK(relative_error(out, wanted) <= allowed<TestType>);
}

TEST_CASE("encoder_block: what the mixer throws passes through, and out is as it was", "[encoder_block]") {
  const encoder_store<float> stored(random_weights(8, 16, true));
  tensor<float> x = cast<float>(random_sequence(1, 1, 5, 8)), before = x;
  const mixer_of<float> thrower = [](auto, auto, attn::execution&) { throw std::runtime_error("mixer"); };
  attn::execution serial;
  const auto call = [&](const mixer_of<float>& mix) {
    compiled_layers<float>::encoder_block(sequence(std::as_const(x)), sequence(x), stored.views(), mix, {}, serial);
  };
  CHECK_THROWS_AS(call(thrower), std::runtime_error);
  CHECK(x == before);
  call(shift<float>);  // and the execution is sound
  CHECK(all_finite(x));
}

TEST_CASE("encoder_block: Eigen matrices and default arguments", "[encoder_block]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6), u = Eigen::MatrixXf::Zero(4, 6);
  Eigen::MatrixXf out(9, 6);
  const auto nothing = [](auto, auto to, attn::execution&) {
    for (idx_t i = 0; i < to.extent(1); ++i)
      for (idx_t d = 0; d < to.extent(2); ++d) to(0, i, d) = 0;
  };
  attn::encoder_block(x, out, {.feed_forward = {.up = u, .down = u.transpose()}}, nothing);
  CHECK((out - x).isZero(0));  // nothing mixed, nothing fed: the residual alone
  attn::execution threads(2, 0);
  out.setZero();
  attn::encoder_block(x, out, {.feed_forward = {.up = u, .down = u.transpose()}}, nothing, threads);
  CHECK(out == x);
}

}  // namespace testing::encoder_block_tests
