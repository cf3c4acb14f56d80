// attn: elements of caches in fewer bits, beside Eigen::half, Eigen::bfloat16 and std::int8_t.
//
//   attn::kv_cache<attn::int4> cache({.heads = 8, .dim = 128});            // 5 bits for each number
//   attn::kv_cache<attn::int8_channels> cache({.heads = 8, .dim = 128});   // 9 bits
//
// Where a few channels of the keys are far larger than the others, as in many trained models, a scale for each token
// leaves little to the others. Therefore these have a scale and an offset for each channel of 32 tokens (KIVI, Liu et
// al. 2024); the formula is in core/detail/channel_codes.hpp.
#pragma once

#include <attn/core/detail/config.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

/// Four bits, and eight bits, of each number: bytes of blocks of 32 tokens.
enum class int4 : std::uint8_t {};
enum class int8_channels : std::uint8_t {};

}}  // namespace attn::ATTN_ISA
