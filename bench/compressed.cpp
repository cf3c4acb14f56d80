// Attention to keys that stand for several tokens, as DeepSeek-V4 (2026) composes it: the last 128 tokens, and pooled
// keys of 4 tokens that an indexer chooses (CSA) or all those of 128 tokens (HCA), under one softmax. All query heads
// share one key head, and the values are the keys. Causal full softmax, which they are compared with, has a key head
// for every query head, and its step one for every 4. Choosing is part of the time; making pooled keys is not.
#include <attn/core/tensor.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/merge_softmax.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <algorithm>
#include <memory>

#include "flops.hpp"
#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

constexpr idx_t near_tokens = 128, csa_span = 4, hca_span = 128, most_chosen = 512;
/// The indexer takes a sixteenth of the operations of attention to a key, as with DeepSeek's 64 index heads of 128 for
/// 128 heads of 512.
constexpr idx_t index_heads = 2;
idx_t index_dim(const problem& p) { return std::max<idx_t>(1, p.dim / 2); }

/// Keys that are seen, by all queries together: at most `most` by each.
double seen_pairs(const problem& p, idx_t span, idx_t most) {
  double pairs = 0;
  for (idx_t i = 0; i < p.length; ++i) pairs += static_cast<double>(std::min(most, (i + 1) / span));
  return pairs;
}
double near_pairs(const problem& p) { return seen_pairs(p, 1, near_tokens); }
double index_flops(const problem& p, double pairs) {
  return 2 * pairs * static_cast<double>(index_heads * index_dim(p));
}

input drawn(role of, const std::array<idx_t, 4>& extents) {
  return {drawn_numbers<element>(of, std::size_t(extents[1] * extents[2] * extents[3])), extents};
}
struct index_views {
  input q, k;
  attn::tensor_view<const real, 3> w;

  index_views(const problem& p, idx_t queries, idx_t keys)
      : q(drawn(role::gradient, {1, index_heads, queries, index_dim(p)})),
        k(drawn(role::bias, {1, 1, keys, index_dim(p)})),
        w(drawn_numbers<real>(role::parameter, std::size_t(queries * index_heads)), {1, queries, index_heads}) {}
};
input first_keys(input k, idx_t count) { return k.slice(1, 0, 1).slice(2, 0, count); }

runner prepare_span(const problem&) {
  return [](input q, input k, input v, output out, attn::execution& exec) {
    const idx_t keys = k.extent(2) / csa_span;
    attn::full_softmax(q, k.slice(2, 0, keys), v.slice(2, 0, keys), out,
                       {.causal = true, .first_position = 0, .span = csa_span}, exec);
  };
}

/// What both parts give, and what is chosen by `queries` queries.
struct results {
  attn::tensor<element> far;
  attn::tensor<real, 3> lse, far_lse;
  attn::tensor<std::int32_t> lists;

  results(const problem& p, idx_t queries)
      : far({1, p.heads, queries, p.dim}), lse({1, p.heads, queries}), far_lse(lse),
        lists({1, 1, queries, most_chosen}) {}
  static double bytes(const problem& p) {
    return static_cast<double>(p.length * (p.heads * p.dim * idx_t(sizeof(element)) + 4 * most_chosen));
  }
};

enum class choice { indexed, all };
template <choice Choice>
constexpr idx_t span_of = Choice == choice::indexed ? csa_span : hca_span;

template <choice Choice>
runner prepare_compressed(const problem& p) {
  return [p, r = std::make_shared<results>(p, p.length), index = index_views(p, p.length, p.length / span_of<Choice>)](
             input q, input k, input, output out, attn::execution& exec) {
    const input keys = first_keys(k, p.length / span_of<Choice>), near = first_keys(k, p.length);
    attn::sliding_window(q, near, near, out, {.causal = true, .left = near_tokens - 1, .lse = r->lse}, exec);
    if constexpr (Choice == choice::indexed) {
      attn::lightning_indexer(
          index.q, index.k, r->lists,
          {.causal = true, .first_position = 0, .span = span_of<Choice>, .topk = most_chosen, .w = index.w}, exec);
      attn::selected_keys(q, keys, keys, r->far, r->lists,
                          {.causal = true, .first_position = 0, .span = span_of<Choice>, .lse = r->far_lse}, exec);
    } else {
      attn::full_softmax(q, keys, keys, r->far,
                         {.causal = true, .first_position = 0, .span = span_of<Choice>, .lse = r->far_lse}, exec);
    }
    attn::merge_softmax(out, r->lse, r->far, r->far_lse);
  };
}

/// A pooled key is whatever token completes its window.
struct compressed_stream final : stream {
  problem p;
  attn::sliding_window_cache<element> near;
  attn::kv_cache<element> keys, index_keys;
  results r;
  idx_t tokens = 0;

  explicit compressed_stream(const problem& of)
      : p(of), near({.dim = p.dim}, {.left = near_tokens - 1}),
        keys({.dim = p.dim}, {.values_in_keys = true}), index_keys({.dim = index_dim(p), .value_dim = 0}), r(p, 1) {
    keys.reserve(p.length / csa_span), index_keys.reserve(p.length / csa_span);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<compressed_stream>(*this); }
  void append_pooled(input k) {
    const idx_t count = (tokens + k.extent(2)) / csa_span - tokens / csa_span;
    const input pooled = first_keys(k, count), index = index_views(p, 1, count).k;
    keys.append(pooled, pooled);
    index_keys.append(index, index.slice(3, 0, 0));
    tokens += k.extent(2);
  }
  void feed(input k, input) override {
    near.append(first_keys(k, k.extent(2)), first_keys(k, k.extent(2)));
    append_pooled(k);
  }
  void step(input q, input k, input, output out, attn::execution& exec) override {
    const index_views index(p, q.extent(2), 0);
    const idx_t first = tokens;
    if (q.extent(2) != r.far.extent(2)) r = results(p, q.extent(2));
    const input of_tokens = first_keys(k, k.extent(2));
    attn::sliding_window_step(near, q, of_tokens, of_tokens, out, {.lse = r.lse}, exec);
    append_pooled(k);
    attn::lightning_indexer_cached(
        index_keys, index.q, r.lists,
        {.first_position = first, .span = csa_span, .topk = most_chosen, .w = index.w}, exec);
    attn::selected_keys_cached(keys, q, r.far, r.lists,
                               {.first_position = first, .span = csa_span, .lse = r.far_lse}, exec);
    attn::merge_softmax(out, r.lse, r.far, r.far_lse);
  }
  void rewind(idx_t to) override {
    keys.truncate(to / csa_span), index_keys.truncate(to / csa_span);
    tokens = to;
  }
};
double step_rows(const problem& p) {
  return static_cast<double>(std::min(p.length, near_tokens) + std::min(most_chosen, p.length / csa_span));
}
double pooled_bytes(const problem& p, double rows_of_keys) {
  return sizeof(element) * (rows_of_keys * static_cast<double>(p.dim) +
                            static_cast<double>(p.length / csa_span * index_dim(p)));
}

operator_entry entry_of(const char* name, const char* colour, double (*flops)(const problem&),
                        runner (*prepare)(const problem&), double (*parameter_bytes)(const problem&)) {
  return {.name = name,
          .colour = colour,
          .cost = growth::quadratic,
          .has_causal = true,
          .exact = false,
          .uses = {},
          .flops = flops,
          .prepare = prepare,
          .parameter_bytes = parameter_bytes,
          .approximates = false,
          .only_causal = true};
}

}  // namespace

std::vector<operator_entry> compressed_operators() {
  return {entry_of("full_softmax_span", "#455a64",
                   [](const problem& p) { return score_flops(p, seen_pairs(p, csa_span, p.length)); }, prepare_span,
                   nullptr),
          entry_of("compressed_csa", "#00838f",
                   [](const problem& p) {
                     return score_flops(p, near_pairs(p) + seen_pairs(p, csa_span, most_chosen)) +
                            index_flops(p, seen_pairs(p, csa_span, p.length));
                   },
                   prepare_compressed<choice::indexed>, results::bytes),
          entry_of("compressed_hca", "#4dd0e1",
                   [](const problem& p) { return score_flops(p, near_pairs(p) + seen_pairs(p, hca_span, p.length)); },
                   prepare_compressed<choice::all>, results::bytes)};
}
std::vector<decode_entry> compressed_decoders() {
  return {{.name = "compressed_csa_decode",
           .exact = false,
           .uses = {},
           .flops = [](const problem& p) {
             return score_flops(p, step_rows(p)) + index_flops(p, static_cast<double>(p.length / csa_span));
           },
           .cache_bytes = [](const problem& p) { return pooled_bytes(p, step_rows(p)); },
           .prepare = [](const problem& p) -> std::unique_ptr<stream> {
             return std::make_unique<compressed_stream>(p);
           },
           .approximates = false,
           .state_bytes = [](const problem& p) {
             return pooled_bytes(p, static_cast<double>(near_tokens + p.length / csa_span));
           }}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
