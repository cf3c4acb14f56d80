// Log decays, bonuses and states that do not fit are refused on entry: std::invalid_argument in one sentence, nothing
// written.
#include <algorithm>
#include <functional>

#include "support/call_kernel.hpp"
#include "support/refused.hpp"

namespace testing::linear_decay_refusals_tests {
namespace {

// A good call, to be spoilt in one place: batch 2, heads 4 over 2, length 9, dims 8 and 5; sums per query head.
struct inputs {
  tensor<float> q{2, 4, 9, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, d_out{2, 4, 9, 5, 1};
  tensor<float> other{2, 4, 30, 30, 1};  // more memory to point to
  tensor<float> log_decay{2, 4, 9, 8, -0.5f}, bonus{1, 4, 1, 8, 0.5f}, state{2, 4, 8, 5, 1}, weights{2, 4, 1, 8, 1};
  tensor<float> decay{2, 4, 9, 1, 0.5f};
  // What is written, all of it 7.
  tensor<float> out{2, 4, 9, 5, 7}, final_state{2, 4, 8, 5, 7}, final_weights{2, 4, 1, 8, 7};
  tensor<float> dq{2, 4, 9, 8, 7}, d_log_decay{2, 4, 9, 8, 7}, d_bonus{1, 4, 1, 8, 7}, d_state{2, 4, 8, 5, 7};
  attn::linear_options<float> options{.causal = true,
                                      .log_decay = view(std::as_const(log_decay)),
                                      .bonus = {bonus.data.data(), {4, 8}},
                                      .initial_state = view(std::as_const(state)),
                                      .initial_weights = {weights.data.data(), {2, 4, 8}},
                                      .final_state = view(final_state),
                                      .final_weights = {final_weights.data.data(), {2, 4, 8}}};
  attn::linear_gradients<float> gradients{.q = view(dq),
                                          .log_decay = view(d_log_decay),
                                          .bonus = {d_bonus.data.data(), {4, 8}},
                                          .initial_state = view(d_state),
                                          .d_final_state = view(std::as_const(state))};

  inputs() = default;
  inputs(const inputs&) = delete;

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
  std::vector<const tensor<float>*> written() const {
    return {&out, &final_state, &final_weights, &dq, &d_log_decay, &d_bonus, &d_state};
  }
};

using refused = testing::refused<inputs>;

const std::vector<refused>& of_both() {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  static const std::vector<refused> list = {
      {"decay and log_decay", "either decay or log_decay", [](inputs& x) { x.options.decay = row_view(x.decay); }},
      {"a log decay above 0", "log_decay <= 0", [](inputs& x) { x.log_decay(1, 2, 3, 4) = 0.5f; }},
      {"a log decay that is no number", "log_decay <= 0", [](inputs& x) { x.log_decay(0, 0, 8, 7) = nan; }},
      {"log decays of other heads", "log_decay heads = query heads 4 or key heads 2; found 3",
       [](inputs& x) { x.options.log_decay = x.shaped(2, 3, 9, 8), x.gradients.log_decay = {}; }},
      {"log decays of another batch", "log_decay batch",
       [](inputs& x) { x.options.log_decay = x.shaped(1, 4, 9, 8), x.gradients.log_decay = {}; }},
      {"log decays of another length", "log_decay length = key length 9; found 8",
       [](inputs& x) { x.options.log_decay = x.shaped(2, 4, 8, 8), x.gradients.log_decay = {}; }},
      {"log decays of other channels", "log_decay channels",
       [](inputs& x) { x.options.log_decay = x.shaped(2, 4, 9, 7), x.gradients.log_decay = {}; }},
      {"log decays without causal", "causal with log_decay",
       [](inputs& x) { x.options.causal = false, x.options.bonus = {}, x.gradients.bonus = {}; }},
      {"a bonus without causal", "causal with a bonus",
       [](inputs& x) { x.options.causal = false, x.options.log_decay = {}, x.gradients.log_decay = {}; }},
      {"a bonus of other heads", "bonus heads = query heads 4; found 2",
       [](inputs& x) { x.options.bonus = x.options.bonus.slice(0, 0, 2), x.gradients.bonus = {}; }},
      {"a bonus of other features", "bonus columns = features 8; found 7",
       [](inputs& x) { x.options.bonus = x.options.bonus.slice(1, 0, 7), x.gradients.bonus = {}; }},
      {"an initial state of another batch", "initial_state batch",
       [](inputs& x) { x.options.initial_state = x.shaped(1, 4, 8, 5), x.gradients.initial_state = {}; }},
      {"an initial state of other heads", "initial_state heads",
       [](inputs& x) { x.options.initial_state = x.shaped(2, 3, 8, 5), x.gradients.initial_state = {}; }},
      {"an initial state of other features", "initial_state features = 8; found 7",
       [](inputs& x) { x.options.initial_state = x.shaped(2, 4, 7, 5), x.gradients.initial_state = {}; }},
      {"an initial state of another value dim", "initial_state value dim = 5; found 6",
       [](inputs& x) { x.options.initial_state = x.shaped(2, 4, 8, 6), x.gradients.initial_state = {}; }},
      {"initial weights of other features", "initial_weights features = 8; found 7",
       [](inputs& x) { x.options.initial_weights = x.options.initial_weights.slice(2, 0, 7); }},
      {"a null state with extents", "null", [](inputs& x) { x.options.initial_state = null_view(2, 4, 8, 5); }},
      {"a scale that is infinite", "a finite scale",
       [](inputs& x) { x.options.scale = std::numeric_limits<float>::infinity(); }}};
  return list;
}

}  // namespace

TEST_CASE("linear refuses log decays, a bonus and states that do not fit", "[refusals]") {
  std::vector<refused> list = of_both();
  list.insert(list.end(),
              {{"a final state of other heads", "final_state heads",
                [](inputs& x) { x.options.final_state = reshaped(x.final_state, 2, 3, 8, 5); }},
               {"a final state for key heads", "heads of the final state = heads of sums 4; found 2",
                [](inputs& x) { x.options.final_state = reshaped(x.final_state, 2, 2, 8, 5); }},
               {"final weights of other features", "final_weights features",
                [](inputs& x) { x.options.final_weights = x.options.final_weights.slice(2, 0, 7); }},
               {"a final state that is out", "overlap",
                [](inputs& x) { x.options.final_state = reshaped(x.out, 2, 4, 8, 5); }},
               {"a final state that is the initial one", "overlap",
                [](inputs& x) { x.options.initial_state = reshaped(x.final_state, 2, 4, 8, 5); }}});
  check_refused("linear", list, [](inputs& x) {
    attn::execution serial;
    compiled_linear<float>::call(view(std::as_const(x.q)), view(std::as_const(x.k)), view(std::as_const(x.v)),
                                 view(x.out), x.options, reference::linear_feature::elu_plus_one, serial);
  });
}

TEST_CASE("linear_backward refuses log decays, a bonus and states that do not fit", "[refusals]") {
  std::vector<refused> list = of_both();
  list.insert(list.end(),
              {{"a gradient of log decays of another shape", "the gradient of log_decay",
                [](inputs& x) { x.gradients.log_decay = x.gradients.log_decay.slice(3, 0, 1); }},
               {"a gradient of log decays not given", "log_decay", [](inputs& x) { x.options.log_decay = {}; }},
               {"a gradient of a bonus not given", "bonus", [](inputs& x) { x.options.bonus = {}; }},
               {"a gradient of a state not given", "initial_state", [](inputs& x) { x.options.initial_state = {}; }},
               {"a gradient that is an input", "overlap",
                [](inputs& x) { x.gradients.log_decay = view(x.log_decay); }},
               {"d_final_state of other features", "d_final_state features = 8; found 7",
                [](inputs& x) { x.gradients.d_final_state = x.shaped(2, 4, 7, 5); }},
               {"d_final_state for key heads", "heads of d_final_state = heads of sums 4; found 2",
                [](inputs& x) { x.gradients.d_final_state = x.shaped(2, 2, 8, 5); }},
               {"d_final_weights of another batch", "d_final_weights batch",
                [](inputs& x) { x.gradients.d_final_weights = reshaped(x.other, 1, 4, 8); }}});
  check_refused("linear_backward", list, [](inputs& x) {
    attn::execution serial;
    compiled_linear<float>::backward(view(std::as_const(x.q)), view(std::as_const(x.k)), view(std::as_const(x.v)),
                                     view(std::as_const(x.d_out)), x.gradients, x.options,
                                     reference::linear_feature::elu_plus_one, serial);
  });
}

}  // namespace testing::linear_decay_refusals_tests
