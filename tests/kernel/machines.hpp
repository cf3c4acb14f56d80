#pragma once
// The states of linear, performer and rfa with their steps, so that each test runs over all of them.
#include <memory>
#include <sstream>

#include "support/call_kernel.hpp"

namespace testing::kernel_machines {

inline constexpr idx_t batch = 2, heads = 4, kv_heads = 2, length = 150, dim = 9, value_dim = 12, count = 20;

// One operator's state, so that each test runs over all of them.
struct machine {
  virtual ~machine() = default;
  virtual std::unique_ptr<machine> fresh() const = 0;
  virtual std::unique_ptr<machine> copy() const = 0;
  virtual void step(idx_t begin, idx_t tokens) = 0;
  virtual attn::kernel_state<float>& state() = 0;
  double near = 1e-5;  // what rounding may change
  tensor<float> out{batch, heads, length, value_dim, 7};
};

inline const tensor<float>& input(int which) {
  static const tensor<float> all[] = {cast<float>(random_normal(1, batch, heads, length, dim)),
                                      cast<float>(random_normal(2, batch, kv_heads, length, dim)),
                                      cast<float>(random_normal(3, batch, kv_heads, length, value_dim))};
  return all[which];
}
inline const tensor<float>& gates() {
  static const tensor<float> all = [] {
    auto g = cast<float>(random_gates(batch, kv_heads, length));
    for (float& x : g.data) x = 0.5f + x / 2;
    return g;
  }();
  return all;
}

template <class State, class Step>
struct machine_of final : machine {
  State made;
  Step feed;
  machine_of(State s, Step f) : made(std::move(s)), feed(std::move(f)) {}
  std::unique_ptr<machine> fresh() const override {
    auto other = std::make_unique<machine_of>(made, feed);
    other->made.reset();
    return other;
  }
  std::unique_ptr<machine> copy() const override { return std::make_unique<machine_of>(*this); }
  void step(idx_t begin, idx_t tokens) override {
    const auto part = [&](auto x) { return x.slice(2, begin, tokens); };
    feed(made, part(view(input(0))), part(view(input(1))), part(view(input(2))), part(view(out)), begin, tokens);
  }
  attn::kernel_state<float>& state() override { return made; }
};

template <class State, class Step>
std::unique_ptr<machine> machine_for(State state, Step step) {
  return std::make_unique<machine_of<State, Step>>(std::move(state), std::move(step));
}

inline const attn::tensor<float, 3>& features() {
  static const auto w = attn::draw_features<float>(count, dim, {.seed = 4});
  return w;
}

inline constexpr attn::kernel_state_extents linear_extents{
    .batch = batch, .heads = kv_heads, .features = dim, .value_dim = value_dim};
inline constexpr attn::kernel_state_extents drawn_extents{
    .batch = batch, .heads = kv_heads, .features = count, .value_dim = value_dim};

inline std::vector<std::pair<std::string, std::unique_ptr<machine>>> machines() {
  using in = in_view<float>;
  using out = out_view<float>;
  std::vector<std::pair<std::string, std::unique_ptr<machine>>> all;
  for (bool gated : {false, true}) {
    all.emplace_back(gated ? "linear with decay" : "linear",
                     machine_for(attn::linear_state<float>(linear_extents),
                                 [gated](auto& s, in q, in k, in v, out o, idx_t begin, idx_t tokens) {
                                   attn::execution serial;
                                   attn::linear_step_options<float> options;
                                   if (gated) options.decay = gate_view(gates()).slice(2, begin, tokens);
                                   compiled_linear<float>::step(s, q, k, v, o, options,
                                                                reference::linear_feature::elu_plus_one, serial);
                                 }));
    all.emplace_back(gated ? "rfa with gate" : "rfa",
                     machine_for(attn::rfa_state<float>(drawn_extents),
                                 [gated](auto& s, in q, in k, in v, out o, idx_t begin, idx_t tokens) {
                                   attn::execution serial;
                                   attn::rfa_step_options<float> options;
                                   if (gated) options.gate = gate_view(gates()).slice(2, begin, tokens);
                                   compiled_rfa<float>::step(s, q, k, v, o, features().view(), options, serial);
                                 }));
  }
  for (auto kernel : {attn::performer_kernel::positive, attn::performer_kernel::hyperbolic,
                      attn::performer_kernel::trigonometric, attn::performer_kernel::relu})
    all.emplace_back("performer, kernel " + std::to_string(int(kernel)),
                     machine_for(attn::performer_state<float>(drawn_extents, {.kernel = kernel}),
                                 [](auto& s, in q, in k, in v, out o, idx_t, idx_t) {
                                   attn::execution serial;
                                   compiled_performer<float>::step(s, q, k, v, o, features().view(), {}, serial);
                                 }));
  for (auto& [name, one] : all)  // sines and cosines cancel, and lose the more digits
    if (name.starts_with("rfa") || name == "performer, kernel 2") one->near = 1e-3;
  return all;
}

inline std::string written(machine& m) {
  std::ostringstream stream;
  m.state().write(stream);
  return stream.str();
}

}  // namespace testing::kernel_machines
