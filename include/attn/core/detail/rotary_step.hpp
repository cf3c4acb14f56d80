// attn: rotary positions in a step with a cache: the new queries and keys are rotated in scratch memory of the
// execution before the keys enter the cache.
#pragma once

#include <attn/core/rotary.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Gives the options the positions of `count` new tokens of every item, which are kept in `positions` [B, count]. Item
/// b has before[b] tokens so far: its next one is at that position, plus first_position, unless positions are given. It
/// has the first lengths[b] tokens of the chunk, or all; the rest is padding, at any valid position. Returns whether
/// all of it is: it needs no position then, and a table may have none.
template <class S>
bool place_new_tokens(const validator& check, rotary_options<S>& options, std::span<const idx_t> before,
                      std::span<const idx_t> lengths, idx_t count, idx_t* positions) {
  const auto batch = static_cast<idx_t>(before.size());
  const tensor_view<const idx_t, 2> given = options.positions;
  if (given) {
    check.readable("positions", given);
    check.broadcasts("positions batch", batch, given.extent(0));
    check.equal("positions length = key length", count, given.extent(1));
  } else if (std::abs(options.first_position) > furthest_position) {
    check.fail({"a first position from ", -furthest_position, " to ", furthest_position}, options.first_position);
  }
  bool padding = count > 0;
  for (idx_t b = 0; b < batch; ++b) {
    const auto item = static_cast<std::size_t>(b);
    const idx_t taken = lengths.empty() ? count : lengths[item];
    padding &= taken == 0;
    idx_t position = 0;
    for (idx_t t = 0; t < count; ++t) {
      if (t < taken)
        position = given ? given(given.extent(0) == 1 ? 0 : b, t) : before[item] + options.first_position + t;
      positions[b * count + t] = position;
    }
  }
  options.positions = {positions, {batch, padding ? 0 : count}};
  return padding;
}

template <class S>
struct rotary_step {
  S *q = nullptr, *k = nullptr;
  idx_t* positions = nullptr;

  static rotary_step layout(arena& memory, bool wanted, const tensor_view<const S>& q, const tensor_view<const S>& k) {
    if (!wanted) return {};
    return {memory.allocate<S>(q.size()), memory.allocate<S>(k.size()),
            memory.allocate<idx_t>(k.extent(0) * k.extent(2))};
  }

  /// q_new [B, H, n, D] and k_new [B, Hkv, n, D] become views of their rotations.
  void rotate(const validator& check, std::optional<rotary_options<S>> options, std::span<const idx_t> before,
              std::span<const idx_t> lengths, tensor_view<const S>& q_new, tensor_view<const S>& k_new,
              execution& exec) const {
    if (!options) return;
    const bool padding = place_new_tokens(check, *options, before, lengths, k_new.extent(2), positions);
    const auto rotated = [&](const char* name, tensor_view<const S> x, S* memory) {
      if (padding) x = x.slice(2, 0, 0);
      const tensor_view<S> to(memory, x.extents());
      run_rotary<S>(check, x, to, {name, "the rotated tokens"}, *options, false, false, exec);
      return to;
    };
    const tensor_view<const S> q_rotated = rotated("q", q_new, q), k_rotated = rotated("k", k_new, k);
    if (!padding) q_new = q_rotated, k_new = k_rotated;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
