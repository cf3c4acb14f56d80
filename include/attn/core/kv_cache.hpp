// attn: keys and values of the tokens so far, for operators that decode with a cache that grows.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});
//   cache.append(k, v);                                             // or by the step of an operator
//
// Memory   batch * heads * capacity * (dim + value_dim) elements. It grows as tokens come, doubling; reserve() allocates
//          once.
#pragma once

#include <attn/core/state_extents.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// Keys [B, Hkv, tokens, D] and values [B, Hkv, tokens, Dv], each head contiguous. One that was moved from may only be
/// assigned to or destroyed.
template <element S>
class kv_cache : public detail::token_state {
 public:
  /// An empty cache; heads are key heads. Throws std::invalid_argument for a negative extent.
  explicit kv_cache(const state_extents& extents) : kv_cache("kv_cache", extents) {}

  /// Tokens there is room for.
  index capacity() const { return capacity_; }
  std::size_t bytes() const { return (keys_.capacity() + values_.capacity()) * sizeof(S); }

  /// Room for `tokens` tokens; never shrinks. What views point to may move. Throws std::invalid_argument for sizes no
  /// memory can hold, std::bad_alloc.
  void reserve(index tokens) {
    const detail::validator check(name_);
    check.at_least("tokens to reserve", 0, tokens);
    if (tokens <= capacity_) return;
    const auto grown = [&](const char* what, const std::vector<S>& from, index dim) {
      std::vector<S> to(static_cast<std::size_t>(check.fits(what, {batch(), heads(), tokens, dim})));
      for (index h = 0; h < batch() * heads() && tokens_ > 0; ++h)
        std::copy_n(from.data() + h * capacity_ * dim, tokens_ * dim, to.data() + h * tokens * dim);
      return to;
    };
    std::vector<S> keys = grown("keys", keys_, dim()), values = grown("values", values_, value_dim());
    keys_ = std::move(keys);
    values_ = std::move(values);
    capacity_ = tokens;
  }

  /// Forgets all but the first `tokens` tokens; the memory stays.
  void truncate(index tokens) {
    if (tokens < 0 || tokens > tokens_)
      detail::validator(name_).fail(detail::text({"tokens to keep from 0 to ", tokens_}), tokens);
    tokens_ = tokens;
  }
  /// Forgets all tokens; the memory stays.
  void reset() { tokens_ = 0; }

  /// Adds the tokens of k [B, Hkv, n, D] and v [B, Hkv, n, Dv]: a copy, and now and then a move of what is there.
  /// Throws std::invalid_argument for shapes that do not fit or views of the cache itself, before anything changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    const tensor_view<const S> keys = as_view(k), values = as_view(v);
    check_tokens(detail::validator(name_), keys, values);
    const index count = keys.extent(2);
    if (tokens_ + count > capacity_) reserve(std::max({tokens_ + count, 2 * capacity_, index(16)}));
    const auto copy = [&](const tensor_view<const S>& from, std::vector<S>& to, index dim) {
      for (index b = 0; b < batch(); ++b)
        for (index h = 0; h < heads(); ++h)
          for (index i = 0; i < count; ++i) {
            S* row = to.data() + ((b * heads() + h) * capacity_ + tokens_ + i) * dim;
            for (index d = 0; d < dim; ++d) row[d] = from(b, h, i, d);
          }
    };
    copy(keys, keys_, dim());
    copy(values, values_, value_dim());
    tokens_ += count;
  }

  tensor_view<const S> keys() const { return view(keys_, dim()); }
  tensor_view<const S> values() const { return view(values_, value_dim()); }

  // For the step: checks what append() would, and nothing else.
  void check_tokens(const detail::validator& check, const detail::memory_layout& k,
                    const detail::memory_layout& v) const {
    token_state::check_tokens(check, k, v);
    no_alias(check, "k", k);
    no_alias(check, "v", v);
  }
  void no_alias(const detail::validator& check, const char* what, const detail::memory_layout& x) const {
    check.no_alias("cache keys", whole(keys_), what, x);
    check.no_alias("cache values", whole(values_), what, x);
  }

 protected:
  /// For caches that keep more than this: messages are theirs.
  kv_cache(const char* name, const state_extents& extents) : token_state(name, extents), name_(name) {}

 private:
  tensor_view<const S> view(const std::vector<S>& memory, index dim) const {
    return {memory.data(), {batch(), heads(), tokens_, dim}, {heads() * capacity_ * dim, capacity_ * dim, dim, 1}};
  }
  static tensor_view<const S> whole(const std::vector<S>& memory) {
    return {memory.data(), {1, 1, 1, static_cast<index>(memory.size())}};
  }

  const char* name_;
  index capacity_ = 0;
  std::vector<S> keys_, values_;
};

}  // namespace attn::inline ATTN_ISA
