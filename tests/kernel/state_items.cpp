// States of several sequences: fed with chunks of different lengths, branched, reordered, begun anew.
#include <sstream>

#include "support/cache_items.hpp"
#include "support/call_delta_rule.hpp"
#include "support/call_dplr.hpp"
#include "support/call_kernel.hpp"

namespace testing::state_items_tests {
namespace {

constexpr cache_shape shape{.heads = 4, .kv_heads = 2, .dim = 9, .value_dim = 12, .chunk = 70};
constexpr attn::kernel_state_extents linear_extents{
    .batch = 4, .heads = 2, .features = 9, .value_dim = 12, .keep = 2};

// The same of one item.
template <class Extents>
constexpr Extents one_of(Extents e) {
  e.batch = 1;
  return e;
}

// Parameters made of the keys, so that those of padding are not numbers either.
template <class F>
tensor<float> of_keys(in_view<float> k, idx_t dim, F&& f) {
  tensor<float> x(k.extent(0), k.extent(1), k.extent(2), dim);
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t t = 0; t < x.length(); ++t)
        for (idx_t d = 0; d < dim; ++d) x(b, h, t, d) = f(k(b, h, t, d));
  return x;
}
tensor<float> gates_of(in_view<float> k) {
  return of_keys(k, 1, [](float x) { return 0.75f + 0.25f * std::tanh(x); });
}

// Threads where there are several items, none where there is one.
struct executions {
  attn::execution three{3, 0}, serial;
  attn::execution& of(idx_t batch) { return batch > 1 ? three : serial; }
};

constexpr auto elu = reference::linear_feature::elu_plus_one;

const auto linear_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  const tensor<float> gates = gates_of(k);
  compiled_linear<float>::step(state, q, k, v, out, {.lengths = lengths, .decay = gate_view(gates)}, elu,
                               exec.of(state.batch()));
};
const auto delta_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  const tensor<float> beta = gates_of(k), decay = of_keys(k, k.extent(3), [](float x) { return -0.1f * x * x; });
  compiled_delta_rule<float>::step(
      state, q, k, v, out,
      {.lengths = lengths, .beta = gate_view(beta), .log_decay = view(decay), .unit_norm_eps = 1e-6f},
      exec.of(state.batch()));
};

// a = -b / 3, of keys
const auto dplr_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  const auto of_k = [&](auto&& f) { return of_keys(k, k.extent(3), f); };
  const tensor<float> a = of_k([](float x) { return -0.1f * x; }), b = of_k([](float x) { return 0.3f * x; }),
                      decay = of_k([](float x) { return -0.1f * x * x; });
  compiled_dplr<float>::step(state, {q, k, v, view(a), view(b)}, out, {.lengths = lengths, .log_decay = view(decay)},
                             exec.of(state.batch()));
};

template <class State>
std::string content(const State& state) {
  std::ostringstream stream;
  state.write(stream);
  return stream.str();
}

}  // namespace

TEST_CASE("linear: items of their own lengths", "[state_items]") {
  attn::linear_state<float> state(linear_extents);
  check_items<float>(state, attn::linear_state<float>(one_of(linear_extents)), linear_step, shape);
}

TEST_CASE("linear with decays per channel and a bonus: items of their own lengths", "[state_items]") {
  auto extents = linear_extents;
  extents.keep = 0;
  attn::linear_state<float> state(extents);
  executions exec;
  const tensor<float> u = cast<float>(random_normal(3, 1, 1, 4, 9));
  check_items<float>(
      state, attn::linear_state<float>(one_of(extents)),
      [&](auto& s, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
        const tensor<float> decay = of_keys(k, 9, [](float x) { return -std::abs(x); });
        compiled_linear<float>::step(
            s, q, k, v, out,
            {.lengths = lengths, .scale = 0.5f, .log_decay = view(decay), .bonus = {u.data.data(), {4, 9}}}, elu,
            exec.of(s.batch()));
      },
      shape);
}

TEST_CASE("performer and rfa: items of their own lengths", "[state_items]") {
  attn::kernel_state_extents e{.batch = 4, .heads = 2, .features = 20, .value_dim = 12, .keep = 1};
  const auto w = attn::draw_features<float>(20, 9, {.seed = 4});
  executions exec;
  attn::performer_state<float> performer(e);
  check_items<float>(
      performer, attn::performer_state<float>(one_of(e)),
      [&](auto& s, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
        compiled_performer<float>::step(s, q, k, v, out, w.view(), {.lengths = lengths}, exec.of(s.batch()));
      },
      shape);
  // A matrix for every query head.
  e.heads = 4;
  const auto own = attn::draw_features<float>(20, 9, {.seed = 5, .heads = 4});
  attn::rfa_state<float> rfa(e);
  check_items<float>(
      rfa, attn::rfa_state<float>(one_of(e)),
      [&](auto& s, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
        const tensor<float> gates = gates_of(k);
        compiled_rfa<float>::step(s, q, k, v, out, own.view(), {.lengths = lengths, .gate = gate_view(gates)},
                                  exec.of(s.batch()));
      },
      shape);
}

TEST_CASE("delta_rule: items of their own lengths", "[state_items]") {
  const attn::delta_rule_state_extents e{.batch = 4, .heads = 2, .dim = 9, .value_dim = 12, .keep = 2};
  attn::delta_rule_state<float> state(e);
  cache_shape even = shape;
  even.heads = 2;
  check_items<float>(state, attn::delta_rule_state<float>(one_of(e)), delta_step, even);
}

TEST_CASE("dplr: items of their own lengths", "[state_items]") {
  const attn::dplr_state_extents e{.batch = 4, .heads = 2, .dim = 9, .value_dim = 12, .keep = 2};
  attn::dplr_state<float> state(e);
  cache_shape even = shape;
  even.heads = 2;
  check_items<float>(state, attn::dplr_state<float>(one_of(e)), dplr_step, even);
}

TEST_CASE("states are written, read and merged item by item", "[state_items]") {
  const tensor<float> k = cast<float>(random_normal(2, 4, 2, 40, 9)), v = cast<float>(random_normal(3, 4, 2, 40, 12));
  const std::vector<idx_t> first{40, 0, 2, 7}, second{0, 3, 5, 40};
  attn::linear_state<float> state(linear_extents), later(linear_extents), read(linear_extents);
  state.append(view(k), view(v), {.lengths = first});
  later.append(view(k), view(v), {.lengths = second});
  std::istringstream stream(content(state));
  read.append(view(k), view(v));
  read.read(stream);
  CHECK(content(read) == content(state));
  CHECK(std::ranges::equal(read.lengths(), first));
  CHECK(read.kept() == 0);
  state.merge(later);
  for (idx_t b = 0; b < 4; ++b) {
    const auto n = static_cast<std::size_t>(b);
    attn::linear_state<float> one(one_of(linear_extents)), rest = one;
    const auto fed = [&](auto& to, idx_t count) {
      to.append(view(k).slice(0, b, 1).slice(2, 0, count), view(v).slice(0, b, 1).slice(2, 0, count));
    };
    fed(one, first[n]), fed(rest, second[n]);
    one.merge(rest);
    CHECK(state.tokens(b) == first[n] + second[n]);
    bool same = true;
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t r = 0; r < 9; ++r) {
        same = same && state.weight(b, h, r) == one.weight(0, h, r);
        for (idx_t d = 0; d < 12; ++d) same = same && state.sum(b, h, r, d) == one.sum(0, h, r, d);
      }
    CHECK(same);
  }
}

TEST_CASE("states refuse items there are not, and lengths that do not fit", "[state_items]") {
  auto two = linear_extents;
  two.batch = 2;
  attn::linear_state<float> linear(two);
  check_item_refusals<float>(
      linear, {"linear_state", "linear_step", "linear_state::append"}, linear_step,
      [](auto& s, auto k, auto v, const std::vector<idx_t>& lengths) { s.append(k, v, {.lengths = lengths}); }, shape);
  attn::delta_rule_state<float> delta({.batch = 2, .heads = 2, .dim = 9, .value_dim = 12, .keep = 2});
  cache_shape even = shape;
  even.heads = 2;
  check_item_refusals<float>(
      delta, {"delta_rule_state", "delta_rule_step", "delta_rule_state::append"}, delta_step,
      [](auto& s, auto k, auto v, const std::vector<idx_t>& lengths) { s.append(k, v, {.lengths = lengths}); }, even);
  attn::dplr_state<float> dplr({.batch = 2, .heads = 2, .dim = 9, .value_dim = 12, .keep = 2});
  check_item_refusals<float>(
      dplr, {"dplr_state", "dplr_step", "dplr_state::append"}, dplr_step,
      [](auto& s, auto k, auto v, const std::vector<idx_t>& lengths) { s.append(k, v, k, k, {.lengths = lengths}); },
      even);
}

}  // namespace testing::state_items_tests
