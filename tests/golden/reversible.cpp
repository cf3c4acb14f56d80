#include "golden/operators.hpp"
#include "layers/layers.hpp"

namespace testing {
namespace {

// f or g of one layer: tanh(x W^T + b), or attention with q = k = x and v = x W^T.
struct function {
  bool attention, causal;
  tensor<double> weight, bias;

  tensor<double> by_reference(const tensor<double>& x) const {
    if (attention) {
      reference::full_softmax_options options;
      options.causal = causal;
      return reference::full_softmax(x, x, reference::project(x, weight), options).out;
    }
    tensor<double> out = reference::project(x, weight, bias);
    for (double& value : out.data) value = std::tanh(value);
    return out;
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
    for (index n = 0; n < out.extent(0); ++n)
      for (index i = 0; i < out.extent(1); ++i)
        for (index d = 0; d < out.extent(2); ++d) out(n, i, d) = std::tanh(out(n, i, d));
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
  for (index layer = 0; layer < golden.integer("layers"); ++layer)
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
reference::result result_of(tensor<double> x) {
  x.extents = {1, x.extents[0], x.extents[2], x.extents[3]};
  return {x, {}};
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

}  // namespace

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
          run_there_and_back<double>,
          run_there_and_back<float>};
}

}  // namespace testing
