// What the layers along a sequence refuse (refusals.hpp), and their states.
#include "layers/refusals.hpp"

namespace testing::filter_refusals_tests {

using namespace layer_refusals;

TEST_CASE("short_convolution and its step refuse what does not fit", "[layer_refusals]") {
  check_refusals(
      "short_convolution",
      [](arguments& d) {
        compiled_layers<float>::short_convolution(d.x_view, d.out_view_, {.weight = d.taps, .bias = d.bias},
                                                  {.lengths = d.lengths,
                                                   .initial_state = d.state,
                                                   .final_state = d.remainder.slice(1, 0, 3)},
                                                  d.serial);
      },
      with_sequences({
            {"too few rows of the weight", "weight rows = x dim 8; found 7",
             [](arguments& d) { d.taps = d.matrix(7, 4); }},
            {"a weight of no columns", "weight columns >= 1; found 0",
             [](arguments& d) { d.taps = d.matrix(8, 0); }},
            {"a bias of another size", "bias, one per channel: 8; found 7", [](arguments& d) { d.bias = d.vector(7); }},
            {"a weight within out", "separate", [](arguments& d) { d.taps = d.within_out(d.taps); }},
            {"x that is out", "separate", [](arguments& d) { d.x_view = d.out_view_; }},
            {"another number of lengths", "lengths, one per batch item: 2; found 1",
             [](arguments& d) { d.lengths = {3}; }},
            {"a length beyond x", "lengths from 0 to 6; found 7", [](arguments& d) { d.lengths = {7, 6}; }},
            {"a state of another length",
             "initial_state of the shape of the last weight columns - 1 tokens [2, 3, 8]; found [2, 4, 8]",
             [](arguments& d) { d.state = d.shaped(2, 4, 8); }},
            {"a final state of another length", "final_state of the shape of the last weight columns - 1 tokens",
             [](arguments& d) { d.taps = d.matrix(8, 3), d.state = {}; }},
            {"a state that is the final one", "final_state and initial_state in separate memory",
             [](arguments& d) { d.state = d.remainder.slice(1, 0, 3); }},
      }));
  attn::short_convolution_state<float> state({.batch = 2, .channels = 8, .width = 4});
  check_refusals(
      "short_convolution_step",
      [&](arguments& d) {
        compiled_layers<float>::short_convolution_step(state, d.x_view, d.out_view_, {.weight = d.taps},
                                                       {.lengths = d.lengths}, d.serial);
      },
      {
          {"another batch", "x batch = batch of the state 2; found 1",
           [](arguments& d) { d.x_view = d.x_view.slice(0, 0, 1), d.out_view_ = d.out_view_.slice(0, 0, 1); }},
          {"another width", "weight columns = width of the state 4; found 3",
           [](arguments& d) { d.taps = d.matrix(8, 3); }},
          {"a length beyond x", "lengths from 0 to 6; found 7", [](arguments& d) { d.lengths = {7, 6}; }},
          {"x that is out", "separate", [](arguments& d) { d.x_view = d.out_view_; }},
      });
  CHECK(state.tokens() == 0);
  const auto refused_state = [](const attn::short_convolution_state_extents& e) {
    return refusal([&] { attn::short_convolution_state<float> one(e); });
  };
  CHECK(refused_state({.channels = 8, .width = 0}) == "attn::short_convolution_state: expected width >= 1; found 0");
  CHECK(well_formed(refused_state({.batch = -1, .width = 2}), "short_convolution_state"));
  CHECK(well_formed(refused_state({.channels = idx_t(1) << 40, .width = 1 << 20}), "short_convolution_state"));
  arguments d;
  CHECK(well_formed(refusal([&] { state.append(d.x_view.slice(2, 0, 7)); }), "short_convolution_state::append"));
}

TEST_CASE("token_shift and its step refuse what does not fit", "[layer_refusals]") {
  const auto row = [](arguments& d, idx_t b, idx_t c) { return in_matrix<float>(d.memory.data.data(), {b, c}); };
  in_matrix<float> initial;
  attn::tensor_view<float, 2> final;
  check_refusals(
      "token_shift",
      [&](arguments& d) {
        compiled_layers<float>::token_shift(d.x_view, d.out_view_, {.mix = d.bias},
                                            {.lengths = d.lengths,
                                             .initial_state = std::exchange(initial, {}),
                                             .final_state = std::exchange(final, {})},
                                            d.serial);
      },
      with_sequences({
          {"mix of another size", "mix, one per channel: 8; found 7", [](arguments& d) { d.bias = d.vector(7); }},
          {"mix within out", "separate", [](arguments& d) { d.bias = d.within_out(d.bias); }},
          {"x that is out", "separate", [](arguments& d) { d.x_view = d.out_view_; }},
          {"another number of lengths", "lengths, one per batch item: 2; found 1",
           [](arguments& d) { d.lengths = {3}; }},
          {"a length beyond x", "lengths from 0 to 6; found 7", [](arguments& d) { d.lengths = {7, 6}; }},
          {"a state of more channels",
           "initial_state of the shape of one token of each batch item [2, 8]; found [2, 9]",
           [&](arguments& d) { initial = row(d, 2, 9); }},
          {"a state of one item", "initial_state of the shape of one token of each batch item [2, 8]; found [1, 8]",
           [&](arguments& d) { initial = row(d, 1, 8); }},
          {"a final state of one item",
           "final_state of the shape of one token of each batch item [2, 8]; found [1, 8]",
           [&](arguments& d) { final = reshaped(d.rest, 1, 8); }},
          {"a state that is the final one", "final_state and initial_state in separate memory",
           [&](arguments& d) { final = reshaped(d.rest, 2, 8), initial = final; }},
          {"a final state within out", "separate", [&](arguments& d) { final = reshaped(d.out, 2, 8); }},
      }));
  attn::token_shift_state<float> state({.batch = 2, .channels = 8});
  check_refusals(
      "token_shift_step",
      [&](arguments& d) {
        compiled_layers<float>::token_shift_step(state, d.x_view, d.out_view_, {.mix = d.bias}, {.lengths = d.lengths},
                                                 d.serial);
      },
      {
          {"another batch", "x batch = batch of the state 2; found 1",
           [](arguments& d) { d.x_view = d.x_view.slice(0, 0, 1), d.out_view_ = d.out_view_.slice(0, 0, 1); }},
          {"fewer channels", "x dim = channels of the state 8; found 7",
           [](arguments& d) { d.x_view = d.x_view.slice(2, 0, 7), d.out_view_ = d.out_view_.slice(2, 0, 7); }},
          {"mix of another size", "mix, one per channel: 8; found 9", [](arguments& d) { d.bias = d.vector(9); }},
          {"a length beyond x", "lengths from 0 to 6; found 7", [](arguments& d) { d.lengths = {7, 6}; }},
          {"x that is out", "separate", [](arguments& d) { d.x_view = d.out_view_; }},
      });
  CHECK(state.tokens() == 0);
  const auto refused_state = [](const attn::token_shift_state_extents& e) {
    return refusal([&] { attn::token_shift_state<float> one(e); });
  };
  CHECK(refused_state({.channels = -1}) == "attn::token_shift_state: expected channels >= 0; found -1");
  CHECK(well_formed(refused_state({.batch = -1}), "token_shift_state"));
  CHECK(well_formed(refused_state({.batch = 1 << 20, .channels = idx_t(1) << 40}), "token_shift_state"));
  arguments d;
  CHECK(well_formed(refusal([&] { state.append(d.x_view.slice(2, 0, 7)); }), "token_shift_state::append"));
}

}  // namespace testing::filter_refusals_tests
