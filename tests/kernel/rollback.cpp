// States that go back: for every state that keeps tokens, going back gives the very bits that were there before them.
#include <attn/kernel/delta_rule_step.hpp>
#include <attn/kernel/dplr_step.hpp>
#include <attn/kernel/linear_step.hpp>

#include <sstream>

#include "support/call_kernel.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::rollback_tests {
namespace {

constexpr idx_t batch = 2, kv_heads = 2, heads = 4, length = 90, dim = 9, value_dim = 12, count = 20, keep = 5;

struct inputs {
  tensor<float> q = cast<float>(random_normal(1, batch, heads, length, dim)),
                key_q = cast<float>(random_normal(2, batch, kv_heads, length, dim)),
                k = cast<float>(random_normal(3, batch, kv_heads, length, dim)),
                v = cast<float>(random_normal(4, batch, kv_heads, length, value_dim)),
                gate = cast<float>(random_gates(batch, kv_heads, length)),
                out{batch, heads, length, value_dim}, key_out{batch, kv_heads, length, value_dim};
  attn::tensor<float, 3> features = attn::draw_features<float>(count, dim, {.seed = 4});
};

attn::tensor_view<const float, 3> rows(const tensor<float>& x, idx_t begin, idx_t n) {
  return attn::tensor_view<const float, 3>(x.data.data(), {x.batch(), x.heads(), x.length()}).slice(2, begin, n);
}

// What a state is, in bytes; the count of its tokens included.
template <class State>
std::string content(const State& state) {
  std::ostringstream stream;
  state.write(stream);
  return stream.str();
}

// Items go back one by one. feed(state, begin, n, lengths) feeds tokens, all or the first lengths[b] of n.
template <class State, class Feed>
void check_item_rollback(const State& fresh, const State& without, Feed&& feed) {
  const std::vector<idx_t> swapped{1, 0};
  State state = fresh;
  feed(state, 0, 6, {});
  feed(state, 6, 4, {4, 1});
  CHECK((state.tokens(0) == 10 && state.tokens(1) == 7 && state.tokens() == 10));
  CHECK((state.kept(0) == keep && state.kept(1) == keep));
  State back = state;
  back.rollback(1, 3);
  CHECK((back.tokens(0) == 10 && back.tokens(1) == 4 && back.tokens() == 10));
  CHECK((back.kept(0) == keep && back.kept(1) == keep - 3 && back.kept() == keep - 3));
  CHECK(!refusal([&] { back.rollback(1, keep - 2); }).empty());
  CHECK(!refusal([&] { back.rollback(keep - 2); }).empty());
  feed(back, 4, 2, {0, 2});
  feed(back, 6, 1, {0, 1});
  CHECK(content(back) == content(state));
  // A branch can go back too, and so can what was reordered.
  State branch = state, behind = state;
  branch.copy_item(0, 1), branch.rollback(2);
  behind.rollback(0, 2), behind.copy_item(0, 1);
  CHECK(content(branch) == content(behind));
  branch = behind = state;
  branch.reorder(swapped), branch.rollback(0, 3);
  behind.rollback(1, 3), behind.reorder(swapped);
  CHECK(content(branch) == content(behind));
  CHECK((branch.tokens(0) == 4 && branch.tokens(1) == 10));
  state.reset(1);
  CHECK((state.kept(0) == keep && state.kept(1) == 0 && state.kept() == 0 && state.tokens(1) == 0));
  feed(state, 0, 40, {0, 40});  // more than are kept, at once
  CHECK((state.kept(0) == keep && state.kept(1) == keep && state.tokens(0) == 10 && state.tokens(1) == 40));
  state.rollback(0, 4), state.rollback(1, 5);
  State never = without;
  for (idx_t t = 0; t < 6; ++t) feed(never, t, 1, {1, 0});
  feed(never, 0, 35, {0, 35});
  CHECK(content(never) == content(state));
}

// feed(state, begin, n) feeds tokens. Chunks of many sizes, and after each all rollbacks.
template <class State, class Feed>
void check_rollback(const State& fresh, const State& without, Feed&& with_lengths) {
  check_item_rollback(fresh, without, with_lengths);
  const auto feed = [&](State& to, idx_t begin, idx_t n) { with_lengths(to, begin, n, {}); };
  State state = fresh, plain = without;
  idx_t at = 0;
  for (idx_t n : {1, 2, 1, 3, 4, 7, 1, 40, 6, 1}) {
    const idx_t kept_before = state.kept();
    feed(state, at, n);
    at += n;
    feed(plain, at - n, n);
    REQUIRE(state.tokens() == at);
    REQUIRE(state.kept() == std::min<idx_t>(keep, n > keep ? keep : kept_before + n));
    for (idx_t m = 0; m <= state.kept(); ++m) {
      State back = state;
      back.rollback(m);
      CHECK(back.tokens() == at - m);
      CHECK(back.kept() == state.kept() - m);
      // Fed again they give the same bits, since each is a token of its own.
      for (idx_t t = at - m; t < at; ++t) feed(back, t, 1);
      CHECK(content(back) == content(state));
    }
  }
  // Another continuation is that of a state that never saw the tokens undone.
  State never = fresh;
  feed(never, 0, 10);
  state.reset();
  CHECK(state.kept() == 0);
  feed(state, 0, 10);
  feed(state, 60, 3);
  state.rollback(3);
  CHECK(content(state) == content(never));
  feed(state, 70, 2);
  feed(never, 70, 2);
  CHECK(content(state) == content(never));
  CHECK(content(plain).size() == content(never).size());  // what is kept is not written
  CHECK(state.bytes() >= (keep + 1) * without.bytes() - 4096);

  const std::string refused = refusal([&] { state.rollback(state.kept() + 1); });
  CHECK(refused.find("tokens to undo from 0 to ") != std::string::npos);
  CHECK(!refusal([&] { state.rollback(-1); }).empty());
  CHECK(!refusal([&] { plain.rollback(1); }).empty());
  CHECK(content(state) == content(never));
  std::istringstream stream(content(never));
  state.read(stream);
  CHECK(state.kept() == 0);
}

TEST_CASE("linear goes back", "[rollback]") {
  inputs x;
  constexpr attn::kernel_state_extents e{.batch = batch, .heads = kv_heads, .features = dim, .value_dim = value_dim};
  auto kept = e;
  kept.keep = keep;
  check_rollback(attn::linear_state<float>(kept), attn::linear_state<float>(e),
                 [&](auto& state, idx_t begin, idx_t n, const std::vector<idx_t>& lengths) {
    const auto part = [&](auto all) { return all.slice(2, begin, n); };
    attn::linear_step(state, part(view(x.q)), part(view(x.k)), part(view(x.v)), part(view(x.out)),
                      {.lengths = lengths, .decay = rows(x.gate, begin, n)});
  });
}

TEST_CASE("performer goes back, log scales too", "[rollback]") {
  inputs x;
  constexpr attn::kernel_state_extents e{.batch = batch, .heads = kv_heads, .features = count, .value_dim = value_dim};
  auto kept = e;
  kept.keep = keep;
  check_rollback(attn::performer_state<float>(kept), attn::performer_state<float>(e),
                 [&](auto& state, idx_t begin, idx_t n, const std::vector<idx_t>& lengths) {
                   const auto part = [&](auto all) { return all.slice(2, begin, n); };
                   attn::performer_step(state, part(view(x.q)), part(view(x.k)), part(view(x.v)), part(view(x.out)),
                                        x.features, {.lengths = lengths});
                 });
}

TEST_CASE("rfa goes back", "[rollback]") {
  inputs x;
  constexpr attn::kernel_state_extents e{.batch = batch, .heads = kv_heads, .features = count, .value_dim = value_dim};
  auto kept = e;
  kept.keep = keep;
  check_rollback(attn::rfa_state<float>(kept), attn::rfa_state<float>(e),
                 [&](auto& state, idx_t begin, idx_t n, const std::vector<idx_t>& lengths) {
    const auto part = [&](auto all) { return all.slice(2, begin, n); };
    attn::rfa_step(state, part(view(x.q)), part(view(x.k)), part(view(x.v)), part(view(x.out)), x.features,
                   {.lengths = lengths, .gate = rows(x.gate, begin, n)});
  });
}

TEST_CASE("delta_rule goes back", "[rollback]") {
  inputs x;
  constexpr attn::delta_rule_state_extents e{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};
  auto kept = e;
  kept.keep = keep;
  check_rollback(attn::delta_rule_state<float>(kept), attn::delta_rule_state<float>(e),
                 [&](auto& state, idx_t begin, idx_t n, const std::vector<idx_t>& lengths) {
                   const auto part = [&](auto all) { return all.slice(2, begin, n); };
                   attn::delta_rule_step(state, part(view(x.key_q)), part(view(x.k)), part(view(x.v)),
                                         part(view(x.key_out)),
                                         {.lengths = lengths, .beta = rows(x.gate, begin, n), .unit_norm_eps = 1e-6f});
                 });
}

TEST_CASE("dplr goes back", "[rollback]") {
  inputs x;
  constexpr attn::dplr_state_extents e{.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim};
  auto kept = e;
  kept.keep = keep;
  tensor<float> a = x.k, b = x.k;
  for (float& each : a.data) each *= -0.1f;
  for (float& each : b.data) each *= 0.3f;
  check_rollback(attn::dplr_state<float>(kept), attn::dplr_state<float>(e),
                 [&](auto& state, idx_t begin, idx_t n, const std::vector<idx_t>& lengths) {
                   const auto part = [&](auto all) { return all.slice(2, begin, n); };
                   attn::dplr_step(state, part(view(x.key_q)), part(view(x.k)), part(view(x.v)), part(view(a)),
                                   part(view(b)), part(view(x.key_out)), {.lengths = lengths});
                 });
}

TEST_CASE("A state merged into can no longer go back, and a negative keep is refused", "[rollback]") {
  inputs x;
  constexpr attn::kernel_state_extents e{
      .batch = batch, .heads = kv_heads, .features = dim, .value_dim = value_dim, .keep = 2};
  attn::linear_state<float> state(e), later(e);
  for (auto* each : {&state, &later}) each->append(view(x.k), view(x.v));
  CHECK(state.kept() == 2);
  state.merge(later);
  CHECK(state.kept() == 0);
  CHECK(well_formed(refusal([] { attn::linear_state<float> wrong({.features = 4, .value_dim = 4, .keep = -1}); }),
                    "linear_state"));
  CHECK(well_formed(refusal([] { attn::delta_rule_state<float> wrong({.dim = 4, .value_dim = 4, .keep = -1}); }),
                    "delta_rule_state"));
}

}  // namespace
}  // namespace testing::rollback_tests
