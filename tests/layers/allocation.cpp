// No allocation in a serial call of a layer, or of its backward pass, once the execution's scratch memory has grown.
#include "layers/backward_table.hpp"
#include "support/allocations.hpp"

namespace testing::allocation_tests {

TEMPLATE_LIST_TEST_CASE("layers: no allocation once scratch has grown", "[layer_allocation]", exact_types) {
  for (const auto& op : layers<TestType>()) {
    attn::execution serial;
    for (bool grown : {false, true})
      for (idx_t length : lengths) {
        const auto x = input(op, 2, length);
        auto out = x;
        const std::size_t before = allocations(), scratch = serial.scratch_bytes();
        op.run(sequence(x), sequence(out), serial);
        const std::size_t after = allocations();
        if (!grown) continue;
        INFO(op.name << ", length " << length);
        CHECK(after == before);
        CHECK(serial.scratch_bytes() == scratch);
      }
  }
}

TEMPLATE_LIST_TEST_CASE("layers backward: no allocation once scratch has grown", "[layer_allocation]", exact_types) {
  for (const auto& op : backward_layers<TestType>()) {
    if (calls_attention(op)) continue;
    attn::execution serial;
    for (bool grown : {false, true})
      for (idx_t length : {0, 1, 48, 200}) {
        const auto x = input(op, 2, length), d = input(op, 2, length, 10);
        auto dx = x;
        auto gradients = op.weights;
        const std::size_t before = allocations(), scratch = serial.scratch_bytes();
        op.run(sequence(x), sequence(d), sequence(dx), gradients, serial);
        const std::size_t after = allocations();
        if (!grown) continue;
        INFO(op.name << ", length " << length);
        CHECK(after == before);
        CHECK(serial.scratch_bytes() == scratch);
      }
  }
}

TEMPLATE_LIST_TEST_CASE("multi_head_latent_step: no allocation once scratch has grown", "[layer_allocation]",
                        exact_types) {
  using S = TestType;
  const latent_layer_store<S> latents(24);
  attn::multi_head_latent_step_options<S> options{.heads = 2};
  options.rotary = attn::rotary_options<S>{.interleaved = true};
  attn::kv_cache<S> cache({.batch = 2, .dim = 11, .value_dim = 7}, {.values_in_keys = true});
  cache.reserve(400);
  attn::execution serial;
  for (bool grown : {false, true})
    for (idx_t tokens : {70, 3, 1, 1}) {
      const tensor<S> x = cast<S>(random_sequence(1, 2, tokens, 24));
      tensor<S> out = x;
      if (tokens == 70) cache.reset();
      const std::size_t before = allocations();
      compiled_multi_head_latent<S>::step(cache, sequence(x), sequence(out), latents.views(), options, serial);
      const std::size_t after = allocations();
      CHECK((!grown || after == before));
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward, encoder_block_backward: no allocation once scratch has grown",
                        "[layer_allocation]", exact_types) {
  using S = TestType;
  const reversible_layer<S> parts(random_layers<S>(1, 12, 20, 0.5)[0], std::vector<tensor<S>*>(5, nullptr), false);
  const mixer_of<S> mix = parts.f();  // multi_head
  const mixer_backward_of<S> mix_backward = parts.f_backward();
  const tensor<S> x = cast<S>(random_sequence(1, 2, 60, 12)), up = cast<S>(random_weight(2, 20, 12)),
                  down = cast<S>(random_weight(3, 12, 20));
  attn::execution serial;
  for (bool norm_first : {false, true}) {
    std::size_t before = 0, after = 0;
    for (int times = 0; times < 2; ++times) {
      tensor<S> d = x, d_up = up;
      const attn::encoder_block_weights<S> w{.feed_forward = {.up = matrix(up), .down = matrix(down)}};
      before = allocations();
      compiled_layers<S>::encoder_block_backward(sequence(x), w, mix, mix_backward, sequence(std::as_const(d)),
                                                 {.x = sequence(d), .feed_forward = {.up = matrix_or_none(&d_up)}},
                                                 {.norm_first = norm_first}, serial);
      after = allocations();
    }
    CHECK(after == before);
  }
}

// The sequence, its gradient and the remainder go through in place: once two layers have gone there and back, 24 take
// not one number more, from the heap or of scratch.
TEMPLATE_LIST_TEST_CASE("reversible_block_backward: 24 layers train in the memory of two", "[layer_allocation]",
                        exact_types) {
  using S = TestType;
  const idx_t dim = 12;
  std::vector<tensor<S>> gradients = random_layers<S>(1, dim, 20, 0.5)[0];
  std::vector<tensor<S>*> to;
  for (auto& g : gradients) to.push_back(&g);
  std::vector<reversible_layer<S>> layers;
  for (const auto& weights : random_layers<S>(24, dim, 20, 0.5)) layers.emplace_back(weights, to, true);
  struct callables {
    mixer_of<S> f, g;
    mixer_backward_of<S> f_backward, g_backward;
  };
  std::vector<callables> all;
  for (const auto& layer : layers) all.push_back({layer.f(), layer.g(), layer.f_backward(), layer.g_backward()});

  const tensor<S> start = cast<S>(random_sequence(1, 2, 60, 2 * dim));
  tensor<S> x = start, d = start, rest(2, 1, 60, 2 * dim);
  attn::execution serial;
  const auto train = [&](std::size_t depth) {
    const attn::reversible_block_options<S> options{.remainder = sequence(rest)};
    const auto y = sequence(x);
    for (std::size_t n = 0; n < depth; ++n)
      compiled_layers<S>::reversible_block(y, y, all[n].f, all[n].g, options, serial);
    for (std::size_t n = depth; n-- > 0;)
      compiled_layers<S>::reversible_block_backward(y, y, all[n].f, all[n].g, all[n].f_backward, all[n].g_backward,
                                                    sequence(std::as_const(d)), {.x = sequence(d)}, options, serial);
    return serial.scratch_bytes();
  };
  for (const auto& layer : all) {  // each layer's own lse is there
    tensor<S> in(2, 1, 60, dim), out = in;
    layer.f(sequence(std::as_const(in)), sequence(out), serial);
  }
  const std::size_t two = train(2), before = allocations(), deep = train(24), after = allocations();
  CHECK(deep == two);
  CHECK(after == before);
  CHECK(x == start);
}

}  // namespace testing::allocation_tests
