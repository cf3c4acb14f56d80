// multi_head_backward against the reverse pass of its reference, with full softmax as the operator.
#include "layers/gradients.hpp"
#include "support/pairwise.hpp"

namespace testing::multi_head_backward_tests {
namespace {

struct heads_case {
  idx_t batch = 2, queries = 21, keys = 17, model = 10, model_kv = 7, heads = 4, kv_heads = 4, dim = 3, dim_v = 5,
        out = 9;
  bool context = false, key = true, output = true, causal = false, attended = false;
  int biases = 15;  // of query, value, key, output
  bool gate = false, silu = false;
  std::vector<idx_t> lengths{};
  idx_t q_norm = 0, k_norm = 0;  // numbers of them
  reference::head_rotation rotation{};
  bool value = true;

  bool own_keys() const { return !key && !value; }  // the operator has keys and values of its own
};

std::string name_of(const heads_case& a) {
  return "queries " + std::to_string(a.queries) + ", keys " + std::to_string(a.keys) + ", kv_heads " +
         std::to_string(a.kv_heads) + ", context " + std::to_string(a.context) + ", key " + std::to_string(a.key) +
         ", output " + std::to_string(a.output) + ", causal " + std::to_string(a.causal) + ", attended " +
         std::to_string(a.attended) + ", gate " + std::to_string(a.gate + a.silu) + ", biases " +
         std::to_string(a.biases) + ", norms " + std::to_string(a.q_norm) + " " + std::to_string(a.k_norm) +
         ", rotated " + std::to_string(a.rotation.dims) + ", value " + std::to_string(a.value);
}

// The arguments of a call: all of them, given or not, in the order of the case's inputs.
template <class T>
struct arguments {
  T x, context, query, value, key, output, query_bias, value_bias, key_bias, output_bias, gate, gate_bias, q_norm,
      k_norm;

  arguments(const heads_case& a, const std::vector<T>& all) {
    next_of<T> next(all);
    x = next(), context = next(a.context), query = next(), value = next(a.value);
    key = next(a.key), output = next(a.output);
    query_bias = next(a.biases & 1), value_bias = next(a.value && (a.biases & 2));
    key_bias = next(a.key && (a.biases & 4)), output_bias = next(a.output && (a.biases & 8));
    gate = next(a.gate), gate_bias = next(a.gate && (a.biases & 1));
    q_norm = next(a.q_norm > 0), k_norm = next(a.k_norm > 0);
  }
};

template <class S>
attn::multi_head_weights<S> weights_of(const arguments<tensor<S>>& in) {
  return {.query = matrix(in.query),
          .key = matrix(in.key),
          .value = matrix(in.value),
          .output = matrix(in.output),
          .gate = matrix(in.gate),
          .query_bias = vector(in.query_bias),
          .key_bias = vector(in.key_bias),
          .value_bias = vector(in.value_bias),
          .output_bias = vector(in.output_bias),
          .gate_bias = vector(in.gate_bias),
          .q_norm = vector(in.q_norm),
          .k_norm = vector(in.k_norm)};
}

template <class S>
layer_backward_case<S> case_of(heads_case a) {
  if (sizeof(S) == 2) a.biases &= ~4;  // in the gradient of the key bias most of what the keys add cancels
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = name_of(a);
  const idx_t model_kv = a.context ? a.model_kv : a.model;
  add(r, "x", random_sequence(1, a.batch, a.queries, a.model));
  if (a.context) add(r, "context", random_sequence(2, a.batch, a.keys, model_kv));
  add(r, "query", random_weight(3, a.heads * a.dim, a.model));
  if (a.value) add(r, "value", random_weight(4, a.kv_heads * a.dim_v, model_kv));
  if (a.key) add(r, "key", random_weight(5, a.kv_heads * a.dim, model_kv));
  if (a.output) add(r, "output", random_weight(6, a.out, a.heads * a.dim_v));
  if (a.biases & 1) add(r, "query_bias", random_vector(7, a.heads * a.dim));
  if (a.value && (a.biases & 2)) add(r, "value_bias", random_vector(8, a.kv_heads * a.dim_v));
  if (a.key && (a.biases & 4)) add(r, "key_bias", random_vector(9, a.kv_heads * a.dim));
  if (a.output && (a.biases & 8)) add(r, "output_bias", random_vector(10, a.out));
  if (a.gate) add(r, "gate", random_weight(11, a.heads * a.dim_v, a.model));
  if (a.gate && (a.biases & 1)) add(r, "gate_bias", random_vector(12, a.heads * a.dim_v));
  if (a.q_norm) add(r, "q_norm", random_vector(13, a.q_norm));
  if (a.k_norm) add(r, "k_norm", random_vector(14, a.k_norm));
  const attention_pair<S> attention{.heads = a.heads, .causal = a.causal, .lengths = a.lengths};
  const tensor<double> own_k = rounded<S>(random_normal(15, a.batch, a.kv_heads, 6, a.dim)),
                       own_v = rounded<S>(random_normal(16, a.batch, a.kv_heads, 6, a.dim_v));
  r.forward = [=](const std::vector<tensor<variable>>& all) {
    const arguments<tensor<variable>> in(a, all);
    const reference::basic_multi_head_weights<variable> w{in.query,      in.key,      in.value,      in.output,
                                                          in.query_bias, in.key_bias, in.value_bias, in.output_bias,
                                                          in.gate,       in.gate_bias, a.silu, in.q_norm, in.k_norm};
    return std::vector{reference::multi_head_around(
        in.x, a.context ? in.context : in.x, w, a.heads, a.kv_heads,
        [&](const auto& q, const auto& k, const auto& v) {
          return a.own_keys() ? attention.reference(q, cast<variable>(own_k), cast<variable>(own_v))
                              : attention.reference(q, k, v);
        },
        a.rotation)};
  };
  const auto attend_own = [=, k = cast<S>(own_k), v = cast<S>(own_v)](in_view<S> q, in_view<S> no_k, in_view<S> no_v,
                                                                      out_view<S> out, attn::execution& exec) {
    CHECK((!no_k && !no_v));
    attention.forward()(q, view(k), view(v), out, exec);
  };
  const auto own_backward = [=, k = cast<S>(own_k), v = cast<S>(own_v)](
                                in_view<S> q, in_view<S>, in_view<S>, in_view<S> out, in_view<S> d_out,
                                out_view<S> dq, out_view<S> dk, out_view<S> dv, attn::execution& exec) {
    CHECK((!dk && !dv));
    attention.backward()(q, view(k), view(v), out, d_out, dq, dk, dv, exec);
  };
  const attention_of<S> attend = a.own_keys() ? attention_of<S>(attend_own) : attention.forward();
  const attention_backward_of<S> attend_backward =
      a.own_keys() ? attention_backward_of<S>(own_backward) : attention.backward();
  c.run = [=](const std::vector<tensor<S>>& all, const tensor<S>& d_out,
                         const std::vector<tensor<S>*>& gradients, bool accumulate, attn::execution& exec) {
    const arguments<tensor<S>> in(a, all);
    const arguments<tensor<S>*> g(a, gradients);
    attn::multi_head_options<S> options{.heads = a.heads, .kv_heads = a.kv_heads};
    if (a.context) options.context = sequence(in.context);
    if (a.silu) options.gate_activation = attn::gate_activation::silu;
    if (const auto& r_of = a.rotation; r_of.dims)
      options.rotary = {.first_position = r_of.first_position, .interleaved = r_of.interleaved, .dims = r_of.dims,
                        .base = r_of.base};
    tensor<S> attended(a.batch, 1, a.queries, a.heads * a.dim_v), out = d_out;
    if (a.attended) {  // what the forward call leaves
      const bool separate = a.output || a.gate;
      if (separate) options.attended = sequence(attended);
      compiled_layers<S>::multi_head(sequence(in.x), sequence(out), weights_of(in), attend, options, exec);
      options.attended = separate ? sequence(attended) : sequence(out);
    }
    compiled_layers<S>::multi_head_backward(
        sequence(in.x), weights_of(in),
        a.attended ? [](auto&&...) { FAIL("the operator was called"); } : attend, attend_backward,
        sequence(d_out),
        {.x = sequence_or_none(g.x),
         .context = sequence_or_none(g.context),
         .query = matrix_or_none(g.query),
         .key = matrix_or_none(g.key),
         .value = matrix_or_none(g.value),
         .output = matrix_or_none(g.output),
         .gate = matrix_or_none(g.gate),
         .query_bias = vector_or_none(g.query_bias),
         .key_bias = vector_or_none(g.key_bias),
         .value_bias = vector_or_none(g.value_bias),
         .output_bias = vector_or_none(g.output_bias),
         .gate_bias = vector_or_none(g.gate_bias),
         .q_norm = vector_or_none(g.q_norm),
         .k_norm = vector_or_none(g.k_norm),
         .accumulate = accumulate},
        options, exec);
  };
  return c;
}

// Projections, operator and output in a row, each of which rounds what it gives; scores' gradients are differences.
template <class S>
constexpr double factor = sizeof(S) == 2 ? 8 : 2;

}  // namespace

TEMPLATE_LIST_TEST_CASE("multi_head_backward: options", "[multi_head_backward]", all_types) {
  std::vector<heads_case> all;
  for (int bits = 0; bits < 32; ++bits)
    for (idx_t kv_heads : {1, 2, 4})
      for (int biases : {0, 5, 10, 15}) {
        heads_case c{.kv_heads = kv_heads};
        c.context = bits & 1, c.key = bits & 2, c.output = bits & 4, c.causal = bits & 8, c.attended = bits & 16;
        c.biases = biases;
        if (!c.key && kv_heads != 4) continue;
        if (!c.key) c.keys = c.queries;
        all.push_back(c);
      }
  for (const auto& chosen : selected(
           all,
           [](const heads_case& c) {
             return std::array{+c.context, +c.key, +c.output, +c.causal, +c.attended, int(c.kv_heads), c.biases};
           },
           true))
    check_layer_backward(case_of<TestType>(chosen), factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: gates", "[multi_head_backward]", all_types) {
  for (int bits = 0; bits < 16; ++bits)
    check_layer_backward(case_of<TestType>({.context = bool(bits & 1), .output = bool(bits & 2),
                                            .attended = bool(bits & 4), .biases = bits & 1 ? 15 : 0, .gate = true,
                                            .silu = bool(bits & 8)}),
                         factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: norms and rotations", "[multi_head_backward]", all_types) {
  for (int bits = 0; bits < 16; ++bits) {
    const bool norms = bits & 1, all_heads = bits & 2, shared = bits & 4, context = bits & 8;
    if (shared && context) continue;
    check_layer_backward(case_of<TestType>({.kv_heads = shared ? 4 : 2, .dim = 4, .context = context, .key = !shared,
                                            .attended = all_heads, .q_norm = !norms ? 0 : all_heads ? 16 : 4,
                                            .k_norm = !norms || shared ? 0 : all_heads ? 8 : 4,
                                            .rotation = {norms && all_heads ? 0 : norms ? 2 : 4, 3, 50, context}}),
                         2 * factor<TestType>);  // two more roundings
  }
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: values that are the context", "[multi_head_backward]", all_types) {
  for (int bits = 0; bits < 16; ++bits) {
    const bool context = bits & 1, norms = bits & 8;
    check_layer_backward(case_of<TestType>({.model = 8, .model_kv = 10, .kv_heads = 2, .dim_v = context ? 5 : 4,
                                            .context = context, .output = bool(bits & 2), .gate = bool(bits & 4),
                                            .q_norm = norms ? 3 : 0, .k_norm = norms ? 6 : 0,
                                            .rotation = {norms ? 2 : 0, 3, 50, false}, .value = false}),
                         (norms ? 2 : 1) * factor<TestType>);
  }
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: an operator with keys and values of its own", "[multi_head_backward]",
                        all_types) {
  for (int bits = 0; bits < 16; ++bits) {
    const bool norm = bits & 8;
    check_layer_backward(case_of<TestType>({.kv_heads = 2, .key = false, .output = bool(bits & 2),
                                            .attended = bool(bits & 1), .gate = bool(bits & 4), .q_norm = norm ? 3 : 0,
                                            .rotation = {norm ? 2 : 0, 3, 50, false}, .value = false}),
                         (norm ? 3 : 1) * factor<TestType>);  // two more roundings, and one of the gate
  }
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: lengths", "[multi_head_backward]", all_types) {
  for (idx_t length : {0, 1, 2, 48, 65})
    for (bool context : {false, true})
      check_layer_backward(case_of<TestType>({.queries = length, .keys = length / 2, .context = context}),
                           factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("multi_head_backward: several chunks of tokens", "[multi_head_backward]", exact_types) {
  check_layer_backward(case_of<TestType>({.batch = 20, .queries = 30, .model = 4, .heads = 2, .kv_heads = 1, .dim = 2}),
                       factor<TestType>);
}

// With true lengths the operator leaves zeros in padding; what lies there, NaN too, reaches no gradient.
TEMPLATE_LIST_TEST_CASE("multi_head_backward: padding", "[multi_head_backward]", all_types) {
  using S = TestType;
  const heads_case a{.kv_heads = 2, .causal = true, .lengths = {13, 21}};
  const auto c = case_of<S>(a);
  check_layer_backward(c, factor<S>);
  std::vector<tensor<S>> inputs;
  for (const auto& x : c.reference.inputs) inputs.push_back(cast<S>(x));
  tensor<S> d_out = cast<S>(random_sequence(70, a.batch, a.queries, a.out));
  for (idx_t i = 13; i < 21; ++i)
    for (idx_t d = 0; d < a.out; ++d) d_out(0, 0, i, d) = S(0);
  attn::execution serial;
  const auto clean = all_gradients(c, inputs, d_out, serial);
  for (idx_t i = 13; i < 21; ++i)
    for (idx_t d = 0; d < a.model; ++d) {
      CHECK(clean[0](0, 0, i, d) == S(0));
      inputs[0](0, 0, i, d) = std::numeric_limits<S>::quiet_NaN();
    }
  CHECK(all_gradients(c, inputs, d_out, serial) == clean);
}

TEST_CASE("multi_head_backward: the reverse pass against central differences", "[multi_head_backward]") {
  check_central_differences(case_of<float>({.queries = 6, .keys = 5, .kv_heads = 2, .context = true}).reference);
  check_central_differences(case_of<float>({.queries = 6, .key = false, .causal = true}).reference);
}

TEST_CASE("multi_head_backward: the operator's callables see views of what was projected", "[multi_head_backward]") {
  const auto c = case_of<float>({.kv_heads = 2});
  std::vector<tensor<float>> inputs;
  for (const auto& x : c.reference.inputs) inputs.push_back(cast<float>(x));
  const arguments<tensor<float>> in({.kv_heads = 2}, inputs);
  const tensor<float> d_out = cast<float>(random_sequence(1, 2, 21, 9));
  tensor<float> dx = in.x;
  attn::execution serial;
  int calls = 0;
  const auto op = [&](auto, auto, auto, auto out, attn::execution& exec) {
    CHECK(calls++ == 0);
    CHECK(&exec == &serial);
    for (idx_t n = 0; n < 2 * 21 * 20; ++n) out.data()[n] = static_cast<float>(n);
  };
  const auto op_backward = [&](auto q, auto k, auto v, auto out, auto d, auto dq, auto dk, auto dv, attn::execution&) {
    CHECK(calls++ == 1);
    CHECK(q.extents() == std::array<idx_t, 4>{2, 4, 21, 3});
    CHECK(k.extents() == std::array<idx_t, 4>{2, 2, 21, 3});
    CHECK(v.extents() == std::array<idx_t, 4>{2, 2, 21, 5});
    CHECK(out.extents() == std::array<idx_t, 4>{2, 4, 21, 5});
    CHECK(out.strides() == std::array<idx_t, 4>{21 * 20, 5, 20, 1});
    CHECK(out.data()[100] == 100);
    CHECK(d.extents() == out.extents());
    CHECK(dq.extents() == q.extents());
    CHECK(dk.extents() == k.extents());
    CHECK(dv.extents() == v.extents());
    for (const auto& g : {dq, dk, dv})
      for (idx_t n = 0; n < g.size(); ++n) g.data()[n] = 0;
  };
  attn::multi_head_backward(sequence(in.x), weights_of(in), op, op_backward, sequence(d_out), {.x = sequence(dx)},
                            {.heads = 4, .kv_heads = 2}, serial);
  CHECK(calls == 2);
  CHECK(std::all_of(dx.data.begin(), dx.data.end(), [](float value) { return value == 0; }));
  // The output weight alone asks for no more than the heads' output.
  tensor<float> dw = in.output;
  calls = 0;
  attn::multi_head_backward(sequence(in.x), weights_of(in), op, op_backward, sequence(d_out),
                            {.output = matrix_or_none(&dw)}, {.heads = 4, .kv_heads = 2}, serial);
  CHECK(calls == 1);
}

TEST_CASE("multi_head_backward: without key and value weights the operator takes none", "[multi_head_backward]") {
  const auto c = case_of<float>({.key = false, .value = false});
  std::vector<tensor<float>> inputs;
  for (const auto& x : c.reference.inputs) inputs.push_back(cast<float>(x));
  const arguments<tensor<float>> in({.key = false, .value = false}, inputs);
  const tensor<float> d_out = cast<float>(random_sequence(1, 2, 21, 9));
  tensor<float> dx = in.x, same = in.x;
  attn::execution serial;
  const auto twice = [](in_view<float> from, out_view<float> to) {  // between heads of 3 dims and of 5
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 4; ++h)
        for (idx_t i = 0; i < 21; ++i)
          for (idx_t d = 0; d < to.extent(3); ++d) to(b, h, i, d) = d < 3 ? 2 * from(b, h, i, d) : 0;
  };
  attn::multi_head_backward(
      sequence(in.x), weights_of(in), [&](auto q, auto out, auto&) { twice(q, out); },
      [&](auto, auto, auto d, auto dq, auto&) { twice(d, dq); }, sequence(d_out), {.x = sequence(dx)}, {.heads = 4},
      serial);
  attn::multi_head_backward(
      sequence(in.x), weights_of(in), [&](auto q, auto, auto, auto out, auto&) { twice(q, out); },
      [&](auto, auto, auto, auto, auto d, auto dq, auto, auto, auto&) { twice(d, dq); }, sequence(d_out),
      {.x = sequence(same)}, {.heads = 4}, serial);
  CHECK(dx == same);
  CHECK(dx != in.x);
}

}  // namespace testing::multi_head_backward_tests
