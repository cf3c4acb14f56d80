// Attention to keys that stand for several tokens, or that an indexer chooses, as models have it: DeepSeek-V4's (csa,
// hca, and joint, their softmax alone), MiniMax-M3's (msa) and Qwen3.8's (qsa). They are composed once, of parts that
// are the references' or the library's.
#include <attn/core/rotary.hpp>
#include <attn/softmax/merge_softmax.hpp>

#include "golden/gradients.hpp"
#include "golden/indexer.hpp"
#include "layers/pooled_tokens.hpp"
#include "reference/selected_keys.hpp"
#include "support/call_layers.hpp"
#include "support/call_selected_keys.hpp"

namespace testing::compressed_golden { namespace {

using lists = tensor<idx_t>;
template <class N>
using arrays = std::map<std::string, tensor<N>>;  // by their names, those that are given
template <class N>
tensor<N> find(const arrays<N>& all, const std::string& name) {
  return all.count(name) ? all.at(name) : tensor<N>{};
}
template <class To, class From>
arrays<To> cast_all(const arrays<From>& from) {
  arrays<To> to;
  for (const auto& [name, x] : from) to[name] = cast<To>(x);
  return to;
}

struct model {
  std::set<std::string> keys, inputs, fixed;  // gradients are known of the inputs
  std::string chosen{};                       // the name of the lists
};
const std::set<std::string> pooling_keys = {"span", "window", "rotary_dims", "rotary_base", "norm_eps"};
const std::set<std::string> pooling_inputs = {"q", "kv", "x", "logits", "bias", "norm", "sinks"};
const std::map<std::string, model> models = {
    {"joint", {{"window", "span", "first_position", "scale"}, {"q", "k_near", "v_near", "k", "v", "sinks"}, {}}},
    {"hca", {pooling_keys, pooling_inputs, {}}},
    {"csa",
     {with(pooling_keys, {"topk"}),
      pooling_inputs,
      {"x_idx", "logits_idx", "bias_idx", "norm_idx", "q_idx", "w"},
      "indices"}},
    {"msa", {{"block", "topk", "local_blocks"}, {"q", "k", "v"}, {"q_idx", "k_idx"}, "block_indices"}},
    {"qsa",
     {{"block", "topk", "rotary_dims", "rotary_base", "norm_eps"},
      {"q", "k", "v"},
      {"q_idx", "k_idx", "norm_idx"},
      "block_indices"}}};

struct problem {
  std::string name;
  arrays<double> inputs, fixed;
  tensor<double> wanted_lists;
  idx_t span, window, block;
  std::optional<double> scale;
  std::vector<idx_t> first;  // positions of the first queries, one or one for each item
  reference::indexer_options choice;
  reference::head_rotation rotation;
  double norm_eps;

  idx_t first_of(idx_t b) const { return first[first.size() == 1 ? 0 : static_cast<std::size_t>(b)]; }
  // DeepSeek-V4's pairs are neighbours, among the last dims.
  reference::head_rotation rotation_of(idx_t dim, idx_t begin, idx_t step, bool back) const {
    auto r = rotation;
    r.begin = r.interleaved ? dim - r.dims : 0, r.first_position = begin, r.step = step, r.back = back;
    return r;
  }
};

problem read(const golden_case& golden) {
  problem p{};
  p.name = golden.text("operator");
  const model& m = models.at(p.name);
  if (!golden.flag("causal", false)) throw std::runtime_error(golden.name() + ": expected causal = true");
  for (const auto& x : m.inputs)
    if (golden.has_array(x)) p.inputs[x] = golden.array(x);
  for (const auto& x : m.fixed)
    if (golden.has_array(x)) p.fixed[x] = golden.array(x);
  if (!m.chosen.empty()) p.wanted_lists = golden.array(m.chosen);
  const auto number = [&](const char* name, idx_t absent) { return golden.has(name) ? golden.integer(name) : absent; };
  p.block = number("block", 1), p.span = number("span", p.block), p.window = number("window", 0);
  if (golden.has("scale")) p.scale = golden.number("scale");
  p.first = golden.integers("first_position");
  if (p.first.empty()) p.first = {p.window > 0 ? 0 : p.inputs.at("k").length() - p.inputs.at("q").length()};
  if (golden.has("rotary_dims"))
    p.rotation = {.dims = golden.integer("rotary_dims"), .base = golden.number("rotary_base")};
  p.rotation.interleaved = p.window > 0;
  if (golden.has("norm_eps")) p.norm_eps = golden.number("norm_eps");
  p.choice.causal = true, p.choice.topk = number("topk", 1), p.choice.w = find(p.fixed, "w");
  p.choice.first_position = p.first;
  if (p.name == "msa") {
    p.choice.scale = 1, p.choice.relu = false, p.choice.per_head = true;
    p.choice.block = p.block, p.choice.local_blocks = golden.integer("local_blocks");
  } else {
    p.choice.span = p.span, p.choice.tail = p.name == "qsa";
  }
  return p;
}

// The parts that are references; N is double or variable --------------------------------------------------------------

template <class N>
tensor<N> one_after_another(const tensor<N>& x, const tensor<N>& y) {
  tensor<N> all(x.batch(), x.heads(), x.length() + y.length(), x.dim());
  for (idx_t b = 0; b < all.batch(); ++b)
    for (idx_t h = 0; h < all.heads(); ++h)
      for (idx_t i = 0; i < all.length(); ++i)
        for (idx_t d = 0; d < all.dim(); ++d)
          all(b, h, i, d) = i < x.length() ? x(b, h, i, d) : y(b, h, i - x.length(), d);
  return all;
}

template <class N>
struct of_references {
  using result = reference::basic_result<N>;
  const problem& p;

  tensor<N> pooled(const tensor<N>& x, const tensor<N>& z, const tensor<N>& bias, bool overlap) const {
    return reference::pooled_tokens(x, z, bias, {.window = p.span, .overlap = overlap});
  }
  tensor<N> normed(const tensor<N>& x, const tensor<N>& gamma) const {
    return reference::rms_norm(x, gamma, p.norm_eps);
  }
  tensor<N> rotated(const tensor<N>& x, idx_t begin, idx_t step = 1, bool back = false) const {
    return reference::rotated_heads(x, p.rotation_of(x.dim(), begin, step, back));
  }
  lists choose(const tensor<N>& q, const tensor<N>& k) const {
    return reference::lightning_indexer(cast<double>(q), cast<double>(k), p.choice);
  }
  result selected(const arrays<N>& x, const lists& chosen) const {
    reference::basic_selected_keys_options<N> o;
    o.causal = true, o.block = p.block, o.indices = chosen;
    return reference::selected_keys(x.at("q"), x.at("k"), x.at("v"), o);
  }
  // One softmax over the near keys and, behind them, those that stand for several tokens.
  result joint(const arrays<N>& x, const lists& chosen) const {
    const idx_t near = x.at("k_near").length(), heads = x.at("q").heads(), kv_heads = x.at("k").heads();
    reference::basic_full_softmax_options<N> o;
    o.scale = p.scale, o.sinks = find(x, "sinks").data, o.first_position = 0;
    o.score = [&, skipped = near - x.at("q").length()](N s, idx_t b, idx_t h, idx_t i, idx_t j) {
      const idx_t at = i + skipped, c = j - near;
      const bool seen = c < 0 ? j <= at && j > at - p.window
                              : (c + 1) * p.span - 1 <= i + p.first_of(b) &&
                                    (chosen.empty() || reference::names(chosen, 1, heads, kv_heads, b, h, i, c));
      return seen ? s : N(-reference::infinity);
    };
    return reference::full_softmax(x.at("q"), one_after_another(x.at("k_near"), x.at("k")),
                                   one_after_another(x.at("v_near"), x.at("v")), o);
  }
};

// The parts of the library --------------------------------------------------------------------------------------------

template <class S>
attn::tensor_view<S, 3> lse_view(tensor<S>& x) {
  return {x.data.data(), {x.batch(), x.heads(), x.length()}};
}
template <class S>
attn::tensor_view<S, 1> list(tensor<S>& x) {
  return {x.data.data(), {x.size()}};
}

template <class S>
struct of_library {
  using result = reference::basic_result<S>;
  const problem& p;
  mutable attn::execution exec{};

  pooled_tokens_problem pooling(const tensor<S>& x, const tensor<S>& z, const tensor<S>& bias, bool overlap) const {
    return {cast<double>(x), cast<double>(z), cast<double>(bias), {.window = p.span, .overlap = overlap}};
  }
  tensor<S> pooled(const tensor<S>& x, const tensor<S>& z, const tensor<S>& bias, bool overlap) const {
    pooled_tokens_memory<S> m(pooling(x, z, bias, overlap));
    m.run(exec);
    return m.out;
  }
  attn::rms_norm_options<S> eps() const { return {static_cast<S>(p.norm_eps)}; }
  tensor<S> normed(tensor<S> x, tensor<S> gamma) const {
    compiled_layers<S>::rms_norm(sequence(x), sequence(x), {.gamma = list(gamma)}, eps(), exec);
    return x;
  }
  tensor<S> rotated(tensor<S> x, idx_t begin, idx_t step = 1, bool back = false) const {
    const auto r = p.rotation_of(x.dim(), begin, step, back);
    std::vector<idx_t> positions;
    for (idx_t i = 0; i < x.length(); ++i) positions.push_back(begin + i * step);
    attn::rotary_options<S> o{.interleaved = r.interleaved, .base = r.base};
    o.positions = {positions.data(), {1, x.length()}};
    const auto part = view(x).slice(3, r.begin, r.dims);
    back ? attn::rotary_backward(part, {.x = part}, o) : attn::rotary(part, part, o);
    return x;
  }
  lists choose(const tensor<S>& q, const tensor<S>& k) const { return chosen_by_library(q, k, p.choice); }

  // The options of each softmax, with its lse.
  template <class Options>
  Options options(tensor<S>& lse) const {
    Options o{};
    o.causal = true, o.lse = lse_view(lse);
    if (p.scale) o.scale = static_cast<S>(*p.scale);
    if constexpr (requires { o.span; })
      if (p.window > 0) o.span = p.span, o.first_position = p.first;
    return o;
  }
  auto of_window(tensor<S>& lse, const tensor<S>& sinks) const {
    auto o = options<attn::sliding_window_options<S>>(lse);
    o.left = p.window - 1, o.sinks = sinks.data;
    return o;
  }
  auto of_lists(tensor<S>& lse, const lists& chosen) const {
    auto o = options<typename compiled_selected_keys<S>::options>(lse);
    o.block = p.block, o.indices = attn::tensor_view<const idx_t>(chosen.data.data(), chosen.extents);
    return o;
  }

  result selected(const arrays<S>& x, const lists& chosen) const {
    result r = reference::empty_result(x.at("q"), x.at("v"));
    compiled_selected_keys<S>::call(view(x.at("q")), view(x.at("k")), view(x.at("v")), view(r.out),
                                    of_lists(r.lse, chosen), {}, exec);
    return r;
  }
  result joint(const arrays<S>& x, const lists& chosen) const {
    const tensor<S>&q = x.at("q"), sinks = find(x, "sinks");
    result r = reference::empty_result(q, x.at("v")), far = r;
    compiled_sliding_window<S>::call(view(q), view(x.at("k_near")), view(x.at("v_near")), view(r.out),
                                     of_window(r.lse, sinks), {}, exec);
    if (!chosen.empty())
      far = selected(x, chosen);
    else
      compiled_full_softmax<S>::call(view(q), view(x.at("k")), view(x.at("v")), view(far.out),
                                     options<attn::full_softmax_options<S>>(far.lse), {}, exec);
    attn::merge_softmax(view(r.out), lse_view(r.lse), view(far.out), lse_view(far.lse));
    return r;
  }

  // The gradients, to g, which has room for them.
  void selected_backward(const arrays<S>& x, const lists& chosen, result& r, const tensor<S>& d_out, arrays<S>& g,
                         bool accumulate = false) const {
    compiled_selected_keys<S>::backward(
        view(x.at("q")), view(x.at("k")), view(x.at("v")), view(std::as_const(r.out)), view(d_out),
        {.q = view(g["q"]), .k = view(g["k"]), .v = view(g["v"]), .accumulate = accumulate}, of_lists(r.lse, chosen),
        {}, {}, exec);
  }
  // Those of either part with the merged out and lse add up to those of the merged result.
  void joint_backward(const arrays<S>& x, const lists& chosen, result& r, const tensor<S>& d_out, arrays<S>& g) const {
    const in_view<S> q = view(x.at("q")), out = view(r.out);
    const tensor<S> sinks = find(x, "sinks");
    attn::sliding_window_gradients<S> near{.q = view(g["q"]), .k = view(g["k_near"]), .v = view(g["v_near"])};
    near.sinks = list(g["sinks"]);
    compiled_sliding_window<S>::backward(q, view(x.at("k_near")), view(x.at("v_near")), out, view(d_out), near,
                                         of_window(r.lse, sinks), {}, {}, exec);
    for (const char* name : {"k", "v"}) g[name].data.assign(g[name].data.size(), S(0));
    if (!chosen.empty()) return selected_backward(x, chosen, r, d_out, g, true);
    compiled_full_softmax<S>::backward(q, view(x.at("k")), view(x.at("v")), out, view(d_out),
                                       {.q = view(g["q"]), .k = view(g["k"]), .v = view(g["v"]), .accumulate = true},
                                       options<attn::full_softmax_options<S>>(r.lse), {}, {}, exec);
  }
  void pooled_backward(const arrays<S>& x, bool overlap, tensor<S> d_keys, arrays<S>& g) const {
    std::vector<tensor<S>> in{x.at("x")};
    std::vector<tensor<S>*> to{&g["x"]};
    for (const char* name : {"logits", "bias"})
      if (x.count(name)) in.push_back(x.at(name)), to.push_back(&g[name]);
    tensor<S> tokens = pooled(in[0], find(x, "logits"), find(x, "bias"), overlap), d_tokens = tokens;
    tensor<S> gamma = find(x, "norm");
    d_keys = rotated(d_keys, 0, p.span, true);
    compiled_layers<S>::rms_norm_backward(sequence(tokens), {.gamma = list(gamma)}, sequence(d_keys),
                                          {.x = sequence(d_tokens), .gamma = list(g["norm"])}, eps(), exec);
    pooled_tokens_gradients_of<S>(pooling(in[0], find(x, "logits"), find(x, "bias"), overlap), in, d_tokens, to, false,
                                  exec);
  }
};

// The models ----------------------------------------------------------------------------------------------------------

// Keys that stand for span tokens each: of arrays x, logits, bias and norm, and what follows their names.
template <class N, template <class> class Parts>
tensor<N> pooled_keys(const Parts<N>& parts, const arrays<N>& x, bool overlap, const std::string& suffix = "") {
  const tensor<N> tokens = x.count("x" + suffix) ? x.at("x" + suffix) : x.at("k" + suffix);
  const tensor<N> pooled = parts.pooled(tokens, find(x, "logits" + suffix), find(x, "bias" + suffix), overlap);
  return parts.rotated(parts.normed(pooled, find(x, "norm" + suffix)), 0, parts.p.span);
}

// What the queries choose, which is a constant.
template <class N, template <class> class Parts>
lists choose(const Parts<N>& parts) {
  const problem& p = parts.p;
  if (p.wanted_lists.empty()) return {};
  const arrays<N> x = cast_all<N>(p.fixed);
  const lists chosen = p.name == "msa" ? parts.choose(x.at("q_idx"), x.at("k_idx"))
                                       : parts.choose(parts.rotated(x.at("q_idx"), p.first[0]),
                                                      pooled_keys(parts, x, p.name == "csa", "_idx"));
  if (cast<double>(chosen).data != p.wanted_lists.data) throw std::runtime_error("other keys are chosen");
  return chosen;
}

// The arrays of the softmax, those of joint.
template <class N, template <class> class Parts>
arrays<N> attended(const Parts<N>& parts, const arrays<N>& x) {
  if (!x.count("kv")) return x;
  const tensor<N> near = parts.rotated(x.at("kv"), 0), keys = pooled_keys(parts, x, parts.p.name == "csa");
  return {{"q", parts.rotated(x.at("q"), 0)}, {"k_near", near}, {"v_near", near}, {"k", keys}, {"v", keys},
          {"sinks", find(x, "sinks")}};
}
template <class N, template <class> class Parts>
reference::basic_result<N> softmax(const Parts<N>& parts, const arrays<N>& y, const lists& chosen) {
  return parts.p.window > 0 ? parts.joint(y, chosen) : parts.selected(y, chosen);
}
template <class N, template <class> class Parts>
reference::basic_result<N> composed(const Parts<N>& parts, const arrays<N>& x, const lists& chosen) {
  auto r = softmax(parts, attended(parts, x), chosen);
  if (x.count("kv")) r.out = parts.rotated(r.out, 0, 1, true);
  return r;
}

template <class S>
reference::result by_library(const golden_case& golden) {
  const problem p = read(golden);
  const of_library<S> parts{p};
  const auto r = composed(parts, cast_all<S>(p.inputs), choose(parts));
  return {cast<double>(r.out), cast<double>(r.lse)};
}

template <class S>
named_tensors gradients_by_library(const problem& p, const tensor<double>& d_results) {
  const of_library<S> parts{p};
  const arrays<S> x = cast_all<S>(p.inputs), y = attended(parts, x);
  const lists chosen = choose(parts);
  const bool rotates = x.count("kv") > 0;
  auto r = softmax(parts, y, chosen);
  const tensor<S> d = cast<S>(d_results), d_out = rotates ? parts.rotated(d, 0) : d;
  arrays<S> dy = y, g = x;
  if (p.window > 0)
    parts.joint_backward(y, chosen, r, d_out, dy);
  else
    parts.selected_backward(y, chosen, r, d_out, dy);
  if (!rotates) return cast_all<double>(dy);
  g["q"] = parts.rotated(dy["q"], 0, 1, true), g["sinks"] = dy["sinks"];
  g["kv"] = parts.rotated(reference::sum(dy["k_near"], dy["v_near"]), 0, 1, true);
  parts.pooled_backward(x, p.name == "csa", reference::sum(dy["k"], dy["v"]), g);
  return cast_all<double>(g);
}

gradient_case as_case(const problem& p) {
  gradient_case c;
  for (const auto& [name, x] : p.inputs) c.names.push_back(name), c.inputs.push_back(x);
  c.forward = [p, names = c.names](const std::vector<tensor<variable>>& in) {
    arrays<variable> x;
    for (std::size_t n = 0; n < in.size(); ++n) x[names[n]] = in[n];
    return std::vector{composed(of_references<variable>{p}, x, choose(of_references<double>{p})).out};
  };
  return c;
}

golden_operator entry_of(const std::string& name) {
  const model& m = models.at(name);
  auto names = with(with(m.inputs, m.fixed), {"out", "lse"});
  if (!m.chosen.empty()) names.insert(m.chosen);
  return with_gradients({.name = name,
                         .keys = with(m.keys, {"operator", "source", "tolerance", "causal"}),
                         .arrays = names,
                         .by_reference = [](const golden_case& golden) -> reference::result {
                           const problem p = read(golden);
                           const of_references<double> parts{p};
                           return composed(parts, p.inputs, choose(parts));
                         },
                         .in_double = by_library<widest_type>,
                         .in_float = by_library<float>},
                        read, as_case, [](const problem& p, const tensor<double>& d_out, auto zero) {
                          return gradients_by_library<decltype(zero)>(p, d_out);
                        });
}

const golden_entry entries[] = {golden_entry(entry_of("joint")), golden_entry(entry_of("hca")),
                                golden_entry(entry_of("csa")), golden_entry(entry_of("msa")),
                                golden_entry(entry_of("qsa"))};

}}  // namespace testing::compressed_golden
