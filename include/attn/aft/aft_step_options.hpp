// attn: options of the steps of the attention-free family, and of append() of their states.
#pragma once

#include <attn/aft/detail/aft_parameters.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step.
struct aft_step_options {
  list_view<idx_t> lengths{};  ///< item b takes the first lengths[b] tokens, the rest is padding; all unless given
  bool gate = true;  ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};  ///< [B or 1, n]; of aft_full_step [B or 1, tokens of the cache with the new ones]

  operator detail::aft_parameters() const { return {lengths, true, gate, key_mask}; }
};

/// Options of append().
struct aft_append_options {
  list_view<idx_t> lengths{};  ///< as of a step
  key_mask_view key_mask{};    ///< [B or 1, n]
};

}}  // namespace attn::ATTN_ISA
