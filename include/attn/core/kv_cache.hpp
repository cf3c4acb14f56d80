// attn: keys and values of the tokens so far, for operators that decode with a cache that grows.
//
// Memory   batch * kv_heads * capacity * (dim + value_dim) elements. It grows as tokens come, doubling; reserve() makes
//          the room once.
#pragma once

#include <attn/core/detail/attention_shape.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// Keys [B, Hkv, size, D] and values [B, Hkv, size, Dv] of the tokens so far, each head contiguous. One that was moved
/// from may only be assigned to or destroyed.
template <element S>
class kv_cache {
 public:
  /// An empty cache. Throws std::invalid_argument for a negative extent.
  kv_cache(index batch, index kv_heads, index dim, index value_dim)
      : batch_(batch), heads_(kv_heads), dim_(dim), dim_v_(value_dim) {
    detail::check_cache(detail::validator("kv_cache"), batch, kv_heads, dim, value_dim);
  }
  kv_cache(index batch, index kv_heads, index dim) : kv_cache(batch, kv_heads, dim, dim) {}

  index size() const { return size_; }
  index capacity() const { return capacity_; }
  index batch() const { return batch_; }
  index kv_heads() const { return heads_; }
  index dim() const { return dim_; }
  index value_dim() const { return dim_v_; }
  std::size_t bytes() const { return (keys_.capacity() + values_.capacity()) * sizeof(S); }

  /// Room for `tokens` tokens; never shrinks. What views point to may move. Throws std::invalid_argument for sizes no
  /// memory can hold, std::bad_alloc.
  void reserve(index tokens) {
    const detail::validator check("kv_cache");
    check.at_least("tokens to reserve", 0, tokens);
    if (tokens <= capacity_) return;
    std::vector<S> keys(static_cast<std::size_t>(check.fits("keys", {batch_, heads_, tokens, dim_})));
    std::vector<S> values(static_cast<std::size_t>(check.fits("values", {batch_, heads_, tokens, dim_v_})));
    for (index h = 0; h < batch_ * heads_; ++h) {
      std::copy_n(keys_.data() + h * capacity_ * dim_, size_ * dim_, keys.data() + h * tokens * dim_);
      std::copy_n(values_.data() + h * capacity_ * dim_v_, size_ * dim_v_, values.data() + h * tokens * dim_v_);
    }
    keys_ = std::move(keys);
    values_ = std::move(values);
    capacity_ = tokens;
  }

  /// Forgets all but the first `tokens` tokens; the memory stays.
  void truncate(index tokens) {
    if (tokens < 0 || tokens > size_)
      detail::validator("kv_cache").fail(detail::text({"tokens to keep from 0 to ", size_}), tokens);
    size_ = tokens;
  }
  void clear() { size_ = 0; }

  /// Adds the tokens of k [B, Hkv, n, D] and v [B, Hkv, n, Dv]: a copy, and now and then a move of what is there.
  /// Throws std::invalid_argument for shapes that do not fit or views of the cache itself, before anything changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    append_views(detail::validator("kv_cache"), as_view(k), as_view(v));
  }

  tensor_view<const S> keys() const { return view(keys_.data(), dim_); }
  tensor_view<const S> values() const { return view(values_.data(), dim_v_); }

  // For the step: checks what append() would, and nothing else.
  void check_tokens(const detail::validator& check, const tensor_view<const S>& k, const tensor_view<const S>& v) const {
    detail::check_tokens(check, batch_, heads_, dim_, dim_v_, k, v);
    no_alias(check, "k", k);
    no_alias(check, "v", v);
  }
  void no_alias(const detail::validator& check, const char* what, const detail::memory_layout& x) const {
    check.no_alias("cache keys", whole(keys_), what, x);
    check.no_alias("cache values", whole(values_), what, x);
  }

 private:
  tensor_view<const S> view(const S* data, index dim) const {
    return {data, {batch_, heads_, size_, dim}, {heads_ * capacity_ * dim, capacity_ * dim, dim, 1}};
  }
  static tensor_view<const S> whole(const std::vector<S>& memory) {
    return {memory.data(), {1, 1, 1, static_cast<index>(memory.size())}};
  }

  void append_views(const detail::validator& check, const tensor_view<const S>& k, const tensor_view<const S>& v) {
    check_tokens(check, k, v);
    const index tokens = k.extent(2);
    if (size_ + tokens > capacity_) reserve(std::max({size_ + tokens, 2 * capacity_, index(16)}));
    const auto copy = [&](const tensor_view<const S>& from, std::vector<S>& to, index dim) {
      for (index b = 0; b < batch_; ++b)
        for (index h = 0; h < heads_; ++h)
          for (index i = 0; i < tokens; ++i) {
            S* row = to.data() + ((b * heads_ + h) * capacity_ + size_ + i) * dim;
            for (index d = 0; d < dim; ++d) row[d] = from(b, h, i, d);
          }
    };
    copy(k, keys_, dim_);
    copy(v, values_, dim_v_);
    size_ += tokens;
  }

  index batch_, heads_, dim_, dim_v_;
  index size_ = 0, capacity_ = 0;
  std::vector<S> keys_, values_;
};

}  // namespace attn
