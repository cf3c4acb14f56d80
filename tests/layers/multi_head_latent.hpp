#pragma once
// A problem of multi_head_latent: by its reference and through the library, forward and backward.
#include "layers/gradients.hpp"
#include "reference/multi_head_latent.hpp"
#include "support/call_multi_head_latent.hpp"

namespace testing {

inline constexpr const char* latent_layer_names[] = {"x",        "w_query",     "w_query_down", "q_norm",  "w_query_up",
                                                     "w_latent", "latent_norm", "w_latent_up",  "w_output"};

// x and weights, those that are given, by name.
template <class T>
struct named_list {
  const std::vector<std::string>& names;
  const std::vector<T>& all;

  T operator[](const char* name) const {
    const auto n = static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
    return n < all.size() ? all[n] : T{};
  }
};

struct latent_layer_problem {
  std::vector<std::string> given{};
  tensors inputs{};
  idx_t heads = 1;
  bool causal = true;
  double norm_eps = 1e-6, scale = 0;  // scale 0: not given
  reference::head_rotation rotation{};
  std::vector<idx_t> lengths{};
  attn::latent_form form = attn::latent_form::automatic;
  bool attended = false;  // whether the backward pass gets what the forward pass leaves

  void add(const char* name, tensor<double> x) { given.push_back(name), inputs.push_back(std::move(x)); }

  template <class N>
  tensor<N> by_reference(const std::vector<tensor<N>>& all) const {
    const named_list<tensor<N>> in{given, all};
    reference::basic_full_softmax_options<N> options;
    options.causal = causal, options.lengths = lengths;
    if (scale != 0) options.scale = scale;
    return reference::multi_head_latent(in["x"],
                                        {in["w_query"], in["w_query_down"], in["q_norm"], in["w_query_up"],
                                         in["w_latent"], in["latent_norm"], in["w_latent_up"], in["w_output"]},
                                        heads, options, rotation, norm_eps);
  }
};

struct latent_layer_case {
  idx_t batch = 2, length = 21, model = 10, heads = 3, key = 4, value = 5, shared = 6, rank = 7, down = 9, out = 8;
  bool low_rank = true, norms = true, output = true, rotated = true, causal = true;
};

inline latent_layer_problem random_latent_layer(const latent_layer_case& c) {
  latent_layer_problem p{.heads = c.heads, .causal = c.causal};
  if (c.rotated) p.rotation = {c.shared / 4 * 2 + 2, 3, 100, true};
  p.add("x", random_sequence(1, c.batch, c.length, c.model));
  if (!c.low_rank) p.add("w_query", random_weight(2, c.heads * (c.key + c.shared), c.model));
  if (c.low_rank) p.add("w_query_down", random_weight(3, c.down, c.model));
  if (c.low_rank && c.norms) p.add("q_norm", random_vector(4, c.down));
  if (c.low_rank) p.add("w_query_up", random_weight(5, c.heads * (c.key + c.shared), c.down));
  p.add("w_latent", random_weight(6, c.rank + c.shared, c.model));
  if (c.norms) p.add("latent_norm", random_vector(7, c.rank));
  p.add("w_latent_up", random_weight(8, c.heads * (c.key + c.value), c.rank));
  if (c.output) p.add("w_output", random_weight(9, c.out, c.heads * c.value));
  return p;
}

inline std::string name_of(const latent_layer_problem& p) {
  std::string name = "heads " + std::to_string(p.heads) + ", causal " + std::to_string(p.causal) + ", rotated " +
                     std::to_string(p.rotation.dims) + ", attended " + std::to_string(p.attended);
  for (std::size_t n = 0; n < p.given.size(); ++n)
    name += ", " + p.given[n] + " " + std::to_string(p.inputs[n].length()) + " " + std::to_string(p.inputs[n].dim());
  return name;
}

template <class S>
attn::multi_head_latent_weights<S> latent_weights_of(const latent_layer_problem& p, const std::vector<tensor<S>>& all) {
  attn::multi_head_latent_weights<S> w;
  for (std::size_t n = 0; n < all.size(); ++n) {
    const std::string& name = p.given[n];
    if (name == "w_query") w.query = matrix(all[n]);
    if (name == "w_query_down") w.query_down = matrix(all[n]);
    if (name == "q_norm") w.q_norm = vector(all[n]);
    if (name == "w_query_up") w.query_up = matrix(all[n]);
    if (name == "w_latent") w.latent = matrix(all[n]);
    if (name == "latent_norm") w.latent_norm = vector(all[n]);
    if (name == "w_latent_up") w.latent_up = matrix(all[n]);
    if (name == "w_output") w.output = matrix(all[n]);
  }
  return w;
}

// Options of the call or of a step.
template <class S, class Options = attn::multi_head_latent_options<S>>
Options latent_options_of(const latent_layer_problem& p) {
  Options o;
  o.heads = p.heads, o.norm_eps = static_cast<real<S>>(p.norm_eps), o.attention.lengths = p.lengths;
  if constexpr (requires { o.attention.causal; }) o.attention.causal = p.causal, o.attention.form = p.form;
  if (p.scale != 0) o.attention.scale = static_cast<real<S>>(p.scale);
  if (const auto& r = p.rotation; r.dims)
    o.rotary = {.first_position = r.first_position, .interleaved = r.interleaved, .dims = r.dims, .base = r.base};
  return o;
}

template <class S>
tensor<S> run_latent_layer(const latent_layer_problem& p, attn::execution& exec) {
  std::vector<tensor<S>> in;
  for (const auto& x : p.inputs) in.push_back(cast<S>(x));
  const auto w = latent_weights_of(p, in);
  const idx_t dim = w.output ? w.output.extent(0) : p.by_reference(p.inputs).dim();
  tensor<S> out(in[0].batch(), 1, in[0].length(), dim, S(7));
  compiled_multi_head_latent<S>::call(sequence(std::as_const(in[0])), sequence(out), w, latent_options_of<S>(p), exec);
  return out;
}

template <class S>
layer_backward_case<S> case_of(const latent_layer_problem& p) {
  layer_backward_case<S> c;
  c.reference = {name_of(p), p.given, p.inputs,
                 [p](const std::vector<tensor<variable>>& all) { return std::vector{p.by_reference(all)}; }};
  c.run = [p](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& to,
              bool accumulate, attn::execution& exec) {
    const auto w = latent_weights_of(p, in);
    auto options = latent_options_of<S>(p);
    const named_list<tensor<S>*> g{p.given, to};
    const idx_t values = w.output ? w.output.extent(1) : d_out.dim();
    tensor<S> attended(in[0].batch(), 1, in[0].length(), values), out = d_out;
    tensor<real<S>> lse(in[0].batch(), p.heads, in[0].length(), 1);
    if (p.attended) {
      options.attention.lse = row_view(lse);
      if (w.output) options.attended = sequence(attended);
      compiled_multi_head_latent<S>::call(sequence(in[0]), sequence(out), w, options, exec);
      options.attended = sequence(w.output ? attended : out);
    }
    compiled_multi_head_latent<S>::backward(
        sequence(in[0]), w, sequence(d_out),
        {.x = sequence_or_none(g["x"]), .query = matrix_or_none(g["w_query"]),
         .query_down = matrix_or_none(g["w_query_down"]), .q_norm = vector_or_none(g["q_norm"]),
         .query_up = matrix_or_none(g["w_query_up"]), .latent = matrix_or_none(g["w_latent"]),
         .latent_norm = vector_or_none(g["latent_norm"]), .latent_up = matrix_or_none(g["w_latent_up"]),
         .output = matrix_or_none(g["w_output"]), .accumulate = accumulate},
        options, exec);
  };
  return c;
}

}  // namespace testing
