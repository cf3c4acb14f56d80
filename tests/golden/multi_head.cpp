#include "golden/gradients.hpp"
#include "layers/gradients.hpp"

namespace testing::multi_head_golden {
namespace {

// A case is its arrays, in this order, those that are not given empty, and a layer around full_softmax.
constexpr const char* names[] = {"x",       "w_query", "w_key",    "w_value", "w_output", "b_query",
                                 "b_key",   "b_value", "b_output", "q_norm",  "k_norm"};

struct problem {
  std::vector<std::string> given;  // names
  tensors inputs;
  idx_t heads = 1, kv_heads = 1;
  double norm_eps = 1e-6, scale = 0;
  reference::head_rotation rotation{};
  tensor<double> bias;  // hides what causality and a window hide

  template <class T>
  T array(const std::vector<T>& all, const char* name) const {
    for (std::size_t n = 0; n < given.size(); ++n)
      if (given[n] == name) return all[n];
    return T{};
  }
};

problem read(const golden_case& golden) {
  problem p;
  for (const char* name : names)
    if (golden.has_array(name)) {
      tensor<double> x = golden.array(name);
      if (p.given.empty()) x = by_item(std::move(x));
      p.given.push_back(name), p.inputs.push_back(std::move(x));
    }
  p.heads = golden.integer("heads"), p.kv_heads = golden.integer("kv_heads"), p.norm_eps = golden.number("norm_eps");
  if (golden.has("scale")) p.scale = golden.number("scale");
  p.rotation.dims = golden.integer("rotary_dims"), p.rotation.interleaved = golden.flag("interleaved", false);
  if (golden.has("rotary_base")) p.rotation.base = golden.number("rotary_base");
  if (golden.has("first_position")) p.rotation.first_position = golden.integer("first_position");
  const idx_t length = p.inputs[0].length(), left = golden.has("left") ? golden.integer("left") : length;
  const bool causal = golden.flag("causal", false);
  p.bias = tensor<double>(1, 1, length, length);
  for (idx_t i = 0; i < length; ++i)
    for (idx_t j = 0; j < length; ++j)
      if ((causal && j > i) || i - j > left) p.bias(0, 0, i, j) = -std::numeric_limits<double>::infinity();
  return p;
}

gradient_case case_of(const problem& p) {
  return {"multi_head", p.given, p.inputs, [p](const std::vector<tensor<variable>>& all) {
            const auto in = [&](const char* name) { return p.array(all, name); };
            const reference::basic_multi_head_weights<variable> w{
                in("w_query"), in("w_key"),   in("w_value"), in("w_output"), in("b_query"), in("b_key"),
                in("b_value"), in("b_output"), {},           {},             false,         in("q_norm"),
                in("k_norm")};
            reference::basic_full_softmax_options<variable> options;
            for (double b : p.bias.data) options.bias.data.push_back(variable(b));
            options.bias.extents = p.bias.extents;
            if (p.scale != 0) options.scale = p.scale;
            const auto attend = [&](const auto& q, const auto& k, const auto& v) {
              return reference::full_softmax(q, k, v, options).out;
            };
            return std::vector{reference::multi_head_around(in("x"), in("x"), w, p.heads, p.kv_heads, attend,
                                                            p.rotation, p.norm_eps)};
          }};
}

// The library's layer; the operator's lse goes from one pass to the other.
template <class S>
struct layer {
  problem p;
  std::vector<tensor<S>> inputs;
  tensor<real<S>> bias, lse;
  attn::multi_head_options<S> options;
  attn::full_softmax_options<S> of_operator;
  attn::execution exec;

  explicit layer(const golden_case& golden) : p(read(golden)), bias(cast<real<S>>(p.bias)) {
    for (const auto& x : p.inputs) inputs.push_back(cast<S>(x));
    lse = tensor<real<S>>(inputs[0].batch(), p.heads, inputs[0].length(), 1);
    options = {.heads = p.heads, .kv_heads = p.kv_heads, .norm_eps = static_cast<real<S>>(p.norm_eps)};
    if (const auto& r = p.rotation; r.dims)
      options.rotary = {.first_position = r.first_position, .interleaved = r.interleaved, .dims = r.dims,
                        .base = r.base};
    of_operator = {.bias = view(bias), .lse = row_view(lse)};
    if (p.scale != 0) of_operator.scale = static_cast<real<S>>(p.scale);
  }
  attn::multi_head_weights<S> weights() const {
    attn::multi_head_weights<S> w;
    const auto at = [&](const char* name) { return index_of(name); };
    w.query = matrix(inputs[at("w_query")]), w.key = matrix(inputs[at("w_key")]);
    w.value = matrix(inputs[at("w_value")]), w.output = matrix(inputs[at("w_output")]);
    for (auto [field, name] : {std::pair{&w.query_bias, "b_query"}, {&w.key_bias, "b_key"}, {&w.value_bias, "b_value"},
                               {&w.output_bias, "b_output"}, {&w.q_norm, "q_norm"}, {&w.k_norm, "k_norm"}})
      if (at(name) < inputs.size()) *field = vector(inputs[at(name)]);
    return w;
  }
  std::size_t index_of(const char* name) const {
    return static_cast<std::size_t>(std::ranges::find(p.given, name) - p.given.begin());
  }
  attention_of<S> attend() {
    return [this](in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, attn::execution& e) {
      compiled_full_softmax<S>::call(q, k, v, out, of_operator, {}, e);
    };
  }
  reference::result out() {
    tensor<S> to = inputs[0];
    compiled_layers<S>::multi_head(sequence(inputs[0]), sequence(to), weights(), attend(), options, exec);
    return {as_read(cast<double>(to)), {}};
  }
  named_tensors gradients(const tensor<double>& d_out) {
    auto to = inputs;
    const auto at = [&](const char* name) { return index_of(name) < to.size() ? &to[index_of(name)] : nullptr; };
    compiled_layers<S>::multi_head_backward(
        sequence(inputs[0]), weights(), attend(),
        [this](in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d, out_view<S> dq, out_view<S> dk,
               out_view<S> dv, attn::execution& e) {
          compiled_full_softmax<S>::backward(q, k, v, out, d, {.q = dq, .k = dk, .v = dv}, of_operator, {}, {}, e);
        },
        sequence(cast<S>(d_out)),
        {.x = sequence(to[0]), .query = matrix_or_none(at("w_query")), .key = matrix_or_none(at("w_key")),
         .value = matrix_or_none(at("w_value")), .output = matrix_or_none(at("w_output")),
         .query_bias = vector_or_none(at("b_query")), .key_bias = vector_or_none(at("b_key")),
         .value_bias = vector_or_none(at("b_value")), .output_bias = vector_or_none(at("b_output")),
         .q_norm = vector_or_none(at("q_norm")), .k_norm = vector_or_none(at("k_norm"))},
        options, exec);
    named_tensors named;
    for (std::size_t n = 0; n < to.size(); ++n) named[p.given[n]] = cast<double>(to[n]);
    return named;
  }
};

template <class S>
reference::result by_library(const golden_case& golden) {
  return layer<S>(golden).out();
}
template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  return layer<S>(golden).gradients(by_item(golden.array("d_out")));
}

const golden_entry entry({"multi_head",
                          {"operator", "source", "tolerance", "heads", "kv_heads", "causal", "left", "scale",
                           "norm_eps", "rotary_dims", "rotary_base", "interleaved", "first_position"},
                          {"x", "w_query", "w_key", "w_value", "w_output", "b_query", "b_key", "b_value", "b_output",
                           "q_norm", "k_norm", "out"},
                          [](const golden_case& golden) -> reference::result {
                            const gradient_case c = case_of(read(golden));
                            return {as_read(cast<double>(c.forward(independent(c.inputs))[0])), {}};
                          },
                          by_library<widest_type>,
                          by_library<float>,
                          [](const golden_case& golden) {
                            return reverse_gradients(case_of(read(golden)), by_item(golden.array("d_out")));
                          },
                          gradients_by_library<widest_type>,
                          gradients_by_library<float>});

}  // namespace
}  // namespace testing::multi_head_golden
