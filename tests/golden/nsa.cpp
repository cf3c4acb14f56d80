// Native sparse attention is no operator: full_softmax over the means of blocks, selected_keys and sliding_window, each
// times a gate, composed as in examples/20_native_sparse_attention.cpp.
#include <attn/softmax/attention_weights.hpp>

#include <unistd.h>

#include "golden/gradients.hpp"
#include "reference/selected_keys.hpp"
#include "support/call_selected_keys.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"

namespace testing::nsa_golden {
namespace {

const char* const gates[] = {"g_cmp", "g_slc", "g_swa"};

struct nsa_problem {
  tensor<double> q, k, v, gate[3];  // without a window the last one may be missing
  idx_t block, count, window;
  std::optional<double> scale;
  tensor<double> wanted_blocks;
};

nsa_problem read(const golden_case& golden) {
  if (!golden.flag("causal", true)) throw std::runtime_error(golden.name() + ": nsa is causal");
  nsa_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}, golden.integer("block"),
                golden.integer("count"), golden.integer("window"), {}, golden.array("block_indices")};
  for (int n = 0; n < 3; ++n)
    if (n < 2 || p.window > 0 || golden.has_array(gates[n])) p.gate[n] = golden.row_array(gates[n]);
  if (golden.has("scale")) p.scale = golden.number("scale");
  return p;
}

// The means of complete blocks.
template <class N>
tensor<N> block_means(const tensor<N>& x, idx_t block) {
  tensor<N> means(x.batch(), x.heads(), x.length() / block, x.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t j = 0; j < means.length() * block; ++j)
        for (idx_t d = 0; d < x.dim(); ++d)
          means(b, h, j / block, d) += x(b, h, j, d) / static_cast<N>(static_cast<double>(block));
  return means;
}
bool sees_block(idx_t i, idx_t c, idx_t block) { return (c + 1) * block <= i + 1; }

// The first block, the query's own, the one before it, then those with the largest weights of the group.
template <class Weight>
tensor<idx_t> choose(const nsa_problem& p, const Weight& weight) {
  const idx_t group = p.q.heads() / p.k.heads();
  tensor<idx_t> blocks(p.q.batch(), p.k.heads(), p.q.length(), p.count, -1);
  for (idx_t b = 0; b < blocks.batch(); ++b)
    for (idx_t kv = 0; kv < blocks.heads(); ++kv)
      for (idx_t i = 0; i < blocks.length(); ++i) {
        std::set<idx_t> chosen = {0, std::max<idx_t>(0, i / p.block - 1), i / p.block};
        std::vector<std::pair<double, idx_t>> others;
        for (idx_t c = 0; sees_block(i, c, p.block); ++c) {
          double sum = 0;
          for (idx_t h = kv * group; h < (kv + 1) * group; ++h) sum += static_cast<double>(weight(b, h, i, c));
          if (!chosen.count(c)) others.push_back({-sum, c});
        }
        std::sort(others.begin(), others.end());
        for (const auto& [sum, c] : others)
          if (std::ssize(chosen) < p.count) chosen.insert(c);
        std::copy(chosen.begin(), chosen.end(), &blocks(b, kv, i, 0));
      }
  if (cast<double>(blocks).data != p.wanted_blocks.data) throw std::runtime_error("other blocks are chosen");
  return blocks;
}

template <class N>
tensor<N> gated(const tensor<N>& out, const tensor<N>& gate) {
  tensor<N> x = out;
  for (idx_t n = 0; n < x.size(); ++n) x.data[std::size_t(n)] *= gate.data[std::size_t(n / x.dim())];
  return x;
}
// Without a window its branch is empty.
template <class N>
tensor<N> sum_of(const std::array<tensor<N>, 3>& branches, const tensor<N>* gate) {
  tensor<N> all = gated(branches[0], gate[0]);
  for (int n : {1, 2}) {
    if (branches[n].data.empty()) continue;
    const tensor<N> one = gated(branches[n], gate[n]);
    for (std::size_t e = 0; e < all.data.size(); ++e) all.data[e] += one.data[e];
  }
  return all;
}

// By the references; the choice is a constant.
template <class N>
tensor<N> by_references(const nsa_problem& p, const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                        const tensor<N>* gate) {
  const tensor<N> keys = block_means(k, p.block), values = block_means(v, p.block);
  reference::basic_full_softmax_options<N> means;
  reference::basic_selected_keys_options<N> selected;
  reference::basic_sliding_window_options<N> window;
  means.scale = selected.scale = window.scale = p.scale;
  means.causal = true, means.first_position = 0, means.span = p.block;
  const reference::basic_result<N> compressed = reference::full_softmax(q, keys, values, means);
  const double scale = p.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  selected.indices = choose(p, [&](idx_t b, idx_t h, idx_t i, idx_t c) {
    double dot = 0;
    for (idx_t d = 0; d < q.dim(); ++d)
      dot += static_cast<double>(q(b, h, i, d)) * static_cast<double>(keys(b, h / (q.heads() / k.heads()), c, d));
    return std::exp(scale * dot - static_cast<double>(compressed.lse(b, h, i, 0)));
  });
  selected.causal = window.causal = true, selected.block = p.block, window.left = p.window - 1;
  return sum_of<N>({compressed.out, reference::selected_keys(q, k, v, selected).out,
                    p.window > 0 ? reference::sliding_window(q, k, v, window).out : tensor<N>{}},
                   gate);
}

gradient_case as_case(const nsa_problem& p) {
  gradient_case c;
  c.names = {"q", "k", "v", gates[0], gates[1]};
  c.inputs = {p.q, p.k, p.v, p.gate[0], p.gate[1]};
  if (!p.gate[2].data.empty()) c.names.push_back(gates[2]), c.inputs.push_back(p.gate[2]);
  c.forward = [p](const std::vector<tensor<variable>>& x) {
    return std::vector<tensor<variable>>{by_references(p, x[0], x[1], x[2], &x[3])};
  };
  return c;
}

template <class S>
struct composed {
  const nsa_problem& p;
  tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), keys = block_means(k, p.block),
            values = block_means(v, p.block);
  std::array<tensor<S>, 3> out;
  tensor<idx_t> blocks;
  attn::full_softmax_options<S> of_means;
  attn::sliding_window_options<S> of_window{.causal = true, .left = p.window - 1};
  typename compiled_selected_keys<S>::options of_selected;
  attn::execution exec{};

  explicit composed(const nsa_problem& given) : p(given) {
    for (int n = 0; n < branches(); ++n) out[n] = tensor<S>(q.batch(), q.heads(), q.length(), v.dim());
    if (p.scale) of_means.scale = of_window.scale = of_selected.scale = static_cast<S>(*p.scale);
    of_means.causal = true, of_means.first_position = 0, of_means.span = p.block;
    compiled_full_softmax<S>::call(view(q), view(keys), view(values), view(out[0]), of_means, {}, exec);
    tensor<S> weights(q.batch(), q.heads(), q.length(), keys.length());
    attn::attention_weights(view(q), view(keys), {}, view(weights), of_means, exec);
    blocks = choose(p, weights);
    of_selected.causal = true, of_selected.block = p.block;
    of_selected.indices = attn::tensor_view<const idx_t>(blocks.data.data(), blocks.extents);
    compiled_selected_keys<S>::call(view(q), view(k), view(v), view(out[1]), of_selected, {}, exec);
    if (p.window > 0)
      compiled_sliding_window<S>::call(view(q), view(k), view(v), view(out[2]), of_window, {}, exec);
  }
  composed(const composed&) = delete;

  int branches() const { return p.window > 0 ? 3 : 2; }
  reference::result result() const {
    const tensor<S> gate[] = {cast<S>(p.gate[0]), cast<S>(p.gate[1]), cast<S>(p.gate[2])};
    return {cast<double>(sum_of(out, gate)), {}};
  }
  named_tensors gradients(const tensor<double>& d_out) {
    named_tensors all;
    std::array<tensor<S>, 3> d;
    all[gates[2]] = p.gate[2];
    std::fill(all[gates[2]].data.begin(), all[gates[2]].data.end(), 0.0);
    for (int n = 0; n < branches(); ++n) {
      const tensor<double> o = cast<double>(out[n]);
      tensor<double> d_gate(q.batch(), q.heads(), q.length(), 1);
      for (idx_t e = 0; e < o.size(); ++e)
        d_gate.data[std::size_t(e / o.dim())] += o.data[std::size_t(e)] * d_out.data[std::size_t(e)];
      all[gates[n]] = d_gate;
      d[n] = gated(cast<S>(d_out), cast<S>(p.gate[n]));
    }
    tensor<S> dq = q, dk = k, dv = v, d_keys = keys, d_values = values;
    for (tensor<S>* x : {&d_keys, &d_values}) std::fill(x->data.begin(), x->data.end(), S(0));
    const auto in = [](const tensor<S>& x) { return view(x); };
    compiled_selected_keys<S>::backward(in(q), in(k), in(v), in(out[1]), in(d[1]),
                                        {.q = view(dq), .k = view(dk), .v = view(dv)}, of_selected, {}, {}, exec);
    if (p.window > 0)
      compiled_sliding_window<S>::backward(in(q), in(k), in(v), in(out[2]), in(d[2]),
                                           {.q = view(dq), .k = view(dk), .v = view(dv), .accumulate = true}, of_window,
                                           {}, {}, exec);
    compiled_full_softmax<S>::backward(in(q), in(keys), in(values), in(out[0]), in(d[0]),
                                       {.q = view(dq), .k = view(d_keys), .v = view(d_values), .accumulate = true},
                                       of_means, {}, {}, exec);
    for (auto [to, mean] : {std::pair{&dk, &d_keys}, {&dv, &d_values}})
      for (idx_t b = 0; b < to->batch(); ++b)
        for (idx_t h = 0; h < to->heads(); ++h)
          for (idx_t j = 0; j < mean->length() * p.block; ++j)
            for (idx_t e = 0; e < to->dim(); ++e)
              (*to)(b, h, j, e) += (*mean)(b, h, j / p.block, e) / static_cast<S>(p.block);
    all["q"] = cast<double>(dq), all["k"] = cast<double>(dk), all["v"] = cast<double>(dv);
    return all;
  }
};

golden_operator golden_nsa() {
  golden_operator entry{.name = "nsa",
                        .keys = {"operator", "source", "tolerance", "causal", "scale", "block", "count", "window"},
                        .arrays = {"q", "k", "v", "g_cmp", "g_slc", "g_swa", "out", "block_indices"},
                        .by_reference = [](const golden_case& golden) -> reference::result {
                          const nsa_problem p = read(golden);
                          return {by_references(p, p.q, p.k, p.v, p.gate), {}};
                        },
                        .in_double = [](const golden_case& golden) {
                          return composed<widest_type>(read(golden)).result();
                        },
                        .in_float = [](const golden_case& golden) { return composed<float>(read(golden)).result(); }};
  return with_gradients(std::move(entry), read, as_case,
                        [](const nsa_problem& p, const tensor<double>& d_out, auto zero) {
                          return composed<decltype(zero)>(p).gradients(d_out);
                        });
}

const golden_entry entry(golden_nsa());

}  // namespace

// As in the original: without a window no gate of it is needed, and one that is there counts nothing.
TEST_CASE("nsa without a window", "[reader]") {
  namespace fs = std::filesystem;
  const fs::path from = fs::path(ATTN_GOLDEN_DIR) / "nsa_01_fla",
                 to = fs::temp_directory_path() / ("attn_nsa_" + std::to_string(getpid()));
  fs::copy(from, to);
  std::ofstream(to / "case.txt") << "operator = nsa\ncausal = true\nblock = 4\ncount = 4\nwindow = 0\n";
  const golden_operator nsa = golden_nsa();
  const golden_case gated(to);
  const tensor<double> wanted = nsa.by_reference(gated).out;
  CHECK(relative_error(wanted, gated.array("out")) > 0.01);  // which has a window
  CHECK(nsa.gradients_in_float(gated).at("g_swa").data == nsa.gradients_by_reference(gated).at("g_swa").data);
  fs::remove(to / "g_swa.npy"), fs::remove(to / "dg_swa.npy");
  const golden_case golden(to);
  CHECK(nsa.by_reference(golden).out.data == wanted.data);
  CHECK(relative_error(nsa.in_float(golden).out, wanted) <= 2e-5);
  const auto of_reference = nsa.gradients_by_reference(golden), of_library = nsa.gradients_in_float(golden);
  for (const std::string& name : golden.gradients()) {
    INFO(name);
    CHECK(relative_error(of_library.at(name), of_reference.at(name)) <= 2e-5);
  }
  fs::remove_all(to);
}

}  // namespace testing::nsa_golden
