// attn: the terms of a score between the product and the softmax, in this order: softcap c tanh(s / c), + bias, + the
//   bias of the distance, + ALiBi (-slope |distance|), + the decay of the key, the caller's score(s, batch, head, i,
//   j), -infinity for keys that are excluded though they lie in the range the query sees, and for those the mask hides,
//   + log(count) for slots that stand for several keys.
// Terms that are not given cost nothing: without any, the kernel does not process scores at all. All operators use this
// one type of terms, so that their kernels are compiled once.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/softmax/detail/decay_sums.hpp>
#include <attn/softmax/detail/dropped_weights.hpp>
#include <attn/softmax/detail/online_softmax.hpp>
#include <attn/softmax/detail/packed_keys.hpp>
#include <attn/softmax/detail/position_queries.hpp>
#include <attn/softmax/detail/relative_bias.hpp>
#include <attn/softmax/detail/relative_keys.hpp>
#include <attn/softmax/detail/score_loops.hpp>
#include <attn/softmax/detail/softmax_parameters.hpp>
#include <attn/softmax/detail/tile_skip.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// Stands for a score function where there is none.
struct no_score {};

/// Stands in its place and makes weights of scores, which stay in base e, without a softmax (pointwise_function.hpp).
template <class Score>
concept makes_weights = requires { typename std::remove_const_t<Score>::makes_weights_of; };

/// Keys a query does not see though they lie in its range of slots: its own, or its own and all later ones.
struct excluded_keys {
  enum class kind { none, own, own_and_later };
  kind what = kind::none;
  /// Where positions do not ascend along the slots: the key at position p is in slot known.begin + offset[p]; keys in
  /// slots outside `known` may be at any position.
  const idx_t* offset = nullptr;
  key_range known{};

  explicit operator bool() const { return what != kind::none; }

  /// Masks the excluded keys among those of slots slot + n, n < count, for the query at `position`.
  template <class T>
  void apply(T* s, idx_t count, idx_t position, const index_map& positions, idx_t slot) const {
    constexpr T hidden = -std::numeric_limits<T>::infinity();
    idx_t own = -1;
    if (what == kind::own_and_later) {
      const idx_t* const key = positions.list + slot;
      for (idx_t n = 0; n < count; ++n) s[n] = key[n] >= position ? hidden : s[n];
    } else if (!offset) {
      own = positions.find(position, slot, slot + count) - slot;
    } else if (slot < known.begin || slot + count > known.end) {
      const idx_t* const key = positions.list + slot;
      for (idx_t n = 0; n < count; ++n) s[n] = key[n] == position ? hidden : s[n];
    } else {
      own = known.begin + offset[position] - slot;
    }
    if (own >= 0 && own < count) s[own] = hidden;
  }
};

/// Slots [0, slots) represent several keys each: log2 of their number, -infinity for none. The list of each query head
/// begins head_stride after that of the head before.
template <class T>
struct slot_counts {
  const T* log2 = nullptr;
  idx_t slot_count = 0, head_stride = 0;

  explicit operator bool() const { return log2 != nullptr; }

  void apply(T* s, idx_t count, idx_t head, idx_t slot) const {
    const T* const logs = log2 + head * head_stride + slot;
    const auto weighted = [](T x, T y) { return y == -std::numeric_limits<T>::infinity() ? y : x + y; };
    for (idx_t n = 0; n < (std::min)(count, slot_count - slot); ++n) s[n] = weighted(s[n], logs[n]);
  }
};

/// The terms of one call; for_head() narrows them to one head.
template <class T, class Score>
struct score_terms {
  std::optional<T> softcap{};
  tensor_view<const T> bias{};
  relative_bias<T> relative{};
  decay_sums<T> decay{};
  relative_keys<T> by_distance{};  // parts of the product: added before the terms
  position_queries<T> by_position{};
  dropout_options dropout{};  // of the weights, after the softmax
  tensor_view<const unsigned char> mask{}, key_mask{};  // the latter only beside the former
  std::span<const T> slopes{};
  Score* score = nullptr;
  T scale = T(1);
  excluded_keys excluded{};
  slot_counts<T> counts{};
  tile_skip<T> skip{};

  bool prepared = false;  // whether those that need memory of the call have it
  idx_t batch = 0, head = 0, query_shift = 0;  // query i is at position i + query_shift

  static constexpr bool pointwise = makes_weights<Score>;
  static constexpr bool scored = !pointwise && !std::same_as<std::remove_const_t<Score>, no_score>;

  /// Whether there is a term that needs scores in base e.
  bool change_scores() const { return scored || softcap || bias || relative || !slopes.empty(); }
  bool any_but_mask() const { return change_scores() || decay || excluded || counts; }
  bool any() const { return any_but_mask() || mask; }

  /// Whether there is a term that the memory of a call is laid out for.
  bool need_memory() const { return !prepared && (decay.log_decay || by_distance.table || by_position.table); }

  /// The factor of queries as they are packed. Scores enter the softmax in base 2; where a term needs them in base e,
  /// the change of base follows the terms.
  T query_factor() const { return pointwise || change_scores() ? scale : scale * log2_e<T>; }

  score_terms for_head(idx_t b, idx_t h, idx_t shift) const {
    score_terms one = *this;
    one.batch = b;
    one.head = h;
    one.query_shift = shift;
    return one;
  }

  /// s[n] holds query_factor() * q_i.k of the keys at slots slot + n, n < count, and becomes log2(e) times the final
  /// score.
  void apply(T* s, idx_t count, idx_t i, const index_map& positions, idx_t slot) const {
    const idx_t position = i + query_shift;
    if (change_scores())
      change(s, count, i, positions, slot);
    else if (decay)
      decay.add(s, count, batch, head, position, positions, slot, log2_e<T>);
    if (decay) decay.hide(s, count, batch, head, position, positions, slot);
    if (excluded) excluded.apply(s, count, position, positions, slot);
    if (counts) counts.apply(s, count, head, slot);
    if (mask) hide(mask, s, count, i, positions, slot);
    if (key_mask) hide(key_mask, s, count, i, positions, slot);
  }

  /// Drops weights of query i, or their gradients x[n] of the keys at slots slot + n, n < count.
  void drop(T* x, idx_t count, idx_t i, const index_map& positions, idx_t slot) const {
    drop_weights(dropout.row(batch, head, i + query_shift), x, count, positions, slot, T(dropout.factor()));
  }

  /// Prefetches what seen() will read.
  void prefetch_mask(idx_t i, idx_t count, const index_map& positions, idx_t slot) const {
    if (positions.list || positions.step != 1 || mask.stride(3) != 1) return;
    prefetch_bytes<cache_level::first>(reinterpret_cast<const char*>(row_of_query(mask, i) + positions[slot]), count);
  }
  /// How many of the keys at slots slot + n, n < count, the mask leaves visible for query i.
  mask_coverage seen(idx_t i, idx_t count, const index_map& positions, idx_t slot) const {
    const mask_coverage by_pairs = seen(mask, i, count, positions, slot);
    if (!key_mask || by_pairs == mask_coverage::none) return by_pairs;
    return (std::min)(by_pairs, seen(key_mask, i, count, positions, slot));
  }

 private:
  using flags = tensor_view<const unsigned char>;

  /// The row of query i of a view that may be broadcast.
  template <class E>
  E* row_of_query(const tensor_view<E>& x, idx_t i) const {
    return x.data() + (x.extent(0) == 1 ? 0 : batch) * x.stride(0) + (x.extent(1) == 1 ? 0 : head) * x.stride(1) +
           (x.extent(2) == 1 ? 0 : i) * x.stride(2);
  }
  mask_coverage seen(const flags& of, idx_t i, idx_t count, const index_map& positions, idx_t slot) const {
    const unsigned char* const row = row_of_query(of, i);
    if (!positions.list)
      return seen_of(row + positions[slot] * of.stride(3), count, positions.step * of.stride(3));
    bool any = false, all = true;
    for (idx_t n = 0; n < count && (all || !any); ++n) {
      const bool one = row[positions[slot + n] * of.stride(3)] != 0;
      any |= one, all &= one;
    }
    return any ? (all ? mask_coverage::all : mask_coverage::some) : mask_coverage::none;
  }
  void hide(const flags& by, T* s, idx_t count, idx_t i, const index_map& positions, idx_t slot) const {
    constexpr T hidden = -std::numeric_limits<T>::infinity();
    const unsigned char* const row = row_of_query(by, i);
    const idx_t stride = by.stride(3);
    if (stride == 1 && !positions.list && positions.step == 1) {
      hide_scores(s, count, row + positions[slot]);
    } else {
      for (idx_t n = 0; n < count; ++n) s[n] = row[positions[slot + n] * stride] ? s[n] : hidden;
    }
  }

  /// The caller's function on every score; key(n) is the position of key n. Some scores at a time, through a local
  /// buffer: the function then cannot read what is being written, and compilers vectorise it. Keys that the bias masks
  /// stay masked.
  template <class Key>
  void apply_score(T* s, idx_t count, idx_t i, Key key) const {
    constexpr idx_t block = 64;
    const idx_t b = batch, h = head, position = i + query_shift;
    const bool biased = bias || relative;
    T scores[block];
    for (idx_t begin = 0; begin < count; begin += block) {
      const idx_t end = (std::min)(count - begin, block);
      for (idx_t n = 0; n < end; ++n) {
        const T x = s[begin + n], y = static_cast<T>((*score)(x, b, h, position, key(begin + n)));
        scores[n] = biased && x == -std::numeric_limits<T>::infinity() ? x : y;
      }
      std::copy_n(scores, end, s + begin);
    }
  }

  /// Terms that need scores in base e; the result is in base 2. Finite terms leave scores finite, if need be at the end
  /// of the range of T.
  void change(T* s, idx_t count, idx_t i, const index_map& positions, idx_t slot) const {
    if (softcap) cap_scores(s, count, *softcap);
    if (decay) decay.add(s, count, batch, head, i + query_shift, positions, slot, T(1));
    const T slope = slopes.empty() ? T(0) : slopes[static_cast<std::size_t>(head)];
    const T* const row = bias ? row_of_query(bias, i) : nullptr;
    const idx_t position = i + query_shift;
    const bool plain = !relative && !positions.list && (!row || (bias.stride(3) == 1 && positions.step == 1));
    if (relative)
      add_relative(s, count, row, slope, position, positions, slot);
    else if (plain && (row || slope != T(0)))
      add_linear_terms(s, count, row ? row + positions[slot] : nullptr, slope, position - positions[slot],
                       positions.step, scored || pointwise ? T(1) : log2_e<T>);
    else if (row || slope != T(0))
      for (idx_t n = 0; n < count; ++n) {
        const idx_t j = positions[slot + n];
        const T b = row ? row[j * bias.stride(3)] : T(0), x = s[n] + b - slope * static_cast<T>(std::abs(position - j));
        s[n] = b == -std::numeric_limits<T>::infinity() ? b : std::clamp(x, -most, most);
      }
    if constexpr (scored) {
      if (positions.list)
        apply_score(s, count, i, [list = positions.list + slot](idx_t n) { return list[n]; });
      else
        apply_score(s, count, i, [map = positions.from(slot)](idx_t n) { return map.first + map.step * n; });
    }
    if constexpr (pointwise) return;
    if (scored || !(plain || relative) || (!relative && !row && slope == T(0))) scores_to_base_2(s, count);
  }
  /// The bias of the distance with the other linear terms, in base 2 unless a function follows. Its entries are used
  /// where they lie, or some at a time are put together with the bias of the pair.
  void add_relative(T* s, idx_t count, const T* row, T slope, idx_t position, const index_map& positions,
                    idx_t slot) const {
    constexpr idx_t block = 256;
    const T factor = scored || pointwise ? T(1) : log2_e<T>;
    const std::optional<T> one = relative.constant(head, position, positions, slot, count);
    if (one && !row && slope == T(0)) return add_constant(s, count, *one, factor);
    T sums[block];
    const T* const entries = row ? nullptr : relative.adjacent(head, position, positions, slot, count);
    const idx_t together = entries ? count : block;
    for (idx_t begin = 0; begin < count; begin += together) {
      const idx_t some = (std::min)(count - begin, together), at = slot + begin;
      if (one)
        std::fill_n(sums, some, *one);
      else if (!entries)
        relative.copy(head, position, positions, at, some, sums);
      for (idx_t n = 0; row && n < some; ++n) sums[n] += row[positions[at + n] * bias.stride(3)];
      for (idx_t n = 0; positions.list && slope != T(0) && n < some; ++n)
        sums[n] -= slope * static_cast<T>(std::abs(position - positions[at + n]));
      add_linear_terms(s + begin, some, entries ? entries : sums, positions.list ? T(0) : slope,
                       position - positions[at], positions.step, factor);
    }
  }
  static constexpr T most = (std::numeric_limits<T>::max)();
};

/// The terms of one query, row t of what has a row for each.
template <class T, class Score>
score_terms<T, Score> for_query(score_terms<T, Score> terms, idx_t t) {
  if (terms.bias.extent(2) > 1) terms.bias = terms.bias.slice(2, t, 1);
  if (terms.mask.extent(2) > 1) terms.mask = terms.mask.slice(2, t, 1);
  return terms;
}

/// 1 / sqrt(dim) unless given.
template <class T>
T scale_or_default(const std::optional<T>& scale, idx_t dim) {
  return scale ? *scale : T(1) / std::sqrt(static_cast<T>(std::max<idx_t>(dim, 1)));
}

/// The terms an operator's options ask for.
template <class S, class Score>
void set_terms(score_terms<compute_type<S>, Score>& terms, const softmax_parameters<S>& given, idx_t dim) {
  terms.scale = scale_or_default(given.scale, dim);
  terms.softcap = given.softcap, terms.slopes = given.alibi_slopes, terms.dropout = given.dropout;
  terms.skip.below = given.skip_below, terms.skip.share = given.skip_share, terms.skip.counts = given.skipped;
  const auto set = [](auto& to, const auto& from) {  // most are not given
    if (from) to = from;
  };
  set(terms.bias, *given.bias), set(terms.relative.table, *given.relative_bias);
  set(terms.by_distance.table, *given.relative_keys), set(terms.by_position.table, *given.position_queries);
  set(terms.decay.log_decay, *given.log_decay);
  set(terms.mask, *given.mask), set(terms.mask ? terms.key_mask : terms.mask, *given.key_mask);
}

/// Checks the scale, which must be finite in base 2 too.
template <class T>
void check_scale(const validator& check, const std::optional<T>& scale) {
  if (scale && !std::isfinite(*scale * log2_e<T>)) check.fail("a finite scale, times log2(e) too", *scale);
}

/// Checks the numbers that every operator with a softmax over keys may be given: scale, softcap, slopes, sinks.
template <class S>
void check_softmax_numbers(call_views& views, const attention_shape& s, const softmax_parameters<S>& given) {
  using T = compute_type<S>;
  check_scale(views, given.scale);
  if (given.softcap && !(*given.softcap > 0 && std::isfinite(*given.softcap) && std::isfinite(T(1) / *given.softcap)))
    views.fail("a finite softcap > 0 whose inverse is finite", *given.softcap);
  const auto check_list = [&](const char* what, const char* numbers, std::span<const T> list, T least) {
    if (list.empty()) return;
    check_per_head(views, what, list, s.heads);
    for (T x : list)
      if (!(x >= least && x <= (std::numeric_limits<T>::max)())) views.fail({what, numbers}, x);
    views.read(what, list_layout(list));
  };
  if (!(given.dropout.rate >= 0 && given.dropout.rate < 1))
    views.fail("a dropout rate from 0 to less than 1", given.dropout.rate);
  if (given.skip_below && given.skip_share) views.fail("either skip_below or skip_share", "both");
  if (given.skip_below && !(*given.skip_below >= 0)) views.fail("skip_below >= 0", *given.skip_below);
  if (given.skip_share && !(*given.skip_share > 0 && std::isfinite(*given.skip_share)))
    views.fail("a finite skip_share > 0", *given.skip_share);
  if (given.skipped && !given.skip_below && !given.skip_share)
    views.fail("skip_below or skip_share, since skipped is given", "neither");
  check_list("alibi_slopes", " that are finite", given.alibi_slopes, std::numeric_limits<T>::lowest());
  check_list("sinks", " that are finite, or -infinity for none", given.sinks, -std::numeric_limits<T>::infinity());
  if (!*given.relative_bias && !*given.relative_keys && !*given.position_queries && !*given.relative_queries) return;
  const auto check_odd = [&](const char* expected, const auto& table) {
    if (table && table.extent(1) % 2 == 0) views.fail(expected, table.extent(1));
  };
  views.option("relative_bias", *given.relative_bias, {{"relative_bias heads", s.heads, or_one}});
  check_odd("2 R + 1 entries of relative_bias", *given.relative_bias);
  views.option("relative_keys", *given.relative_keys,
               {{"relative_keys heads", s.heads, or_one}, {}, {"relative_keys dim = query dim", s.dim}});
  check_odd("2 R + 1 rows of relative_keys", *given.relative_keys);
  views.option("position_queries", *given.position_queries,
               {{"position_queries heads", s.heads, or_one}, {}, {"position_queries dim = key dim", s.dim}});
  check_odd("2 R + 1 rows of position_queries", *given.position_queries);
  views.option("relative_queries", *given.relative_queries, {{"relative_queries batch = query batch", s.batch},
                                                             {"relative_queries heads = query heads", s.heads},
                                                             {"relative_queries length = query length", s.queries},
                                                             {"relative_queries dim = query dim", s.dim}});
  if (*given.relative_queries && !*given.relative_keys)
    views.fail("relative_keys, since relative_queries are given", "none");
}

/// The options with an entry for every key; a step's keys are those of its cache.
template <class S>
void check_key_options(call_views& views, const attention_shape& s, const softmax_parameters<S>& given) {
  if (!*given.mask && !*given.key_mask && !*given.log_decay && !*given.bias) return;
  views.option("mask", *given.mask, {{"mask batch", s.batch, or_one},
                                     {"mask heads", s.heads, or_one},
                                     {"mask query length", s.queries, or_one},
                                     {"mask key length = key length", s.keys}});
  key_flags(*given.key_mask).validate(views, s.batch, s.keys);
  views.option("log_decay", *given.log_decay, {{"log_decay batch = query batch", s.batch},
                                               {"log_decay heads = query heads", s.heads},
                                               {"log_decay length = key length", s.keys}});
  if (*given.log_decay && !given.causal) views.fail("causal attention, since log_decay is given", "causal = false");
  views.option("bias", *given.bias, {{"bias batch", s.batch, or_one},
                                     {"bias heads", s.heads, or_one},
                                     {"bias query length", s.queries, or_one},
                                     {"bias key length = key length", s.keys}});
}

/// The checks every operator with a softmax over keys shares.
template <class S>
void check_softmax_options(call_views& views, const attention_shape& s, const softmax_parameters<S>& given) {
  check_softmax_numbers(views, s, given);
  if (!given.of_cache) check_key_options(views, s, given);
}

/// Checks at compile time that the caller's score function can be called, or that there is none.
template <class Score, class T>
constexpr void require_score() {
  static_assert(std::is_invocable_r_v<T, Score&, T, idx_t, idx_t, idx_t, idx_t> ||
                    std::same_as<std::remove_cvref_t<Score>, no_score> || makes_weights<Score>,
                "attn: score must be callable as score(s, batch, head, i, j) and return a number");
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
