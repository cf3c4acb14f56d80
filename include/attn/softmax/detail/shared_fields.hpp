// attn: which of the options that operators of softmax attention share the options and gradients of one have: each says
// it, and softmax_parameters.hpp and softmax_backward_call.hpp read those fields. One that is listed and is not there, or
// has another name, does not compile.
//
//   static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::lse;
#pragma once

#include <attn/core/detail/config.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Fields of options and gradients that not all operators have, and sets of them.
namespace fields {
inline constexpr unsigned causal = 1u << 0, first_position = 1u << 1, span = 1u << 2, bias = 1u << 3,
                          relative_bias = 1u << 4, log_decay = 1u << 5, mask = 1u << 6, key_mask = 1u << 7,
                          softcap = 1u << 8, alibi_slopes = 1u << 9, sinks = 1u << 10, dropout = 1u << 11,
                          lse = 1u << 12, k = 1u << 13, sums = 1u << 14, rotary = 1u << 15,
                          lengths = 1u << 16,        // and query_lengths, key_lengths
                          relative_keys = 1u << 17,  // and relative_queries, position_queries
                          skip = 1u << 18,           // skip_below, skip_share, skipped
                          of_cache = 1u << 19;       // no field: the keys are those of a cache, and `lengths` of chunks
inline constexpr unsigned masks = mask | key_mask, distances = relative_keys | relative_bias | log_decay,
                          of_softmax = softcap | alibi_slopes | sinks | lse,
                          all_terms = distances | bias | masks | of_softmax | dropout | skip,
                          of_pattern = causal | lengths | masks | relative_bias | of_softmax | dropout | skip,
                          of_pointwise = bias | relative_bias | masks | softcap | alibi_slopes;
}  // namespace fields

}}}  // namespace attn::ATTN_ISA::detail
