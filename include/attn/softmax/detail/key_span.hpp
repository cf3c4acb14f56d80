// attn: which keys a query sees by its position, where a key may stand for several tokens: key s for the tokens s span,
// ..., s span + span - 1, seen from the last of them on.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/packing.hpp>
#include <attn/core/first_positions.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Which keys a query sees by its position: all of them, or with causal those that are complete at it.
struct key_limit {
  bool causal = false;
  idx_t span = 1;  // tokens of a key

  /// A query at this position sees the keys below.
  idx_t end(idx_t position, idx_t keys) const {
    if (!causal) return keys;
    return std::clamp<idx_t>(span == 1 ? position + 1 : floor_div(position + 1, span), 0, keys);
  }
};

/// Checks the span and the positions that the options of a call say.
inline void check_span(const validator& check, const first_positions& first, const key_limit& limit, idx_t batch) {
  check.at_least("span", 1, limit.span);
  const idx_t count = first.list().empty() ? idx_t(bool(first)) : std::ssize(first.list());
  if (count > 1) check.one_per("first_position", "batch item", batch, count);
  for (idx_t b = 0; b < count; ++b)
    if (const idx_t p = first.of(b); p < -furthest_position || p > furthest_position)
      check.fail("a first_position from -2^40 to 2^40", p);
  if (limit.span > 1 && !limit.causal) check.fail("causal attention, since span is given", "causal = false");
  if (limit.span > 1 && !first) check.fail("first_position, since span is given", "none");
}

/// A name stands for several keys, or a key for several tokens.
template <class Options>
void check_block_of_span(const validator& check, const Options& options) {
  if (options.span > 1 && options.block > 1) check.fail("a block of 1, since span is given", options.block);
}

}}}  // namespace attn::ATTN_ISA::detail
