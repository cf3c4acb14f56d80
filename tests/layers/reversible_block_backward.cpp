// reversible_block_backward against the reverse pass of its reference: around attention and a feed-forward layer, in
// stacks that store no activations.
#include "layers/reversible.hpp"

namespace testing::reversible_block_backward_tests {
namespace {

struct reversible_case {
  idx_t batch = 2, length = 19, dim = 8, hidden = 11, layers = 1;
  bool remainder = false, in_place = false;
  double gain = 1;
};

template <class S>
layer_backward_case<S> case_of(const reversible_case& a) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = "length " + std::to_string(a.length) + ", layers " + std::to_string(a.layers) + ", remainder " +
           std::to_string(a.remainder) + ", in place " + std::to_string(a.in_place);
  add(r, "x", random_sequence(1, a.batch, a.length, 2 * a.dim));
  for (idx_t n = 0; n < a.layers; ++n) {
    const std::uint64_t seed = 10 * static_cast<std::uint64_t>(n + 1);
    add(r, "query", random_weight(seed, a.dim, a.dim)), add(r, "key", random_weight(seed + 1, a.dim, a.dim));
    add(r, "value", random_weight(seed + 2, a.dim, a.dim, a.gain));
    add(r, "up", random_weight(seed + 3, a.hidden, a.dim)),
        add(r, "down", random_weight(seed + 4, a.dim, a.hidden, a.gain));
  }
  r.forward = [a](const std::vector<tensor<variable>>& in) {
    tensor<variable> x = in[0];
    for (idx_t n = 0; n < a.layers; ++n) {
      const auto w = [&, n](int which) { return in[static_cast<std::size_t>(1 + 5 * n + which)]; };
      const auto f = [&](const tensor<variable>& s) {
        const reference::basic_multi_head_weights<variable> heads{w(0), w(1), w(2), {}, {}, {}, {}, {}};
        return reference::multi_head_around(s, s, heads, 2, 2, [](const auto& q, const auto& k, const auto& v) {
          return attention_pair<float>{.heads = 2}.reference(q, k, v);
        });
      };
      const auto g = [&](const tensor<variable>& s) {
        const reference::basic_feed_forward_weights<variable> feed{w(3), {}, w(4), {}};
        return reference::feed_forward(s, feed, [](const variable& v) { return activated(attn::activation::gelu, v); });
      };
      x = reference::reversible_block(x, f, g);
    }
    return std::vector{x};
  };
  c.run = [a](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& to,
              bool accumulate, attn::execution& exec) {
    tensor<S> x = in[0], rest(a.batch, 1, a.length, 2 * a.dim), d = d_out;
    const attn::reversible_block_options<S> options{.remainder = a.remainder ? sequence(rest) : out_sequence<S>()};
    std::vector<reversible_layer<S>> layers;
    for (idx_t n = 0; n < a.layers; ++n) {
      const auto from = in.begin() + 1 + 5 * n;
      layers.emplace_back(std::vector<tensor<S>>(from, from + 5),
                          std::vector<tensor<S>*>(to.begin() + 1 + 5 * n, to.begin() + 6 + 5 * n), accumulate);
    }
    for (auto& layer : layers) layer.forward(sequence(x), options, exec);
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
      if (layer + 1 == layers.rend() && !a.in_place) {  // the last one to where it is wanted
        tensor<S> x_out(a.batch, 1, a.length, 2 * a.dim, S(7));
        layer->backward(sequence(std::as_const(x)), sequence(x_out), sequence(std::as_const(d)),
                        {.x = sequence_or_none(to[0]), .accumulate = accumulate}, options, exec);
        x = x_out;
      } else {
        layer->backward(sequence(std::as_const(x)), sequence(x), sequence(std::as_const(d)), {.x = sequence(d)},
                        options, exec);
      }
    }
    if (a.in_place && to[0]) *to[0] = d;
    if (a.remainder && sizeof(S) > 2) CHECK(x == in[0]);
    CHECK(relative_error(x, in[0]) <= (sizeof(S) == 2 ? 4 * tolerance<S>::out : 1e3 * tolerance<S>::out));
  };
  return c;
}

// Sums, and two functions of several steps, each within the tolerance of its type.
template <class S>
constexpr double factor = sizeof(S) == 2 ? 6 : 2;

}  // namespace

TEMPLATE_LIST_TEST_CASE("reversible_block_backward: against the reverse pass", "[reversible_block_backward]",
                        all_types) {
  for (idx_t length : {0, 1, 19, 65})
    for (bool remainder : {false, true})
      check_layer_backward(case_of<TestType>({.length = length, .remainder = remainder}), factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("reversible_block_backward: stacks", "[reversible_block_backward]", exact_types) {
  for (bool remainder : {false, true})
    check_layer_backward(case_of<TestType>({.layers = 5, .remainder = remainder, .gain = 0.5}), 4 * factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("reversible_block_backward: in place", "[reversible_block_backward]", all_types) {
  using S = TestType;
  for (bool remainder : {false, true}) {
    const auto apart = case_of<S>({.layers = 2, .remainder = remainder}),
               in_place = case_of<S>({.layers = 2, .remainder = remainder, .in_place = true});
    std::vector<tensor<S>> inputs;
    for (const auto& x : apart.reference.inputs) inputs.push_back(cast<S>(x));
    const tensor<S> d_out = cast<S>(random_sequence(70, 2, 19, 16));
    attn::execution serial;
    CHECK(all_gradients(apart, inputs, d_out, serial) == all_gradients(in_place, inputs, d_out, serial));
  }
}

TEMPLATE_LIST_TEST_CASE("reversible_block_backward: x as reversible_block_inverse has it",
                        "[reversible_block_backward]", all_types) {
  using S = TestType;
  const auto c = case_of<S>({});
  std::vector<tensor<S>> weights;
  for (std::size_t n = 1; n < 6; ++n) weights.push_back(cast<S>(c.reference.inputs[n]));
  const reversible_layer<S> layer(weights, std::vector<tensor<S>*>(5, nullptr), false);
  for (bool remainder : {false, true}) {
    tensor<S> out = cast<S>(c.reference.inputs[0]), x = out, back = out, rest(2, 1, 19, 16), other(2, 1, 19, 16);
    const tensor<S> d = out;
    attn::execution serial;
    attn::reversible_block_options<S> options;
    if (remainder) options.remainder = sequence(rest);
    layer.forward(sequence(out), options, serial);
    other = rest;
    layer.backward(sequence(std::as_const(out)), sequence(x), sequence(d), {}, options, serial);
    if (remainder) options.remainder = sequence(other);
    compiled_layers<S>::reversible_block_inverse(sequence(std::as_const(out)), sequence(back), layer.f(), layer.g(),
                                                 options, serial);
    CHECK(x == back);
    CHECK(rest == other);
  }
}

// With a remainder, gradients through 24 layers are those of stored activations, to the last bit.
TEMPLATE_LIST_TEST_CASE("reversible_block_backward: 24 layers as with stored activations",
                        "[reversible_block_backward]", exact_types) {
  using S = TestType;
  const idx_t layers = 24, dim = 8;
  std::vector<reversible_layer<S>> stack;
  std::vector<tensor<S>> gradients, stored_gradients;
  const auto weights = random_layers<S>(layers, dim, 16, 0.5);
  for (const auto& layer : weights)
    for (const auto& w : layer) gradients.push_back(w);
  stored_gradients = gradients;
  const auto stack_of = [&](std::vector<tensor<S>>& to) {
    std::vector<reversible_layer<S>> all;
    for (std::size_t n = 0; n < weights.size(); ++n) {
      std::vector<tensor<S>*> g;
      for (std::size_t w = 0; w < 5; ++w) g.push_back(&to[5 * n + w]);
      all.emplace_back(weights[n], g, false);
    }
    return all;
  };
  const tensor<S> x = cast<S>(random_sequence(1, 2, 33, 2 * dim)), d_out = cast<S>(random_sequence(2, 2, 33, 2 * dim));
  attn::execution serial;

  tensor<S> y = x, rest(2, 1, 33, 2 * dim), d = d_out;
  const attn::reversible_block_options<S> options{.remainder = sequence(rest)};
  std::vector<tensor<S>> stored = {x};
  for (const auto& layer : stack_of(gradients)) {
    layer.forward(sequence(y), options, serial);
    stored.push_back(y);
  }
  const auto reversible = stack_of(gradients);
  for (auto layer = reversible.rbegin(); layer != reversible.rend(); ++layer)
    layer->backward(sequence(std::as_const(y)), sequence(y), sequence(std::as_const(d)), {.x = sequence(d)}, options,
                    serial);
  CHECK(y == x);

  const auto by_store = stack_of(stored_gradients);
  tensor<S> d_stored = d_out, made(2, 1, 33, dim), change = made;
  const auto half = [&](auto&& whole, idx_t which) { return whole.slice(2, which * dim, dim); };
  for (std::size_t n = weights.size(); n-- > 0;) {
    const auto step = [&](const mixer_of<S>& f, const mixer_backward_of<S>& f_backward, in_sequence<S> from,
                          idx_t d_of) {
      f(from, sequence(made), serial);
      f_backward(from, sequence(std::as_const(made)), half(sequence(std::as_const(d_stored)), d_of), sequence(change),
                 serial);
      const auto to = half(sequence(d_stored), 1 - d_of);
      for (idx_t b = 0; b < 2; ++b)
        for (idx_t i = 0; i < 33; ++i)
          for (idx_t e = 0; e < dim; ++e) to(b, i, e) += change(b, 0, i, e);
    };
    step(by_store[n].g(), by_store[n].g_backward(), half(sequence(std::as_const(stored[n + 1])), 0), 1);
    step(by_store[n].f(), by_store[n].f_backward(), half(sequence(std::as_const(stored[n])), 1), 0);
  }
  CHECK(d == d_stored);
  CHECK(gradients == stored_gradients);
}

TEST_CASE("reversible_block_backward: the reverse pass against central differences", "[reversible_block_backward]") {
  check_central_differences(case_of<float>({.length = 6, .layers = 2}).reference);
}

TEST_CASE("reversible_block_backward: Eigen matrices and default arguments", "[reversible_block_backward]") {
  Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6), y(9, 6), d = Eigen::MatrixXf::Random(9, 6), dx(9, 6), back(9, 6);
  const auto half = [](auto s, auto to, attn::execution&) {
    for (idx_t i = 0; i < s.extent(1); ++i)
      for (idx_t e = 0; e < s.extent(2); ++e) to(0, i, e) = s(0, i, e) / 2;
  };
  const auto half_backward = [&](auto, auto, auto d_out, auto to, attn::execution& exec) { half(d_out, to, exec); };
  attn::reversible_block(x, y, half, half);
  attn::reversible_block_backward(y, back, half, half, half_backward, half_backward, d, {.x = dx});
  CHECK((back - x).norm() < 1e-6f);
  const Eigen::MatrixXf d1 = d.leftCols(3) + d.rightCols(3) / 2, d2 = d.rightCols(3) + d1 / 2;
  CHECK((dx.leftCols(3) - d1).norm() + (dx.rightCols(3) - d2).norm() < 1e-6f);
  attn::execution threads(2, 0);
  const Eigen::MatrixXf before = dx;
  attn::reversible_block_backward(y, back, half, half, half_backward, half_backward, d, {.x = dx, .accumulate = true},
                                  threads);
  CHECK(dx == 2 * before);
}

}  // namespace testing::reversible_block_backward_tests
