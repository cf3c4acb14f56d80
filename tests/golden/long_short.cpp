#include "golden/gradients.hpp"
#include "support/run_long_short.hpp"

namespace testing::long_short_golden {
namespace {

long_short_problem read(const golden_case& golden) {
  long_short_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  auto& o = p.options;
  read_softmax_options(golden, o);
  o.left = golden.integer("left"), o.right = golden.integer("right");
  if (golden.has("block")) o.block = golden.integer("block");
  if (golden.has("segment")) o.segment = golden.integer("segment");
  if (golden.has("norm_eps")) o.norm_eps = golden.number("norm_eps");
  o.logits = golden.array("logits");
  o.local_gamma = golden.vector("local_gamma"), o.local_beta = golden.vector("local_beta");
  o.global_gamma = golden.vector("global_gamma"), o.global_beta = golden.vector("global_beta");
  return p;
}

// The lists of a case that have gradients, by their names.
template <class Options>
std::vector<std::pair<std::string, decltype(&std::declval<Options&>().local_gamma)>> lists(Options& o) {
  return {{"local_gamma", &o.local_gamma},
          {"local_beta", &o.local_beta},
          {"global_gamma", &o.global_gamma},
          {"global_beta", &o.global_beta}};
}

named_tensors case_by_reference(const golden_case& golden) {
  long_short_problem p = read(golden);
  gradient_case c{"", {"q", "k", "v", "logits"}, {p.q, p.k, p.v, p.options.logits}, {}};
  for (const auto& [name, list] : lists(p.options)) {
    c.names.push_back(name), c.inputs.emplace_back(1, 1, 1, std::ssize(*list));
    c.inputs.back().data = *list;
  }
  c.forward = [&p](const std::vector<tensor<variable>>& x) {
    reference::basic_long_short_options<variable> o;
    reference::copy_choices(p.options, o);
    o.left = p.options.left, o.right = p.options.right, o.block = p.options.block, o.segment = p.options.segment;
    o.norm_eps = p.options.norm_eps, o.logits = x[3];
    for (std::size_t at = 4; const auto& [name, list] : lists(o)) *list = x[at++].data;
    return std::vector{reference::long_short(x[0], x[1], x[2], o).out};
  };
  return reverse_gradients(c, golden.array("d_out"));
}

template <class T>
named_tensors case_by_library(const golden_case& golden) {
  long_short_problem p = read(golden);
  common_softmax_options<T, attn::long_short_options<T>> stored(p.options);
  auto& o = stored.options;
  o.left = p.options.left, o.right = p.options.right, o.block = p.options.block, o.segment = p.options.segment;
  o.norm_eps = static_cast<T>(p.options.norm_eps);
  const tensor<T> q = cast<T>(p.q), k = cast<T>(p.k), v = cast<T>(p.v), logits = cast<T>(p.options.logits),
                  out = cast<T>(golden.array("out")), d_out = cast<T>(golden.array("d_out"));
  tensor<T> dq = q, dk = k, dv = v, d_logits = logits;
  attn::long_short_gradients<T> g{.q = view(dq), .k = view(dk), .v = view(dv), .logits = view(d_logits)};
  std::map<std::string, std::vector<T>> values, gradients;
  for (const auto& [name, list] : lists(p.options))
    if (!list->empty()) values[name] = gradients[name] = cast<T>(*list);
  for (const auto& [name, to] : lists(o)) *to = values[name];
  for (const auto& [name, to] : lists(g))
    if (!gradients[name].empty()) *to = gradients[name];
  attn::execution serial;
  compiled_long_short<T>::backward(view(q), view(k), view(v), view(out), view(logits), view(d_out), g, o, serial);
  named_tensors all{
      {"q", cast<double>(dq)}, {"k", cast<double>(dk)}, {"v", cast<double>(dv)}, {"logits", cast<double>(d_logits)}};
  for (const auto& [name, list] : gradients) {
    all[name] = tensor<double>(1, 1, 1, std::ssize(list));
    all[name].data = cast<double>(list);
  }
  return all;
}

golden_operator golden_long_short() {
  return {"long_short",
          with(softmax_keys, {"left", "right", "rank", "segment", "block", "norm_eps"}),
          with(softmax_arrays, {"logits", "local_gamma", "local_beta", "global_gamma", "global_beta"}),
          [](const golden_case& golden) {
            const long_short_problem p = read(golden);
            return reference::long_short(p.q, p.k, p.v, p.options);
          },
          [](const golden_case& golden) { return run_long_short<widest_type>(read(golden)); },
          [](const golden_case& golden) { return run_long_short<float>(read(golden)); },
          case_by_reference,
          case_by_library<widest_type>,
          case_by_library<float>};
}

const golden_entry entry(golden_long_short());

}  // namespace
}  // namespace testing::long_short_golden
