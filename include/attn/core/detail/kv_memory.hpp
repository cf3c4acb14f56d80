// attn: memory of keys and values, of its own or the caller's: what caches are made of.
#pragma once

#include <attn/core/state_extents.hpp>

#include <vector>

namespace attn::inline ATTN_ISA::detail {

/// Keys [items, heads, rows, D] and values [items, heads, rows, Dv]. Values that are the first dims of the keys are not
/// stored. A copy of the caller's memory is the same memory.
template <element S>
class kv_memory {
 public:
  /// Of its own, without rows.
  kv_memory(const validator& check, const state_extents& e, bool values_in_keys)
      : extents_(check_state_extents(check, e)), values_in_keys_(values_in_keys) {
    if (values_in_keys && extents_.value_dim > extents_.dim)
      check.fail({"a value dim up to the key dim ", extents_.dim}, extents_.value_dim);
  }
  kv_memory(const validator& check, const tensor_view<S>& keys, const tensor_view<S>& values)
      : extents_{keys.extent(0), keys.extent(1), keys.extent(3), values.extent(3)},
        values_in_keys_(is_part(values, keys)), given_(true), rows_(keys.extent(2)), given_keys_(keys),
        given_values_(values) {
    check.writable("keys", keys), check.writable("values", values);
    if (!values_in_keys_) check.no_alias("keys", keys, "values", values);
    check.extents({{"value batch = key batch", keys.extent(0), values.extent(0)},
                   {"value heads = key heads", keys.extent(1), values.extent(1)},
                   {"value length = key length", keys.extent(2), values.extent(2)}});
  }

  const state_extents& extents() const { return extents_; }
  index rows() const { return rows_; }
  bool given() const { return given_; }
  bool values_in_keys() const { return values_in_keys_; }
  std::size_t bytes() const { return (own_keys_.capacity() + own_values_.capacity()) * sizeof(S); }

  tensor_view<S> keys() const { return given_ ? given_keys_ : own(own_keys_, extents_.dim); }
  tensor_view<S> values() const {
    if (values_in_keys_) return keys().slice(3, 0, extents_.value_dim);
    return given_ ? given_values_ : own(own_values_, extents_.value_dim);
  }

  /// Room for more rows; of item b the first lengths[b] are kept, of all items none where there is no list.
  void grow(const validator& check, index rows, std::span<const index> lengths) {
    const index heads = extents_.heads;
    const auto grown = [&](const char* what, const std::vector<S>& from, index dim) {
      std::vector<S> to(static_cast<std::size_t>(check.fits(what, {extents_.batch, heads, rows, dim})));
      for (std::size_t b = 0; b < lengths.size(); ++b)
        for (index h = index(b) * heads; h < index(b + 1) * heads && lengths[b] > 0; ++h)
          std::copy_n(from.data() + h * rows_ * dim, lengths[b] * dim, to.data() + h * rows * dim);
      return to;
    };
    std::vector<S> keys = grown("keys", own_keys_, extents_.dim);
    std::vector<S> values = grown("values", own_values_, values_in_keys_ ? 0 : extents_.value_dim);
    own_keys_ = std::move(keys), own_values_ = std::move(values);
    rows_ = rows;
  }

  /// Rows of a pool, whose items are pages: of a head all pages lie one after another, so that what prefetches does not
  /// stop where a sequence has pages in a row (measured: 0.9 of the time of a step, pages of 64 tokens).
  void make_pages(const validator& check, index rows) {
    heads_first_ = true;
    grow(check, rows, {});
  }

  /// Token i of batch item b and a head of k and v goes to a row of an item.
  void put(const tensor_view<const S>& k, const tensor_view<const S>& v, index b, index h, index i, index item,
           index row) {
    const auto copy_row = [&](const tensor_view<const S>& x, const tensor_view<S>& memory) {
      const S* const from = head_of(x, b, h).row(i);
      S* const to = head_of(memory, item, h).row(row);
      for (index d = 0; d < memory.extent(3); ++d) to[d * memory.stride(3)] = from[d * x.stride(3)];
    };
    copy_row(k, keys());
    if (!values_in_keys_) copy_row(v, values());
  }

  /// The first `count` rows of an item, in every head, go to those of another, or change places with them.
  void copy(index from, index to, index count) {
    each_number(from, to, count, [](S& x, S& y) { y = x; });
  }
  void exchange(index a, index b, index count) {
    each_number(a, b, count, [](S& x, S& y) { std::swap(x, y); });
  }

  /// Tokens that are to be put here: values that are not stored are those dims of k, and neither lies in this memory.
  void check_tokens(const validator& check, const tensor_view<const S>& k, const tensor_view<const S>& v) const {
    if (values_in_keys_ && !k.empty() && !is_part(v, k)) check.fail("v to be the first dims of k", "other memory");
    no_alias(check, "k", k);
    no_alias(check, "v", v);
  }
  void no_alias(const validator& check, const char* what, const memory_layout& x) const {
    check.no_alias("cache keys", given_ ? given_keys_ : whole(own_keys_), what, x);
    check.no_alias("cache values", given_ ? given_values_ : whole(own_values_), what, x);
  }

 private:
  template <class A, class B>
  static bool is_part(const tensor_view<A>& v, const tensor_view<B>& k) {
    bool same = v.data() == k.data() && v.extent(3) <= k.extent(3);
    for (int axis = 0; axis < 4; ++axis) same &= v.extent(axis) <= 1 || v.stride(axis) == k.stride(axis);
    return same;
  }
  tensor_view<S> own(const std::vector<S>& memory, index dim) const {
    const index item = rows_ * dim, outer = heads_first_ ? extents_.batch : extents_.heads;
    return {const_cast<S*>(memory.data()),
            {extents_.batch, extents_.heads, rows_, dim},
            {heads_first_ ? item : outer * item, heads_first_ ? outer * item : item, dim, 1}};
  }
  static tensor_view<S> whole(const std::vector<S>& memory) {
    return {const_cast<S*>(memory.data()), {1, 1, 1, static_cast<index>(memory.size())}};
  }
  template <class Visit>
  void each_number(index a, index b, index count, const Visit& visit) {
    const auto each = [&](const tensor_view<S>& x) {
      for (index h = 0; h < extents_.heads; ++h)
        for (index t = 0; t < count; ++t)
          for (index d = 0; d < x.extent(3); ++d) visit(x(a, h, t, d), x(b, h, t, d));
    };
    each(keys());
    if (!values_in_keys_) each(values());
  }

  state_extents extents_;
  bool values_in_keys_, given_ = false, heads_first_ = false;
  index rows_ = 0;
  std::vector<S> own_keys_, own_values_;
  tensor_view<S> given_keys_{}, given_values_{};
};

/// Where the rows of items are that lie in pages of a pool: row j of item b is row j % page_rows of page
/// tables[b][j / page_rows].
struct page_tables {
  const std::vector<index>* tables = nullptr;
  index page_rows = 0;

  explicit operator bool() const { return tables != nullptr; }
};

/// Rows of one head, one after another or in pages.
template <class S>
struct cache_rows {
  S* data = nullptr;
  index rows = 0, cols = 0, row_stride = 0, col_stride = 1;
  const index* pages = nullptr;
  index page_rows = 0, page_stride = 0;

  cache_rows(const matrix_view<S>& x)
      : data(x.data), rows(x.rows), cols(x.cols), row_stride(x.row_stride), col_stride(x.col_stride) {}

  /// Of a batch item and head of x, which is [B, H, rows, D], or [pages, H, page_rows, D].
  cache_rows(const tensor_view<S>& x, index b, index h, const page_tables& given)
      : cache_rows(head_of(x, given ? 0 : b, h)) {
    if (!given) return;
    const std::vector<index>& table = given.tables[b];
    pages = table.data(), page_rows = given.page_rows, page_stride = x.stride(0);
    rows = std::ssize(table) * page_rows;
  }

  S* row(index j) const {
    return pages ? data + pages[j / page_rows] * page_stride + j % page_rows * row_stride : data + j * row_stride;
  }
  /// The rows from j on that follow one another.
  matrix_view<S> from(index j) const {
    const index count = pages ? page_rows - j % page_rows : rows - j;
    return {row(j), count, cols, row_stride, col_stride};
  }
};

/// kv_cache, paged_cache: all tokens of all items.
template <class Cache>
concept key_value_cache = requires(Cache& cache, std::span<const index> lengths) {
  typename Cache::value_type;
  { cache.pages() } -> std::same_as<page_tables>;
  cache.forget(index(), lengths);
};

}  // namespace attn::inline ATTN_ISA::detail
