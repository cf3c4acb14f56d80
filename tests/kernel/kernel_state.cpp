// States: feeding, merging, copying, and what a million tokens do to them.
#include <attn/kernel/linear_step.hpp>

#include "kernel/machines.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::kernel_state_tests {
using namespace kernel_machines;

TEST_CASE("a sequence in two parts, states merged, equals one pass", "[kernel_state]") {
  for (auto& [name, one] : machines()) {
    INFO(name);
    one->step(0, 90);
    auto first = one->fresh(), second = one->fresh();
    first->step(0, 40), first->step(40, 1);
    second->step(41, 1), second->step(42, 48);
    first->state().merge(second->state());
    CHECK(first->state().tokens() == 90);
    one->step(90, 60), first->step(90, 60);
    CHECK(relative_error(rows(first->out, 90, 60), rows(one->out, 90, 60)) <= one->near);
    // a part that was fed nothing changes nothing, on either side
    auto nothing = one->fresh();
    nothing->state().merge(one->state());
    CHECK(written(*nothing) == written(*one));
    const std::string before = written(*one);
    one->state().merge(one->fresh()->state());
    CHECK(written(*one) == before);
  }
}

TEST_CASE("a copy goes its own way, a reset starts anew", "[kernel_state]") {
  for (auto& [name, one] : machines()) {
    INFO(name);
    one->step(0, 70);
    auto branch = one->copy();
    one->step(70, 5);
    branch->step(70, 5);
    CHECK(one->out == branch->out);
    branch->step(75, 1);
    CHECK(one->state().tokens() == 75);
    CHECK(branch->state().tokens() == 76);
    auto fresh = one->fresh();
    fresh->step(0, 5);
    branch->state().reset();
    CHECK(branch->state().tokens() == 0);
    branch->step(0, 5);
    CHECK(written(*branch) == written(*fresh));
  }
}

TEST_CASE("merging refuses a state of another kind or shape, and changes nothing", "[kernel_state]") {
  auto all = machines();
  machine& one = *all[0].second;
  one.step(0, 5);
  const std::string before = written(one);
  for (idx_t attn::kernel_state_extents::*axis :
       {&attn::kernel_state_extents::batch, &attn::kernel_state_extents::heads, &attn::kernel_state_extents::features,
        &attn::kernel_state_extents::value_dim}) {
    attn::kernel_state_extents other = linear_extents;
    ++(other.*axis);
    CHECK(well_formed(refusal([&] { one.state().merge(attn::linear_state<float>(other)); }), "linear_state"));
  }
  for (auto& named : all) {
    auto& other = named.second->state();
    if (!(attn::detail::step_access::of(other).kind() == attn::detail::step_access::of(one.state()).kind()))
      CHECK(well_formed(refusal([&] { one.state().merge(other); }), "linear_state"));
  }
  CHECK(written(one) == before);
}

TEST_CASE("states of no size memory could have are refused", "[kernel_state]") {
  constexpr idx_t huge = idx_t(1) << 40, most = std::numeric_limits<idx_t>::max(), least = -most - 1;
  for (const attn::kernel_state_extents& e : {attn::kernel_state_extents{.heads = -1, .features = 4, .value_dim = 4},
                                              {.heads = 1, .features = -4, .value_dim = 4},
                                              {.heads = 1, .features = 4, .value_dim = -4},
                                              {.batch = -1, .heads = 1, .features = 4, .value_dim = 4},
                                              {.heads = huge, .features = huge, .value_dim = huge},
                                              {.heads = 1, .features = most, .value_dim = 4},
                                              {.heads = 1, .features = most / 2 - 4, .value_dim = 4},
                                              {.heads = 1, .features = least, .value_dim = 2},
                                              {.heads = 1, .features = 4, .value_dim = most - 10},
                                              {.heads = 1, .features = 4, .value_dim = least},
                                              {.heads = 0, .features = huge, .value_dim = huge}}) {
    CAPTURE(e.batch, e.heads, e.features, e.value_dim);
    CHECK(well_formed(refusal([&] { attn::linear_state<float>{e}; }), "linear_state"));
    CHECK(well_formed(refusal([&] { attn::rfa_state<float>{e}; }), "rfa_state"));
    for (auto kernel : {attn::performer_kernel::positive, attn::performer_kernel::hyperbolic})
      CHECK(well_formed(refusal([&] { attn::performer_state<float>(e, {.kernel = kernel}); }), "performer_state"));
  }
}

// Float sums of a million terms of one sign, token by token and in chunks, against the exact mean, a constant: bounds
// as stated in kernel_state.hpp, n / 2 units in the last place at worst, sqrt(n) where terms vary.
TEST_CASE("a million tokens of constant values stay that constant", "[kernel_state][long]") {
  constexpr idx_t tokens = 1'000'000, at_once = 1000;
  const auto k = cast<float>(random_normal(1, 1, 1, at_once, 4)), q = cast<float>(random_normal(2, 1, 1, at_once, 4));
  const tensor<float> v(1, 1, at_once, 1, 3.3f);
  tensor<float> out(1, 1, at_once, 1);
  for (bool chunks : {false, true}) {
    attn::linear_state<float> state({.heads = 1, .features = 4, .value_dim = 1});
    for (idx_t begin = 0; begin < tokens; begin += at_once) {
      const auto feed = [&](idx_t from, idx_t some) {
        const auto part = [&](auto x) { return x.slice(2, from, some); };
        attn::linear_step(state, part(view(q)), part(view(k)), part(view(v)), part(view(out)), {.eps = 0});
      };
      if (chunks)
        feed(0, at_once);
      else
        for (idx_t t = 0; t < at_once; ++t) feed(t, 1);
    }
    double worst = 0;
    for (float x : out.data) worst = std::max(worst, static_cast<double>(std::abs(x / 3.3f - 1)));
    CAPTURE(chunks, worst);
    CHECK(worst <= (chunks ? 2e-5 : 1e-3));
    CHECK(state.tokens() == tokens);
  }
}

TEST_CASE("what a caller's map throws resets the state", "[kernel_state]") {
  attn::linear_state<float> state({.heads = 1, .features = 4, .value_dim = 2});
  const tensor<float> k(1, 1, 3, 4, 0.5f), v(1, 1, 3, 2, 1);
  tensor<float> out(1, 1, 3, 2);
  attn::linear_step(state, view(k), view(k), view(v), view(out));
  int calls = 0;
  const auto map = [&](float x) { return ++calls > 20 ? throw std::runtime_error("no") : x; };
  CHECK_THROWS_AS(attn::linear_step(state, view(k), view(k), view(v), view(out), {}, map), std::runtime_error);
  CHECK(state.tokens() == 0);
  CHECK(state.weight(0, 0, 0) == 0);
}

TEST_CASE("a caller's map is called for the numbers there are, and asked once how many features it makes",
          "[kernel_state]") {
  const tensor<float> k(1, 2, 70, 5, 0.5f), v(1, 2, 70, 3, 1);
  tensor<float> out(1, 2, 70, 3);
  for (idx_t tokens : {1, 70}) {
    attn::linear_state<float> state({.heads = 2, .features = 5, .value_dim = 3});
    const auto some = [&](auto x) { return x.slice(2, 0, tokens); };
    idx_t calls = 0;
    attn::linear_step(state, some(view(k)), some(view(k)), some(view(v)), some(view(out)), {},
                      [&](float x) { return ++calls, x * x; });
    CHECK(calls == 2 * 2 * tokens * 5);  // queries and keys of two heads

    struct one_more_every_time {
      idx_t* asked;
      idx_t features(idx_t channels) const { return channels + (*asked)++; }
      void operator()(std::span<const float> token, std::span<float> phi) const {
        REQUIRE(phi.size() == token.size());
        std::copy(token.begin(), token.end(), phi.begin());
      }
    };
    idx_t asked = 0;
    attn::linear_step(state, some(view(k)), some(view(k)), some(view(v)), some(view(out)), {},
                      one_more_every_time{&asked});
    CHECK(asked == 1);
    CHECK(relative_error(rows(out, 0, tokens), tensor<float>(1, 2, tokens, 3, 1)) <= 1e-5);
  }
}

TEST_CASE("append feeds as a step does, without queries", "[kernel_state]") {
  const auto w = attn::draw_features<float>(6, 4, {.seed = 2});
  for (idx_t tokens : {1, 100}) {
    const auto k = cast<float>(random_normal(1, 1, 2, tokens, 4)), v = cast<float>(random_normal(2, 1, 2, tokens, 2));
    const auto gate = cast<float>(random_gates(1, 4, tokens));
    const tensor<float> q(1, 4, tokens, 4, 0.5f);
    tensor<float> out(1, 4, tokens, 2);
    const auto same = [](const auto& fed, const auto& asked) {
      std::ostringstream a, b;
      fed.write(a), asked.write(b);
      return a.str() == b.str() && fed.tokens() == asked.tokens();
    };
    const auto check = [&](auto fed, const auto& append, const auto& step) {
      auto asked = fed;
      for (int n = 0; n < 2; ++n) append(fed), step(asked);
      CHECK(same(fed, asked));
    };
    const attn::kernel_state_extents key_heads{.heads = 2, .features = 4, .value_dim = 2},
        query_heads{.heads = 4, .features = 4, .value_dim = 2}, rows{.heads = 2, .features = 6, .value_dim = 2};
    check(
        attn::linear_state<float>(key_heads), [&](auto& s) { s.append(view(k), view(v)); },
        [&](auto& s) { attn::linear_step(s, view(q), view(k), view(v), view(out)); });
    check(  // a decay for every query head
        attn::linear_state<float>(query_heads),
        [&](auto& s) { s.append(view(k), view(v), {.decay = gate_view(gate)}, attn::feature_maps::relu{}); },
        [&](auto& s) {
          attn::linear_step(s, view(q), view(k), view(v), view(out), {.decay = gate_view(gate)},
                            attn::feature_maps::relu{});
        });
    const auto bonus = cast<float>(random_normal(3, 1, 1, 4, 4));  // which queries read
    const attn::linear_step_options<float> with_bonus{.bonus = {bonus.data.data(), {4, 4}}};
    check(
        attn::linear_state<float>(key_heads), [&](auto& s) { s.append(view(k), view(v), with_bonus); },
        [&](auto& s) { attn::linear_step(s, view(q), view(k), view(v), view(out), with_bonus); });
    check(
        attn::performer_state<float>(rows, {.kernel = attn::performer_kernel::hyperbolic}),
        [&](auto& s) { s.append(view(k), view(v), w, {.scale = 0.3f}); },
        [&](auto& s) { attn::performer_step(s, view(q), view(k), view(v), view(out), w, {.scale = 0.3f}); });
    check(
        attn::rfa_state<float>(rows), [&](auto& s) { s.append(view(k), view(v), w, attn::execution()); },
        [&](auto& s) { attn::rfa_step(s, view(q), view(k), view(v), view(out), w, attn::execution(2)); });
  }
  attn::linear_state<float> three({.heads = 3, .features = 4, .value_dim = 2});
  const tensor<float> k(1, 2, 5, 4, 1), v(1, 2, 5, 2, 1);
  CHECK(well_formed(refusal([&] { three.append(view(k), view(v)); }), "linear_state::append"));
  CHECK(three.tokens() == 0);
}

TEST_CASE("without queries a step only takes in", "[kernel_state]") {
  for (idx_t tokens : {1, 100}) {
    attn::linear_state<float> asked({.heads = 2, .features = 4, .value_dim = 2}), fed = asked;
    const auto k = cast<float>(random_normal(1, 1, 2, tokens, 4)), v = cast<float>(random_normal(2, 1, 2, tokens, 2));
    tensor<float> out(1, 2, tokens, 2);
    attn::linear_step(asked, view(k), view(k), view(v), view(out));
    attn::linear_step(fed, in_view<float>(nullptr, {1, 0, tokens, 4}), view(k), view(v),
                      out_view<float>(nullptr, {1, 0, tokens, 2}));
    for (idx_t r = 0; r < 4; ++r) {
      CHECK(fed.weight(0, 1, r) == asked.weight(0, 1, r));
      CHECK(fed.sum(0, 1, r, 1) == asked.sum(0, 1, r, 1));
    }
  }
}

}  // namespace testing::kernel_state_tests
