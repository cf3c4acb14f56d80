// attn: the list of one query of lightning_indexer, filled from the scores of keys in their order: the keys, or the
// blocks by the largest score among their keys, that score best, beside those that are named whatever their scores.
#pragma once

#include <attn/softmax/detail/indexer_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The largest of `count` scores; NaN counts as -infinity.
template <class T>
T largest_of(const T* scores, idx_t count) {
  packet<T> most = broadcast<T>(-std::numeric_limits<T>::infinity());
  idx_t n = 0;
  for (; n + width<T> <= count; n += width<T>) {
    const packet<T> x = load<T>(scores + n);
    most = if_less(most, x, x, most);
  }
  T all = n > 0 ? max_lanes(most) : -std::numeric_limits<T>::infinity();
  for (; n < count; ++n) all = scores[n] > all ? scores[n] : all;
  return all;
}

template <class T>
struct named_blocks {
  static constexpr idx_t most_at_once = 64;  // blocks whose largest scores are handed on together

  topk_keys<T> best;       // of what is not forced
  scored_keys<T> forced;   // ascending
  forced_names of_query{};
  idx_t block = 1, room = 0;                       // room: for forced names
  T open = -std::numeric_limits<T>::infinity();    // the largest score of the block that is not complete

  template <class Call>
  static named_blocks layout(arena& memory, const Call& call, T* some, T* others) {
    const idx_t names = call.names(), room = (std::min)(call.local_blocks + call.first_blocks, names);
    return {.best = topk_keys<T>::layout(memory, call.topk, names, some, others),
            .forced = scored_keys<T>::layout(memory, room), .block = call.block, .room = room};
  }
  void begin(const forced_names& names, idx_t topk) {
    best.clear();
    of_query = names, forced.count = 0, open = -std::numeric_limits<T>::infinity();
    best.topk = topk - names.count();
  }

  /// The scores of `some` keys from `first` on, of which the query sees those below `end`. Keys of a call, and of a part
  /// of it, begin with a block.
  void take(const T* scores, idx_t first, idx_t some, idx_t end) {
    if (block == 1) return take_names(scores, first, some);
    T largest[most_at_once];
    idx_t count = 0;
    for (idx_t n = 0; n < some;) {
      const idx_t begin = n, name = (first + n) / block;
      n = (std::min)(some, (name + 1) * block - first);
      open = (std::max)(open, largest_of(scores + begin, n - begin));
      const bool complete = (first + n) % block == 0 || first + n == end;
      if (complete) largest[count++] = std::exchange(open, -std::numeric_limits<T>::infinity());
      if (count < most_at_once && n < some) continue;
      take_names(largest, name + complete - count, count);
      count = 0;
    }
  }
  /// Those of a list of later keys.
  void merge(const named_blocks& later) {
    if (best.topk > 0) best.merge(later.best);
    for (idx_t n = 0; n < later.forced.count; ++n) forced.add(later.forced[n]);
  }
  /// Everything that is named, ascending: in `both`, which has room for topk, or where it is.
  scored_keys<T> finish(scored_keys<T> both) {
    best.finish();
    if (forced.count == 0) return best;
    both.count = 0;
    idx_t next = 0;  // of the forced ones
    for (idx_t n = 0; n < best.count; both.add(best[n++]))
      while (next < forced.count && forced.keys[next] < best.keys[n]) both.add(forced[next++]);
    while (next < forced.count) both.add(forced[next++]);
    return both;
  }

 private:
  void take_names(const T* scores, idx_t first, idx_t count) {
    const idx_t end = first + count, stops[] = {first, of_query.leading, of_query.begin, of_query.end, end};
    if (room == 0) return best.take(scores, first, count);
    for (int part = 0; part < 4; ++part) {
      const idx_t from = std::clamp(stops[part], first, end), to = std::clamp(stops[part + 1], first, end);
      if (part % 2 == 1 && best.topk > 0 && from < to) best.take(scores + (from - first), from, to - from);
      for (idx_t n = from; part % 2 == 0 && n < to; ++n) forced.add({scores[n - first], n});
    }
  }
};

/// Lists of several queries, or of several heads, with the scratch that they share.
template <class T, class Call>
std::span<named_blocks<T>> layout_lists(arena& memory, const Call& call, idx_t count) {
  const idx_t room = topk_keys<T>::room_for(call.topk, call.names());
  T *const some = memory.allocate<T>(room), *const others = memory.allocate<T>(room);
  named_blocks<T>* const lists = memory.allocate_list(
      count, [&](arena& m) { return named_blocks<T>::layout(m, call, some, others); });
  return {lists, static_cast<std::size_t>(count)};
}

}}}  // namespace attn::ATTN_ISA::detail
