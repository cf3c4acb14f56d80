// The guide's block of a decoder with cross attention: self attention over a cache, attention to an encoder's tokens
// that were projected once, and a feed-forward layer. Prompts, chunks and single tokens give what the whole gives.
#include "layers/layers.hpp"

namespace testing::decoder_block_tests {
namespace {

constexpr idx_t batch = 2, heads = 4, dim = 6, width = heads * dim, hidden = 40, encoded = 11;

struct block_weights {
  reference::multi_head_weights self, cross;
  reference::encoder_block_weights tail;  // its first norm is that before, or behind, cross attention
  tensor<double> gamma, beta;
};

template <class S>
block_weights random_block() {
  const auto attention = [](std::uint64_t seed) {
    reference::multi_head_weights w;
    w.query = random_weight(seed, width, width), w.key = random_weight(seed + 1, width, width);
    w.value = random_weight(seed + 2, width, width), w.output = random_weight(seed + 3, width, width);
    w.query_bias = random_vector(seed + 4, width), w.output_bias = random_vector(seed + 5, width);
    w.value_bias = random_vector(seed + 6, width);
    return rounded<S>(w);
  };
  block_weights w{attention(10), attention(20), {}, rounded<S>(random_vector(1, width, 1)),
                  rounded<S>(random_vector(2, width))};
  w.tail.gamma_1 = random_vector(3, width, 1), w.tail.beta_1 = random_vector(4, width);
  w.tail.gamma_2 = random_vector(5, width, 1), w.tail.beta_2 = random_vector(6, width);
  w.tail.feed = random_feed_forward(width, hidden, width);
  w.tail = rounded<S>(w.tail);
  return w;
}

tensor<double> expected(const tensor<double>& x, const tensor<double>& y, const block_weights& w, bool norm_first,
                        double eps) {
  const auto norm = [&](const tensor<double>& s) { return reference::layer_norm(s, w.gamma, w.beta, eps); };
  reference::full_softmax_options causal;
  causal.causal = true;
  const tensor<double> normed = norm_first ? norm(x) : x;
  tensor<double> h = reference::sum(x, reference::multi_head(normed, normed, w.self, heads, heads, causal));
  if (!norm_first) h = norm(h);
  return reference::encoder_block(
      h, [&](const tensor<double>& s) { return reference::multi_head(s, y, w.cross, heads, heads); }, w.tail,
      norm_first, reference::gelu, eps);
}

template <class S>
struct decoder {
  using L = compiled_layers<S>;
  multi_head_store<S> self, cross;
  encoder_store<S> tail;
  tensor<S> gamma, beta, keys{batch, 1, encoded, width}, values{batch, 1, encoded, width};
  attn::kv_cache<S> cache{{.batch = batch, .heads = heads, .dim = dim}};
  attn::execution serial{};
  bool norm_first;

  decoder(const block_weights& w, const tensor<S>& y, bool first)
      : self(w.self), cross(w.cross), tail(w.tail), gamma(cast<S>(w.gamma)), beta(cast<S>(w.beta)), norm_first(first) {
    L::project(sequence(y), sequence(keys), {.weight = matrix(cross.key)}, serial);
    L::project(sequence(y), sequence(values), {.weight = matrix(cross.value), .bias = vector(cross.value_bias)},
               serial);
  }

  // Of the tokens after those in the cache.
  void run(in_sequence<S> x, out_sequence<S> out) {
    tensor<S> h(batch, 1, x.extent(1), width), mixed = h;
    const attn::layer_norm_weights<S> norm{.gamma = vector(gamma), .beta = vector(beta)};
    if (norm_first) L::layer_norm(x, sequence(h), norm, {}, serial);
    L::multi_head(norm_first ? sequence(std::as_const(h)) : x, sequence(mixed), self.views(),
                  [&](auto q, auto k, auto v, auto to, auto& exec) {
                    compiled_full_softmax<S>::step(cache, q, k, v, to, {}, {}, exec);
                  },
                  {.heads = heads}, serial);
    for (idx_t b = 0; b < batch; ++b)
      for (idx_t i = 0; i < x.extent(1); ++i)
        for (idx_t d = 0; d < width; ++d)
          mixed(b, 0, i, d) = S(static_cast<real<S>>(mixed(b, 0, i, d)) + static_cast<real<S>>(x(b, i, d)));
    if (!norm_first) L::layer_norm(sequence(std::as_const(mixed)), sequence(mixed), norm, {}, serial);
    attn::multi_head_weights<S> to_encoder = cross.views();
    to_encoder.key = to_encoder.value = {}, to_encoder.value_bias = {};
    const attention_of<S> attend = [&](auto q, auto, auto, auto to, auto& exec) {
      full_attention<S>()(q, attn::split_heads(sequence(std::as_const(keys)), heads),
                          attn::split_heads(sequence(std::as_const(values)), heads), to, exec);
    };
    L::encoder_block(sequence(std::as_const(mixed)), out, tail.views(),
                     [&](auto from, auto to, auto& exec) {
                       L::multi_head(from, to, to_encoder, attend, {.heads = heads}, exec);
                     },
                     {.norm_first = norm_first}, serial);
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("decoder block: at once, in chunks and token by token", "[decoder_block]", all_types) {
  using S = TestType;
  const idx_t length = 13;
  const auto x = rounded<S>(random_sequence(1, batch, length, width)),
             y = rounded<S>(random_sequence(2, batch, encoded, width));
  const auto w = random_block<S>();
  const tensor<S> sx = cast<S>(x), sy = cast<S>(y);
  for (bool norm_first : {true, false})
    for (idx_t prompt : {13, 6, 1}) {
      CAPTURE(norm_first, prompt);
      decoder<S> block(w, sy, norm_first);
      tensor<S> out(batch, 1, length, width, S(7));
      for (idx_t begin = 0, count = prompt; begin < length; begin += count, count = 1)
        block.run(sequence(sx).slice(1, begin, count), sequence(out).slice(1, begin, count));
      const double eps = static_cast<double>(attn::encoder_block_options<S>{}.eps);
      // two attentions, the feed-forward layer and what is stored between them
      CHECK(relative_error(out, expected(x, y, w, norm_first, eps)) <= 8 * tolerance<S>::out);
    }
}

}  // namespace testing::decoder_block_tests
