// Bad input is refused on entry to every layer's backward pass: std::invalid_argument in one sentence, no gradient
// touched. What the forward pass refuses of weights and options is refused by the same checks (refusals.cpp): here one
// of each kind, and all that concerns gradients.
#include "layers/layers.hpp"
#include "support/refused.hpp"

namespace testing::backward_refusals_tests {
namespace {

// Arguments of a valid call of each layer, of which a test makes one invalid: batch 2, length 6, width 8, hidden 10, 4
// heads over 2. A gradient is the next piece of one memory.
struct arguments {
  tensor<float> x{2, 1, 6, 8, 0.5f}, y{2, 1, 9, 8, 0.25f}, d{2, 1, 6, 8, 0.125f}, rest{2, 1, 6, 8, 7};
  tensor<float> memory{1, 1, 40, 40, 0.1f}, written{1, 1, 40, 40, 7};
  idx_t used = 0;
  in_sequence<float> x_view = sequence(std::as_const(x)), y_view = sequence(std::as_const(y)),
                     d_view = sequence(std::as_const(d));
  out_sequence<float> dx = next(2, 6, 8), remainder = sequence(rest);
  attn::project_weights<float> one{.weight = matrix(8, 8), .bias = vector(8)};
  attn::project_gradients<float> d_one{.x = dx, .weight = next(8, 8), .bias = next(8)};
  attn::layer_norm_weights<float> norm{.gamma = vector(8), .beta = vector(8)};
  attn::layer_norm_gradients<float> d_norm{.x = dx, .gamma = next(8), .beta = next(8)};
  attn::feed_forward_weights<float> feed{
      .up = matrix(10, 8), .down = matrix(8, 10), .up_bias = vector(10), .down_bias = vector(8)};
  attn::feed_forward_gradients<float> d_feed{
      .x = dx, .up = next(10, 8), .down = next(8, 10), .up_bias = next(10), .down_bias = next(8)};
  attn::multi_head_weights<float> heads{.query = matrix(8, 8),
                                        .key = matrix(4, 8),
                                        .value = matrix(4, 8),
                                        .output = matrix(8, 8),
                                        .query_bias = vector(8)};
  attn::multi_head_gradients<float> d_heads{.x = dx,
                                            .context = next(2, 9, 8),
                                            .query = next(8, 8),
                                            .key = next(4, 8),
                                            .value = next(4, 8),
                                            .output = next(8, 8),
                                            .query_bias = next(8)};
  attn::multi_head_options<float> options{.heads = 4, .kv_heads = 2, .context = y_view, .attended = remainder};
  attn::encoder_block_weights<float> block{.norm_1 = norm, .norm_2 = norm, .feed_forward = feed};
  attn::encoder_block_gradients<float> d_block{.x = dx,
                                               .norm_1 = {.gamma = d_norm.gamma, .beta = d_norm.beta},
                                               .norm_2 = {.gamma = next(8), .beta = next(8)},
                                               .feed_forward = {.up = d_feed.up, .down = d_feed.down}};
  attn::short_convolution_weights<float> convolution{.weight = matrix(8, 4), .bias = vector(8)};
  in_sequence<float> state = shaped(2, 3, 8);
  attn::short_convolution_gradients<float> d_convolution{
      .x = dx, .weight = next(8, 4), .bias = next(8), .initial_state = next(2, 3, 8), .d_final_state = state};
  float eps = 1e-5f;
  attn::execution serial;

  arguments() = default;
  arguments(const arguments&) = delete;
  in_matrix<float> matrix(idx_t rows, idx_t columns) const { return {memory.data.data(), {rows, columns}}; }
  in_vector<float> vector(idx_t n) const { return {memory.data.data(), {n}}; }
  in_sequence<float> shaped(idx_t b, idx_t l, idx_t e) const { return {memory.data.data(), {b, l, e}}; }
  float* next_memory(idx_t n) { return written.data.data() + std::exchange(used, used + n); }
  out_sequence<float> next(idx_t b, idx_t l, idx_t e) { return {next_memory(b * l * e), {b, l, e}}; }
  attn::tensor_view<float, 2> next(idx_t rows, idx_t columns) { return {next_memory(rows * columns), {rows, columns}}; }
  attn::tensor_view<float, 1> next(idx_t n) { return {next_memory(n), {n}}; }
};

void nothing(in_sequence<float>, out_sequence<float>, attn::execution&) { FAIL("the mixer was called"); }
void nothing_back(in_sequence<float>, in_sequence<float>, in_sequence<float>, out_sequence<float>, attn::execution&) {
  FAIL("the mixer was called");
}

using refused = testing::refused<arguments>;

void check_refusals(const std::string& name, const std::function<void(arguments&)>& call,
                    const std::vector<refused>& list) {
  for (const refused& bad : list) {
    INFO(name << ": " << bad.what);
    arguments d;
    bad.alter(d);
    const tensor<float> x = d.x, written = d.written, rest = d.rest, d_out = d.d;
    const std::string message = refusal([&] { call(d); });
    INFO(message);
    CHECK(well_formed(message, name));
    CHECK(message.find(bad.says) != std::string::npos);
    CHECK(d.x == x);
    CHECK(d.d == d_out);
    CHECK(d.written == written);
    CHECK(d.rest == rest);
  }
}

// What concerns x and d_out alone; `dx` is the call's gradient of x.
std::vector<refused> with_sequences(const std::function<out_sequence<float>&(arguments&)>& dx,
                                    std::vector<refused> more) {
  std::vector<refused> all = {
      {"another batch of d_out", "d_out batch = x batch 2; found 1",
       [](arguments& d) { d.d_view = d.d_view.slice(0, 0, 1); }},
      {"another length of d_out", "d_out length = x length 6; found 5",
       [](arguments& d) { d.d_view = d.d_view.slice(1, 0, 5); }},
      {"a null x", "null", [](arguments& d) { d.x_view = null_view(2, 6, 8); }},
      {"a null d_out", "null", [](arguments& d) { d.d_view = null_view(2, 6, 8); }},
      {"a negative extent", "extents", [](arguments& d) { d.d_view = d.shaped(2, -6, 8); }},
      {"a gradient of another shape", "the gradient of x of the shape of x [2, 6, 8]; found [2, 5, 8]",
       [dx](arguments& d) { dx(d) = dx(d).slice(1, 0, 5); }},
      {"a gradient that overlaps itself", "overlap",
       [dx](arguments& d) { dx(d) = reshaped(d.written, 2, 6, 8).strided(8, 8, 1); }},
      {"a gradient that is x", "the gradient of x and x in separate memory; found an overlap",
       [dx](arguments& d) { dx(d) = reshaped(d.x, 2, 6, 8); }},
      {"a gradient that shares a part of d_out", "separate",
       [dx](arguments& d) { dx(d) = reshaped(d.d.data.data() + 8, 2, 6, 8); }},
  };
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TEST_CASE("project_backward refuses what does not fit", "[layer_backward_refusals]") {
  const auto call = [](arguments& d) {
    compiled_layers<float>::project_backward(d.x_view, d.one, d.d_view, d.d_one, d.serial);
  };
  arguments good;
  call(good);
  CHECK(good.d_one.x(0, 0, 0) != 7);
  check_refusals(
      "project_backward", call,
      with_sequences(
          [](arguments & d) -> auto& { return d.d_one.x; },
          {
              {"another dim of d_out", "d_out dim = weight rows 8; found 7",
               [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
              {"too few columns", "weight [outputs, inputs] with columns = dim of its input 8; found [8, 7]",
               [](arguments& d) { d.one.weight = d.matrix(8, 7), d.d_one.weight = {}; }},
              {"a gradient of no bias", "bias, since its gradient is asked for; found none",
               [](arguments& d) { d.one.bias = {}; }},
              {"a gradient of the weight of another shape", "the gradient of weight of the shape of weight [8, 8]",
               [](arguments& d) { d.d_one.weight = d.d_one.weight.slice(0, 0, 7); }},
              {"a gradient of heads of one weight",
               "the gradient of weight of the shape of weight [8, 8]; found [2, 4, 8]",
               [](arguments& d) { d.d_one.weight = reshaped(d.d_one.weight.data(), 2, 4, 8); }},
              {"a gradient of one weight of heads", "the gradient of weight as a view [heads, outputs, inputs]",
               [](arguments& d) {
                 d.one.weight = {d.memory.data.data(), {2, 4, 4}}, d.d_one.weight = {d.d_one.weight.data(), {2, 4}};
               }},
              {"a gradient of heads of another shape", "the gradient of weight of the shape of weight [2, 4, 4]",
               [](arguments& d) {
                 d.one.weight = {d.memory.data.data(), {2, 4, 4}}, d.d_one.weight = {d.d_one.weight.data(), {2, 4, 3}};
               }},
              {"heads that are not x", "weight [heads, outputs, inputs] with heads x inputs = x dim 8; found [2, 4, 3]",
               [](arguments& d) { d.one.weight = reshaped(d.memory, 2, 4, 3), d.d_one.weight = {}; }},
              {"a gradient of the bias of another size", "the gradient of bias",
               [](arguments& d) { d.d_one.bias = d.d_one.bias.slice(0, 0, 7); }},
              {"gradients that overlap", "the gradient of weight and the gradient of bias in separate memory",
               [](arguments& d) { d.d_one.bias = reshaped(d.d_one.weight.data() + 8, 8); }},
              {"a gradient in the weight", "separate", [](arguments& d) { d.d_one.bias = reshaped(d.memory, 8); }},
              {"a gradient that is d_out", "the gradient of x and d_out in separate memory",
               [](arguments& d) { d.d_one.x = sequence(d.d); }},
          }));
}

TEST_CASE("layer_norm_backward refuses what does not fit", "[layer_backward_refusals]") {
  check_refusals(
      "layer_norm_backward",
      [](arguments& d) {
        compiled_layers<float>::layer_norm_backward(d.x_view, d.norm, d.d_view, d.d_norm, {.eps = d.eps}, d.serial);
      },
      with_sequences([](arguments & d) -> auto& { return d.d_norm.x; },
                     {
                         {"another dim of d_out", "d_out dim 8; found 7",
                          [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
                         {"a gradient of no gamma", "gamma, since its gradient is asked for",
                          [](arguments& d) { d.norm.gamma = {}; }},
                         {"a gradient of no beta", "beta, since its gradient is asked for",
                          [](arguments& d) { d.norm.beta = {}; }},
                         {"gamma of another size", "gamma, one per feature: 8; found 7",
                          [](arguments& d) { d.norm.gamma = d.vector(7), d.d_norm.gamma = {}; }},
                         {"a negative eps", "eps >= 0; found -1", [](arguments& d) { d.eps = -1; }},
                         {"one gradient for both", "separate", [](arguments& d) { d.d_norm.beta = d.d_norm.gamma; }},
                     }));
}

TEST_CASE("group_norm_backward refuses what does not fit", "[layer_backward_refusals]") {
  check_refusals(
      "group_norm_backward",
      [](arguments& d) {
        compiled_layers<float>::group_norm_backward(d.x_view, d.norm, d.d_view, d.d_norm,
                                                    {.heads = d.options.heads, .eps = d.eps}, d.serial);
      },
      with_sequences([](arguments & d) -> auto& { return d.d_norm.x; },
                     {
                         {"another dim of d_out", "d_out dim 8; found 7",
                          [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
                         {"heads that do not divide x", "x dim divisible by heads 3; found 8",
                          [](arguments& d) { d.options.heads = 3; }},
                         {"a gradient of no beta", "beta, since its gradient is asked for",
                          [](arguments& d) { d.norm.beta = {}; }},
                         {"gamma of one head", "gamma, one per feature: 8; found 2",
                          [](arguments& d) { d.norm.gamma = d.vector(2), d.d_norm.gamma = {}; }},
                     }));
}

TEST_CASE("short_convolution_backward refuses what does not fit", "[layer_backward_refusals]") {
  check_refusals(
      "short_convolution_backward",
      [](arguments& d) {
        compiled_layers<float>::short_convolution_backward(d.x_view, d.convolution, d.d_view, d.d_convolution,
                                                           {.initial_state = d.state}, d.serial);
      },
      with_sequences([](arguments & d) -> auto& { return d.d_convolution.x; },
                     {
                         {"another dim of d_out", "d_out dim 8; found 7",
                          [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
                         {"a gradient of no bias", "bias, since its gradient is asked for",
                          [](arguments& d) { d.convolution.bias = {}; }},
                         {"a gradient of no state", "initial_state, since its gradient is asked for",
                          [](arguments& d) { d.state = {}; }},
                         {"too few rows", "weight rows = x dim 8; found 7",
                          [](arguments& d) { d.convolution.weight = d.matrix(7, 4), d.d_convolution.weight = {}; }},
                         {"another length of d_final_state",
                          "d_final_state of the shape of the last weight columns - 1 tokens [2, 3, 8]; found [2, 2, 8]",
                          [](arguments& d) { d.d_convolution.d_final_state = d.shaped(2, 2, 8); }},
                         {"one gradient for both", "separate",
                          [](arguments& d) { d.d_convolution.initial_state = d.d_convolution.x.slice(1, 0, 3); }},
                     }));
}

TEST_CASE("token_shift_backward refuses what does not fit", "[layer_backward_refusals]") {
  attn::token_shift_gradients<float> g;
  attn::token_shift_weights<float> w;
  in_matrix<float> state;
  const auto with_all = [&](arguments& d) {
    w.mix = d.vector(8), state = d.matrix(2, 8);
    g = {.x = d.dx, .mix = d.next(8), .initial_state = d.next(2, 8), .d_final_state = d.matrix(2, 8)};
  };
  const auto but = [&](std::function<void(arguments&)> change) {
    return [=](arguments& d) { with_all(d), change(d); };
  };
  check_refusals(
      "token_shift_backward",
      [&](arguments& d) {
        compiled_layers<float>::token_shift_backward(d.x_view, w, d.d_view, g, {.initial_state = state}, d.serial);
      },
      {
          {"another dim of d_out", "d_out dim 8; found 7",
           but([](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); })},
          {"another length of d_out", "d_out length = x length 6; found 5",
           but([](arguments& d) { d.d_view = d.d_view.slice(1, 0, 5); })},
          {"a gradient of no mix", "mix, since its gradient is asked for", but([&](arguments&) { w.mix = {}; })},
          {"a gradient of no state", "initial_state, since its gradient is asked for",
           but([&](arguments&) { state = {}; })},
          {"a mix of another size", "mix, one per channel: 8; found 7",
           but([&](arguments& d) { w.mix = d.vector(7), g.mix = {}; })},
          {"d_final_state of another size",
           "d_final_state of the shape of one token of each batch item [2, 8]; found [2, 7]",
           but([&](arguments& d) { g.d_final_state = d.matrix(2, 7); })},
          {"dx of another length", "x", but([&](arguments& d) { g.x = d.dx.slice(1, 0, 5); })},
          {"dx that is x", "separate", but([&](arguments& d) { g.x = sequence(d.x); })},
          {"one gradient for both", "separate",
           but([&](arguments& d) { g.initial_state = reshaped(d.dx.data(), 2, 8); })},
      });
}

TEST_CASE("feed_forward_backward refuses what does not fit", "[layer_backward_refusals]") {
  check_refusals(
      "feed_forward_backward",
      [](arguments& d) {
        compiled_layers<float>::feed_forward_backward(d.x_view, d.feed, d.d_view, d.d_feed, attn::activation::relu,
                                                      d.serial);
      },
      with_sequences([](arguments & d) -> auto& { return d.d_feed.x; },
                     {
                         {"another dim of d_out", "down weight rows = out dim 7; found 8",
                          [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
                         {"columns of down", "down weight [outputs, inputs] with columns = dim of its input 10; found [",
                          [](arguments& d) { d.feed.down = d.matrix(8, 11), d.d_feed.down = {}; }},
                         {"a gradient of no up bias", "up bias, since its gradient is asked for",
                          [](arguments& d) { d.feed.up_bias = {}; }},
                         {"a gradient of no gate", "gate weight, since its gradient is asked for",
                          [](arguments& d) { d.d_feed.gate = {d.d_feed.up.data(), {10, 8}}, d.d_feed.up = {}; }},
                         {"a gradient of no down bias", "down bias, since its gradient is asked for",
                          [](arguments& d) { d.feed.down_bias = {}; }},
                         {"gradients of up and down in one place", "separate",
                          [](arguments& d) { d.d_feed.down = reshaped(d.d_feed.up.data(), 8, 10); }},
                         {"the gradient of down of another shape", "the gradient of down",
                          [](arguments& d) { d.d_feed.down = d.d_feed.down.slice(1, 0, 8); }},
                     }));
}

TEST_CASE("multi_head_backward refuses what does not fit", "[layer_backward_refusals]") {
  const attention_of<float> op = [](auto&&...) { FAIL("the operator was called"); };
  const attention_backward_of<float> op_backward = [](auto&&...) { FAIL("the operator was called"); };
  check_refusals(
      "multi_head_backward",
      [&](arguments& d) {
        compiled_layers<float>::multi_head_backward(d.x_view, d.heads, op, op_backward, d.d_view, d.d_heads, d.options,
                                                    d.serial);
      },
      with_sequences([](arguments & d) -> auto& { return d.d_heads.x; },
                     {
                         {"another dim of d_out", "d_out dim = output weight rows 8; found 7",
                          [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
                         {"another batch of y", "context batch = x batch 2; found 1",
                          [](arguments& d) { d.options.context = d.shaped(1, 9, 8), d.d_heads.context = {}; }},
                         {"a gradient of no context", "context, since its gradient is asked for; found none",
                          [](arguments& d) { d.options.context = {}; }},
                         {"a gradient of no key weight", "key weight, since its gradient is asked for",
                          [](arguments& d) { d.heads.key = {}; }},
                         {"a gradient of no value weight", "value weight, since its gradient is asked for",
                          [](arguments& d) { d.heads.value = {}; }},
                         {"a gradient of the operator's own context", "context, since its gradient is asked for",
                          [](arguments& d) {
                            d.heads.key = d.heads.value = {}, d.d_heads.key = d.d_heads.value = {};
                            d.options.context = {};
                          }},
                         {"a gradient of no output weight", "output weight, since its gradient is asked for",
                          [](arguments& d) { d.heads.output = {}; }},
                         {"a gradient of no key bias", "key bias, since its gradient is asked for",
                          [](arguments& d) { d.d_heads.key_bias = d.next(4); }},
                         {"a gradient of no norm", "q_norm, since its gradient is asked for",
                          [](arguments& d) { d.d_heads.q_norm = d.next(2); }},
                         {"the gradient of the context of another shape", "the gradient of context",
                          [](arguments& d) { d.d_heads.context = d.d_heads.context.slice(1, 0, 6); }},
                         {"the gradient of the context in that of x", "separate",
                          [](arguments& d) { d.d_heads.context = reshaped(d.d_heads.x.data(), 2, 9, 8); }},
                         {"key heads that do not divide", "kv_heads that divide heads 4; found 3",
                          [](arguments& d) { d.options.kv_heads = 3; }},
                         {"attended of another length", "attended length = x length 6; found 5",
                          [](arguments& d) { d.options.attended = d.remainder.slice(1, 0, 5); }},
                         {"a gradient in attended", "the gradient of x and attended in separate memory",
                          [](arguments& d) { d.d_heads.x = d.remainder; }},
                     }));
}

TEST_CASE("encoder_block_backward refuses what does not fit", "[layer_backward_refusals]") {
  check_refusals(
      "encoder_block_backward",
      [](arguments& d) {
        compiled_layers<float>::encoder_block_backward(d.x_view, d.block, nothing, nothing_back, d.d_view, d.d_block,
                                                       {.eps = d.eps, .mixed = d.remainder}, d.serial);
      },
      with_sequences(
          [](arguments & d) -> auto& { return d.d_block.x; },
          {
              {"another dim of d_out", "d_out dim 8; found 7",
               [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 7); }},
              {"a gradient that is d_out, added to", "separate",
               [](arguments& d) { d.d_block.x = sequence(d.d), d.d_block.accumulate = true; }},
              {"a gradient of no gamma", "gamma of norm_1, since its gradient is asked for",
               [](arguments& d) { d.block.norm_1.gamma = {}; }},
              {"a gradient of no beta", "beta of norm_2, since its gradient is asked for",
               [](arguments& d) { d.block.norm_2.beta = {}; }},
              {"a gradient of no up bias", "up bias, since its gradient is asked for",
               [](arguments& d) { d.block.feed_forward.up_bias = {}, d.d_block.feed_forward.up_bias = d.next(10); }},
              {"a negative eps", "eps >= 0; found -1", [](arguments& d) { d.eps = -1; }},
              {"mixed of another length", "mixed length = x length 6; found 5",
               [](arguments& d) { d.remainder = d.remainder.slice(1, 0, 5); }},
              {"a gradient in mixed", "separate", [](arguments& d) { d.d_block.x = d.remainder; }},
              {"rows of down", "down weight rows = out dim 8; found 7",
               [](arguments& d) {
                 d.block.feed_forward.down = d.matrix(7, 10), d.block.feed_forward.down_bias = d.vector(7);
                 d.d_block.feed_forward.down = {};
               }},
          }));
}

TEST_CASE("reversible_block_backward refuses what does not fit", "[layer_backward_refusals]") {
  // out is x_view, x what is written first
  check_refusals(
      "reversible_block_backward",
      [](arguments& d) {
        compiled_layers<float>::reversible_block_backward(
            d.x_view, d.dx, nothing, nothing, nothing_back, nothing_back, d.d_view,
            {.x = d.d_block.x, .accumulate = d.d_one.accumulate}, {.remainder = d.remainder}, d.serial);
      },
      {
          {"an odd width", "an even width; found 7",
           [](arguments& d) {
             d.x_view = d.x_view.slice(2, 0, 7), d.d_view = d.d_view.slice(2, 0, 7), d.dx = d.dx.slice(2, 0, 7);
             d.d_block.x = {}, d.remainder = {};
           }},
          {"x of another shape", "x of the shape of out [2, 6, 8]; found [2, 5, 8]",
           [](arguments& d) { d.dx = d.dx.slice(1, 0, 5), d.d_block.x = {}; }},
          {"d_out of another shape", "d_out of the shape of out",
           [](arguments& d) { d.d_view = d.d_view.slice(2, 0, 6), d.d_block.x = {}; }},
          {"a gradient of another shape", "the gradient of x", [](arguments& d) { d.d_block.x = d.next(2, 6, 6); }},
          {"a remainder of another shape", "remainder of the shape of out",
           [](arguments& d) { d.remainder = d.remainder.slice(0, 0, 1), d.d_block.x = {}; }},
          {"a null out", "null",
           [](arguments& d) {
             d.x_view = {nullptr, {2, 6, 8}};
             d.d_block.x = {};
           }},
          {"x and its gradient in one place", "separate", [](arguments& d) { d.d_block.x = d.dx; }},
          {"x that is d_out", "x and d_out in separate memory",
           [](arguments& d) { d.dx = sequence(d.d), d.d_block.x = {}; }},
          {"x that shares a part of out", "x and out in separate memory",
           [](arguments& d) {
             d.dx = {d.x.data.data() + 8, {2, 6, 8}};
             d.d_block.x = {};
           }},
          {"a gradient that is d_out, added to", "the gradient of x and d_out in separate memory",
           [](arguments& d) { d.d_block.x = sequence(d.d), d.d_one.accumulate = true; }},
          {"a remainder that is out", "separate", [](arguments& d) { d.x_view = d.remainder, d.d_block.x = {}; }},
      });
}

}  // namespace testing::backward_refusals_tests
