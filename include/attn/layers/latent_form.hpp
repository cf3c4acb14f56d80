// attn: how latent_attention is computed.
#pragma once

#include <attn/core/detail/config.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Keys and values of all heads made from the latents, or weights absorbed into queries and results.
enum class latent_form : unsigned char { automatic, expanded, absorbed };

}}  // namespace attn::ATTN_ISA
