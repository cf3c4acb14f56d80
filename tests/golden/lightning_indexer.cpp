#include <attn/softmax/lightning_indexer.hpp>

#include "golden/indexer.hpp"
#include "golden/operators.hpp"
#include "support/run.hpp"

namespace testing {

template <class S>
tensor<idx_t> chosen_by_library(const tensor<S>& q, const tensor<S>& k, const reference::indexer_options& o) {
  const tensor<S> w = cast<S>(o.w);
  attn::lightning_indexer_options<S> options{.causal = o.causal, .topk = o.topk};
  options.lengths = o.lengths, options.query_lengths = o.query_lengths, options.key_lengths = o.key_lengths;
  options.activation = o.relu ? attn::indexer_activation::relu : attn::indexer_activation::none;
  if (o.scale) options.scale = static_cast<S>(*o.scale);
  if (!w.empty()) options.w = {w.data.data(), {w.heads(), w.length(), w.dim()}};
  options.span = o.span, options.block = o.block, options.per_head = o.per_head, options.tail = o.tail;
  options.local_blocks = o.local_blocks, options.first_blocks = o.first_blocks;
  if (!o.first_position.empty()) options.first_position = o.first_position;
  tensor<idx_t> indices(q.batch(), o.per_head ? q.heads() : 1, q.length(), o.topk + o.tail, 99);
  attn::lightning_indexer(view(q), view(k), attn::tensor_view<idx_t>(indices.data.data(), indices.extents), options);
  return indices;
}
template tensor<idx_t> chosen_by_library(const tensor<float>&, const tensor<float>&, const reference::indexer_options&);
#if !defined(ATTN_TEST_FEW_TYPES)
template tensor<idx_t> chosen_by_library(const tensor<double>&, const tensor<double>&,
                                         const reference::indexer_options&);
#endif

namespace lightning_indexer_golden {
namespace {

reference::indexer_options read(const golden_case& golden) {
  reference::indexer_options o;
  const std::string f = golden.text("activation");
  if (f != "relu" && f != "none") throw std::runtime_error("no activation is called " + f);
  o.relu = f == "relu", o.topk = golden.integer("topk"), o.causal = golden.flag("causal", false);
  if (golden.has("scale")) o.scale = golden.number("scale");
  o.query_lengths = golden.integers("query_lengths"), o.key_lengths = golden.integers("key_lengths");
  o.lengths = golden.integers("lengths"), o.first_position = golden.integers("first_position");
  const auto number = [&](const char* name, idx_t absent) { return golden.has(name) ? golden.integer(name) : absent; };
  o.span = number("span", 1), o.block = number("block", 1);
  o.local_blocks = number("local_blocks", 0), o.first_blocks = number("first_blocks", 0);
  o.per_head = golden.flag("per_head", false), o.tail = golden.flag("tail", false);
  o.w = golden.optional_array("w");
  return o;
}

// Indices, exact in double.
reference::result by_reference(const golden_case& golden) {
  return {cast<double>(reference::lightning_indexer(golden.array("q_idx"), golden.array("k_idx"), read(golden))), {}};
}

template <class S>
reference::result by_library(const golden_case& golden) {
  return {cast<double>(chosen_by_library(cast<S>(golden.array("q_idx")), cast<S>(golden.array("k_idx")), read(golden))),
          {}};
}

const golden_entry entry({.name = "lightning_indexer",
                          .keys = {"operator", "source", "tolerance", "topk", "activation", "causal", "scale",
                                   "lengths", "query_lengths", "key_lengths", "first_position", "span", "block",
                                   "local_blocks", "first_blocks", "per_head", "tail"},
                          .arrays = {"q_idx", "k_idx", "w", "indices"},
                          .by_reference = by_reference,
                          .in_double = by_library<widest_type>,
                          .in_float = by_library<float>,
                          .result = "indices"});

}  // namespace
}  // namespace lightning_indexer_golden
}  // namespace testing
