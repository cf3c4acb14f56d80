// attn: the checked call of lightning_indexer.hpp, its step and its gradients.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/index_view.hpp>
#include <attn/softmax/detail/score_terms.hpp>
#include <attn/softmax/detail/topk_keys.hpp>
#include <attn/softmax/indexer_activation.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A checked call; C: the elements of the keys.
template <class S, class C = S>
struct indexer_call {
  using T = compute_type<S>;

  tensor_view<const S> q;
  tensor_view<const C> k;
  execution& exec;
  attention_shape shape;  // heads: those of the indexer; one key head
  sequence_lengths lengths;
  bool causal;
  idx_t topk;
  T scale;
  indexer_activation activation;
  tensor_view<const T, 3> w;
  index_output indices;
  tensor_view<T> scores;
  page_tables pages{};

  idx_t shift(idx_t b) const { return lengths.keys(b) - lengths.queries(b); }
  /// Query i sees the keys below.
  idx_t end_of(idx_t b, idx_t i) const {
    const idx_t all = lengths.keys(b);
    return causal ? std::clamp<idx_t>(i + shift(b) + 1, 0, all) : all;
  }
  T weight(idx_t b, idx_t i, idx_t h) const { return w ? w(b, i, h) : T(1); }
  packet<T> activated(const packet<T>& x) const {
    return activation == indexer_activation::relu ? (max)(x, zero<T>()) : x;  // NaN stays
  }

  /// Stores the keys of query i, and -1 behind them.
  void store(idx_t b, idx_t i, const topk_keys<T>& best) const {
    indices.typed([&](const auto& to) {
      using index = typename std::remove_cvref_t<decltype(to)>::value_type;
      for (idx_t n = 0; n < topk; ++n) to(b, 0, i, n) = static_cast<index>(n < best.count ? best.list[n].key() : -1);
    });
    for (idx_t n = 0; scores && n < topk; ++n)
      scores(b, 0, i, n) = n < best.count ? best.list[n].score() : -std::numeric_limits<T>::infinity();
  }
  void clear_padding(idx_t b, idx_t begin, idx_t end) const {
    const topk_keys<T> none;
    for (idx_t i = (std::max)(begin, lengths.queries(b)); i < (std::min)(end, shape.queries); ++i) store(b, i, none);
  }
};

/// What whole calls, steps and backward passes share, checked; the views that are written follow.
template <class S, class Options>
indexer_call<S> indexer_inputs(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                               const Options& options, execution& exec) {
  views.read("q", q), views.read("k", k);
  const attention_shape s{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = 1, .queries = q.extent(2),
                          .keys = k.extent(2), .dim = q.extent(3), .dim_v = 0};
  views.extents({{"key batch = query batch", s.batch, k.extent(0)},
                 {"key heads", 1, k.extent(1)},
                 {"key dim = query dim", s.dim, k.extent(3)}});
  views.at_least("topk", 1, options.topk);
  check_scale(views, options.scale);
  views.option("w", options.w, {{"w batch = query batch", s.batch},
                                {"w length = query length", s.queries},
                                {"w heads = query heads", s.heads}});
  return {.q = q, .k = k, .exec = exec, .shape = s, .lengths = {s.queries, s.keys, {}, {}}, .causal = false,
          .topk = options.topk, .scale = scale_or_default(options.scale, s.dim), .activation = options.activation,
          .w = options.w, .indices = {}, .scores = {}};
}
/// The layout of indices, for the checks.
template <class Void>
memory_layout index_layout(const any_index_view<Void>& x) {
  return x.typed([](const auto& view) { return memory_layout(view); });
}
/// A view with an entry for every chosen pair.
inline void check_chosen(const validator& check, const attention_shape& s, idx_t topk, const memory_layout& x,
                         const char* name) {
  const idx_t wanted[] = {s.batch, 1, s.queries, topk};
  if (!std::equal(wanted, wanted + 4, x.extents))
    check.fail({name, " of shape [batch, 1, query length, topk] = ", error_text::list(wanted, 4)},
               error_text::list(x.extents, 4));
}

template <class S, class Options>
indexer_call<S> indexer_call_of(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                                const index_output& indices, const Options& options, execution& exec) {
  indexer_call<S> call = indexer_inputs<S>(views, q, k, options, exec);
  const auto write = [&](const char* name, const memory_layout& x) {
    views.write(name, x);
    check_chosen(views, call.shape, options.topk, x, name);
  };
  write("indices", index_layout(indices));
  if (options.scores) write("scores", options.scores);
  if (call.shape.keys >= candidate<compute_type<S>>::most_keys) views.fail("fewer than 2^32 keys", call.shape.keys);
  call.indices = indices, call.scores = options.scores;
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
