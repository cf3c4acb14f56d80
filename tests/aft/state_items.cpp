// States of several sequences: fed with chunks of different lengths, branched, reordered, begun anew.
#include "support/cache_items.hpp"
#include "support/call_aft.hpp"

namespace testing::aft_state_items_tests {
namespace {

constexpr cache_shape shape{.heads = 2, .kv_heads = 2, .dim = 9, .value_dim = 9, .chunk = 21};
constexpr attn::state_extents four{.batch = 4, .heads = 2, .dim = 9}, two{.batch = 2, .heads = 2, .dim = 9},
    one{.batch = 1, .heads = 2, .dim = 9};

// Threads where there are several items, none where there is one.
struct executions {
  attn::execution three{3, 0}, serial;
  attn::execution& of(idx_t batch) { return batch > 1 ? three : serial; }
};

const auto append = [](auto& state, auto k, auto v, const std::vector<idx_t>& lengths) {
  state.append(k, v, {.lengths = lengths});
};

const tensor<float>& biases() {
  static const tensor<float> w = cast<float>(random_normal(9, 1, 2, 300, 300));
  return w;
}
const auto simple_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  compiled_aft_simple<float>::step(state, q, k, v, out, {.lengths = lengths}, exec.of(state.batch()));
};
const auto local_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  compiled_aft_local<float>::step(state, q, k, v, out, view(biases()), {.lengths = lengths}, exec.of(state.batch()));
};
const auto conv_step = [](auto& state, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  const in_view<float> kernels(biases().data.data(), {1, 1, 2, 11}, {0, 0, 300, 1});
  compiled_aft_conv<float>::step(state, q, k.slice(3, 2, 1), v, out, kernels, {.lengths = lengths},
                                 exec.of(state.batch()));
};
const auto full_step = [](auto& cache, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
  static executions exec;
  compiled_aft_full<float>::step(cache, q, k, v, out, view(biases()), {.lengths = lengths}, exec.of(cache.batch()));
};

}  // namespace

TEST_CASE("aft_simple: items of their own lengths", "[state_items]") {
  attn::aft_simple_state<float> state(four), of_two(two);
  check_items<float>(state, attn::aft_simple_state<float>(one), simple_step, shape);
  check_item_refusals<float>(of_two, {"aft_simple_state", "aft_simple_step", "aft_simple_state"}, simple_step, append,
                             shape);
}

TEST_CASE("aft_local: items of their own lengths", "[state_items]") {
  attn::aft_local_state<float> state(four, {.window = 6}), of_two(two, {.window = 3});
  check_items<float>(state, attn::aft_local_state<float>(one, {.window = 6}), local_step, shape);
  check_item_refusals<float>(of_two, {"aft_local_state", "aft_local_step", "aft_local_state"}, local_step, append,
                             shape);
}

TEST_CASE("aft_conv: items of their own lengths", "[state_items]") {
  attn::aft_conv_state<float> state(four, {.width = 11}), of_two(two, {.width = 11});
  check_items<float>(state, attn::aft_conv_state<float>(one, {.width = 11}), conv_step, shape);
  check_item_refusals<float>(of_two, {"aft_conv_state", "aft_conv_step", "aft_conv_state"}, conv_step, append, shape);
}

TEST_CASE("aft_full: items of their own lengths", "[state_items]") {
  attn::kv_cache<float> cache(four), of_two(two);
  check_items<float>(cache, attn::kv_cache<float>(one), full_step, shape);
  check_item_refusals<float>(of_two, {"kv_cache", "aft_full_step", "kv_cache"}, full_step, append, shape);
}

TEST_CASE("what the longest item needs of the biases is needed, no more", "[state_items]") {
  const tensor<float> x = cast<float>(random_normal(1, 2, 2, 4, 9));
  tensor<float> out(2, 2, 4, 9, 7);
  const auto w = view(biases()).slice(2, 0, 6).slice(3, 0, 6);
  attn::execution serial;
  attn::aft_local_state<float> state(two, {.window = 2});
  attn::kv_cache<float> cache(two);
  const auto step = [&](std::vector<idx_t> lengths) {
    const std::string local = refusal([&] {
      compiled_aft_local<float>::step(state, view(x), view(x), view(x), view(out), w, {.lengths = lengths}, serial);
    });
    const std::string full = refusal([&] {
      compiled_aft_full<float>::step(cache, view(x), view(x), view(x), view(out), w, {.lengths = lengths}, serial);
    });
    CHECK(local.empty() == full.empty());
    return local;
  };
  CHECK(step({4, 1}).empty());
  CHECK(step({2, 4}).empty());
  CHECK(step({1, 0}).find("w rows >= 7") != std::string::npos);
  CHECK(step({0, 1}).empty());
  CHECK((state.tokens(0) == 6 && state.tokens(1) == 6 && cache.tokens(0) == 6 && cache.tokens(1) == 6));
}

}  // namespace testing::aft_state_items_tests
