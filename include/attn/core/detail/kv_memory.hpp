// attn: memory of keys and values, of its own or the caller's: what caches are made of.
#pragma once

#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/detail/hadamard.hpp>
#include <attn/core/detail/pages.hpp>
#include <attn/core/detail/row_format.hpp>
#include <attn/core/state_extents.hpp>

#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How keys are stored.
struct key_storage {
  bool values_in_keys = false, rotated = false;
};

/// Keys [items, heads, rows, D] and values [items, heads, rows, Dv]; of elements that are codes [items, heads, blocks,
/// bytes], blocks of rows (row_format.hpp). Values that are the first dims of the keys are not stored. A copy of the
/// caller's memory is the same memory.
template <class S>
class kv_memory {
  static_assert(check_cache_element<S>());
  using format = row_format<S>;

 public:
  /// Own memory, without rows.
  kv_memory(const validator& check, const state_extents& e, const key_storage& storage)
      : extents_(check_state_extents(check, e)), values_in_keys_(storage.values_in_keys) {
    format::validate(check, "dim", extents_.dim), format::validate(check, "value dim", extents_.value_dim);
    if (values_in_keys_ && extents_.value_dim > extents_.dim)
      check.fail({"a value dim up to the key dim ", extents_.dim}, extents_.value_dim);
    set_rotated(check, storage);
  }
  /// The caller's, where the views say whether values are in the keys.
  kv_memory(const validator& check, const tensor_view<S>& keys, const tensor_view<S>& values,
            const key_storage& storage = {})
      : extents_{keys.extent(0), keys.extent(1), format::cols(keys.extent(3), true),
                 format::cols(values.extent(3), is_part(values, keys))},
        values_in_keys_(is_part(values, keys)), given_(true),
        rows_(std::max<idx_t>(0, keys.extent(2) - format::tail) * format::rows), given_keys_(keys),
        given_values_(values) {
    call_views views(check);
    views.write("keys", keys);
    if (values_in_keys_)
      check.writable("values", values);
    else
      views.write("values", values);
    format::validate(check, "keys", keys, true), format::validate(check, "values", values, values_in_keys_);
    check.extents({{"value batch = key batch", keys.extent(0), values.extent(0)},
                   {"value heads = key heads", keys.extent(1), values.extent(1)},
                   {"value length = key length", keys.extent(2), values.extent(2)}});
    if (storage.values_in_keys && !values_in_keys_)
      check.fail("values that are the first dims of the keys, since values_in_keys is given", "other memory");
    set_rotated(check, storage);
  }

  const state_extents& extents() const { return extents_; }
  idx_t rows() const { return rows_; }
  bool given() const { return given_; }
  bool values_in_keys() const { return values_in_keys_; }
  /// Whether keys are stored rotated (hadamard.hpp): queries are, too, before they are multiplied with them.
  bool rotated() const { return rotated_; }
  std::size_t bytes() const {
    return own_keys_.get_deleter().bytes + own_values_.get_deleter().bytes + moved_.bytes();
  }

  tensor_view<S> keys() const { return given_ ? given_keys_ : own(own_keys_, format::elements(extents_.dim, true)); }
  tensor_view<S> values() const {
    if (values_in_keys_) return format::rows == 1 ? keys().slice(3, 0, extents_.value_dim) : keys();
    return given_ ? given_values_ : own(own_values_, format::elements(extents_.value_dim, false));
  }

  /// A view of the first `rows` rows; of all where there is a tail.
  tensor_view<const S> keys(idx_t rows) const { return first(keys(), rows); }
  tensor_view<const S> values(idx_t rows) const { return first(values(), rows); }

  /// Makes room for so many rows. Of item b the first lengths[b] are kept; without a list, none. Large pages are for
  /// memory most of which is written soon.
  void grow(const validator& check, idx_t rows, std::span<const idx_t> lengths, bool large_pages = true) {
    kv_memory grown(*this);
    grown.allocate(check, rows, large_pages);
    for (std::size_t b = 0; b < lengths.size(); ++b) grown.copy_from(*this, idx_t(b), idx_t(b), lengths[b]);
    own_keys_ = std::move(grown.own_keys_), own_values_ = std::move(grown.own_values_);
    rows_ = grown.rows_;
  }
  /// A copy, by which the caller's memory is the same memory, and memory of its own has no rows yet.
  kv_memory(const kv_memory& other)
      : extents_(other.extents_), values_in_keys_(other.values_in_keys_), rotated_(other.rotated_),
        given_(other.given_), heads_first_(other.heads_first_), rows_(given_ ? other.rows_ : 0),
        given_keys_(other.given_keys_), given_values_(other.given_values_) {}
  kv_memory(kv_memory&&) noexcept = default;
  kv_memory& operator=(kv_memory&&) noexcept = default;
  /// Whether this memory, of its own, has room for the rows of another one of the same shape.
  bool has_room_of(const kv_memory& other, idx_t rows) const {
    const state_extents &a = extents_, &b = other.extents_;
    return own_keys_ && !other.given_ && rows <= rows_ && a.batch == b.batch && a.heads == b.heads && a.dim == b.dim &&
           a.value_dim == b.value_dim && values_in_keys_ == other.values_in_keys_ && rotated_ == other.rotated_;
  }

  /// Rows of a pool, whose items are pages. All pages of one head are adjacent, so that the processor's prefetching
  /// goes on where a sequence has consecutive pages (measured: 0.9 of the time of a step, pages of 64 tokens).
  void make_pages(const validator& check, idx_t rows) {
    heads_first_ = true;
    grow(check, rows, {});
  }

  /// Stores token i of batch item b and one head of k and v in a row of an item.
  template <class E>
  void put(const tensor_view<const E>& k, const tensor_view<const E>& v, idx_t b, idx_t h, idx_t i, idx_t item,
           idx_t row) {
    const E* const key = head_of(k, b, h).row(i);
    if (rotated_)
      put_rotated(key, k.stride(3), head_of(keys(), item, h), row);
    else
      format::put(key, k.stride(3), true, head_of(keys(), item, h), row);
    if (!values_in_keys_) format::put(head_of(v, b, h).row(i), v.stride(3), false, head_of(values(), item, h), row);
  }

  /// Before rows are moved, of which the last are those of an item that has `rows` of them.
  void begin_moves(idx_t item, idx_t rows) {
    if constexpr (format::tail > 0) {
      moved_.begin(item, rows, (std::max)(extents_.dim, extents_.value_dim));
      const auto each = [&](const tensor_view<S>& x, bool of_keys) {
        for (idx_t h = 0; h < extents_.heads; ++h) moved_.keep(head_of(x, item, h), of_keys);
      };
      each(keys(), true);
      if (!values_in_keys_) each(values(), false);
    }
  }
  /// A row of an item becomes, in every head, what another row of it or of another item is. Rows are moved in rising
  /// order, to a row before their own or to another item, for in eight bits the first of a block changes the block.
  void move(idx_t from, idx_t from_row, idx_t to, idx_t row) {
    if constexpr (format::tail == 0)
      if (from == to && from_row == row) return;
    const auto each = [&](const tensor_view<S>& x, bool of_keys) {
      for (idx_t h = 0; h < extents_.heads; ++h)
        if constexpr (format::tail > 0)
          moved_.move(head_of(x, from, h), from, from_row, of_keys ? h : extents_.heads + h, of_keys,
                      head_of(x, to, h), row, from == to);
        else
          format::move(head_of(x, from, h), from_row, of_keys, head_of(x, to, h), row);
    };
    each(keys(), true);
    if (!values_in_keys_) each(values(), false);
  }

  /// Copies `count` rows of an item from row `first` on, where a block begins, in every head, to those of another, of
  /// this memory or another of its shape, or swaps them. The rest of their room costs nothing.
  void copy(idx_t from, idx_t to, idx_t count, idx_t first = 0) { copy_from(*this, from, to, count, first); }
  void copy_from(const kv_memory& other, idx_t from, idx_t to, idx_t count, idx_t first = 0) {
    each_run(other, from, to, first, count, [](S* x, S* y, idx_t n) { std::copy_n(x, n, y); });
  }
  void exchange(idx_t a, idx_t b, idx_t count, idx_t first = 0) {
    each_run(*this, a, b, first, count, [](S* x, S* y, idx_t n) { std::swap_ranges(x, x + n, y); });
  }

  /// Checks tokens that are to be stored here, of item b the first given[b] or all: values that are not stored must be
  /// those dims of k. Numbers in eight bits have a scale, which must be finite; finite numbers stay finite in 16 bits.
  template <class E>
  void check_tokens(const validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> given) const {
    if constexpr (format::rows > 1 || sizeof(S) < sizeof(E))
      check_size(check, "k", k, given, rotated_ ? rotated_most : format::most),
          check_size(check, "v", v, given, format::most);
    if (values_in_keys_ && !k.empty() && !is_part(v, k)) check.fail("v to be the first dims of k", "other memory");
  }
  /// This memory, which a step updates, and which overlaps no view of its call.
  void list_memory(call_views& views) const {
    views.update("cache keys", given_ ? given_keys_ : whole(own_keys_));
    if (!values_in_keys_) views.update("cache values", given_ ? given_values_ : whole(own_values_));
  }

 private:
  template <class A, class B>
  static bool is_part(const tensor_view<A>& v, const tensor_view<B>& k) {
    bool same = v.data() == k.data() && v.extent(3) <= k.extent(3);
    for (int axis = 0; axis < 4; ++axis) same &= v.extent(axis) <= 1 || v.stride(axis) == k.stride(axis);
    return same;
  }
  template <class E>
  static void check_size(const validator& check, const char* what, const tensor_view<const E>& x,
                         std::span<const idx_t> given, float most) {
    for (idx_t b = 0; b < x.extent(0); ++b)
      for (idx_t h = 0; h < x.extent(1); ++h)
        for (idx_t t = 0; t < (given.empty() ? x.extent(2) : given[static_cast<std::size_t>(b)]); ++t) {
          std::uint32_t largest = 0;  // of the bits without the sign, which are ordered as the numbers are
          for (idx_t d = 0; d < x.extent(3); ++d)
            largest = (std::max)(largest, std::bit_cast<std::uint32_t>(static_cast<float>(x(b, h, t, d))) &
                                              0x7fffffffu);
          if (largest <= std::bit_cast<std::uint32_t>(most)) continue;
          for (idx_t d = 0; d < x.extent(3); ++d)
            if (const float number = static_cast<float>(x(b, h, t, d));
                !(std::abs(number) <= most) && (format::finite || std::isfinite(number)))
              check.fail({what, format::finite ? " of finite numbers up to " : " of numbers up to ", most,
                          " for a cache of ", format::numbers},
                         number);
        }
  }
  static constexpr float rotated_most = 1e34f;       // the largest number of keys that are to be rotated
  static constexpr idx_t rotated_most_dim = 2048;

  void set_rotated(const validator& check, const key_storage& storage) {
    if (!(rotated_ = storage.rotated)) return;
    if (!format::one_scale)
      check.fail("elements of type std::int8_t, since rotate is given: only those have one scale for all channels",
                 "others");
    if (values_in_keys_) check.fail("values of their own, since rotate is given", "values that are dims of the keys");
    if (rotation_block(extents_.dim) < 2 || extents_.dim > rotated_most_dim)
      check.fail({"an even dim up to ", rotated_most_dim, ", since rotate is given"}, extents_.dim);
  }
  template <class E>
  static void put_rotated([[maybe_unused]] const E* x, [[maybe_unused]] idx_t stride,
                          [[maybe_unused]] const matrix_view<S>& memory, [[maybe_unused]] idx_t row) {
    if constexpr (format::one_scale) {
      const idx_t cols = format::cols(memory.cols, true);
      alignas(64) float numbers[rotated_most_dim + width<float>];
      for (idx_t c = 0; c < cols; ++c) numbers[c] = static_cast<float>(x[c * stride]);
      std::fill_n(numbers + cols, width<float>, 0.0f);
      rotate_row(numbers, cols);
      format::put(numbers, 1, true, memory, row);
    }
  }

  static idx_t stored(idx_t rows) { return rows / format::rows + (rows % format::rows != 0); }
  static idx_t with_tail(idx_t stored_rows) { return stored_rows == 0 ? 0 : stored_rows + format::tail; }
  static tensor_view<const S> first(const tensor_view<const S>& x, idx_t rows) {
    return format::tail > 0 ? x : x.slice(2, 0, stored(rows));
  }
  tensor_view<S> own(const memory_block& memory, idx_t elements) const {
    const idx_t rows = with_tail(stored(rows_)), item = rows * elements;
    const idx_t outer = heads_first_ ? extents_.batch : extents_.heads;
    return {numbers(memory),
            {extents_.batch, extents_.heads, rows, elements},
            {heads_first_ ? item : outer * item, heads_first_ ? outer * item : item, elements, 1}};
  }
  /// The size comes first: with AVX-512 GCC 12.2 makes 1, 1, 1, 1 of the constants 1, 1, 1, 0, which a new cache has.
  static tensor_view<S> whole(const memory_block& memory) {
    return {numbers(memory), {static_cast<idx_t>(memory.get_deleter().bytes / sizeof(S)), 1, 1, 1}};
  }
  static S* numbers(const memory_block& memory) { return static_cast<S*>(static_cast<void*>(memory.get())); }
  /// Memory of its own, whose rows nobody has written yet.
  void allocate(const validator& check, idx_t rows, bool large_pages) {
    rows = with_tail(stored(rows));
    const auto block = [&](const char* what, idx_t elements) {
      const idx_t bytes = check.fits(what, {extents_.batch, extents_.heads, rows, elements, sizeof(S)});
      return bytes > 0 ? allocate_block(static_cast<std::size_t>(bytes), large_pages) : memory_block();
    };
    own_keys_ = block("keys", format::elements(extents_.dim, true));
    if (!values_in_keys_) own_values_ = block("values", format::elements(extents_.value_dim, false));
    rows_ = std::max<idx_t>(0, rows - format::tail) * format::rows;
  }
  /// visit(x, y, n) for the numbers of rows, and of the tail, of an item of `other` and one of this memory.
  template <class Visit>
  void each_run(const kv_memory& other, idx_t a, idx_t b, idx_t first, idx_t count, const Visit& visit) {
    if (count == 0) return;
    const auto each = [&](const tensor_view<S>& from, const tensor_view<S>& to) {
      const auto rows = [&](const matrix_view<S>& x, const matrix_view<S>& y, idx_t at, idx_t y_at, idx_t some) {
        const bool dense = x.col_stride == 1 && y.col_stride == 1;
        if (dense && x.row_stride == x.cols && y.row_stride == y.cols)
          return visit(x.row(at), y.row(y_at), some * x.cols);
        for (idx_t r = 0; r < some; ++r)
          for (idx_t d = 0, n = dense ? x.cols : 1; d < x.cols; d += n)
            visit(x.row(at + r) + d * x.col_stride, y.row(y_at + r) + d * y.col_stride, n);
      };
      for (idx_t h = 0; h < extents_.heads; ++h) {
        const matrix_view<S> x = head_of(from, a, h), y = head_of(to, b, h);
        rows(x, y, first / format::rows, first / format::rows, stored(count));
        rows(x, y, x.rows - format::tail, y.rows - format::tail, format::tail);
      }
    };
    each(other.keys(), keys());
    if (!values_in_keys_) each(other.values(), values());
  }

  state_extents extents_;
  bool values_in_keys_, rotated_ = false, given_ = false, heads_first_ = false;
  idx_t rows_ = 0;
  memory_block own_keys_, own_values_;
  tensor_view<S> given_keys_{}, given_values_{};
  [[no_unique_address]] moved_rows<S> moved_;
};

/// cache_rows for rows in eight bits, the first `cols` columns of each. Values may be stored within the keys.
template <>
struct cache_rows<const std::int8_t> {
  quantised_rows all;
  block_pages pages{};

  cache_rows(const tensor_view<const std::int8_t>& x, idx_t b, idx_t h, idx_t cols, bool of_keys,
             const page_tables& given) {
    const matrix_view<const std::int8_t> blocks = head_of(x, given ? 0 : b, h);
    const auto layout = quantised_layout::of_bytes(blocks.cols, of_keys);
    all = {blocks.data, blocks.row_stride, layout, 0, blocks.rows * quantised_block, cols};
    if (!given) return;
    const std::vector<idx_t>& table = given.tables[b];
    pages = {table.data(), given.page_rows / quantised_block, x.stride(0)};
    all.rows = std::ssize(table) * given.page_rows;
  }

  /// The rows from j on.
  quantised_rows from(idx_t j) const {
    return {all.blocks, all.block_stride, all.layout, j, all.rows - j, all.cols, 1, pages.table ? &pages : nullptr};
  }
};

/// The same for rows with scales for each channel of a block.
template <channel_coded C>
struct cache_rows<const C> {
  channel_rows<C> all;
  block_pages pages{};

  cache_rows(const tensor_view<const C>& x, idx_t b, idx_t h, idx_t cols, bool of_keys, const page_tables& given)
      : all(head_of(x, given ? 0 : b, h), channel_layout<C>::of_bytes(x.extent(3), of_keys), cols) {
    if (!given) return;
    const std::vector<idx_t>& table = given.tables[b];
    pages = {table.data(), given.page_rows / channel_block, x.stride(0)};
    all.rows = std::ssize(table) * given.page_rows;
  }

  /// The rows from j on.
  channel_rows<C> from(idx_t j) const {
    channel_rows<C> rest = all;
    rest.first = j, rest.rows -= j, rest.pages = pages.table ? &pages : nullptr;
    return rest;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
