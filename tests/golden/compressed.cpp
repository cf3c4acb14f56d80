// Attention through keys that stand for several tokens, or that an indexer chooses, as models have it: DeepSeek-V4's
// (csa, hca, and joint, their softmax alone), MiniMax-M3's (msa) and Qwen3.8's (qsa). Each is composed once, of parts
// that are the references' or the library's.
#include <attn/core/rotary.hpp>
#include <attn/softmax/merge_softmax.hpp>

#include "golden/gradients.hpp"
#include "golden/indexer.hpp"
#include "layers/pooled_tokens.hpp"
#include "reference/selected_keys.hpp"
#include "support/call_layers.hpp"
#include "support/call_selected_keys.hpp"

namespace testing::compressed_golden {
namespace {

template <class N>
using arrays = std::map<std::string, tensor<N>>;  // by their names, those that are there
template <class N>
tensor<N> find(const arrays<N>& all, const std::string& name) {
  const auto at = all.find(name);
  return at == all.end() ? tensor<N>{} : at->second;
}
template <class To, class From>
arrays<To> cast_all(const arrays<From>& from) {
  arrays<To> to;
  for (const auto& [name, x] : from) to[name] = cast<To>(x);
  return to;
}

struct model {
  std::set<std::string> keys, inputs, fixed;  // gradients are known of the inputs
  bool lists;
  std::string name_of_lists{};
};
const std::map<std::string, model> models = {
    {"joint", {{"window", "span", "first_position", "scale"}, {"q", "k_near", "v_near", "k", "v", "sinks"}, {}, false}},
    {"hca",
     {{"span", "window", "rotary_dims", "rotary_base", "norm_eps"},
      {"q", "kv", "x", "logits", "bias", "norm", "sinks"},
      {},
      false}},
    {"csa",
     {{"span", "window", "topk", "rotary_dims", "rotary_base", "norm_eps"},
      {"q", "kv", "x", "logits", "bias", "norm", "sinks"},
      {"x_idx", "logits_idx", "bias_idx", "norm_idx", "q_idx", "w"},
      true,
      "indices"}},
    {"msa", {{"block", "topk", "local_blocks"}, {"q", "k", "v"}, {"q_idx", "k_idx"}, true, "block_indices"}},
    {"qsa",
     {{"block", "topk", "rotary_dims", "rotary_base", "norm_eps"},
      {"q", "k", "v"},
      {"q_idx", "k_idx", "norm_idx"},
      true,
      "block_indices"}}};

struct problem {
  std::string name;
  arrays<double> inputs, fixed;
  tensor<double> wanted_lists;
  idx_t span = 1, window = 0, block = 1;
  std::optional<double> scale;
  std::vector<idx_t> first;  // positions of the first queries, one or one for each item
  reference::indexer_options choice;
  reference::head_rotation rotation;
  double norm_eps = 0;

  idx_t first_of(idx_t b) const { return first[first.size() == 1 ? 0 : static_cast<std::size_t>(b)]; }
  // DeepSeek-V4's pairs are dims that follow each other, of the last ones.
  reference::head_rotation rotation_of(idx_t dim, idx_t step, bool back) const {
    auto r = rotation;
    r.begin = r.interleaved ? dim - r.dims : 0, r.step = step, r.back = back;
    return r;
  }
};

problem read(const golden_case& golden) {
  problem p;
  p.name = golden.text("operator");
  const model& m = models.at(p.name);
  if (!golden.flag("causal", false)) throw std::runtime_error(golden.name() + ": expected causal = true");
  for (const auto& x : m.inputs)
    if (golden.has_array(x)) p.inputs[x] = golden.array(x);
  for (const auto& x : m.fixed)
    if (golden.has_array(x)) p.fixed[x] = golden.array(x);
  if (m.lists) p.wanted_lists = golden.array(m.name_of_lists);
  const auto number = [&](const char* name, idx_t absent) { return golden.has(name) ? golden.integer(name) : absent; };
  p.span = number("span", number("block", 1)), p.block = number("block", 1), p.window = number("window", 0);
  if (golden.has("scale")) p.scale = golden.number("scale");
  p.first = golden.integers("first_position");
  const idx_t queries = p.inputs.at("q").length();
  if (p.first.empty()) p.first = {p.inputs.count("k") ? p.inputs.at("k").length() - queries : 0};
  if (golden.has("rotary_dims"))
    p.rotation = {
        .dims = golden.integer("rotary_dims"), .base = golden.number("rotary_base"), .interleaved = p.window > 0};
  if (golden.has("norm_eps")) p.norm_eps = golden.number("norm_eps");
  p.choice.causal = true, p.choice.topk = number("topk", 1), p.choice.w = find(p.fixed, "w");
  p.choice.first_position = p.first;
  if (p.name == "msa") {
    p.choice.scale = 1, p.choice.relu = false, p.choice.per_head = true, p.choice.block = p.block;
    p.choice.local_blocks = golden.integer("local_blocks");
  } else {
    p.choice.span = p.span, p.choice.tail = p.name == "qsa";
  }
  return p;
}

// The parts in double, or in `variable` -------------------------------------------------------------------------------

template <class N>
tensor<N> joined(const tensor<N>& x, const tensor<N>& y) {
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
  tensor<N> rotated(const tensor<N>& x, idx_t first, idx_t step = 1, bool back = false) const {
    auto r = p.rotation_of(x.dim(), step, back);
    r.first_position = first;
    return reference::rotated_heads(x, r);
  }
  tensor<idx_t> chosen(const tensor<N>& q, const tensor<N>& k) const {
    return reference::lightning_indexer(cast<double>(q), cast<double>(k), p.choice);
  }
  result selected(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<idx_t>& lists) const {
    reference::basic_selected_keys_options<N> o;
    o.causal = true, o.block = p.block, o.indices = lists, o.first_position = p.first[0];
    return reference::selected_keys(q, k, v, o);
  }
  // One softmax over the near keys and those behind them, which stand for several tokens.
  result joint(const tensor<N>& q, const tensor<N>& k_near, const tensor<N>& v_near, const tensor<N>& k,
               const tensor<N>& v, const tensor<N>& sinks, const tensor<idx_t>& lists) const {
    const idx_t near = k_near.length(), skipped = near - q.length();
    reference::basic_full_softmax_options<N> o;
    o.scale = p.scale, o.sinks = sinks.data, o.first_position = 0;
    o.score = [&](N s, idx_t b, idx_t h, idx_t i, idx_t j) {
      const idx_t at = i + skipped, c = j - near;
      const bool seen = c < 0 ? j <= at && j > at - p.window
                              : (c + 1) * p.span - 1 <= p.first_of(b) + i &&
                                    (lists.empty() || reference::names(lists, 1, q.heads(), k.heads(), b, h, i, c));
      return seen ? s : N(-reference::infinity);
    };
    return reference::full_softmax(q, joined(k_near, k), joined(v_near, v), o);
  }
};

// The parts of the library --------------------------------------------------------------------------------------------

template <class S>
struct of_library {
  using result = reference::basic_result<S>;
  const problem& p;
  mutable attn::execution exec{};

  static attn::tensor_view<S, 3> sequence(tensor<S>& x) { return {x.data.data(), {x.batch(), x.length(), x.dim()}}; }
  static in_vector<S> vector(const tensor<S>& x) {
    return x.empty() ? in_vector<S>{} : in_vector<S>(x.data.data(), {x.size()});
  }
  static in_view<S> in(const tensor<S>& x) { return view(x); }
  static attn::tensor_view<S, 3> lse_view(tensor<S>& x) { return {x.data.data(), {x.batch(), x.heads(), x.length()}}; }

  pooled_tokens_problem pooling(const tensor<S>& x, const tensor<S>& z, const tensor<S>& bias, bool overlap) const {
    return {cast<double>(x), cast<double>(z), cast<double>(bias), {.window = p.span, .overlap = overlap}};
  }
  tensor<S> pooled(const tensor<S>& x, const tensor<S>& z, const tensor<S>& bias, bool overlap) const {
    pooled_tokens_memory<S> m(pooling(x, z, bias, overlap));
    m.run(exec);
    return m.out;
  }
  tensor<S> normed(tensor<S> x, const tensor<S>& gamma) const {
    compiled_layers<S>::rms_norm(sequence(x), sequence(x), {.gamma = vector(gamma)}, {static_cast<S>(p.norm_eps)},
                                 exec);
    return x;
  }
  tensor<S> rotated(tensor<S> x, idx_t first, idx_t step = 1, bool back = false) const {
    const auto r = p.rotation_of(x.dim(), step, back);
    std::vector<idx_t> positions;
    for (idx_t i = 0; i < x.length(); ++i) positions.push_back(first + i * step);
    attn::rotary_options<S> o{.interleaved = r.interleaved, .base = r.base};
    o.positions = {positions.data(), {1, x.length()}};
    const auto part = view(x).slice(3, r.begin, r.dims);
    if (back)
      attn::rotary_backward(part, {.x = part}, o);
    else
      attn::rotary(part, part, o);
    return x;
  }
  tensor<idx_t> chosen(const tensor<S>& q, const tensor<S>& k) const { return chosen_by_library(q, k, p.choice); }

  typename compiled_selected_keys<S>::options selection(const tensor<idx_t>& lists) const {
    typename compiled_selected_keys<S>::options o;
    o.causal = true, o.indices = attn::tensor_view<const idx_t>(lists.data.data(), lists.extents);
    if (p.scale) o.scale = static_cast<S>(*p.scale);
    if (p.block > 1)
      o.block = p.block;
    else
      o.span = p.span, o.first_position = p.first;
    return o;
  }
  attn::full_softmax_options<S> all_pooled() const {
    attn::full_softmax_options<S> o{.causal = true, .first_position = p.first, .span = p.span};
    if (p.scale) o.scale = static_cast<S>(*p.scale);
    return o;
  }
  attn::sliding_window_options<S> near_window(const tensor<S>& sinks) const {
    attn::sliding_window_options<S> o{.causal = true, .left = p.window - 1};
    if (p.scale) o.scale = static_cast<S>(*p.scale);
    o.sinks = sinks.data;
    return o;
  }
  static result empty(const tensor<S>& q, const tensor<S>& v) { return reference::empty_result(q, v); }

  result selected(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, const tensor<idx_t>& lists) const {
    result r = empty(q, v);
    auto o = selection(lists);
    o.lse = lse_view(r.lse);
    compiled_selected_keys<S>::call(view(q), view(k), view(v), view(r.out), o, {}, exec);
    return r;
  }
  result joint(const tensor<S>& q, const tensor<S>& k_near, const tensor<S>& v_near, const tensor<S>& k,
               const tensor<S>& v, const tensor<S>& sinks, const tensor<idx_t>& lists) const {
    result near = empty(q, v_near), far = empty(q, v);
    auto window = near_window(sinks);
    window.lse = lse_view(near.lse);
    compiled_sliding_window<S>::call(view(q), view(k_near), view(v_near), view(near.out), window, {}, exec);
    if (!lists.empty()) {
      far = selected(q, k, v, lists);
    } else {
      auto o = all_pooled();
      o.lse = lse_view(far.lse);
      compiled_full_softmax<S>::call(view(q), view(k), view(v), view(far.out), o, {}, exec);
    }
    attn::merge_softmax(view(near.out), lse_view(near.lse), view(far.out), lse_view(far.lse));
    return near;
  }

  // g has room for the gradients.
  void selected_backward(const arrays<S>& x, const tensor<idx_t>& lists, result& r, const tensor<S>& d_out,
                         arrays<S>& g, bool accumulate) const {
    auto o = selection(lists);
    o.lse = lse_view(r.lse);
    compiled_selected_keys<S>::backward(
        view(x.at("q")), view(x.at("k")), view(x.at("v")), in(r.out), view(d_out),
        {.q = view(g["q"]), .k = view(g["k"]), .v = view(g["v"]), .accumulate = accumulate}, o, {}, {}, exec);
  }
  // Of the merged result: the gradients of either part with the merged out and lse.
  void joint_backward(const arrays<S>& x, const tensor<idx_t>& lists, result& r, const tensor<S>& d_out,
                      arrays<S>& g) const {
    const tensor<S> sinks = find(x, "sinks");
    auto window = near_window(sinks);
    window.lse = lse_view(r.lse);
    compiled_sliding_window<S>::backward(view(x.at("q")), view(x.at("k_near")), view(x.at("v_near")), in(r.out),
                                         view(d_out),
                                         {.q = view(g["q"]),
                                          .k = view(g["k_near"]),
                                          .v = view(g["v_near"]),
                                          .sinks = attn::tensor_view<S, 1>(g["sinks"].data.data(), {sinks.size()})},
                                         window, {}, {}, exec);
    for (const char* name : {"k", "v"}) std::fill(g[name].data.begin(), g[name].data.end(), S(0));
    if (!lists.empty()) return selected_backward(x, lists, r, d_out, g, true);
    auto o = all_pooled();
    o.lse = lse_view(r.lse);
    compiled_full_softmax<S>::backward(view(x.at("q")), view(x.at("k")), view(x.at("v")), in(r.out), view(d_out),
                                       {.q = view(g["q"]), .k = view(g["k"]), .v = view(g["v"]), .accumulate = true}, o,
                                       {}, {}, exec);
  }
  // From those of keys to those of what they are pooled from.
  void pooled_backward(const arrays<S>& x, bool overlap, tensor<S> d_keys, arrays<S>& g) const {
    std::vector<tensor<S>> from{x.at("x")};
    std::vector<tensor<S>*> to{&g["x"]};
    for (const char* name : {"logits", "bias"})
      if (x.count(name)) from.push_back(x.at(name)), to.push_back(&g[name]);
    tensor<S> tokens = pooled(x.at("x"), find(x, "logits"), find(x, "bias"), overlap), d_tokens = tokens;
    d_keys = rotated(d_keys, 0, p.span, true);
    attn::rms_norm_gradients<S> of_norm{.x = sequence(d_tokens)};
    if (x.count("norm")) of_norm.gamma = attn::tensor_view<S, 1>(g["norm"].data.data(), {g["norm"].size()});
    compiled_layers<S>::rms_norm_backward(sequence(tokens), {.gamma = vector(find(x, "norm"))}, sequence(d_keys),
                                          of_norm, {static_cast<S>(p.norm_eps)}, exec);
    pooled_tokens_gradients_of<S>(pooling(x.at("x"), find(x, "logits"), find(x, "bias"), overlap), from, d_tokens, to,
                                  false, exec);
  }
};

// The models ----------------------------------------------------------------------------------------------------------

// Keys that stand for p.span tokens each.
template <class Parts, class N>
tensor<N> pooled_keys(const Parts& parts, const tensor<N>& x, const tensor<N>& z, const tensor<N>& bias,
                      const tensor<N>& gamma, bool overlap) {
  return parts.rotated(parts.normed(parts.pooled(x, z, bias, overlap), gamma), 0, parts.p.span);
}

// What queries choose, which is a constant.
template <class N, template <class> class Parts>
tensor<idx_t> lists_of(const Parts<N>& parts) {
  const problem& p = parts.p;
  if (p.wanted_lists.empty()) return {};
  const arrays<N> x = cast_all<N>(p.fixed);
  tensor<N> q = x.at("q_idx"), k = find(x, "k_idx");
  if (p.name == "csa")
    k = pooled_keys(parts, x.at("x_idx"), find(x, "logits_idx"), find(x, "bias_idx"), find(x, "norm_idx"), true);
  if (p.name == "qsa") k = pooled_keys(parts, k, {}, {}, find(x, "norm_idx"), false);
  if (p.rotation.dims > 0) q = parts.rotated(q, p.first[0]);
  const tensor<idx_t> lists = parts.chosen(q, k);
  if (cast<double>(lists).data != p.wanted_lists.data) throw std::runtime_error("others are chosen");
  return lists;
}

// What the softmax is over: the arrays of joint.
template <class N, template <class> class Parts>
arrays<N> attended(const Parts<N>& parts, const arrays<N>& x) {
  if (!x.count("kv")) return x;
  arrays<N> y = {{"q", parts.rotated(x.at("q"), 0)}, {"k_near", parts.rotated(x.at("kv"), 0)}};
  if (x.count("sinks")) y["sinks"] = x.at("sinks");
  y["v_near"] = y["k_near"];
  y["v"] = y["k"] =
      pooled_keys(parts, x.at("x"), find(x, "logits"), find(x, "bias"), find(x, "norm"), parts.p.name == "csa");
  return y;
}
template <class N, template <class> class Parts>
reference::basic_result<N> softmax(const Parts<N>& parts, const arrays<N>& y, const tensor<idx_t>& lists) {
  if (parts.p.window == 0) return parts.selected(y.at("q"), y.at("k"), y.at("v"), lists);
  return parts.joint(y.at("q"), y.at("k_near"), y.at("v_near"), y.at("k"), y.at("v"), find(y, "sinks"), lists);
}
template <class N, template <class> class Parts>
reference::basic_result<N> composed(const Parts<N>& parts, const arrays<N>& x, const tensor<idx_t>& lists) {
  auto r = softmax(parts, attended(parts, x), lists);
  if (x.count("kv")) r.out = parts.rotated(r.out, 0, 1, true);
  return r;
}

template <class S>
reference::result by_library(const golden_case& golden) {
  const problem p = read(golden);
  const of_library<S> parts{p};
  const auto r = composed(parts, cast_all<S>(p.inputs), lists_of(parts));
  return {cast<double>(r.out), cast<double>(r.lse)};
}

template <class S>
named_tensors gradients_by_library(const problem& p, const tensor<double>& d_results) {
  const of_library<S> parts{p};
  const arrays<S> x = cast_all<S>(p.inputs), y = attended(parts, x);
  const tensor<idx_t> lists = lists_of(parts);
  arrays<S> g = x, of_softmax = y;
  auto r = softmax(parts, y, lists);
  const tensor<S> d = cast<S>(d_results), d_out = x.count("kv") ? parts.rotated(d, 0) : d;
  if (p.window == 0)
    parts.selected_backward(y, lists, r, d_out, of_softmax, false);
  else
    parts.joint_backward(y, lists, r, d_out, of_softmax);
  if (!x.count("kv")) return cast_all<double>(of_softmax);
  g["q"] = parts.rotated(of_softmax["q"], 0, 1, true), g["sinks"] = of_softmax["sinks"];
  g["kv"] = parts.rotated(reference::sum(of_softmax["k_near"], of_softmax["v_near"]), 0, 1, true);
  parts.pooled_backward(x, p.name == "csa", reference::sum(of_softmax["k"], of_softmax["v"]), g);
  return cast_all<double>(g);
}

gradient_case as_case(const problem& p) {
  gradient_case c;
  for (const auto& [name, x] : p.inputs) c.names.push_back(name), c.inputs.push_back(x);
  c.forward = [p, names = c.names](const std::vector<tensor<variable>>& in) {
    arrays<variable> x;
    for (std::size_t n = 0; n < in.size(); ++n) x[names[n]] = in[n];
    return std::vector{composed(of_references<variable>{p}, x, lists_of(of_references<double>{p})).out};
  };
  return c;
}

golden_operator entry_of(const std::string& name) {
  const model& m = models.at(name);
  auto arrays_of = with(with(m.inputs, m.fixed), {"out", "lse"});
  if (m.lists) arrays_of.insert(m.name_of_lists);
  return with_gradients({.name = name,
                         .keys = with(m.keys, {"operator", "source", "tolerance", "causal"}),
                         .arrays = arrays_of,
                         .by_reference = [](const golden_case& golden) -> reference::result {
                           const problem p = read(golden);
                           const of_references<double> parts{p};
                           return composed(parts, p.inputs, lists_of(parts));
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

}  // namespace
}  // namespace testing::compressed_golden
