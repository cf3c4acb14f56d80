// attn: which keys causal queries see where the caller says at which positions they are, and how many tokens a key
// stands for: key s for the tokens s span, ..., s span + span - 1, seen from the last of them on.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/packing.hpp>
#include <attn/core/first_positions.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

struct key_span {
  first_positions first{};  // unless given, the last query is at the last key
  idx_t tokens = 1;         // of a key

  idx_t position(const sequence_lengths& lengths, idx_t b, idx_t i) const {
    return i + (first ? first.of(b) : lengths.keys(b) - lengths.queries(b));
  }
  /// A causal query at this position sees the keys below.
  idx_t end_at(idx_t position, idx_t keys) const {
    return std::clamp<idx_t>(tokens == 1 ? position + 1 : floor_div(position + 1, tokens), 0, keys);
  }
};

/// The span and the positions that the options of a call say.
inline key_span check_span(const validator& check, const first_positions& first, idx_t span, bool causal, idx_t batch) {
  check.at_least("span", 1, span);
  const idx_t count = first.list().empty() ? idx_t(bool(first)) : std::ssize(first.list());
  if (count > 1) check.one_per("first_position", "batch item", batch, count);
  for (idx_t b = 0; b < count; ++b)
    if (const idx_t p = first.of(b); p < -furthest_position || p > furthest_position)
      check.fail("a first_position from -2^40 to 2^40", p);
  if (span > 1 && !causal) check.fail("causal attention, since span is given", "causal = false");
  if (span > 1 && !first) check.fail("first_position, since span is given", "none");
  return {first, span};
}

}}}  // namespace attn::ATTN_ISA::detail
