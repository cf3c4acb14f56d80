// attn: the inside of caches that keep a summary of the keys of every block: topk_blocks_cache, min_max_cache.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/topk_choice.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// All tokens, and the sums of the keys of every block, or another summary of them: Table<T> (block_sums).
template <class S, template <class> class Table>
class summarised_tokens : public kv_tokens<S> {
  static_assert(check_cache_element<S, true>());
  using base = kv_tokens<S>;
  using T = compute_type<S>;

 public:
  using base::batch, base::heads, base::dim, base::capacity, base::keys, base::length;

  summarised_tokens(const char* name, const state_extents& extents, idx_t block) : base(name, extents), block_(block) {
    validator(name).at_least("block", 1, block);
  }

  summarised_tokens(const summarised_tokens& other) : base(other), block_(other.block_) {
    reserve_sums();
    copy_sums(other);
  }
  summarised_tokens(summarised_tokens&&) noexcept = default;
  summarised_tokens& operator=(const summarised_tokens& other) {
    base::operator=(other);
    block_ = other.block_;
    if (std::ssize(sums_) != batch() * heads() * sums_stride_) sums_.clear(), sums_stride_ = 0;
    reserve_sums();
    copy_sums(other);
    return *this;
  }
  summarised_tokens& operator=(summarised_tokens&&) noexcept = default;

  idx_t block() const { return block_; }
  std::size_t bytes() const { return base::bytes() + sums_.capacity() * sizeof(T); }
  /// The sums of the first key head of batch item 0; those of the next key head follow sums_stride() numbers later.
  const T* sums() const { return sums_.data(); }
  idx_t sums_stride() const { return sums_stride_; }

  void reserve(idx_t count) {
    base::reserve(count);
    reserve_sums();
  }
  template <class E>
  void append(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> given) {
    const idx_t count = k.extent(2);
    append_and(static_cast<base&>(*this), k, v, given, [&] { reserve_sums(); });
    for (idx_t b = 0; b < batch(); ++b) add_up(b, length(b) - base::taken_of(b, count, given), length(b));
  }
  /// Keeps the first `count` tokens of an item; if the last block is cut, its sum is computed again.
  void cut(idx_t b, idx_t count) {
    if (count == length(b)) return;
    length(b) = count;
    add_up(b, count / block_ * block_, count);
  }
  void keep(idx_t b, std::span<const idx_t> positions, idx_t first) {
    base::keep(b, positions, first);
    add_up(b, first / block_ * block_, length(b));
  }
  void reset(idx_t b) { cut(b, 0); }
  void copy(idx_t from, idx_t to) {
    base::copy(from, to);
    copy_sums(*this, from, to);
  }
  void exchange(idx_t a, idx_t b) {
    base::exchange(a, b);
    const idx_t numbers = sums_of((std::max)(length(a), length(b)));
    for (idx_t h = 0; h < heads(); ++h) {
      T* const x = item_sums(a) + h * sums_stride_;
      std::swap_ranges(x, x + numbers, item_sums(b) + h * sums_stride_);
    }
  }

 private:
  void copy_sums(const summarised_tokens& other) {
    for (idx_t b = 0; b < batch() && this != &other; ++b) copy_sums(other, b, b);
  }
  /// The sums of the tokens that an item has.
  void copy_sums(const summarised_tokens& other, idx_t from, idx_t to) {
    const idx_t numbers = sums_of(other.length(from));
    for (idx_t h = 0; h < heads(); ++h)
      std::copy_n(other.sums_.data() + (from * heads() + h) * other.sums_stride_, numbers,
                  item_sums(to) + h * sums_stride_);
  }
  idx_t sums_of(idx_t tokens) const { return Table<T>::size(ceil_div(tokens, block_), dim()); }
  T* item_sums(idx_t b) { return sums_.data() + b * heads() * sums_stride_; }

  /// Makes room for the sums of as many tokens as the cache has room for.
  void reserve_sums() {
    const idx_t key_heads = batch() * heads(), stride = Table<T>::size(ceil_div(capacity(), block_), dim());
    if (stride <= sums_stride_) return;
    std::vector<T> grown(static_cast<std::size_t>(validator(this->name_).fits(Table<T>::name, {key_heads, stride})));
    for (idx_t key_head = 0; key_head < key_heads; ++key_head)
      std::copy_n(sums_.data() + key_head * sums_stride_, sums_stride_, grown.data() + key_head * stride);
    sums_ = std::move(grown);
    sums_stride_ = stride;
  }

  /// Adds the keys of tokens [begin, end) of an item to the sums of their blocks; a block's first key begins its sum.
  void add_up(idx_t b, idx_t begin, idx_t end) {
    const tensor_view<const S> k = keys();
    for (idx_t h = 0; h < heads(); ++h) {
      const auto rows = head_of(k, b, h);
      const Table<T> sums{item_sums(b) + h * sums_stride_, dim()};
      for (idx_t j = begin; j < end; ++j) {
        if (j % block_ == 0) sums.clear(j / block_);
        sums.add_key(j / block_, rows.row(j), rows.col_stride);
      }
    }
  }

  idx_t block_;
  std::vector<T> sums_;
  idx_t sums_stride_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
