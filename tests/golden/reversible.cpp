#include "golden/gradients.hpp"
#include "layers/layers.hpp"

namespace testing::reversible_golden {
namespace {

// f or g of one layer: tanh(x W^T + b), or attention with q = k = x and v = x W^T.
struct function {
  bool attention, causal;
  tensor<double> weight, bias;

  template <class N>
  static tensor<N> by_reference(const tensor<N>& x, const tensor<N>& w, const tensor<N>& b, bool attention,
                                bool causal) {
    using std::tanh;
    if (attention) {
      reference::basic_full_softmax_options<N> options;
      options.causal = causal;
      return reference::full_softmax(x, x, reference::project(x, w), options).out;
    }
    tensor<N> out = reference::project(x, w, b);
    for (N& value : out.data) value = tanh(value);
    return out;
  }
  tensor<double> by_reference(const tensor<double>& x) const {
    return by_reference(x, weight, bias, attention, causal);
  }

  template <class S>
  void run(in_sequence<S> x, out_sequence<S> out, attn::execution& exec) const {
    const tensor<S> w = cast<S>(weight), b = cast<S>(bias);
    if (attention) {
      const auto attend = full_attention<S>({.causal = causal});
      tensor<S> v(x.extent(0), 1, x.extent(1), x.extent(2));
      compiled_layers<S>::project(x, sequence(v), {.weight = matrix(w)}, exec);
      attend(attn::split_heads(x, 1), attn::split_heads(x, 1), view(std::as_const(v)), attn::split_heads(out, 1), exec);
      return;
    }
    compiled_layers<S>::project(x, out, {.weight = matrix(w), .bias = vector(b)}, exec);
    for (idx_t n = 0; n < out.extent(0); ++n)
      for (idx_t i = 0; i < out.extent(1); ++i)
        for (idx_t d = 0; d < out.extent(2); ++d) out(n, i, d) = std::tanh(out(n, i, d));
  }

  // dx from d_out, and what the weights get.
  template <class S>
  void run_backward(in_sequence<S> x, in_sequence<S> out, in_sequence<S> d_out, out_sequence<S> dx, tensor<S>& d_weight,
                    tensor<S>& d_bias, attn::execution& exec) const {
    const tensor<S> w = cast<S>(weight), b = cast<S>(bias);
    tensor<S> inner(x.extent(0), 1, x.extent(1), x.extent(2));  // the gradient of what was projected
    const attn::tensor_view<S, 2> to_weight(d_weight.data.data(), {w.length(), w.dim()});
    if (attention) {
      tensor<S> v = inner, dq = inner, dk = inner;
      compiled_layers<S>::project(x, sequence(v), {.weight = matrix(w)}, exec);
      const auto heads = [](const auto& s) { return attn::split_heads(s, 1); };
      compiled_full_softmax<S>::backward(heads(x), heads(x), view(std::as_const(v)), heads(out), heads(d_out),
                                         {.q = view(dq), .k = view(dk), .v = view(inner)}, {.causal = causal}, {}, {},
                                         exec);
      compiled_layers<S>::project_backward(x, {.weight = matrix(w)}, sequence(std::as_const(inner)),
                                           {.x = dx, .weight = to_weight}, exec);
      for (idx_t n = 0; n < dx.extent(0); ++n)
        for (idx_t i = 0; i < dx.extent(1); ++i)
          for (idx_t d = 0; d < dx.extent(2); ++d) dx(n, i, d) += dq(n, 0, i, d) + dk(n, 0, i, d);
      return;
    }
    for (idx_t n = 0; n < out.extent(0); ++n)
      for (idx_t i = 0; i < out.extent(1); ++i)
        for (idx_t d = 0; d < out.extent(2); ++d)
          inner(n, 0, i, d) = d_out(n, i, d) * (1 - out(n, i, d)) * (1 + out(n, i, d));
    compiled_layers<S>::project_backward(x, {.weight = matrix(w), .bias = vector(b)}, sequence(std::as_const(inner)),
                                         {.x = dx, .weight = to_weight, .bias = {d_bias.data.data(), {d_bias.dim()}}},
                                         exec);
  }
};

struct problem_of_layers {
  tensor<double> x;
  std::vector<function> f, g;
};

problem_of_layers read(const golden_case& golden) {
  problem_of_layers p;
  p.x = golden.array("x");
  p.x.extents = {p.x.extents[1], 1, p.x.extents[2], p.x.extents[3]};
  for (idx_t layer = 0; layer < golden.integer("layers"); ++layer)
    for (const char* which : {"f", "g"}) {
      const std::string kind = golden.text(which), name = which + std::to_string(layer);
      if (kind != "tanh" && kind != "attention") throw std::runtime_error("no function is called " + kind);
      (*which == 'f' ? p.f : p.g)
          .push_back({kind == "attention", golden.flag("causal", false), golden.array(name + "_w"),
                      golden.optional_array(name + "_b")});
    }
  return p;
}

// As the case has it: [batch, length, dim].
reference::result result_of(tensor<double> x) { return {as_read(std::move(x)), {}}; }

named_tensors case_by_reference(const golden_case& golden) {
  const problem_of_layers p = read(golden);
  gradient_case c{"", {"x"}, {p.x}, {}};
  for (std::size_t n = 0; n < p.f.size(); ++n)
    for (const auto& [which, f] : {std::pair<std::string, const function&>{"f", p.f[n]}, {"g", p.g[n]}}) {
      c.names.push_back(which + std::to_string(n) + "_w"), c.inputs.push_back(f.weight);
      c.names.push_back(which + std::to_string(n) + "_b"), c.inputs.push_back(f.bias);
    }
  c.forward = [&p](const std::vector<tensor<variable>>& x) {
    tensor<variable> y = x[0];
    for (std::size_t n = 0; n < p.f.size(); ++n) {
      const auto part = [&](const function& f, std::size_t at) {
        return
            [&x, &f, at](const auto& s) { return function::by_reference(s, x[at], x[at + 1], f.attention, f.causal); };
      };
      y = reference::reversible_block(y, part(p.f[n], 1 + 4 * n), part(p.g[n], 3 + 4 * n));
    }
    return std::vector{y};
  };
  named_tensors all = reverse_gradients(c, by_item(golden.array("d_out")));
  all["x"] = result_of(all["x"]).out;
  return all;
}

template <class S>
named_tensors case_by_library(const golden_case& golden) {
  const problem_of_layers p = read(golden);
  tensor<S> y = cast<S>(p.x), d = cast<S>(by_item(golden.array("d_out")));
  attn::execution serial;
  const auto mixer = [](const function& f) -> mixer_of<S> {
    return [&f](in_sequence<S> s, out_sequence<S> out, attn::execution& exec) { f.run<S>(s, out, exec); };
  };
  for (std::size_t n = 0; n < p.f.size(); ++n)
    compiled_layers<S>::reversible_block(sequence(std::as_const(y)), sequence(y), mixer(p.f[n]), mixer(p.g[n]), {},
                                         serial);
  named_tensors all;
  for (std::size_t n = p.f.size(); n-- > 0;) {
    tensor<S> weights[2] = {cast<S>(p.f[n].weight), cast<S>(p.g[n].weight)};
    tensor<S> biases[2] = {cast<S>(p.f[n].bias), cast<S>(p.g[n].bias)};
    const auto back = [&](const function& f, int which) -> mixer_backward_of<S> {
      return [&f, which, &weights, &biases](in_sequence<S> x, in_sequence<S> out, in_sequence<S> d_out,
                                            out_sequence<S> dx, attn::execution& exec) {
        f.run_backward<S>(x, out, d_out, dx, weights[which], biases[which], exec);
      };
    };
    compiled_layers<S>::reversible_block_backward(sequence(std::as_const(y)), sequence(y), mixer(p.f[n]), mixer(p.g[n]),
                                                  back(p.f[n], 0), back(p.g[n], 1), sequence(std::as_const(d)),
                                                  {.x = sequence(d)}, {}, serial);
    for (int which : {0, 1}) {
      const std::string name = "fg"[which] + std::to_string(n);
      all[name + "_w"] = cast<double>(weights[which]), all[name + "_b"] = cast<double>(biases[which]);
    }
  }
  all["x"] = result_of(cast<double>(d)).out;
  return all;
}

// There, and back again, where x must come out.
template <class S>
reference::result run_there_and_back(const golden_case& golden) {
  const problem_of_layers p = read(golden);
  const tensor<S> x = cast<S>(p.x);
  tensor<S> y = x;
  attn::execution serial;
  const auto mixer = [](const function& f) -> mixer_of<S> {
    return [&f](in_sequence<S> s, out_sequence<S> out, attn::execution& exec) { f.run<S>(s, out, exec); };
  };
  for (std::size_t n = 0; n < p.f.size(); ++n)
    compiled_layers<S>::reversible_block(sequence(std::as_const(y)), sequence(y), mixer(p.f[n]), mixer(p.g[n]), {},
                                         serial);
  tensor<S> back = y;
  for (std::size_t n = p.f.size(); n-- > 0;)
    compiled_layers<S>::reversible_block_inverse(sequence(std::as_const(back)), sequence(back), mixer(p.f[n]),
                                                 mixer(p.g[n]), {}, serial);
  if (!(relative_error(back, x) <= 1e3 * static_cast<double>(std::numeric_limits<S>::epsilon())))
    throw std::runtime_error("the inverse does not lead back to x");
  return result_of(cast<double>(y));
}

golden_operator golden_reversible() {
  std::set<std::string> arrays = {"x", "out"};
  for (int layer = 0; layer < 100; ++layer)
    for (const char* part : {"f_w", "f_b", "g_w", "g_b"}) {
      std::string name = part;
      arrays.insert(name.insert(1, std::to_string(layer)));
    }
  return {"reversible",
          {"operator", "source", "tolerance", "layers", "f", "g", "causal"},
          arrays,
          [](const golden_case& golden) {
            const problem_of_layers p = read(golden);
            tensor<double> y = p.x;
            for (std::size_t n = 0; n < p.f.size(); ++n)
              y = reference::reversible_block(
                  y, [&](const auto& s) { return p.f[n].by_reference(s); },
                  [&](const auto& s) { return p.g[n].by_reference(s); });
            return result_of(y);
          },
          run_there_and_back<widest_type>,
          run_there_and_back<float>,
          case_by_reference,
          case_by_library<widest_type>,
          case_by_library<float>};
}

const golden_entry entry(golden_reversible());

}  // namespace
}  // namespace testing::reversible_golden
