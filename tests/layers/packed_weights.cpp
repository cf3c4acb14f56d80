// Weights packed before the call, of every storage: in every layer, against the reference on the numbers they store.
#include "layers/layers.hpp"

namespace testing::packed_weights_tests {
namespace {

using attn::packed_weights;
using codes = std::int8_t;

// The numbers that weights stored as Stored have.
template <class Stored>
tensor<double> as_stored(tensor<double> w) {
  if constexpr (std::same_as<Stored, codes>) {
    for (idx_t o = 0; o < w.length(); ++o) {
      float largest = 0;
      for (idx_t i = 0; i < w.dim(); ++i) largest = std::max(largest, std::abs(static_cast<float>(w(0, 0, o, i))));
      const float scale = largest / 127;
      for (idx_t i = 0; i < w.dim() && scale > 0; ++i)  // the quotient in float, which decides between two codes
        w(0, 0, o, i) = static_cast<double>(scale) *
                        static_cast<double>(std::nearbyint(static_cast<float>(w(0, 0, o, i)) / scale));
    }
    return w;
  } else {
    return rounded<Stored>(w);
  }
}

// Errors of project, whose elements are S, with weights stored as Stored, made of a view with stride `step`.
template <class S, class Stored>
double error(idx_t length, idx_t inputs, idx_t outputs, idx_t step = 1) {
  const auto x = rounded<S>(random_sequence(1, 2, length, inputs)), b = rounded<S>(random_vector(3, outputs));
  const auto w = rounded<S>(random_weight(2, outputs, inputs));
  tensor<S> memory(1, 1, outputs, inputs * step, std::numeric_limits<S>::quiet_NaN());
  for (idx_t o = 0; o < outputs; ++o)
    for (idx_t i = 0; i < inputs; ++i) memory(0, 0, o, i * step) = static_cast<S>(w(0, 0, o, i));
  const packed_weights<Stored> packed(
      attn::tensor_view<const S, 2>(memory.data.data(), {outputs, inputs}, {inputs * step, step}));
  const tensor<S> sx = cast<S>(x), sb = cast<S>(b);
  tensor<S> out(2, 1, length, outputs, S(7));
  attn::execution serial;
  compiled_layers<S>::project(sequence(sx), sequence(out), {.weight = packed, .bias = vector(sb)}, serial);
  return relative_error(out, reference::project(x, as_stored<Stored>(w), b));
}

template <class S, class Stored>
void check_storage(double allowed) {
  INFO(sizeof(S) << " bytes, stored in " << sizeof(Stored));
  for (idx_t length : {0, 1, 2, 4, 5, 8, 9, 31, 49})
    for (const auto& [inputs, outputs] : {std::pair<idx_t, idx_t>{0, 3}, {1, 1}, {33, 15}, {64, 70}, {1100, 33}}) {
      CAPTURE(length, inputs, outputs);
      CHECK(error<S, Stored>(length, inputs, outputs) <= allowed);
    }
  CHECK(error<S, Stored>(9, 33, 15, 2) <= allowed);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("packed_weights: every storage, in project", "[packed_weights]", all_types) {
  constexpr bool is_bf16 = std::same_as<TestType, Eigen::bfloat16>;
  constexpr double allowed = tolerance<TestType>::out;
  check_storage<TestType, TestType>(allowed);
  if constexpr (std::same_as<TestType, float>) {
    check_storage<float, Eigen::half>(allowed);
    check_storage<float, Eigen::bfloat16>(allowed);
  }
  // products of bf16 numbers round scale * code once more: by 2^-9 at most, each weight on its own
  if constexpr (!std::same_as<TestType, double>) check_storage<TestType, codes>(is_bf16 ? 1.5 * allowed : allowed);
}

TEMPLATE_LIST_TEST_CASE("packed_weights: the bits of the weights themselves", "[packed_weights]", all_types) {
  using S = TestType;
  using L = compiled_layers<S>;
  const feed_forward_store<S> feed(random_feed_forward(33, 600, 33, true, true));
  const tensor<S> query = cast<S>(random_weight(5, 32, 33)), output = cast<S>(random_weight(6, 33, 32));
  const packed_weights<S> up(matrix(feed.up)), down(matrix(feed.down)), gate(matrix(feed.gate)), q(matrix(query)),
      o(matrix(output));
  const attn::multi_head_weights<S> heads{.query = matrix(query),
                                          .key = matrix(query),
                                          .value = matrix(query),
                                          .output = matrix(output),
                                          .gate = matrix(query)};
  const attn::multi_head_weights<S> packed_heads{.query = q, .key = q, .value = q, .output = o, .gate = q};
  auto packed_feed = feed.views();
  packed_feed.up = up, packed_feed.down = down, packed_feed.gate = gate;
  for (idx_t length : {9, 20, 60}) {
    CAPTURE(length);
    const tensor<S> x = cast<S>(random_sequence(1, 2, length, 33));
    tensor<S> wanted(2, 1, length, 33), out(2, 1, length, 33, S(7));
    attn::execution serial;
    L::feed_forward(sequence(x), sequence(wanted), feed.views(), attn::activation::silu, serial);
    L::feed_forward(sequence(x), sequence(out), packed_feed, attn::activation::silu, serial);
    CHECK(out == wanted);
    L::multi_head(sequence(x), sequence(wanted), heads, full_attention<S>(), {.heads = 2}, serial);
    L::multi_head(sequence(x), sequence(out), packed_heads, full_attention<S>(), {.heads = 2}, serial);
    CHECK(out == wanted);
    const auto copy = [](auto from, auto to, auto&) {
      for (idx_t b = 0; b < from.extent(0); ++b)
        for (idx_t i = 0; i < from.extent(1); ++i)
          for (idx_t d = 0; d < from.extent(2); ++d) to(b, i, d) = from(b, i, d);
    };
    L::encoder_block(sequence(x), sequence(wanted), {.feed_forward = feed.views()}, copy, {}, serial);
    L::encoder_block(sequence(x), sequence(out), {.feed_forward = packed_feed}, copy, {}, serial);
    CHECK(out == wanted);
  }
}

TEST_CASE("packed_weights: values, made of matrices and views", "[packed_weights]") {
  const Eigen::MatrixXf w = Eigen::MatrixXf::Random(40, 20), x = Eigen::MatrixXf::Random(12, 20);
  packed_weights<float> packed(w);
  CHECK(packed.outputs() == 40);
  CHECK(packed.inputs() == 20);
  const idx_t padded = attn::detail::round_up(40, attn::detail::panel_width<float>);
  CHECK(packed.bytes() == static_cast<std::size_t>(padded) * 20 * sizeof(float));
  CHECK(packed_weights<Eigen::bfloat16>(w).bytes() == static_cast<std::size_t>(padded) * 20 * 2);
  CHECK(packed_weights<codes>(w).bytes() == static_cast<std::size_t>(padded) * (20 + sizeof(float)));
  Eigen::MatrixXf wanted(12, 40), out(12, 40);
  attn::project(x, wanted, {.weight = w});
  const auto check = [&](const packed_weights<float>& p) {
    out.setZero();
    attn::project(x, out, {.weight = p});
    CHECK(out == wanted);
  };
  check(packed);
  packed_weights<float> copied = packed, other(Eigen::MatrixXf(Eigen::MatrixXf::Zero(3, 2)));
  packed = other;  // what was copied has memory of its own
  CHECK(packed.outputs() == 3);
  check(copied);
  check(packed_weights<float>(std::move(copied)));
  const Eigen::Matrix<float, -1, -1, Eigen::RowMajor> rows = w;
  check(packed_weights<float>(rows));
  check(packed_weights<float>(attn::tensor_view<const float, 2>(w)));
  CHECK(packed_weights<codes>(Eigen::MatrixXf(0, 5)).outputs() == 0);
}

TEST_CASE("packed_weights refuse what they cannot store, and gradients", "[packed_weights]") {
  const auto says = [](const std::string& message, const char* part) {
    INFO(message);
    CHECK(well_formed(message, message.substr(6, message.find(':', 6) - 6)));
    CHECK(message.find(part) != std::string::npos);
  };
  Eigen::MatrixXf w = Eigen::MatrixXf::Random(8, 6);
  const auto refused_with = [&](auto stored, float number) {
    w(3, 4) = number;
    return refusal([&] { packed_weights<decltype(stored)> p(w); });
  };
  constexpr float infinity = std::numeric_limits<float>::infinity();
  says(refused_with(Eigen::half(), 70000), "numbers that 16 bits hold; found 70000");
  says(refused_with(codes(), infinity), "numbers of up to 1e38; found inf");
  says(refused_with(codes(), std::numeric_limits<float>::quiet_NaN()), "numbers of up to 1e38; found");
  says(refused_with(codes(), 2e38f), "numbers of up to 1e38; found");
  w(3, 4) = infinity;  // other storages keep what is not finite, as views do
  CHECK(packed_weights<Eigen::half>(w).outputs() == 8);
  says(refusal([] { packed_weights<float> p(attn::tensor_view<const float, 2>(nullptr, {3, 4})); }), "null view");
  says(refusal([] { packed_weights<float> p(attn::tensor_view<const float, 2>(nullptr, {-3, 4})); }), "extents >= 0");

  w.setOnes();
  const packed_weights<float> packed(w);
  Eigen::MatrixXf x = Eigen::MatrixXf::Ones(5, 7), out(5, 8), dx = x;
  says(refusal([&] { attn::project(x, out, {.weight = packed}); }),
       "weight [outputs, inputs] with columns = dim of its input 7; found [8, 6]");
  x.setOnes(5, 8), out.setConstant(5, 6, 7);
  says(refusal([&] { attn::project(x, out, {.weight = packed}); }),
       "give the transpose of an [inputs, outputs] matrix");
  CHECK(out == Eigen::MatrixXf::Constant(5, 6, 7));
  x.setOnes(5, 6), dx.setOnes(5, 6), out.setOnes(5, 8);
  says(refusal([&] { attn::project_backward(x, {.weight = packed}, out, {.x = dx}); }), "found packed weights");
  says(refusal([&] { attn::feed_forward_backward(x, {.up = packed, .down = w.transpose()}, x, {.x = dx}); }),
       "up weight as a view: gradients are computed from the weight itself; found packed weights");
}

}  // namespace testing::packed_weights_tests
