// attn: keys and values of the tokens so far, for operators that decode with a cache.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});           // grows as tokens come
//   attn::kv_cache<float> cache(keys, values);                                  // in the caller's memory
//   attn::kv_cache<std::int8_t> cache({.heads = 8, .dim = 64});                 // a quarter of the memory of float
//   attn::kv_cache<std::int8_t> cache({.heads = 8, .dim = 64}, {.rotate = true});
//   attn::kv_cache<attn::int4> cache({.heads = 8, .dim = 64});                  // 0.16 of it
//   cache.append(k, v);                                                         // or by the step of an operator
//   cache.append(k, v, {.lengths = n});                                         // n[b] tokens for item b
//   cache.reset(1), cache.truncate(0, 3), cache.copy_item(0, 1), cache.reorder(beams);
//   cache.keep(0, positions);                                                  // leaves the tokens at these positions
//
// Batch items are independent sequences: each has its own number of tokens, and may begin anew. Where sequences come
// and go and share beginnings, paged_cache.hpp takes less memory.
//
// keep() leaves of an item those tokens whose positions a list names, and closes the gaps: the accepted branch of a
// tree of drafts, eviction, a context shift. Keys that were rotated stay as they are. In eight bits, those that come to
// another block are rounded once more (the formula is at keep() in core/detail/cached_sequences.hpp).
//
// Elements have the type of the tokens. A cache of float tokens may also have Eigen::half or Eigen::bfloat16, rounded
// to nearest; one of any tokens but double may have std::int8_t, that is, eight bits, with a scale for each token and
// head and, for every 16 keys, the first of them as bf16, from which the others are differences where those are smaller
// (formula in core/detail/quantised.hpp). Numbers beyond the range of 16 bits, 65504 in Eigen::half, throw. In eight
// bits dims must be even, and numbers finite and no larger than 1e38; a token whose numbers are all below 1e-30 may
// become 0. On attention of a trained model (bench/data, two layers) int8 errs by 0.47 and 0.25 % of the result's norm,
// bfloat16 by 0.28 and 0.09 %. Where the processor multiplies bf16, a step of up to 4 float tokens rounds the queries
// for keys of bf16. Over codes (std::int8_t, attn::int4, int8_channels) queries and weights of every type, bf16 too, are
// 16-bit integers (full_softmax_step.hpp).
//
// With `rotate` a cache of std::int8_t stores keys times an orthogonal matrix, and steps multiply queries with it,
// which keeps the products (core/detail/hadamard.hpp; Ashkboos et al. 2024, "QuaRot"). It spreads channels that are
// far larger than others, beside which one scale for a token leaves little to those: with two channels of the keys 50
// times as large as the others the error becomes 1.9 % in place of 11; without such channels it stays, or grows by an
// eighth. Memory is the same, a step takes 0.99 to 1.05 times as long. The matrix depends on the dim alone; where that
// is no power of two, blocks of the largest power that divides it are rotated. Keys must be no larger than 1e34. Other
// elements refuse it: channels with scales of their own, or numbers with exponents, would become as coarse as the
// largest channel (bench/README.md). Values are stored as they are.
//
// With attn::int4 and attn::int8_channels each channel of 32 tokens has a scale and an offset, of keys and of values
// (formula in core/detail/channel_codes.hpp): channels that are far larger than others, as the keys of many models
// have, cost those nothing. Any dims, and numbers as for std::int8_t; where dims are no multiple of the processor's
// vectors, steps take up to 1.3 times as long for each number, more where they are shorter than a vector. The scales
// are those of a full block: until its last token comes, tokens are bfloat16, and queries that come with that token see
// the block rounded. So by the rounding of four or eight bits results depend on
// how tokens are divided into steps, and a token on those that follow in its block. What truncate(), or a step that
// throws, leaves of a full block stays as it was rounded together with the tokens that are gone, however large those
// were, and is rounded again when the block is full again; so are tokens that keep() moves or leaves in a block that it
// fills. A sliding_window_cache, whose rows are written over, cannot have them. int4 errs by 4.4 and 2.2 % on the same
// attention, int8_channels by 0.38 and 0.17 %; with two channels of the keys 50 times as large as the others, normal
// numbers, by 9 and 0.7 %.
//
// attn::float8_e4m3 and attn::float8_e5m2 store float tokens as floats of eight bits, rounded to nearest. Numbers must
// be finite and no larger than 448 or 57344. They err by 4.5 and 1.1 %, or 8.2 and 2.2 %.
//
// Memory   batch * heads * capacity * (dim + value_dim) elements; in eight bits 1.125 bytes for each number of a key, 1
//          for each of a value, and 8 for each token and head; of int4 0.625 bytes for each number, and for each item
//          those of 128 tokens more, of int8_channels 1.125 and 64 tokens (key dims as multiples of 8 or 4). It grows
//          as tokens come, by doubling; reserve() allocates once; memory of the caller's does not grow. Where values
//          are the first dims of the keys, as in multi-head latent attention (DeepSeek-AI 2024), value_dim takes no
//          memory.
#pragma once

#include <attn/core/detail/cached_sequences.hpp>

namespace attn { inline namespace ATTN_ISA {

struct kv_cache_options {
  /// Values are the first value_dim dims of the keys, and not stored: `v` of a step or append must be that part of `k`.
  bool values_in_keys = false;
  /// Keys are stored times an orthogonal matrix, as at the top of the file: std::int8_t alone, an even dim up to 2048,
  /// and values of their own.
  bool rotate = false;
};

namespace detail {

inline key_storage storage_of(const kv_cache_options& options) { return {options.values_in_keys, options.rotate}; }

}  // namespace detail

/// Keys [B, Hkv, tokens, D] and values [B, Hkv, tokens, Dv], each head contiguous unless the memory is the caller's.
/// With std::int8_t they are blocks of 16 tokens, [B, Hkv, blocks, 64 + 18 D] and [B, Hkv, blocks, 64 + 16 Dv] bytes.
/// With attn::int4 they are blocks of 32, [B, Hkv, blocks + 4, 4 D + 16 round_up(D, 8)] and [B, Hkv, blocks + 4, 20
/// Dv], with attn::int8_channels [B, Hkv, blocks + 2, 4 D + 32 round_up(D, 4)] and [B, Hkv, blocks + 2, 36 Dv]; the
/// last four or two are for the tokens of a block that is not full. A moved-from cache may only be assigned to or
/// destroyed.
template <class S>
class kv_cache : public detail::cached_sequences<detail::kv_tokens<S>> {
  using base = detail::cached_sequences<detail::kv_tokens<S>>;

 public:
  using value_type = S;

  /// An empty cache; heads are key heads. Throws std::invalid_argument for a negative extent, and for options that do
  /// not fit.
  explicit kv_cache(const state_extents& extents, const kv_cache_options& options = {})
      : base("kv_cache", extents, detail::storage_of(options)) {}

  /// A cache in the caller's memory, [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv], with any strides (blocks must be
  /// contiguous, and at even addresses), which has the first lengths[b] tokens of item b already, none unless given.
  /// `v` may be the first dims of `k`. A copy of the cache is in the same memory. Throws
  /// std::invalid_argument for views that do not fit.
  kv_cache(const tensor_view<S>& k, const tensor_view<S>& v, list_view<idx_t> lengths = {},
           const kv_cache_options& options = {})
      : base("kv_cache", detail::kv_memory<S>(detail::validator("kv_cache"), k, v, detail::storage_of(options)),
             lengths) {}

  /// capacity(): number of tokens of an item that there is room for; bytes(): of the memory that the cache owns.
  /// Copies, copy_item and reorder cost the tokens, not the room: a new copy has room for twice its tokens, or for 16.
  using base::capacity, base::bytes;
  /// reserve(tokens) makes room; never shrinks. What views point to may move. Throws std::invalid_argument for sizes no
  /// memory can hold, or beyond the caller's memory, std::bad_alloc.
  using base::reserve;
  /// [B, Hkv, tokens(), D]; of item b the first tokens(b) rows are valid. With std::int8_t blocks, as above, with int4
  /// and int8_channels those of the whole capacity; where values are part of the keys, the blocks of the keys.
  using base::keys, base::values;
};

}}  // namespace attn::ATTN_ISA
