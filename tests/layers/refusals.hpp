#pragma once
// Bad input is refused on entry to every layer: std::invalid_argument in one sentence, out untouched.
#include "layers/layers.hpp"
#include "support/refused.hpp"

namespace testing::layer_refusals {

// Arguments of a valid call of each layer, of which a test makes one invalid: batch 2, length 6, width 8, hidden 10, 4
// heads over 2.
struct arguments {
  tensor<float> x{2, 1, 6, 8, 0.5f}, y{2, 1, 9, 8, 0.25f}, out{2, 1, 6, 8, 7}, rest{2, 1, 6, 8};
  tensor<float> memory{1, 1, 40, 40, 0.1f};  // what every weight points to
  in_sequence<float> x_view = sequence(std::as_const(x)), y_view = sequence(std::as_const(y));
  out_sequence<float> out_view_ = sequence(out);
  attn::project_weight<float> weight = matrix(8, 8);
  in_vector<float> bias = vector(8), gamma = vector(8), beta = vector(8);
  attn::multi_head_weights<float> heads{.query = matrix(8, 8),
                                        .key = matrix(4, 8),
                                        .value = matrix(4, 8),
                                        .output = matrix(8, 8),
                                        .query_bias = vector(8),
                                        .key_bias = vector(4),
                                        .value_bias = vector(4),
                                        .output_bias = vector(8)};
  attn::multi_head_options<float> options{.heads = 4, .kv_heads = 2};
  attn::encoder_block_weights<float> block{
      .norm_1 = {.gamma = vector(8), .beta = vector(8)},
      .norm_2 = {.gamma = vector(8), .beta = vector(8)},
      .feed_forward = {.up = matrix(10, 8), .down = matrix(8, 10), .up_bias = vector(10), .down_bias = vector(8)}};
  float eps = 1e-5f;
  idx_t norm_heads = 4;
  out_sequence<float> remainder = sequence(rest);
  in_matrix<float> taps = matrix(8, 4);
  in_sequence<float> state = shaped(2, 3, 8);
  std::vector<idx_t> lengths{};
  attn::execution serial;

  arguments() = default;
  arguments(const arguments&) = delete;
  in_matrix<float> matrix(idx_t rows, idx_t columns) const { return {memory.data.data(), {rows, columns}}; }
  attn::tensor_view<const float, 3> matrices(idx_t heads_of, idx_t rows, idx_t columns) const {
    return {memory.data.data(), {heads_of, rows, columns}};
  }
  in_vector<float> vector(idx_t n) const { return {memory.data.data(), {n}}; }
  in_sequence<float> shaped(idx_t b, idx_t l, idx_t d) const { return {memory.data.data(), {b, l, d}}; }
  template <class View>
  View within_out(const View& like) const {
    return {out.data.data(), like.extents()};
  }
};

inline void nothing(in_sequence<float>, out_sequence<float>, attn::execution&) { FAIL("the mixer was called"); }
inline void no_attention(in_view<float>, in_view<float>, in_view<float>, out_view<float>, attn::execution&) {
  FAIL("the operator was called");
}

using refused = testing::refused<arguments>;

inline void check_refusals(const std::string& name, const std::function<void(arguments&)>& call,
                    const std::vector<refused>& list) {
  for (const refused& bad : list) {
    INFO(name << ": " << bad.what);
    arguments d;
    bad.alter(d);
    const tensor<float> before = d.out, rest = d.rest;
    const std::string message = refusal([&] { call(d); });
    INFO(message);
    CHECK(well_formed(message, name));
    CHECK(message.find(bad.says) != std::string::npos);
    CHECK(d.out == before);
    CHECK(d.rest == rest);
  }
}

// What concerns x and out alone.
inline std::vector<refused> with_sequences(std::vector<refused> more) {
  std::vector<refused> all = {
      {"another batch of out", "out batch = x batch 2; found 1",
       [](arguments& d) { d.out_view_ = d.out_view_.slice(0, 0, 1); }},
      {"another length of out", "out length = x length 6; found 5",
       [](arguments& d) { d.out_view_ = d.out_view_.slice(1, 0, 5); }},
      {"another dim of out", " 8; found 6", [](arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }},
      {"a null x", "null", [](arguments& d) { d.x_view = null_view(2, 6, 8); }},
      {"a null out", "null", [](arguments& d) { d.out_view_ = null_view(2, 6, 8); }},
      {"a negative extent", "extents", [](arguments& d) { d.x_view = d.shaped(2, -6, 8); }},
      {"out that overlaps itself", "overlap",
       [](arguments& d) { d.out_view_ = reshaped(d.out, 2, 6, 8).strided(8, 8, 1); }},
      {"out that shares memory with x", "separate memory",
       [](arguments& d) { d.x_view = reshaped(d.out, 2, 6, 8).strided(48, 0, 1); }},
      {"more tokens than can be counted, of nothing", "x batch * length that memory can hold",
       [](arguments& d) {
         constexpr idx_t many = idx_t(1) << 33;
         d.out_view_ = {nullptr, {many, many, 0}};
         d.x_view = d.y_view = d.out_view_;
         d.weight = {}, d.bias = d.gamma = d.beta = {}, d.heads = {}, d.options = {}, d.block = {}, d.remainder = {};
       }},
  };
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace testing::layer_refusals
