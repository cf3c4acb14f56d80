// What each layer refuses (refusals.hpp).
#include "layers/refusals.hpp"

namespace testing::refusals_tests {

using namespace layer_refusals;
using layer_refusals::refused;

TEST_CASE("project refuses what does not fit", "[layer_refusals]") {
  const auto call = [](arguments& d) {
    compiled_layers<float>::project(d.x_view, d.out_view_, {.weight = d.weight, .bias = d.bias}, d.serial);
  };
  arguments good;
  call(good);
  CHECK(good.out(0, 0, 0, 0) != 7);
  check_refusals("project", call,
                 with_sequences({
                     {"too few columns", "weight [outputs, inputs] with columns = dim of its input 8; found [8, 7]",
                      [](arguments& d) { d.weight = d.matrix(8, 7); }},
                     {"no weight", "weight [outputs, inputs] with columns = dim of its input 8; found none",
                      [](arguments& d) { d.weight = {}; }},
                     {"too many rows", "out dim = weight rows 9; found 8",
                      [](arguments& d) { d.weight = d.matrix(9, 8), d.bias = d.vector(9); }},
                     {"a transposed weight", "found [8, 5]: give the transpose of an [inputs, outputs] matrix",
                      [](arguments& d) { d.weight = d.matrix(8, 5); }},
                     {"a null weight", "null", [](arguments& d) { d.weight = null_view(8, 8); }},
                     {"heads that are not x",
                      "weight [heads, outputs, inputs] with heads x inputs = x dim 8; found [2, 4, 3]",
                      [](arguments& d) { d.weight = d.matrices(2, 4, 3); }},
                     {"heads that are not out", "out dim = heads x outputs of weight 6; found 8",
                      [](arguments& d) { d.weight = d.matrices(2, 3, 4), d.bias = d.vector(6); }},
                     {"a bias of one head", "bias, one per output of all heads: 8; found 4",
                      [](arguments& d) { d.weight = d.matrices(2, 4, 4), d.bias = d.vector(4); }},
                     {"a null weight of heads", "null", [](arguments& d) { d.weight = null_view(2, 4, 4); }},
                     {"a weight of heads in out", "separate",
                      [](arguments& d) { d.weight = reshaped(d.out, 2, 4, 4); }},
                     {"a bias of another size", "bias, one per row of its weight: 8; found 7",
                      [](arguments& d) { d.bias = d.vector(7); }},
                     {"a null bias", "null", [](arguments& d) { d.bias = null_view(8); }},
                     {"a weight within out", "separate", [](arguments& d) { d.weight = d.within_out(d.matrix(8, 8)); }},
                     {"a bias within out", "separate", [](arguments& d) { d.bias = d.within_out(d.bias); }},
                     {"x that is out", "separate", [](arguments& d) { d.x_view = d.out_view_; }},
                 }));
}

TEST_CASE("layer_norm refuses what does not fit", "[layer_refusals]") {
  const auto call = [](arguments& d) {
    compiled_layers<float>::layer_norm(d.x_view, d.out_view_, {.gamma = d.gamma, .beta = d.beta}, {.eps = d.eps},
                                       d.serial);
  };
  check_refusals(
      "layer_norm", call,
      with_sequences({
          {"gamma of another size", "gamma, one per feature: 8; found 9", [](arguments& d) { d.gamma = d.vector(9); }},
          {"beta of another size", "beta, one per feature: 8; found 7", [](arguments& d) { d.beta = d.vector(7); }},
          {"a negative eps", "eps >= 0; found -1", [](arguments& d) { d.eps = -1; }},
          {"eps that is no number", "eps >= 0", [](arguments& d) { d.eps = std::numeric_limits<float>::quiet_NaN(); }},
          {"gamma within out", "separate", [](arguments& d) { d.gamma = d.within_out(d.gamma); }},
          {"beta within out", "separate", [](arguments& d) { d.beta = d.within_out(d.beta); }},
      }));
}

TEST_CASE("group_norm refuses what does not fit", "[layer_refusals]") {
  check_refusals("group_norm",
                 [](arguments& d) {
                   compiled_layers<float>::group_norm(d.x_view, d.out_view_, {.gamma = d.gamma, .beta = d.beta},
                                                      {.heads = d.norm_heads, .eps = d.eps}, d.serial);
                 },
                 with_sequences({
                     {"heads that do not divide x", "x dim divisible by heads 3; found 8",
                      [](arguments& d) { d.norm_heads = 3; }},
                     {"more heads than channels", "x dim divisible by heads 16; found 8",
                      [](arguments& d) { d.norm_heads = 16; }},
                     {"no heads", "heads >= 1; found 0", [](arguments& d) { d.norm_heads = 0; }},
                     {"gamma of one head", "gamma, one per feature: 8; found 2",
                      [](arguments& d) { d.gamma = d.vector(2); }},
                     {"beta of one head", "beta, one per feature: 8; found 2",
                      [](arguments& d) { d.beta = d.vector(2); }},
                     {"a negative eps", "eps >= 0; found -1", [](arguments& d) { d.eps = -1; }},
                     {"gamma within out", "separate", [](arguments& d) { d.gamma = d.within_out(d.gamma); }},
                 }));
}

TEST_CASE("rms_norm refuses what does not fit", "[layer_refusals]") {
  check_refusals("rms_norm",
                 [](arguments& d) {
                   compiled_layers<float>::rms_norm(d.x_view, d.out_view_, {.gamma = d.gamma}, {.eps = d.eps},
                                                    d.serial);
                 },
                 {
                     {"gamma of another length", "gamma", [](arguments& d) { d.gamma = d.vector(7); }},
                     {"a negative eps", "eps >= 0", [](arguments& d) { d.eps = -1e-5f; }},
                     {"gamma within out", "separate", [](arguments& d) { d.gamma = d.within_out(d.gamma); }},
                 });
}

// The feed-forward weights, in a layer of their own and in a block.
const std::vector<refused> feed_refusals = {
    {"columns of up", "up weight [outputs, inputs] with columns = dim of its input 8; found [10, 9]",
     [](arguments& d) { d.block.feed_forward.up = d.matrix(10, 9); }},
    {"columns of down", "down weight [outputs, inputs] with columns = dim of its input 10; found [8, 11]",
     [](arguments& d) { d.block.feed_forward.down = d.matrix(8, 11); }},
    {"rows of down", "down weight rows = out dim 8; found 7",
     [](arguments& d) { d.block.feed_forward.down = d.matrix(7, 10), d.block.feed_forward.down_bias = d.vector(7); }},
    {"bias of up", "up bias, one per row of its weight: 10; found 8",
     [](arguments& d) { d.block.feed_forward.up_bias = d.vector(8); }},
    {"bias of down", "down bias", [](arguments& d) { d.block.feed_forward.down_bias = d.vector(10); }},
    {"columns of gate", "gate weight [outputs, inputs] with columns = dim of its input 8; found [10, 9]",
     [](arguments& d) { d.block.feed_forward.gate = d.matrix(10, 9); }},
    {"rows of gate", "gate weight rows = up weight rows 10; found 9",
     [](arguments& d) { d.block.feed_forward.gate = d.matrix(9, 8); }},
    {"a bias of no gate", "a gate weight, since there is a bias of it; found none",
     [](arguments& d) { d.block.feed_forward.gate_bias = d.vector(10); }},
    {"bias of gate", "gate bias",
     [](arguments& d) { d.block.feed_forward.gate = d.matrix(10, 8), d.block.feed_forward.gate_bias = d.vector(9); }},
    {"gate within out", "separate", [](arguments& d) { d.block.feed_forward.gate = d.within_out(d.matrix(10, 8)); }},
    {"no up weight", "up weight", [](arguments& d) { d.block.feed_forward.up = {}; }},
    {"down within out", "separate", [](arguments& d) { d.block.feed_forward.down = d.within_out(d.matrix(8, 10)); }},
};

TEST_CASE("feed_forward refuses what does not fit", "[layer_refusals]") {
  check_refusals(
      "feed_forward",
      [](arguments& d) {
        compiled_layers<float>::feed_forward(d.x_view, d.out_view_, d.block.feed_forward, attn::activation::relu,
                                             d.serial);
      },
      [] {
        auto list = with_sequences(feed_refusals);
        // its out dim is that of the weight: asked for there
        list.erase(list.begin() + 2);
        list.push_back({"another dim of out", "down weight rows = out dim 6; found 8",
                        [](arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }});
        return list;
      }());
}

TEST_CASE("multi_head refuses what does not fit", "[layer_refusals]") {
  const auto call = [](arguments& d) {
    attn::multi_head_options<float> options = d.options;
    options.context = d.y_view;
    compiled_layers<float>::multi_head(d.x_view, d.out_view_, d.heads, no_attention, options, d.serial);
  };
  check_refusals(
      "multi_head", call,
      with_sequences({
          {"another batch of y", "context batch = x batch 2; found 1",
           [](arguments& d) { d.y_view = d.shaped(1, 9, 8); }},
          {"a null y", "null", [](arguments& d) { d.y_view = null_view(2, 9, 8); }},
          {"y that is out", "separate", [](arguments& d) { d.y_view = d.out_view_; }},
          {"no heads", "heads >= 1; found 0", [](arguments& d) { d.options.heads = 0; }},
          {"no key heads", "kv_heads >= 1; found 0", [](arguments& d) { d.options.kv_heads = 0; }},
          {"key heads that do not divide", "kv_heads that divide heads 4; found 3",
           [](arguments& d) { d.options.kv_heads = 3; }},
          {"query rows that heads do not divide", "query weight rows divisible by heads 4; found 9",
           [](arguments& d) { d.heads.query = d.matrix(9, 8), d.heads.query_bias = d.vector(9); }},
          {"value rows that heads do not divide", "value weight rows divisible by heads 2; found 5",
           [](arguments& d) { d.heads.value = d.matrix(5, 8), d.heads.value_bias = d.vector(5); }},
          {"key rows of another head dim", "key weight rows = kv_heads x query head dim 4; found 8",
           [](arguments& d) { d.heads.key = d.matrix(8, 8), d.heads.key_bias = d.vector(8); }},
          {"query columns", "query weight [outputs, inputs]", [](arguments& d) { d.heads.query = d.matrix(8, 7); }},
          {"key columns", "key weight [outputs, inputs]", [](arguments& d) { d.heads.key = d.matrix(4, 7); }},
          {"value columns", "value weight [outputs, inputs]", [](arguments& d) { d.heads.value = d.matrix(4, 9); }},
          {"output columns", "output weight [outputs, inputs] with columns = dim of its input 8; found [8, 4]",
           [](arguments& d) { d.heads.output = d.matrix(8, 4); }},
          {"no value weight, but its bias", "value bias with a value weight; found no value weight",
           [](arguments& d) { d.heads.value = {}; }},
          {"no value weight, and an output weight of other heads",
           "output weight [outputs, inputs] with columns = dim of its input 16; found [8, 8]",
           [](arguments& d) { d.heads.value = {}, d.heads.value_bias = {}; }},
          {"no value weight, and heads that do not divide the context",
           "a value weight, or context dim divisible by heads 2; found 7",
           [](arguments& d) {
             d.heads.value = {}, d.heads.value_bias = {}, d.heads.key = d.matrix(4, 7), d.y_view = d.shaped(2, 9, 7);
           }},
          {"neither key nor value weight, but a context",
           "a key or value weight, since there is a context; found neither",
           [](arguments& d) { d.heads.key = d.heads.value = {}, d.heads.key_bias = d.heads.value_bias = {}; }},
          {"neither key nor value weight, and an output weight that heads do not divide",
           "output weight columns divisible by heads 4; found 7",
           [](arguments& d) {
             d.heads.key = d.heads.value = {}, d.heads.key_bias = d.heads.value_bias = {};
             d.heads.output = d.matrix(8, 7);
           }},
          {"neither key nor value weight, and a gate of other heads",
           "gate weight rows = heads x value head dim 8; found 4",
           [](arguments& d) {
             d.heads.key = d.heads.value = {}, d.heads.key_bias = d.heads.value_bias = {};
             d.heads.gate = d.matrix(4, 8);
           }},
          {"neither key nor value nor output weight, and an out that heads do not divide",
           "out dim divisible by heads 4; found 6",
           [](arguments& d) {
             const auto query = d.heads.query;
             d.heads = {}, d.heads.query = query, d.out_view_ = d.out_view_.slice(2, 0, 6);
           }},
          {"a norm of keys that the operator has", "k_norm with a key weight; found no key weight",
           [](arguments& d) {
             d.heads.key = d.heads.value = {}, d.heads.key_bias = d.heads.value_bias = {}, d.heads.k_norm = d.vector(2);
           }},
          {"output rows", "out dim = output weight rows 7; found 8",
           [](arguments& d) { d.heads.output = d.matrix(7, 8), d.heads.output_bias = d.vector(7); }},
          {"gate columns", "gate weight [outputs, inputs]", [](arguments& d) { d.heads.gate = d.matrix(8, 7); }},
          {"gate rows", "gate weight rows = heads x value head dim 8; found 4",
           [](arguments& d) { d.heads.gate = d.matrix(4, 8); }},
          {"a gate bias alone", "gate bias with a gate weight; found no gate weight",
           [](arguments& d) { d.heads.gate_bias = d.vector(8); }},
          {"query bias", "query bias, one per row of its weight: 8; found 4",
           [](arguments& d) { d.heads.query_bias = d.vector(4); }},
          {"key bias", "key bias", [](arguments& d) { d.heads.key_bias = d.vector(8); }},
          {"value bias", "value bias", [](arguments& d) { d.heads.value_bias = d.vector(8); }},
          {"output bias", "output bias", [](arguments& d) { d.heads.output_bias = d.vector(4); }},
          {"a weight within out", "separate", [](arguments& d) { d.heads.value = d.within_out(d.heads.value); }},
          {"a norm of queries", "q_norm of 2 numbers, a head's, or of all heads 8; found 3",
           [](arguments& d) { d.heads.q_norm = d.vector(3); }},
          {"a norm of keys", "k_norm of 2 numbers, a head's, or of all heads 4; found 8",
           [](arguments& d) { d.heads.k_norm = d.vector(8); }},
          {"a norm of keys that are queries", "k_norm with a key weight; found no key weight",
           [](arguments& d) {
             d.options.kv_heads = 4, d.heads.value = d.matrix(8, 8), d.heads.value_bias = d.vector(8);
             d.heads.key = {}, d.heads.key_bias = {}, d.y_view = d.shaped(2, 6, 8), d.heads.k_norm = d.vector(2);
           }},
          {"a norm in out", "separate", [](arguments& d) { d.heads.q_norm = {d.out.data.data(), {8}}; }},
          {"a negative norm_eps", "norm_eps >= 0; found -1", [](arguments& d) { d.options.norm_eps = -1; }},
          {"more dims than a head's", "an even number of dims up to 2; found 4",
           [](arguments& d) { d.options.rotary = {.dims = 4}; }},
          {"a rotation without a base", "a finite base > 0; found 0",
           [](arguments& d) { d.options.rotary = {.base = 0}; }},
          {"no key weight, but grouped", "kv_heads = heads",
           [](arguments& d) {
             d.heads.key = {};
             d.heads.key_bias = {};
           }},
          {"no key weight, but its bias", "no key weight", [](arguments& d) { d.heads.key = {}; }},
          {"no key weight, but another y", "context length = x length",
           [](arguments& d) {
             d.heads.key = {};
             d.heads.key_bias = {};
             d.options.heads = 2;
           }},
          {"more tokens of y than can be counted, of nothing", "context batch * length that memory can hold",
           [](arguments& d) {
             constexpr idx_t many = idx_t(1) << 33;
             d.out_view_ = {nullptr, {many, 1, 0}};
             d.x_view = d.out_view_;
             d.y_view = {nullptr, {many, many, 0}};
             d.heads = {}, d.options = {};
             d.heads.key = d.matrix(0, 0);
           }},
          {"no output weight, but its bias", "no output weight", [](arguments& d) { d.heads.output = {}; }},
          {"attended without an output weight", "attended with an output weight",
           [](arguments& d) {
             d.heads.output = {};
             d.heads.output_bias = {};
             d.options.attended = d.remainder;
           }},
          {"attended of another length", "attended length = x length 6; found 5",
           [](arguments& d) { d.options.attended = d.remainder.slice(1, 0, 5); }},
          {"attended of another dim", "attended dim 8; found 7",
           [](arguments& d) { d.options.attended = d.remainder.slice(2, 0, 7); }},
          {"attended that is out", "separate", [](arguments& d) { d.options.attended = d.out_view_; }},
          {"attended that is y", "separate",
           [](arguments& d) { d.y_view = reshaped(d.rest, 2, 6, 8), d.options.attended = d.remainder; }},
      }));
}

TEST_CASE("multi_head refuses weights of keys and values that its operator does not take", "[layer_refusals]") {
  check_refusals(
      "multi_head",
      [](arguments& d) {
        attn::multi_head(d.x_view, d.out_view_, d.heads,
                         [](in_view<float>, out_view<float>, attn::execution&) { FAIL("the operator was called"); },
                         d.options, d.serial);
      },
      {{"a key and a value weight", "an operator that takes keys and values, since there are weights of them",
        [](arguments&) {}},
       {"a value weight", "found one without", [](arguments& d) { d.heads.key = {}, d.heads.key_bias = {}; }}});
}

TEST_CASE("encoder_block refuses what does not fit", "[layer_refusals]") {
  auto list = with_sequences(feed_refusals);
  const std::vector<refused> more = {
      {"a residual weight for each head", "residual weight as one matrix; found one for each head",
       [](arguments& d) { d.block.residual.weight = d.matrices(1, 8, 8); }},
      {"gamma of norm 1", "gamma of norm_1, one per feature: 8; found 7",
       [](arguments& d) { d.block.norm_1.gamma = d.vector(7); }},
      {"beta of norm 1", "beta of norm_1", [](arguments& d) { d.block.norm_1.beta = d.vector(9); }},
      {"gamma of norm 2", "gamma of norm_2", [](arguments& d) { d.block.norm_2.gamma = d.vector(1); }},
      {"beta of norm 2", "beta of norm_2", [](arguments& d) { d.block.norm_2.beta = d.vector(7); }},
      {"a negative eps", "eps >= 0; found -1", [](arguments& d) { d.eps = -1; }},
      {"mixed of another batch", "mixed batch = x batch 2; found 1",
       [](arguments& d) { d.remainder = d.remainder.slice(0, 0, 1); }},
      {"mixed of another dim", "mixed dim = x dim 8; found 7",
       [](arguments& d) { d.remainder = d.remainder.slice(2, 0, 7); }},
      {"mixed that is out", "separate", [](arguments& d) { d.remainder = d.out_view_; }},
      {"mixed that is x", "separate", [](arguments& d) { d.x_view = d.remainder; }},
  };
  list.insert(list.end(), more.begin(), more.end());
  check_refusals(
      "encoder_block",
      [](arguments& d) {
        compiled_layers<float>::encoder_block(d.x_view, d.out_view_, d.block, nothing,
                                              {.eps = d.eps, .mixed = d.remainder}, d.serial);
      },
      list);
}

TEST_CASE("reversible_block and its inverse refuse what does not fit", "[layer_refusals]") {
  const std::vector<refused> list = with_sequences({
      {"an odd width", "an even width; found 7",
       [](arguments& d) { d.x_view = d.shaped(2, 6, 7), d.out_view_ = d.out_view_.slice(2, 0, 7); }},
      {"another batch of the remainder", "remainder batch",
       [](arguments& d) { d.remainder = d.remainder.slice(0, 0, 1); }},
      {"another length of the remainder", "remainder length",
       [](arguments& d) { d.remainder = d.remainder.slice(1, 0, 5); }},
      {"another dim of the remainder", "remainder dim", [](arguments& d) { d.remainder = d.remainder.slice(2, 0, 4); }},
      {"a null remainder", "null", [](arguments& d) { d.remainder = null_view(2, 6, 8); }},
      {"a remainder that is out", "separate", [](arguments& d) { d.remainder = d.out_view_; }},
      {"a remainder that is x", "separate", [](arguments& d) { d.x_view = d.remainder; }},
  });
  check_refusals(
      "reversible_block",
      [](arguments& d) {
        compiled_layers<float>::reversible_block(d.x_view, d.out_view_, nothing, nothing, {.remainder = d.remainder},
                                                 d.serial);
      },
      list);
  check_refusals(
      "reversible_block_inverse",
      [](arguments& d) {
        compiled_layers<float>::reversible_block_inverse(d.x_view, d.out_view_, nothing, nothing,
                                                         {.remainder = d.remainder}, d.serial);
      },
      list);
}

}  // namespace testing::refusals_tests
