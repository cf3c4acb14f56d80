// Bad input is refused at the door of every layer: std::invalid_argument in one sentence, out untouched.
#include "layers/layers.hpp"

namespace testing {
namespace {

// A good call of each layer, to be spoilt in one place: batch 2, length 6, width 8, hidden 10, 4 heads over 2.
struct door {
  tensor<float> x{2, 1, 6, 8, 0.5f}, y{2, 1, 9, 8, 0.25f}, out{2, 1, 6, 8, 7}, rest{2, 1, 6, 8};
  tensor<float> memory{1, 1, 40, 40, 0.1f};  // what every weight points to
  in_sequence<float> x_view = sequence(std::as_const(x)), y_view = sequence(std::as_const(y));
  out_sequence<float> out_view_ = sequence(out);
  in_matrix<float> weight = matrix(8, 8);
  in_vector<float> bias = vector(8), gamma = vector(8), beta = vector(8);
  attn::multi_head_weights<float> heads{matrix(8, 8), matrix(4, 8), matrix(4, 8), matrix(8, 8),
                                        vector(8),    vector(4),    vector(4),    vector(8)};
  attn::multi_head_options options{.heads = 4, .kv_heads = 2};
  attn::encoder_block_weights<float> block{
      {vector(8), vector(8)}, {vector(8), vector(8)}, {matrix(10, 8), matrix(8, 10), vector(10), vector(8)}};
  float eps = 1e-5f;
  out_sequence<float> remainder = sequence(rest);
  attn::execution serial;

  door() = default;
  door(const door&) = delete;
  in_matrix<float> matrix(index rows, index columns) const { return {memory.data.data(), {rows, columns}}; }
  in_vector<float> vector(index n) const { return {memory.data.data(), {n}}; }
  in_sequence<float> shaped(index b, index l, index d) const { return {memory.data.data(), {b, l, d}}; }
  template <class View>
  View within_out(const View& like) const {
    return {out.data.data(), like.extents()};
  }
};

void nothing(in_sequence<float>, out_sequence<float>, attn::execution&) { FAIL("the mixer was called"); }
void no_attention(in_view<float>, in_view<float>, in_view<float>, out_view<float>, attn::execution&) {
  FAIL("the operator was called");
}

struct refused {
  const char* what;
  const char* says;  // the message names what is wrong
  std::function<void(door&)> spoil;
};

void check_refusals(const std::string& name, const std::function<void(door&)>& call, const std::vector<refused>& list) {
  for (const refused& bad : list) {
    INFO(name << ": " << bad.what);
    door d;
    bad.spoil(d);
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
std::vector<refused> with_sequences(std::vector<refused> more) {
  std::vector<refused> all = {
      {"another batch of out", "out batch = x batch 2; found 1",
       [](door& d) { d.out_view_ = d.out_view_.slice(0, 0, 1); }},
      {"another length of out", "out length = x length 6; found 5",
       [](door& d) { d.out_view_ = d.out_view_.slice(1, 0, 5); }},
      {"another dim of out", "out dim 8; found 6", [](door& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }},
      {"a null x", "null",
       [](door& d) {
         d.x_view = {nullptr, {2, 6, 8}};
       }},
      {"a null out", "null",
       [](door& d) {
         d.out_view_ = {nullptr, {2, 6, 8}};
       }},
      {"a negative extent", "extents", [](door& d) { d.x_view = d.shaped(2, -6, 8); }},
      {"out that overlaps itself", "overlap",
       [](door& d) {
         d.out_view_ = {d.out.data.data(), {2, 6, 8}, {8, 8, 1}};
       }},
      {"out that shares memory with x", "separate memory",
       [](door& d) {
         d.x_view = {d.out.data.data(), {2, 6, 8}, {48, 0, 1}};
       }},
      {"more tokens than can be counted, of nothing", "x batch * length that memory can hold",
       [](door& d) {
         constexpr index many = index(1) << 33;
         d.out_view_ = {nullptr, {many, many, 0}};
         d.x_view = d.y_view = d.out_view_;
         d.weight = {}, d.bias = d.gamma = d.beta = {}, d.heads = {}, d.options = {}, d.block = {}, d.remainder = {};
       }},
  };
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TEST_CASE("project refuses what does not fit", "[layer_refusals]") {
  const auto call = [](door& d) { compiled_layers<float>::project(d.x_view, d.weight, d.out_view_, d.bias, d.serial); };
  door good;
  call(good);
  CHECK(good.out(0, 0, 0, 0) != 7);
  check_refusals("project", call,
                 with_sequences({
                     {"too few columns", "weight columns = dim of its input 8; found 7",
                      [](door& d) { d.weight = d.matrix(8, 7); }},
                     {"too many rows", "out dim 9; found 8", [](door& d) { d.weight = d.matrix(9, 8); }},
                     {"no weight", "out dim 0; found 8", [](door& d) { d.weight = {}; }},
                     {"a null weight", "null",
                      [](door& d) {
                        d.weight = {nullptr, {8, 8}};
                      }},
                     {"a bias of another size", "bias, one per row of its weight: 8; found 7",
                      [](door& d) { d.bias = d.vector(7); }},
                     {"a null bias", "null",
                      [](door& d) {
                        d.bias = {nullptr, {8}};
                      }},
                     {"a weight within out", "separate", [](door& d) { d.weight = d.within_out(d.weight); }},
                     {"a bias within out", "separate", [](door& d) { d.bias = d.within_out(d.bias); }},
                     {"x that is out", "separate", [](door& d) { d.x_view = d.out_view_; }},
                 }));
}

TEST_CASE("layer_norm refuses what does not fit", "[layer_refusals]") {
  const auto call = [](door& d) {
    compiled_layers<float>::layer_norm(d.x_view, d.out_view_, {d.gamma, d.beta, d.eps}, d.serial);
  };
  check_refusals(
      "layer_norm", call,
      with_sequences({
          {"gamma of another size", "gamma, one per feature: 8; found 9", [](door& d) { d.gamma = d.vector(9); }},
          {"beta of another size", "beta, one per feature: 8; found 7", [](door& d) { d.beta = d.vector(7); }},
          {"a negative eps", "eps >= 0; found -1", [](door& d) { d.eps = -1; }},
          {"eps that is no number", "eps >= 0", [](door& d) { d.eps = std::numeric_limits<float>::quiet_NaN(); }},
          {"gamma within out", "separate", [](door& d) { d.gamma = d.within_out(d.gamma); }},
          {"beta within out", "separate", [](door& d) { d.beta = d.within_out(d.beta); }},
      }));
}

// The feed-forward weights, in a layer of their own and in a block.
const std::vector<refused> feed_refusals = {
    {"columns of up", "up weight columns = dim of its input 8; found 9",
     [](door& d) { d.block.feed.up = d.matrix(10, 9); }},
    {"columns of down", "down weight columns = dim of its input 10; found 11",
     [](door& d) { d.block.feed.down = d.matrix(8, 11); }},
    {"rows of down", "down weight rows = out dim 8; found 7",
     [](door& d) { d.block.feed.down = d.matrix(7, 10), d.block.feed.down_bias = d.vector(7); }},
    {"bias of up", "up bias, one per row of its weight: 10; found 8",
     [](door& d) { d.block.feed.up_bias = d.vector(8); }},
    {"bias of down", "down bias", [](door& d) { d.block.feed.down_bias = d.vector(10); }},
    {"no up weight", "up weight", [](door& d) { d.block.feed.up = {}; }},
    {"down within out", "separate", [](door& d) { d.block.feed.down = d.within_out(d.matrix(8, 10)); }},
};

TEST_CASE("feed_forward refuses what does not fit", "[layer_refusals]") {
  check_refusals(
      "feed_forward",
      [](door& d) {
        compiled_layers<float>::feed_forward(d.x_view, d.out_view_, d.block.feed, attn::activation::relu, d.serial);
      },
      [] {
        auto list = with_sequences(feed_refusals);
        // its out dim is that of the weight: asked for there
        list.erase(list.begin() + 2);
        list.push_back({"another dim of out", "down weight rows = out dim 6; found 8",
                        [](door& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }});
        return list;
      }());
}

TEST_CASE("multi_head refuses what does not fit", "[layer_refusals]") {
  const auto call = [](door& d) {
    compiled_layers<float>::multi_head(d.x_view, d.y_view, d.out_view_, d.heads, no_attention, d.options, d.serial);
  };
  check_refusals(
      "multi_head", call,
      with_sequences({
          {"another batch of y", "y batch = x batch 2; found 1", [](door& d) { d.y_view = d.shaped(1, 9, 8); }},
          {"a null y", "null",
           [](door& d) {
             d.y_view = {nullptr, {2, 9, 8}};
           }},
          {"y that is out", "separate", [](door& d) { d.y_view = d.out_view_; }},
          {"no heads", "heads >= 1; found 0", [](door& d) { d.options.heads = 0; }},
          {"no key heads", "kv_heads >= 1; found 0", [](door& d) { d.options.kv_heads = 0; }},
          {"key heads that do not divide", "kv_heads that divide heads 4; found 3",
           [](door& d) { d.options.kv_heads = 3; }},
          {"query rows that heads do not divide", "query weight rows divisible by heads 4; found 9",
           [](door& d) { d.heads.query = d.matrix(9, 8), d.heads.query_bias = d.vector(9); }},
          {"value rows that heads do not divide", "value weight rows divisible by heads 2; found 5",
           [](door& d) { d.heads.value = d.matrix(5, 8), d.heads.value_bias = d.vector(5); }},
          {"key rows of another head dim", "key weight rows = kv_heads x query head dim 4; found 8",
           [](door& d) { d.heads.key = d.matrix(8, 8), d.heads.key_bias = d.vector(8); }},
          {"query columns", "query weight columns", [](door& d) { d.heads.query = d.matrix(8, 7); }},
          {"key columns", "key weight columns", [](door& d) { d.heads.key = d.matrix(4, 7); }},
          {"value columns", "value weight columns", [](door& d) { d.heads.value = d.matrix(4, 9); }},
          {"output columns", "output weight columns = dim of its input 8; found 4",
           [](door& d) { d.heads.output = d.matrix(8, 4); }},
          {"output rows", "out dim 7; found 8",
           [](door& d) { d.heads.output = d.matrix(7, 8), d.heads.output_bias = d.vector(7); }},
          {"query bias", "query bias, one per row of its weight: 8; found 4",
           [](door& d) { d.heads.query_bias = d.vector(4); }},
          {"key bias", "key bias", [](door& d) { d.heads.key_bias = d.vector(8); }},
          {"value bias", "value bias", [](door& d) { d.heads.value_bias = d.vector(8); }},
          {"output bias", "output bias", [](door& d) { d.heads.output_bias = d.vector(4); }},
          {"a weight within out", "separate", [](door& d) { d.heads.value = d.within_out(d.heads.value); }},
          {"no key weight, but grouped", "kv_heads = heads",
           [](door& d) {
             d.heads.key = {};
             d.heads.key_bias = {};
           }},
          {"no key weight, but its bias", "no key weight", [](door& d) { d.heads.key = {}; }},
          {"no key weight, but another y", "y length = x length",
           [](door& d) {
             d.heads.key = {};
             d.heads.key_bias = {};
             d.options.heads = 2;
           }},
          {"more tokens of y than can be counted, of nothing", "y batch * length that memory can hold",
           [](door& d) {
             constexpr index many = index(1) << 33;
             d.out_view_ = {nullptr, {many, 1, 0}};
             d.x_view = d.out_view_;
             d.y_view = {nullptr, {many, many, 0}};
             d.heads = {}, d.options = {};
             d.heads.key = d.matrix(0, 0);
           }},
          {"no output weight, but its bias", "no output weight", [](door& d) { d.heads.output = {}; }},
      }));
}

TEST_CASE("encoder_block refuses what does not fit", "[layer_refusals]") {
  auto list = with_sequences(feed_refusals);
  const std::vector<refused> more = {
      {"gamma of norm 1", "gamma of norm_1, one per feature: 8; found 7",
       [](door& d) { d.block.norm_1.gamma = d.vector(7); }},
      {"beta of norm 1", "beta of norm_1", [](door& d) { d.block.norm_1.beta = d.vector(9); }},
      {"gamma of norm 2", "gamma of norm_2", [](door& d) { d.block.norm_2.gamma = d.vector(1); }},
      {"beta of norm 2", "beta of norm_2", [](door& d) { d.block.norm_2.beta = d.vector(7); }},
      {"a negative eps", "eps >= 0; found -1", [](door& d) { d.eps = -1; }},
  };
  list.insert(list.end(), more.begin(), more.end());
  check_refusals(
      "encoder_block",
      [](door& d) {
        compiled_layers<float>::encoder_block(d.x_view, d.out_view_, nothing, d.block, {.eps = d.eps}, d.serial);
      },
      list);
}

TEST_CASE("reversible_block and its inverse refuse what does not fit", "[layer_refusals]") {
  const std::vector<refused> list = with_sequences({
      {"an odd width", "an even width; found 7",
       [](door& d) { d.x_view = d.shaped(2, 6, 7), d.out_view_ = d.out_view_.slice(2, 0, 7); }},
      {"another batch of the remainder", "remainder batch", [](door& d) { d.remainder = d.remainder.slice(0, 0, 1); }},
      {"another length of the remainder", "remainder length",
       [](door& d) { d.remainder = d.remainder.slice(1, 0, 5); }},
      {"another dim of the remainder", "remainder dim", [](door& d) { d.remainder = d.remainder.slice(2, 0, 4); }},
      {"a null remainder", "null",
       [](door& d) {
         d.remainder = {nullptr, {2, 6, 8}};
       }},
      {"a remainder that is out", "separate", [](door& d) { d.remainder = d.out_view_; }},
      {"a remainder that is x", "separate", [](door& d) { d.x_view = d.remainder; }},
  });
  check_refusals(
      "reversible_block",
      [](door& d) {
        compiled_layers<float>::reversible_block(d.x_view, d.out_view_, nothing, nothing, {d.remainder}, d.serial);
      },
      list);
  check_refusals(
      "reversible_block_inverse",
      [](door& d) {
        compiled_layers<float>::reversible_block_inverse(d.x_view, d.out_view_, nothing, nothing, {d.remainder},
                                                         d.serial);
      },
      list);
}

}  // namespace testing
