// attn: the chunks of lsh.hpp, and who is masked in them.
#pragma once

#include <attn/softmax/detail/score_terms.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The chunks of one round over n sorted tokens, and where a token's keys lie in the round's slab: `before` slots of
/// earlier rounds' chunks, the n tokens, `after` slots of later rounds' chunks. Without `wrap` there are none of those.
struct lsh_ring {
  index n = 0, chunk = 1, chunks = 0, rounds = 1;
  index lookback = 0, lookahead = 0;
  bool wrap = false;

  lsh_ring(index length, index rounds_, index chunk_, index back, index ahead, bool wrap_)
      : n(length), chunk(std::clamp<index>(chunk_, 1, std::max<index>(1, length))), rounds(rounds_), wrap(wrap_) {
    chunks = ceil_div(n, chunk);
    const index others = std::max<index>(0, (wrap ? chunks * rounds : chunks) - 1);
    lookback = std::min(back, others);
    lookahead = std::min(ahead, wrap ? others - lookback : others);
  }

  /// Tokens before chunk c, counted from chunk 0 of this round; c may lie in another round.
  index tokens_before(index c) const {
    const index round = floor_div(c, chunks);
    return round * n + (c - round * chunks) * chunk;
  }
  index before() const { return wrap && n ? -tokens_before(-lookback) : 0; }
  index after() const { return wrap && n ? tokens_before(chunks + lookahead) - n : 0; }
  index slots() const { return before() + n + after(); }
  /// Slots of this or any shorter length.
  index most_slots() const { return n + (wrap ? (lookback + lookahead) * chunk : 0); }

  /// The slots the sorted token t sees.
  key_range span(index t) const {
    const index own = t / chunk;
    index first = own - lookback, last = own + lookahead;
    if (!wrap) first = std::max<index>(first, 0), last = std::min(last, chunks - 1);
    return {before() + tokens_before(first), before() + tokens_before(last + 1)};
  }

  /// The round and the place in its order of a slot of round r.
  std::pair<index, index> source(index r, index slot) const {
    const index at = slot - before(), turn = floor_div(at, n), round = r + turn;
    return {round - floor_div(round, rounds) * rounds, at - turn * n};
  }
};

/// The terms of a score; then the keys that are not for the query: its own and, if causal, later ones.
template <class T, class Score>
struct lsh_terms {
  score_terms<T, Score> terms;
  const index* place;  // of every token in the order of this round
  key_range tokens;     // slots of this round's tokens; others stand for earlier or later rounds
  bool causal;

  static constexpr bool any() { return true; }
  void apply(T* s, index count, index i, const index_map& positions, index slot) const {
    constexpr T hidden = -std::numeric_limits<T>::infinity();
    if (terms.any()) terms.apply(s, count, i, positions, slot);
    const index* const token = positions.list + slot;
    if (causal)
      for (index n = 0; n < count; ++n) s[n] = token[n] >= i ? hidden : s[n];
    else if (slot < tokens.begin || slot + count > tokens.end)
      for (index n = 0; n < count; ++n) s[n] = token[n] == i ? hidden : s[n];
    else if (const index own = tokens.begin + place[i] - slot; own >= 0 && own < count)
      s[own] = hidden;
  }
};

}  // namespace attn::detail
