// attn: the chunks of lsh.hpp.
#pragma once

#include <attn/softmax/detail/packed_keys.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The chunks of one round over n sorted tokens, and the packed slots their queries see: before() slots of earlier
/// rounds' chunks, the n tokens, then those of later rounds' chunks. Without `wrap` there are only the n tokens.
struct lsh_chunks {
  index n = 0, chunk = 1, chunks = 0, rounds = 1;
  index lookback = 0, lookahead = 0;
  bool wrap = false;

  lsh_chunks(index length, index rounds_, index chunk_, index back, index ahead, bool wrap_)
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
  /// Slots of this or any shorter length.
  index most_slots() const { return n + (wrap ? (lookback + lookahead) * chunk : 0); }

  /// The slots the sorted token t sees.
  key_range slots_of(index t) const {
    const index own = t / chunk;
    index first = own - lookback, last = own + lookahead;
    if (!wrap) first = std::max<index>(first, 0), last = std::min(last, chunks - 1);
    return {before() + tokens_before(first), before() + tokens_before(last + 1)};
  }

  /// The round and the rank in its order of a slot of round r.
  std::pair<index, index> source(index r, index slot) const {
    const index at = slot - before(), turn = floor_div(at, n), round = r + turn;
    return {round - floor_div(round, rounds) * rounds, at - turn * n};
  }
};

}  // namespace attn::inline ATTN_ISA::detail
