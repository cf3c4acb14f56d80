// attn: the checked call of lightning_indexer.hpp, its step and its gradients.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/index_view.hpp>
#include <attn/softmax/detail/key_span.hpp>
#include <attn/softmax/detail/score_terms.hpp>
#include <attn/softmax/detail/topk_keys.hpp>
#include <attn/softmax/indexer_activation.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What a list names beside the best: the first blocks, and those up to the query's own.
struct forced_names {
  idx_t leading = 0, begin = 0, end = 0;  // [0, leading) and [begin, end), leading <= begin

  idx_t count() const { return leading + end - begin; }
  bool has(idx_t name) const { return name < leading || (name >= begin && name < end); }
};

/// Which keys the queries of a call see.
struct indexer_positions {
  key_limit limit{};
  first_positions first{};
  bool tail = false;
};

/// A checked call; C: the elements of the keys.
template <class S, class C = S>
struct indexer_call {
  using T = compute_type<S>;

  tensor_view<const S> q;
  tensor_view<const C> k;
  execution& exec;
  attention_shape shape;  // heads: those of the indexer; one key head
  sequence_lengths lengths;
  indexer_positions seen;
  idx_t topk, block, local_blocks, first_blocks;  // a block is what a name stands for: a key, or several
  bool per_head;
  T scale;
  indexer_activation activation;
  tensor_view<const T, 3> w;
  index_output indices;
  tensor_view<T> scores;
  page_tables pages{};
  bool rotated_keys = false;  // of a cache: queries are to be rotated as well

  idx_t position(idx_t b, idx_t i) const {
    return i + (seen.first ? seen.first.of(b) : lengths.keys(b) - lengths.queries(b));
  }
  /// Query i sees the keys below.
  idx_t end_of(idx_t b, idx_t i) const { return seen.limit.end(position(b, i), lengths.keys(b)); }
  /// Lists of a query, and the heads that are added up for each.
  idx_t lists() const { return per_head ? shape.heads : 1; }
  idx_t heads_of_list() const { return per_head ? 1 : shape.heads; }
  /// Entries of a list, and all names there are.
  idx_t entries() const { return topk + seen.tail; }
  idx_t names() const { return ceil_div(shape.keys, block); }
  forced_names forced_of(idx_t b, idx_t i) const {
    const idx_t all = ceil_div(end_of(b, i), block), own = floor_div(position(b, i), block);
    const idx_t leading = (std::min)(first_blocks, all);
    const idx_t begin = local_blocks ? std::clamp(own - local_blocks + 1, leading, all) : all;
    return {leading, begin, std::clamp(own + 1, begin, all)};
  }
  T weight(idx_t b, idx_t i, idx_t h) const { return w ? w(b, i, h) : T(1); }
  packet<T> activated(const packet<T>& x) const {
    return activation == indexer_activation::relu ? (max)(x, zero<T>()) : x;  // NaN stays
  }

  /// Stores what list `list` of query i names; -1 behind them. None (a count of -1): a row of padding.
  void store(idx_t b, idx_t list, idx_t i, const scored_keys<T>& named) const {
    const idx_t p = position(b, i), count = (std::max)(named.count, idx_t(0));
    const bool unfinished = seen.tail && named.count >= 0 && p >= 0 && (p + 1) % seen.limit.span != 0;
    indices.typed([&](const auto& to) {
      using index = typename std::remove_cvref_t<decltype(to)>::value_type;
      index* const row = &to(b, list, i, 0);
      const idx_t stride = to.stride(3);
      if (stride == 1)
        for (idx_t n = 0; n < count; ++n) row[n] = static_cast<index>(named.keys[n]);
      else
        for (idx_t n = 0; n < count; ++n) row[n * stride] = static_cast<index>(named.keys[n]);
      for (idx_t n = count; n < entries(); ++n) row[n * stride] = -1;
      if (unfinished) row[count * stride] = static_cast<index>((p + 1) / seen.limit.span);
    });
    for (idx_t n = 0; scores && n < entries(); ++n)
      scores(b, list, i, n) = n < count ? named[n].score() : -std::numeric_limits<T>::infinity();
  }
  void clear_padding(idx_t b, idx_t begin, idx_t end) const {
    for (idx_t i = (std::max)(begin, lengths.queries(b)); i < (std::min)(end, shape.queries); ++i)
      for (idx_t list = 0; list < lists(); ++list) store(b, list, i, {.count = -1});
  }
};

/// What whole calls, steps and backward passes share, checked; the views that are written follow.
template <class S, class Options>
indexer_call<S> indexer_inputs(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                               const Options& options, const indexer_positions& seen, execution& exec) {
  views.read("q", q), views.read("k", k);
  const attention_shape s{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = 1, .queries = q.extent(2),
                          .keys = k.extent(2), .dim = q.extent(3), .dim_v = 0};
  views.extents({{"key batch = query batch", s.batch, k.extent(0)},
                 {"key heads", 1, k.extent(1)},
                 {"key dim = query dim", s.dim, k.extent(3)}});
  views.at_least("topk", 1, options.topk);
  views.at_least("block", 1, options.block);
  views.at_least("local_blocks", 0, options.local_blocks);
  views.at_least("first_blocks", 0, options.first_blocks);
  if (options.first_blocks > options.topk || options.local_blocks > options.topk - options.first_blocks)
    views.fail({"local_blocks and first_blocks of at most topk = ", options.topk, " together"},
               error_text{options.local_blocks, " and ", options.first_blocks});
  const bool pooled = seen.limit.span > 1;
  check_span(views, seen.first, seen.limit, s.batch);
  if (pooled && options.block > 1) views.fail("a block of 1, since span is given", options.block);
  if (pooled && options.local_blocks + options.first_blocks > 0)
    views.fail("neither local_blocks nor first_blocks, since span is given", "them");
  if (seen.tail && !pooled) views.fail("span, since tail is given", 1);
  check_scale(views, options.scale);
  views.option("w", options.w, {{"w batch = query batch", s.batch},
                                {"w length = query length", s.queries},
                                {"w heads = query heads", s.heads}});
  return {.q = q, .k = k, .exec = exec, .shape = s, .lengths = {s.queries, s.keys, {}, {}}, .seen = seen,
          .topk = options.topk, .block = options.block, .local_blocks = options.local_blocks,
          .first_blocks = options.first_blocks, .per_head = options.per_head,
          .scale = scale_or_default(options.scale, s.dim), .activation = options.activation, .w = options.w,
          .indices = {}, .scores = {}};
}
/// The layout of indices, for the checks.
template <class Void>
memory_layout index_layout(const any_index_view<Void>& x) {
  return x.typed([](const auto& view) { return memory_layout(view); });
}
/// A view with an entry for every entry of the lists.
template <class S>
void check_chosen(const validator& check, const indexer_call<S>& call, const memory_layout& x, const char* name) {
  const idx_t wanted[] = {call.shape.batch, call.lists(), call.shape.queries, call.entries()};
  if (!std::equal(wanted, wanted + 4, x.extents))
    check.fail({name, " of shape [batch, ", call.per_head ? "heads" : "1", ", query length, topk",
                call.seen.tail ? " + 1] = " : "] = ", error_text::list(wanted, 4)},
               error_text::list(x.extents, 4));
}

template <class S, class Options>
indexer_call<S> indexer_call_of(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                                const index_output& indices, const Options& options, const indexer_positions& seen,
                                execution& exec) {
  indexer_call<S> call = indexer_inputs<S>(views, q, k, options, seen, exec);
  const auto write = [&](const char* name, const memory_layout& x) {
    views.write(name, x);
    check_chosen(views, call, x, name);
  };
  write("indices", index_layout(indices));
  if (options.scores) write("scores", options.scores);
  if (call.shape.keys >= candidate<compute_type<S>>::most_keys) views.fail("fewer than 2^32 keys", call.shape.keys);
  call.indices = indices, call.scores = options.scores;
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
