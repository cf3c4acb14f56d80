#pragma once
// The layers as a table, for the laws.
#include "layers/layers.hpp"
#include "support/call_multi_head_latent.hpp"

namespace testing {

// What a row of out depends on: its own token, the tokens up to it, or all of its sequence.
enum class reach { token, past, sequence };

template <class S>
struct layer {
  std::string name;
  idx_t width;  // of input and output
  reach sees;
  std::function<void(in_sequence<S>, out_sequence<S>, attn::execution&)> run;
};

// Of multi_head_latent, of one width.
template <class S>
struct latent_layer_store {
  tensor<S> query_down, q_norm, query_up, latent, latent_norm, latent_up, output;

  explicit latent_layer_store(idx_t width)
      : query_down(cast<S>(random_weight(5, 9, width))),
        q_norm(cast<S>(random_vector(6, 9))),
        query_up(cast<S>(random_weight(7, 2 * (5 + 4), 9))),
        latent(cast<S>(random_weight(8, 7 + 4, width))),
        latent_norm(cast<S>(random_vector(10, 7))),
        latent_up(cast<S>(random_weight(11, 2 * (5 + 6), 7))),
        output(cast<S>(random_weight(12, width, 2 * 6))) {}
  attn::multi_head_latent_weights<S> views() const {
    return {.query_down = matrix(query_down), .q_norm = vector(q_norm), .query_up = matrix(query_up),
            .latent = matrix(latent), .latent_norm = vector(latent_norm), .latent_up = matrix(latent_up),
            .output = matrix(output)};
  }
  attn::multi_head_latent_options<S> options(bool causal) const {
    attn::multi_head_latent_options<S> o;
    o.heads = 2, o.attention.causal = causal, o.rotary = attn::rotary_options<S>{.interleaved = true};
    return o;
  }
};

// The weights of the layers of one width, and what mixes the tokens in them.
template <class S>
struct layer_parts {
  using L = compiled_layers<S>;
  tensor<S> weight, bias, half_weight, taps;
  feed_forward_store<S> feed, gated;
  latent_layer_store<S> latents;
  using codes = std::conditional_t<std::same_as<S, double>, double, std::int8_t>;
  attn::packed_weights<S> packed_weight{matrix(weight)}, packed_up{matrix(feed.up)};
  attn::packed_weights<codes> packed_down{matrix(feed.down)};

  explicit layer_parts(idx_t width)
      : weight(cast<S>(random_weight(1, width, width))),
        bias(cast<S>(random_vector(2, width))),
        half_weight(cast<S>(random_weight(3, width / 2, width / 2))),
        taps(cast<S>(random_weight(4, width, 4))),
        feed(random_feed_forward(width, 600, width)),
        gated(random_feed_forward(width, 600, width, true, true)),
        latents(width) {
    taps(0, 0, 0, 3) = S(1);  // of what is infinite silu leaves the positive
  }

  attn::encoder_block_weights<S> block() const {
    return {.norm_1 = {.gamma = vector(bias)}, .norm_2 = {.beta = vector(bias)}, .feed_forward = feed.views()};
  }
  mixer_of<S> attention(bool causal) const {
    return [this, attend = full_attention<S>({.causal = causal})](auto x, auto out, auto& exec) {
      L::multi_head(x, out,
                    {.query = matrix(weight),
                     .key = matrix(weight),
                     .value = matrix(weight),
                     .output = matrix(weight),
                     .query_bias = vector(bias)},
                    attend, {.heads = 2}, exec);
    };
  }
  mixer_of<S> half() const {
    return [this](auto x, auto out, auto& exec) { L::project(x, out, {.weight = matrix(half_weight)}, exec); };
  }
};

// `p` outlives the table.
template <class S>
void add_layers(std::vector<layer<S>>& all, idx_t width, const layer_parts<S>& p) {
  using L = compiled_layers<S>;
  const auto add = [&](const char* name, reach sees, auto run) {
    all.push_back({name + (" of width " + std::to_string(width)), width, sees, run});
  };
  add("project", reach::token, [&p](auto x, auto out, auto& exec) {
    L::project(x, out, {.weight = matrix(p.weight), .bias = vector(p.bias)}, exec);
  });
  add("layer_norm", reach::token, [&p](auto x, auto out, auto& exec) {
    L::layer_norm(x, out, {.gamma = vector(p.bias), .beta = vector(p.bias)}, {}, exec);
  });
  add("rms_norm", reach::token,
      [&p](auto x, auto out, auto& exec) { L::rms_norm(x, out, {.gamma = vector(p.bias)}, {}, exec); });
  add("group_norm", reach::token, [&p](auto x, auto out, auto& exec) {
    L::group_norm(x, out, {.gamma = vector(p.bias), .beta = vector(p.bias)}, {.heads = 2}, exec);
  });
  add("feed_forward, gated,", reach::token,
      [&p](auto x, auto out, auto& exec) { L::feed_forward(x, out, p.gated.views(), attn::activation::silu, exec); });
  add("feed_forward", reach::token,
      [&p](auto x, auto out, auto& exec) { L::feed_forward(x, out, p.feed.views(), attn::activation::gelu, exec); });
  add("project, the weight transposed,", reach::token, [&p](auto x, auto out, auto& exec) {
    const in_matrix<S> w = matrix(p.weight);
    L::project(x, out, {.weight = {w.data(), w.extents(), {1, w.extent(0)}}, .bias = vector(p.bias)}, exec);
  });
  add("project, the weight packed,", reach::token,
      [&p](auto x, auto out, auto& exec) { L::project(x, out, {.weight = p.packed_weight}, exec); });
  add("feed_forward, the weights packed,", reach::token, [&p](auto x, auto out, auto& exec) {
    L::feed_forward(x, out, {.up = p.packed_up, .down = p.packed_down}, attn::activation::gelu, exec);
  });
  add("reversible_block", reach::token,
      [&p](auto x, auto out, auto& exec) { L::reversible_block(x, out, p.half(), p.half(), {}, exec); });
  add("reversible_block_inverse", reach::token,
      [&p](auto x, auto out, auto& exec) { L::reversible_block_inverse(x, out, p.half(), p.half(), {}, exec); });
  add("short_convolution", reach::past, [&p](auto x, auto out, auto& exec) {
    L::short_convolution(x, out, {.weight = matrix(p.taps), .bias = vector(p.bias)},
                         {.activation = attn::activation::silu}, exec);
  });
  add("token_shift", reach::past,
      [&p](auto x, auto out, auto& exec) { L::token_shift(x, out, {.mix = vector(p.bias)}, {}, exec); });
  for (bool causal : {false, true}) {
    const reach sees = causal ? reach::past : reach::sequence;
    const std::string causally = causal ? ", causal," : "";
    add(("multi_head" + causally).c_str(), sees, p.attention(causal));
    add(("multi_head with norms and rotations" + causally).c_str(), sees,
        [&p, attend = full_attention<S>({.causal = causal})](auto x, auto out, auto& exec) {
          L::multi_head(x, out,
                        {.query = matrix(p.weight), .key = matrix(p.weight), .value = matrix(p.weight),
                         .q_norm = vector(p.bias), .k_norm = vector(p.bias)},
                        attend, {.heads = 2, .rotary = attn::rotary_options<S>{.dims = x.extent(2) / 4 * 2}}, exec);
        });
    add(("multi_head_latent" + causally).c_str(), sees, [&p, causal](auto x, auto out, auto& exec) {
      compiled_multi_head_latent<S>::call(x, out, p.latents.views(), p.latents.options(causal), exec);
    });
    for (bool norm_first : {true, false})
      add(((norm_first ? "encoder_block" : "encoder_block, norm after,") + causally).c_str(), sees,
          [&p, mix = p.attention(causal), norm_first](auto x, auto out, auto& exec) {
            L::encoder_block(x, out, p.block(), mix, {.norm_first = norm_first}, exec);
          });
  }
}

// Of a width that fills packets of 8, and of one that leaves a rest everywhere.
template <class S>
const std::vector<layer<S>>& layers() {
  static const layer_parts<S> whole(24), rest(70);
  static const std::vector<layer<S>> all = [] {
    std::vector<layer<S>> list;
    add_layers(list, 24, whole);
    add_layers(list, 70, rest);
    return list;
  }();
  return all;
}

template <class S>
tensor<S> input(const layer<S>& op, idx_t batch, idx_t length) {
  return cast<S>(random_sequence(9, batch, length, op.width));
}

template <class S>
tensor<S> result(const layer<S>& op, const tensor<S>& x, attn::execution& exec) {
  tensor<S> out(x.batch(), 1, x.length(), op.width, S(7));
  op.run(sequence(x), sequence(out), exec);
  return out;
}
template <class S>
tensor<S> result(const layer<S>& op, const tensor<S>& x) {
  attn::execution serial;
  return result(op, x, serial);
}

inline constexpr idx_t lengths[] = {0, 1, 3, 7, 48, 65, 130};

}  // namespace testing
