// multi_head against its reference, with full softmax as the operator.
#include "layers/layers.hpp"

namespace testing::multi_head_tests {
namespace {

struct heads_case {
  idx_t batch = 2, queries = 30, keys = 30, model = 24, model_kv = 24, heads = 4, kv_heads = 4, dim = 6, dim_v = 6,
        out = 24;
  bool biases = true, key = true, output = true, causal = false, gate = false, silu = false, value = true;
  idx_t q_norm = 0, k_norm = 0;  // numbers of them
  reference::head_rotation rotation{};
};

reference::multi_head_weights random_weights(const heads_case& c) {
  const auto bias = [&](std::uint64_t seed, idx_t n) { return c.biases ? random_vector(seed, n) : tensor<double>{}; };
  reference::multi_head_weights w;
  w.query = random_weight(1, c.heads * c.dim, c.model), w.query_bias = bias(2, c.heads * c.dim);
  const idx_t values = c.kv_heads * c.dim_v;
  if (c.value) w.value = random_weight(3, values, c.model_kv), w.value_bias = bias(4, values);
  if (c.key) w.key = random_weight(5, c.kv_heads * c.dim, c.model_kv), w.key_bias = bias(6, c.kv_heads * c.dim);
  if (c.gate) w.gate = random_weight(9, c.heads * c.dim_v, c.model), w.gate_bias = bias(10, c.heads * c.dim_v);
  w.silu_gate = c.silu;
  if (c.output) w.output = random_weight(7, c.out, c.heads * c.dim_v), w.output_bias = bias(8, c.out);
  if (c.q_norm) w.q_norm = random_vector(11, c.q_norm);
  if (c.k_norm) w.k_norm = random_vector(12, c.k_norm);
  return w;
}

template <class S>
double error_of(const heads_case& c, bool self) {
  const auto x = rounded<S>(random_sequence(21, c.batch, c.queries, c.model));
  const auto y = self ? x : rounded<S>(random_sequence(22, c.batch, c.keys, c.model_kv));
  const auto w = rounded<S>(random_weights(c));
  const multi_head_store<S> stored(w);
  const tensor<S> sx = cast<S>(x), sy = cast<S>(y);
  tensor<S> out(c.batch, 1, c.queries, c.output ? c.out : c.heads * c.dim_v, S(7));
  attn::execution serial;
  attn::multi_head_options<S> how{.heads = c.heads, .kv_heads = c.kv_heads};
  if (!self) how.context = sequence(sy);
  if (c.silu) how.gate_activation = attn::gate_activation::silu;
  if (const auto& r = c.rotation; r.dims)
    how.rotary = {.first_position = r.first_position, .interleaved = r.interleaved, .dims = r.dims, .base = r.base};
  compiled_layers<S>::multi_head(sequence(sx), sequence(out), stored.views(), full_attention<S>({.causal = c.causal}),
                                 how, serial);
  reference::full_softmax_options options;
  options.causal = c.causal;
  return relative_error(out, reference::multi_head(x, y, w, c.heads, c.kv_heads, options, c.rotation));
}

// Four steps in a row, each within the tolerance; what is projected is rounded to the storage type.
template <class S>
constexpr double allowed = 4 * tolerance<S>::out;

}  // namespace

TEMPLATE_LIST_TEST_CASE("multi_head: self-attention", "[multi_head]", all_types) {
  for (idx_t length : {0, 1, 2, 7, 48, 65, 130})
    for (idx_t heads : {1, 3, 8}) {
      CAPTURE(length, heads);
      heads_case c{.queries = length, .keys = length, .heads = heads, .kv_heads = heads, .dim = 8, .dim_v = 5};
      CHECK(error_of<TestType>(c, true) <= allowed<TestType>);
      c.causal = true, c.biases = false;
      CHECK(error_of<TestType>(c, true) <= allowed<TestType>);
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head: grouped queries, cross attention, other widths", "[multi_head]", all_types) {
  for (idx_t kv_heads : {1, 2, 4})
    for (idx_t keys : {0, 1, 40, 101}) {
      CAPTURE(kv_heads, keys);
      const heads_case c{.queries = 33, .keys = keys, .model_kv = 17, .kv_heads = kv_heads, .dim_v = 9, .out = 13};
      CHECK(error_of<TestType>(c, false) <= allowed<TestType>);
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head: gates", "[multi_head]", all_types) {
  for (bool silu : {false, true})
    for (bool output : {false, true})
      for (idx_t queries : {0, 3, 33}) {
        CAPTURE(silu, output, queries);
        heads_case c{.queries = queries, .keys = queries, .dim_v = 5, .output = output, .gate = true, .silu = silu};
        CHECK(error_of<TestType>(c, true) <= allowed<TestType>);
        c.keys = 20, c.model_kv = 17, c.biases = false;
        CHECK(error_of<TestType>(c, false) <= allowed<TestType>);
      }
}

TEMPLATE_LIST_TEST_CASE("multi_head: shared queries and keys, no output weight", "[multi_head]", all_types) {
  for (bool key : {false, true})
    for (bool output : {false, true}) {
      CAPTURE(key, output);
      heads_case c;
      c.key = key, c.output = output;
      CHECK(error_of<TestType>(c, true) <= allowed<TestType>);
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head: norms and rotations of queries and keys", "[multi_head]", all_types) {
  for (idx_t q_norm : {0, 6, 24})
    for (idx_t k_norm : {0, 6, 12})
      for (idx_t dims : {0, 2, 6}) {
        CAPTURE(q_norm, k_norm, dims);
        heads_case c{.kv_heads = 2, .causal = true, .q_norm = q_norm, .k_norm = k_norm,
                     .rotation = {dims, 5, 100, dims == 2}};
        CHECK(error_of<TestType>(c, true) <= 2 * allowed<TestType>);  // two more roundings
        c.keys = 11, c.model_kv = 17, c.biases = c.causal = false;
        CHECK(error_of<TestType>(c, false) <= 2 * allowed<TestType>);
        if (k_norm) continue;
        heads_case shared{.key = false, .q_norm = q_norm, .rotation = {dims, 0, 10000, true}};
        CHECK(error_of<TestType>(shared, true) <= 2 * allowed<TestType>);
      }
}

TEMPLATE_LIST_TEST_CASE("multi_head: without value weights the values are the context", "[multi_head]", all_types) {
  for (bool self : {true, false})
    for (bool output : {true, false})
      for (idx_t queries : {0, 3, 30}) {
        CAPTURE(self, output, queries);
        heads_case c{.queries = queries, .keys = self ? queries : 11, .kv_heads = 2, .dim_v = 12, .output = output,
                     .causal = self, .value = false};
        CHECK(error_of<TestType>(c, self) <= allowed<TestType>);
        c.gate = true, c.k_norm = 6, c.rotation = {4, 3, 100, false};
        CHECK(error_of<TestType>(c, self) <= 2 * allowed<TestType>);
      }
}

// Keys and values that were projected before, as those of an encoder, or are in a cache.
TEMPLATE_LIST_TEST_CASE("multi_head: an operator with keys and values of its own", "[multi_head]", all_types) {
  using S = TestType;
  const idx_t heads = 4, keys = 11, dim = 6, dim_v = 5;
  const auto k = rounded<S>(random_normal(31, 2, 2, keys, dim)), v = rounded<S>(random_normal(32, 2, 2, keys, dim_v));
  const tensor<S> stored_k = cast<S>(k), stored_v = cast<S>(v);
  attn::execution serial;
  for (int bits = 0; bits < 16; ++bits) {
    const bool output = bits & 1, gate = bits & 2, norm = bits & 4;
    const idx_t queries = bits & 8 ? 30 : 1;
    CAPTURE(output, gate, norm, queries);
    const heads_case c{.dim_v = dim_v, .key = false, .output = output, .gate = gate, .value = false,
                       .q_norm = norm ? 6 : 0};
    const auto x = rounded<S>(random_sequence(21, 2, queries, c.model));
    const auto w = rounded<S>(random_weights(c));
    const multi_head_store<S> weights(w);
    const reference::head_rotation rotation{norm ? 4 : 0, 7, 10000, false};
    const auto expected = reference::multi_head_around(
        x, x, w, heads, heads, [&](const auto& q, const auto&, const auto&) {
          return reference::full_softmax(q, k, v, {}).out;
        }, rotation);
    attn::multi_head_options<S> how{.heads = heads};
    if (norm) how.rotary = {.first_position = 7, .dims = 4};
    const tensor<S> sx = cast<S>(x);
    tensor<S> out(2, 1, queries, output ? c.out : heads * dim_v, S(7)), other = out;
    const auto views = weights.views();
    compiled_layers<S>::multi_head(sequence(sx), sequence(out), views,
                                   [&](auto q, auto no_k, auto no_v, auto to, auto& exec) {
                                     CHECK(!no_k);
                                     CHECK(!no_v);
                                     full_attention<S>()(q, view(stored_k), view(stored_v), to, exec);
                                   },
                                   how, serial);
    CHECK(relative_error(out, expected) <= (norm ? 2 : 1) * allowed<S>);
    attn::multi_head(sequence(sx), sequence(other), views, [&](in_view<S> q, out_view<S> to, attn::execution& exec) {
      full_attention<S>()(q, view(stored_k), view(stored_v), to, exec);
    }, how, serial);
    CHECK(other == out);
  }
}

// Weights with columns of stride 1 are read in place for few tokens, others packed: each decides for itself.
TEST_CASE("multi_head: self-attention and attention to a copy agree to the last bit", "[multi_head]") {
  const multi_head_store<float> stored(random_weights({}));
  tensor<float> turned = stored.key;
  for (idx_t i = 0; i < 24; ++i)
    for (idx_t d = 0; d < 24; ++d) turned(0, 0, d, i) = stored.key(0, 0, i, d);
  auto weights = stored.views();
  weights.key = {turned.data.data(), {24, 24}, {1, 24}};
  for (idx_t length : {3, 30}) {
    const tensor<float> x = cast<float>(random_sequence(1, 2, length, 24)), copy = x;
    tensor<float> itself(2, 1, length, 24), other = itself;
    attn::execution serial;
    const auto attend = full_attention<float>();
    const auto call = [&](const tensor<float>& y, tensor<float>& out) {
      compiled_layers<float>::multi_head(sequence(x), sequence(out), weights, attend,
                                         {.heads = 4, .context = sequence(y)}, serial);
    };
    call(x, itself);
    call(copy, other);
    CHECK(itself == other);
  }
}

TEST_CASE("multi_head: the operator sees views of what was projected, and out where it is the last", "[multi_head]") {
  const multi_head_store<float> stored(random_weights({.kv_heads = 2, .dim_v = 5, .output = false}));
  const tensor<float> x = cast<float>(random_sequence(1, 2, 30, 24));
  tensor<float> out(2, 1, 30, 20);
  attn::execution serial;
  int calls = 0;
  const attention_of<float> op = [&](in_view<float> q, in_view<float> k, in_view<float> v, out_view<float> to,
                                     attn::execution& exec) {
    ++calls;
    CHECK(&exec == &serial);
    CHECK(q.extents() == std::array<idx_t, 4>{2, 4, 30, 6});
    CHECK(k.extents() == std::array<idx_t, 4>{2, 2, 30, 6});
    CHECK(v.extents() == std::array<idx_t, 4>{2, 2, 30, 5});
    CHECK(q.strides() == std::array<idx_t, 4>{30 * 24, 6, 24, 1});
    CHECK(to.data() == out.data.data());
    CHECK(to.strides() == std::array<idx_t, 4>{30 * 20, 5, 20, 1});
  };
  compiled_layers<float>::multi_head(sequence(x), sequence(out), stored.views(), op, {.heads = 4, .kv_heads = 2},
                                     serial);
  CHECK(calls == 1);
}

TEST_CASE("multi_head: Eigen matrices, default arguments, padding by the operator's lengths", "[multi_head]") {
  using matrix = Eigen::MatrixXf;
  const matrix x = matrix::Random(12, 8), w = matrix::Random(8, 8), eye = matrix::Identity(8, 8);
  matrix out(12, 8), by_hand(12, 8);
  const attn::idx_t length[] = {9};
  const auto attend = [&](auto q, auto k, auto v, auto to, attn::execution& exec) {
    compiled_full_softmax<float>::call(q, k, v, to, {.lengths = length}, {}, exec);
  };
  attn::multi_head(x, out, {.query = w, .key = w, .value = w, .output = eye}, attend, {.heads = 2});
  const matrix p = x * w.transpose();
  attn::execution serial;
  attend(attn::split_heads(p, 2), attn::split_heads(p, 2), attn::split_heads(p, 2), attn::split_heads(by_hand, 2),
         serial);
  CHECK((out - by_hand).norm() <= 1e-5f * by_hand.norm());

  // options and execution in any combination, and a context that is an Eigen matrix
  const attn::multi_head_weights<float> weights{.query = w, .key = w, .value = w, .output = eye};
  const matrix with_two_heads = out;
  matrix other(12, 8), one_head(12, 8);
  attn::multi_head(x, other, weights, attend, {.heads = 2}, attn::execution(2));
  CHECK(other == with_two_heads);
  attn::multi_head(x, other, weights, attend, {.heads = 2, .context = x});
  CHECK(other == with_two_heads);
  attn::multi_head(x, one_head, weights, attend);
  attn::multi_head(x, other, weights, attend, serial);
  CHECK(other == one_head);
  CHECK(out.bottomRows(3).isZero(0));
}

}  // namespace testing::multi_head_tests
