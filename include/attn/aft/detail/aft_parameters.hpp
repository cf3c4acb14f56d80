// attn: what the options of an operator of the attention-free family say.
#pragma once

#include <attn/core/mask_view.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Options convert to it.
struct aft_parameters {
  list_view<idx_t> lengths{};
  bool causal = true, gate = true;
  key_mask_view key_mask{};
  bool one_key = false;  // a k of one channel serves all of a head
};

}}}  // namespace attn::ATTN_ISA::detail
