// attn: the checked call of what makes lists of blocks without training, and the choice among the scores of blocks. The
// call is that of the indexer (indexer_call.hpp), of whose "heads" each has a list: a query head, or all of a key head.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/named_blocks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What the options of such a call say beside lengths.
template <class S>
struct block_choice {
  idx_t block, local_blocks, first_blocks;
  bool causal;
  first_positions first{};
  std::optional<compute_type<S>> scale{};
};

/// The lengths are those of the tensors: the caller sets others.
template <class S>
indexer_call<S> block_list_call_of(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                                   const index_output& indices, const block_choice<S>& choice, execution& exec) {
  views.read("q", q), views.read("k", k), views.write("indices", index_layout(indices));
  const idx_t heads = q.extent(1), key_heads = k.extent(1), lists = indices.extent(1), topk = indices.extent(3);
  if (heads > 0 && (key_heads == 0 || heads % key_heads != 0))
    views.fail({"key heads that divide the query heads ", heads}, key_heads);
  views.extents({{"key batch = query batch", q.extent(0), k.extent(0)},
                 {"key dim = query dim", q.extent(3), k.extent(3)},
                 {"index batch = query batch", q.extent(0), indices.extent(0)},
                 {"index rows = query length", q.extent(2), indices.extent(2)}});
  if (lists != heads && lists != key_heads) views.fail({"index heads ", key_heads, " or ", heads}, lists);
  views.at_least("entries of a list", 1, topk);
  views.at_least("block", 1, choice.block);
  views.at_least("local_blocks", 0, choice.local_blocks);
  views.at_least("first_blocks", 0, choice.first_blocks);
  if (choice.first_blocks > topk || choice.local_blocks > topk - choice.first_blocks)
    views.fail({"local_blocks and first_blocks of at most the ", topk, " entries of a list together"},
               error_text{choice.local_blocks, " and ", choice.first_blocks});
  check_span(views, choice.first, {choice.causal, 1}, q.extent(0));
  check_scale(views, choice.scale);
  if (k.extent(2) >= candidate<compute_type<S>>::most_keys) views.fail("fewer than 2^32 keys", k.extent(2));
  return {.q = q, .k = k, .exec = exec,
          .shape = {.batch = q.extent(0), .heads = lists, .kv_heads = key_heads, .queries = q.extent(2),
                    .keys = k.extent(2), .dim = q.extent(3), .dim_v = 0},
          .lengths = {q.extent(2), k.extent(2), {}, {}}, .seen = {.limit = {choice.causal, 1}, .first = choice.first},
          .topk = topk, .block = (std::min)(choice.block, std::max<idx_t>(1, k.extent(2))),
          .local_blocks = choice.local_blocks, .first_blocks = choice.first_blocks, .per_head = true,
          .scale = scale_or_default(choice.scale, q.extent(3)), .activation = indexer_activation::none, .w = {},
          .indices = indices, .scores = {}};
}

/// The same by the options of a call over keys, with their lengths.
template <class S, class Q, class K, class Options>
indexer_call<S> checked_block_lists(call_views& views, const Q& q, const K& k, const index_output& indices,
                                    const Options& given, bool causal, const std::optional<compute_type<S>>& scale,
                                    execution& exec) {
  require_one_element_type<const Q&, const K&, const K&, tensor_view<S>>();
  auto call = block_list_call_of<S>(
      views, as_view(q), as_view(k), indices,
      {given.block, given.local_blocks, given.first_blocks, causal, given.first_position, scale}, exec);
  call.lengths = check_lengths(views, call.shape, given);
  return call;
}

/// Query heads whose scores a list adds up: those from the first on.
template <class S>
struct heads_of_list {
  idx_t count, first, key_head;

  heads_of_list(const indexer_call<S>& call, idx_t list)
      : count(call.shape.heads > 0 ? call.q.extent(1) / call.shape.heads : 0), first(list * count),
        key_head(list / std::max<idx_t>(1, call.shape.group())) {}
};

/// A list for all queries of a block: the best of the scores that it gives the blocks of keys.
template <class S>
struct block_list_maker {
  using T = compute_type<S>;

  const indexer_call<S>& in;
  named_blocks<T>* names;
  scored_keys<T> named;    // [topk]
  candidate<T>* by_score;  // the same

  static block_list_maker layout(arena& memory, const indexer_call<S>& call) {
    named_blocks<T>* const names = layout_lists<T>(memory, call, 1).data();
    return {call, names, scored_keys<T>::layout(memory, call.topk), memory.allocate<candidate<T>>(call.topk)};
  }
  /// Blocks of queries of a batch item, and the block that the first query is in.
  static std::pair<idx_t, idx_t> blocks_of(const indexer_call<S>& in, idx_t b) {
    const idx_t first = floor_div(in.position(b, 0), in.block), queries = in.lengths.queries(b);
    return {first, queries > 0 ? floor_div(in.position(b, queries - 1), in.block) + 1 - first : 0};
  }
  static idx_t most_blocks(const indexer_call<S>& in) { return ceil_div(in.shape.queries, in.block) + 1; }

  /// Names of one block of queries the forced ones and the best, of these the fewest that have `share` of all scores
  /// together, and stores them.
  void store(idx_t b, idx_t list, idx_t block, const T* scores, T share) const {
    const idx_t origin = in.position(b, 0), begin = std::max<idx_t>(0, block * in.block - origin),
                end = (std::min)(in.lengths.queries(b), (block + 1) * in.block - origin);
    if (begin >= end) return;
    const idx_t all = ceil_div(in.end_of(b, end - 1), in.block);
    const forced_names forced = in.forced_of(b, end - 1);
    names->begin(forced, in.topk);
    names->block = 1;  // scores are those of names
    names->take(scores, 0, all, all);
    scored_keys<T> best = names->finish(named);
    if (share < T(1)) {
      T wanted = 0;
      for (idx_t n = 0; n < all; ++n) wanted += scores[n];
      best = fewest_with_share(best, forced, share * wanted);
    }
    for (idx_t i = begin; i < end; ++i) in.store(b, list, i, best);
  }

 private:
  scored_keys<T> fewest_with_share(const scored_keys<T>& from, const forced_names& forced, T wanted) const {
    for (idx_t n = 0; n < from.count; ++n) by_score[n] = from[n];
    candidate<T>* const end = by_score + from.count;
    candidate<T>* const best = std::partition(by_score, end, [&](const auto& x) { return forced.has(x.key()); });
    const auto by_key = [](const candidate<T>& a, const candidate<T>& b) { return a.key() < b.key(); };
    std::sort(by_score, best, by_key);
    std::sort(best, end, [](const candidate<T>& a, const candidate<T>& b) { return b < a; });
    T sum = 0;
    candidate<T>* last = by_score;
    for (; last < end && (last < best || sum < wanted); ++last) sum += last->score();
    std::sort(by_score, last, by_key);
    scored_keys<T> to = named;
    to.count = 0;
    for (const candidate<T>* x = by_score; x < last; ++x) to.add(*x);
    return to;
  }
};

/// Scores of `count` packed queries and a panel of keys, slots [slot, slot + panel_width), beside those of the panels
/// before it in rows of `row_stride`.
template <class T>
void panel_scores(const T* queries, idx_t count, const packed_keys<T>& keys, idx_t slot, T* scores, idx_t row_stride) {
  with_tile_height(count, [&](auto M) {
    tile_product<T, M.value, 2>(
        packed_rows<T>{queries}, keys.key_panel(slot), keys.dim,
        [&](auto m, auto vector, const auto& x) __attribute__((always_inline)) {
          store<T>(scores + m * row_stride + slot + vector * width<T>, x);
        });
  });
}

/// Weights e^(x - the largest), in place; NaN and -infinity have none.
template <class T>
void weigh_row(T* scores, idx_t count) {
  constexpr T lowest = std::numeric_limits<T>::lowest(), highest = (std::numeric_limits<T>::max)();
  const idx_t padded = round_up(count, width<T>);
  std::fill(scores + count, scores + padded, -std::numeric_limits<T>::infinity());
  const packet<T> largest = broadcast<T>(std::clamp(largest_of(scores, padded), lowest, highest));
  for (idx_t n = 0; n < padded; n += width<T>) {
    const packet<T> x = load<T>(scores + n), weight = exp_weight<T>(sub((min)(x, broadcast<T>(highest)), largest));
    store<T>(scores + n, if_less(broadcast<T>(lowest), x, weight, zero<T>()));
  }
}

}}}  // namespace attn::ATTN_ISA::detail
