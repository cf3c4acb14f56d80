// attn: keys and values of the tokens so far, for operators that decode with a cache.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});           // grows as tokens come
//   attn::kv_cache<float> cache(keys, values);                                  // in the caller's memory
//   attn::kv_cache<std::int8_t> cache({.heads = 8, .dim = 64});                 // a quarter of the memory of float
//   cache.append(k, v);                                                         // or by the step of an operator
//   cache.append(k, v, {.lengths = n});                                         // n[b] tokens for item b
//   cache.reset(1), cache.truncate(0, 3), cache.copy_item(0, 1), cache.reorder(beams);
//
// Batch items are independent sequences: each has its own number of tokens, and may begin anew. Where sequences come
// and go and share beginnings, paged_cache.hpp takes less memory.
//
// Elements have the type of the tokens. A cache of float tokens may also have Eigen::half or Eigen::bfloat16, rounded
// to nearest; one of any tokens but double may have std::int8_t, that is, eight bits, with a scale for each token and
// head and, for every 16 keys, the first of them as bf16, from which the others are differences where those are smaller
// (formula in core/detail/quantised.hpp). Numbers beyond the range of 16 bits, 65504 in Eigen::half, throw. In eight
// bits dims must be even, and numbers finite and no larger than 1e38; a token whose numbers are all below 1e-30 may
// become 0. On attention of a trained model (bench/data, two layers) int8 errs by 0.47 and 0.25 % of the result's norm,
// bfloat16 by 0.28 and 0.09 %. Where the processor multiplies bf16, a step of up to 4 float tokens rounds the queries
// for keys of bf16, and one of more bf16 tokens those of int8.
//
// Memory   batch * heads * capacity * (dim + value_dim) elements; in eight bits 1.125 bytes for each number of a key, 1
//          for each of a value, and 8 for each token and head. It grows as tokens come, by doubling; reserve()
//          allocates once; memory of the caller's does not grow. Where values are the first dims of the keys, as in
//          multi-head latent attention (DeepSeek-AI 2024), value_dim takes no memory.
#pragma once

#include <attn/core/detail/kv_memory.hpp>

namespace attn { inline namespace ATTN_ISA {

struct kv_cache_options {
  /// Values are the first value_dim dims of the keys, and not stored: `v` of a step or append must be that part of `k`.
  bool values_in_keys = false;
};

/// Keys [B, Hkv, tokens, D] and values [B, Hkv, tokens, Dv], each head contiguous unless the memory is the caller's.
/// With std::int8_t they are blocks of 16 tokens, [B, Hkv, blocks, 64 + 18 D] and [B, Hkv, blocks, 64 + 16 Dv] bytes. A
/// moved-from cache may only be assigned to or destroyed.
template <class S>
class kv_cache : public detail::token_state {
  static_assert(detail::check_cache_element<S>());

 public:
  using value_type = S;

  /// An empty cache; heads are key heads. Throws std::invalid_argument for a negative extent.
  explicit kv_cache(const state_extents& extents, const kv_cache_options& options = {})
      : kv_cache("kv_cache", extents, options) {}

  /// A cache in the caller's memory, [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv], with any strides (blocks of
  /// std::int8_t must be contiguous, and at even addresses), which has the first lengths[b] tokens of item b already,
  /// none unless given. `values` may be the first dims of `keys`. A copy of the cache is in the same memory. Throws
  /// std::invalid_argument for views that do not fit.
  kv_cache(const tensor_view<S>& keys, const tensor_view<S>& values, list_view<idx_t> lengths = {})
      : kv_cache(detail::kv_memory<S>(detail::validator("kv_cache"), keys, values)) {
    detail::check_length_list(detail::validator("kv_cache"), "lengths", lengths, batch(), capacity());
    std::copy(lengths.begin(), lengths.end(), lengths_.begin());
  }

  /// Number of tokens of an item that there is room for.
  idx_t capacity() const { return memory_.rows(); }
  /// Bytes of the memory that the cache owns.
  std::size_t bytes() const { return memory_.bytes(); }

  /// Room for `tokens` tokens; never shrinks. What views point to may move. Throws std::invalid_argument for sizes no
  /// memory can hold, or beyond the caller's memory, std::bad_alloc.
  void reserve(idx_t tokens) {
    const detail::validator check(name_);
    check.at_least("tokens to reserve", 0, tokens);
    check_room(check, tokens);
    if (tokens > capacity()) memory_.grow(check, tokens, lengths_);
  }

  /// Forgets all but the first `tokens` tokens of every item, or of one; the memory stays.
  void truncate(idx_t tokens) {
    check_kept(tokens, this->tokens());
    for (idx_t& length : lengths_) length = std::min(length, tokens);
  }
  void truncate(idx_t item, idx_t tokens) {
    check_kept(tokens, this->tokens(item));
    length(item) = tokens;
  }
  /// Forgets all tokens, or those of one item; the memory stays.
  void reset() { truncate(0); }
  void reset(idx_t item) { truncate(item, 0); }

  /// Item `to` becomes a copy of item `from`: a branch.
  void copy_item(idx_t from, idx_t to) {
    if (check_item(from) != check_item(to)) memory_.copy(from, to, length(to) = length(from));
  }
  /// Item n becomes what item order[n] was, for all n: the survivors of a beam search. Throws std::invalid_argument for
  /// a list of another size, or for items that do not exist.
  void reorder(list_view<idx_t> order) {
    const auto exchange = [&](idx_t a, idx_t b) {
      memory_.exchange(a, b, std::max(length(a), length(b)));
      std::swap(length(a), length(b));
    };
    detail::reorder_items(
        detail::validator(name_), order, batch(), [&](idx_t from, idx_t to) { copy_item(from, to); }, exchange);
  }

  /// Appends copies of the tokens k [B, Hkv, n, D] and v [B, Hkv, n, Dv]; where memory must grow, the earlier tokens
  /// are copied too. Throws std::invalid_argument for shapes that do not fit, views of the cache itself, more tokens
  /// than the caller's memory has room for, or numbers that have no finite scale in eight bits, before anything
  /// changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v, const append_options& options = {}) {
    using E = element_of<const K&>;
    detail::check_stores<S, E>();
    const tensor_view<const E> keys = as_view(k), values = as_view(v);
    detail::check_append(*this, name_, keys, values, options.lengths);
    append_checked(keys, values, options.lengths);
  }

  /// [B, Hkv, tokens(), D]; of item b the first tokens(b) rows are valid. With std::int8_t blocks, as above; where
  /// values are part of the keys, the blocks of the keys.
  tensor_view<const S> keys() const { return memory_.keys(tokens()); }
  tensor_view<const S> values() const { return memory_.values(tokens()); }

  // For the step ------------------------------------------------------------------------------------------------------

  /// Checks the tokens of a step.
  template <class E>
  void check_tokens(const detail::validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> lengths) const {
    token_state::check_tokens(check, k, v, lengths);
    check_room(check, tokens_after(k.extent(2), lengths));
    memory_.check_tokens(check, k, v, lengths);
  }
  /// append() of tokens that were already checked.
  template <class E>
  void append_checked(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> lengths) {
    const idx_t count = k.extent(2), most = tokens_after(count, lengths);
    if (most > capacity()) reserve(std::max({most, 2 * capacity(), idx_t(16)}));
    for (idx_t b = 0; b < batch(); ++b) {
      const idx_t taken = taken_of(b, count, lengths);
      for (idx_t h = 0; h < heads(); ++h)
        for (idx_t i = 0; i < taken; ++i) memory_.put(k, v, b, h, i, b, length(b) + i);
      length(b) += taken;
    }
  }
  void list_memory(detail::call_views& views) const { memory_.list_memory(views); }
  /// Undoes an append of `count` tokens.
  void forget(idx_t count, std::span<const idx_t> lengths) {
    for (idx_t b = 0; b < batch(); ++b) length(b) -= taken_of(b, count, lengths);
  }
  detail::page_tables pages() const { return {}; }
  bool values_in_keys() const { return memory_.values_in_keys(); }

 protected:
  /// For caches derived from this one, whose name error messages have.
  kv_cache(const char* name, const state_extents& extents, const kv_cache_options& options = {})
      : token_state(name, extents), memory_(detail::validator(name), extents_, options.values_in_keys) {}

 private:
  explicit kv_cache(detail::kv_memory<S> given) : token_state("kv_cache", given.extents()), memory_(std::move(given)) {}

  void check_room(const detail::validator& check, idx_t tokens) const {
    if (memory_.given() && tokens > capacity())
      check.fail({"tokens up to the ", capacity(), " there is room for"}, tokens);
  }

  detail::kv_memory<S> memory_;
};

}}  // namespace attn::ATTN_ISA
