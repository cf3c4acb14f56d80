#pragma once
// The layers' backward passes as a table, for the laws.
#include "layers/gradients.hpp"
#include "layers/reversible.hpp"
#include "layers/table.hpp"

namespace testing {

template <class S>
struct backward_layer {
  std::string name;
  idx_t width;  // of input and output
  reach sees;   // of a row of dx: the rows of x and d_out it depends on; past: its own and later ones
  std::vector<tensor<S>> weights;
  // dx and the gradients of the weights.
  std::function<void(in_sequence<S> x, in_sequence<S> d_out, out_sequence<S> dx, std::vector<tensor<S>>& gradients,
                     attn::execution&)>
      run;
};

template <class S>
void add_backward_layers(std::vector<backward_layer<S>>& all, idx_t width) {
  using L = compiled_layers<S>;
  using list = std::vector<tensor<S>>;
  const auto out_matrix = [](tensor<S>& g) { return matrix_or_none(&g); };
  const auto out_vector = [](tensor<S>& g) { return vector_or_none(&g); };
  const tensor<S> weight = cast<S>(random_weight(1, width, width)), bias = cast<S>(random_vector(2, width)),
                  up = cast<S>(random_weight(3, 600, width)), gate = cast<S>(random_weight(5, 600, width)),
                  down = cast<S>(random_weight(4, width, 600)), taps = cast<S>(random_weight(6, width, 4));
  const auto add = [&](std::string name, reach sees, list weights, auto run) {
    all.push_back({name + " of width " + std::to_string(width), width, sees, weights, run});
  };
  add("project", reach::token, {weight, bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::project_backward(x, {.weight = matrix(weight), .bias = vector(bias)}, d,
                        {.x = dx, .weight = out_matrix(g[0]), .bias = out_vector(g[1])}, exec);
  });
  add("layer_norm", reach::token, {bias, bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::layer_norm_backward(x, {.gamma = vector(bias), .beta = vector(bias)}, d,
                           {.x = dx, .gamma = out_vector(g[0]), .beta = out_vector(g[1])}, {}, exec);
  });
  add("rms_norm", reach::token, {bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::rms_norm_backward(x, {.gamma = vector(bias)}, d, {.x = dx, .gamma = out_vector(g[0])}, {}, exec);
  });
  add("group_norm", reach::token, {bias, bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::group_norm_backward(x, {.gamma = vector(bias), .beta = vector(bias)}, d,
                           {.x = dx, .gamma = out_vector(g[0]), .beta = out_vector(g[1])}, {.heads = 2}, exec);
  });
  add("feed_forward, gated,", reach::token, {up, down, gate}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::feed_forward_backward(x, {.up = matrix(up), .down = matrix(down), .gate = matrix(gate)}, d,
                             {.x = dx, .up = out_matrix(g[0]), .down = out_matrix(g[1]), .gate = out_matrix(g[2])},
                             attn::activation::silu, exec);
  });
  add("feed_forward", reach::token, {up, down}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::feed_forward_backward(x, {.up = matrix(up), .down = matrix(down)}, d,
                             {.x = dx, .up = out_matrix(g[0]), .down = out_matrix(g[1])}, attn::activation::gelu, exec);
  });
  add("short_convolution", reach::past, {taps, bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::short_convolution_backward(x, {.weight = matrix(taps), .bias = vector(bias)}, d,
                                  {.x = dx, .weight = out_matrix(g[0]), .bias = out_vector(g[1])},
                                  {.activation = attn::activation::silu}, exec);
  });
  add("token_shift", reach::past, {bias}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
    L::token_shift_backward(x, {.mix = vector(bias)}, d, {.x = dx, .mix = out_vector(g[0])}, {}, exec);
  });
  for (bool causal : {false, true}) {
    const attention_pair<S> attention{.heads = 2, .causal = causal};
    const auto heads = [=](auto x, auto d, auto dx, tensor<S>* g, auto& exec) {
      const attn::multi_head_weights<S> w{
          .query = matrix(weight), .key = matrix(weight), .value = matrix(weight), .output = matrix(weight)};
      L::multi_head_backward(x, w, attention.forward(), attention.backward(), d, {.x = dx, .query = matrix_or_none(g)},
                             {.heads = 2}, exec);
    };
    const reach sees = causal ? reach::past : reach::sequence;
    const std::string causally = causal ? ", causal," : "";
    add("multi_head" + causally, sees, {weight},
        [=](auto x, auto d, auto dx, list& g, auto& exec) { heads(x, d, dx, &g[0], exec); });
    add("multi_head with norms and rotations" + causally, sees, {weight, bias, bias},
        [=](auto x, auto d, auto dx, list& g, auto& exec) {
          L::multi_head_backward(x,
                                 {.query = matrix(weight), .key = matrix(weight), .value = matrix(weight),
                                  .q_norm = vector(bias), .k_norm = vector(bias)},
                                 attention.forward(), attention.backward(), d,
                                 {.x = dx, .key = out_matrix(g[0]), .q_norm = out_vector(g[1]),
                                  .k_norm = out_vector(g[2])},
                                 {.heads = 2, .rotary = attn::rotary_options<S>{.dims = width / 4 * 2}}, exec);
        });
    const latent_layer_store<S> latents(width);
    add("multi_head_latent" + causally, sees,
        {latents.query_down, latents.q_norm, latents.query_up, latents.latent, latents.latent_norm, latents.latent_up,
         latents.output},
        [=](auto x, auto d, auto dx, list& g, auto& exec) {
          compiled_multi_head_latent<S>::backward(x, latents.views(), d,
                                                  {.x = dx, .query_down = out_matrix(g[0]), .q_norm = out_vector(g[1]),
                                                   .query_up = out_matrix(g[2]), .latent = out_matrix(g[3]),
                                                   .latent_norm = out_vector(g[4]), .latent_up = out_matrix(g[5]),
                                                   .output = out_matrix(g[6])},
                                                  latents.options(causal), exec);
        });
    for (bool norm_first : {true, false})
      add((norm_first ? "encoder_block" : "encoder_block, norm after,") + causally, sees,
          {weight, bias, bias, up, down}, [=](auto x, auto d, auto dx, list& g, auto& exec) {
            const mixer_of<S> mix = [&](auto s, auto out, auto& e) {
              L::multi_head(
                  s, out,
                  {.query = matrix(weight), .key = matrix(weight), .value = matrix(weight), .output = matrix(weight)},
                  attention.forward(), {.heads = 2}, e);
            };
            const mixer_backward_of<S> back = [&](auto s, auto, auto d_mixed, auto to, auto& e) {
              heads(s, d_mixed, to, &g[0], e);
            };
            L::encoder_block_backward(x,
                                      {.norm_1 = {.gamma = vector(bias)},
                                       .norm_2 = {.beta = vector(bias)},
                                       .feed_forward = {.up = matrix(up), .down = matrix(down)}},
                                      mix, back, d,
                                      {.x = dx,
                                       .norm_1 = {.gamma = out_vector(g[1])},
                                       .norm_2 = {.beta = out_vector(g[2])},
                                       .feed_forward = {.up = out_matrix(g[3]), .down = out_matrix(g[4])}},
                                      {.norm_first = norm_first}, exec);
          });
  }
}

// Of a width that fills packets of 8, and of one that leaves a rest everywhere.
template <class S>
const std::vector<backward_layer<S>>& backward_layers() {
  static const std::vector<backward_layer<S>> all = [] {
    std::vector<backward_layer<S>> list;
    add_backward_layers(list, 24);
    add_backward_layers(list, 70);
    return list;
  }();
  return all;
}

// Whether it calls the table's attention, which allocates its callables and has one lse for all calls.
template <class S>
bool calls_attention(const backward_layer<S>& op) {
  const auto of = [&](const char* name) { return op.name.starts_with(name); };
  return op.sees != reach::token && !of("short_convolution") && !of("token_shift") && !of("multi_head_latent");
}

template <class S>
struct backward_result {
  tensor<S> dx;
  std::vector<tensor<S>> gradients;
  bool operator==(const backward_result&) const = default;
};

template <class S>
backward_result<S> result(const backward_layer<S>& op, const tensor<S>& x, const tensor<S>& d, attn::execution& exec) {
  backward_result<S> r{x, op.weights};
  std::fill(r.dx.data.begin(), r.dx.data.end(), S(7));
  for (auto& g : r.gradients) std::fill(g.data.begin(), g.data.end(), S(7));
  op.run(sequence(x), sequence(d), sequence(r.dx), r.gradients, exec);
  return r;
}
template <class S>
backward_result<S> result(const backward_layer<S>& op, const tensor<S>& x, const tensor<S>& d) {
  attn::execution serial;
  return result(op, x, d, serial);
}

template <class S>
tensor<S> input(const backward_layer<S>& op, idx_t batch, idx_t length, std::uint64_t seed = 9) {
  return cast<S>(random_sequence(seed, batch, length, op.width));
}

}  // namespace testing
