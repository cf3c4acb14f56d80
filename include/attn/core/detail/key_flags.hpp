// attn: which keys of a call a key_mask leaves visible, in the words of all operators: one key, a range of keys, their
// number; and the one check of such a mask. For operators that sum keys and values up along the sequence the rows of
// hidden ones are 0 in what is multiplied, whatever lies there, and so are their gradients.
#pragma once

#include <attn/core/detail/call_views.hpp>
#include <attn/core/detail/packing.hpp>
#include <attn/core/mask_view.hpp>

#include <cstring>
#include <limits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How many of a set of keys a mask leaves visible.
enum class mask_coverage { none, some, all };  // in ascending order

/// Examines bytes, which are 0 or not.
inline mask_coverage seen_of(const unsigned char* bytes, idx_t count, idx_t stride) {
  bool any = false, all = true;
  idx_t n = 0;
  constexpr idx_t together = 64;
  if (stride == 1)
    for (; n + together <= count && (all || !any); n += together) {
      std::uint64_t words[together / 8], set = 0, zeros = 0;
      std::memcpy(words, bytes + n, together);
      for (std::uint64_t w : words) set |= w, zeros |= (w - 0x0101010101010101u) & ~w & 0x8080808080808080u;
      any |= set != 0, all &= zeros == 0;
    }
  for (; n < count && (all || !any); ++n) {
    any |= bytes[n * stride] != 0;
    all &= bytes[n * stride] != 0;
  }
  return any ? (all ? mask_coverage::all : mask_coverage::some) : mask_coverage::none;
}

/// Some adjacent keys: all of them are seen, unless it has flags.
struct seen_range {
  const unsigned char* flags = nullptr;
  idx_t stride = 1;

  explicit operator bool() const { return flags != nullptr; }
  bool hides(idx_t n) const { return flags && !flags[n * stride]; }
  /// The first hidden key among [n, end), or end.
  idx_t next_hidden(idx_t n, idx_t end) const {
    while (flags && n < end && !hides(n)) ++n;
    return flags ? n : end;
  }
  /// f(first, last, whether they are hidden) for all runs of hidden and of seen keys in [begin, end).
  template <class F>
  void runs(idx_t begin, idx_t end, F&& f) const {
    if (!flags) return f(begin, end, false);
    for (idx_t first = begin, last = begin; first < end; first = last) {
      while (++last < end && hides(last) == hides(first)) {}
      f(first, last, hides(first));
    }
  }

  /// Sets the rows of hidden keys among `count` to 0.
  template <class T>
  void clear_rows(T* rows, idx_t count, idx_t row_stride) const {
    for (idx_t n = 0; flags && n < count; ++n)
      if (hides(n)) std::fill_n(rows + n * row_stride, row_stride, T(0));
  }
  /// Likewise in panels of `capacity` rows as pack_panels writes them.
  template <class P>
  void clear_panels(P* panels, idx_t capacity, idx_t count, idx_t cols) const {
    for (idx_t n = 0; flags && n < count; ++n)
      for (idx_t col = 0; hides(n) && col < cols; col += panel_width<P>)
        for (idx_t lane = 0; lane < panel_width<P>; ++lane) {
          P& x = panels[col * operands<P>(capacity) + n / numbers_of<P> * panel_width<P> + lane];
          if constexpr (numbers_of<P> > 1)
            x.bits &= n % 2 ? 0xffffu : 0xffff0000u;
          else
            x = P(0);
        }
  }
};

/// The keys of a call.
struct key_flags {
  tensor_view<const unsigned char> mask{};  // [B or 1, 1, 1, Lk], or none

  key_flags() = default;
  key_flags(const key_mask_view& given) : mask(given.bytes()) {}
  explicit key_flags(const tensor_view<const unsigned char>& given) : mask(given) {}

  /// Lists and checks the option of this name for `keys` keys of `batch` items.
  void validate(call_views& views, idx_t batch, idx_t keys) const {
    views.option("key_mask", mask, {{"key_mask batch", batch, or_one}, {}, {}, {"key_mask length = key length", keys}});
  }

  explicit operator bool() const { return mask.data() != nullptr; }
  /// Key n of the result is key `begin` + n of a batch item.
  seen_range from(idx_t b, idx_t begin) const {
    if (!*this) return {};
    return {mask.data() + (mask.extent(0) == 1 ? 0 : b) * mask.stride(0) + begin * mask.stride(3), mask.stride(3)};
  }
  bool hides(idx_t b, idx_t key) const { return from(b, key).hides(0); }
  /// Keys [begin, end), without flags if all are seen.
  seen_range range(idx_t b, idx_t begin, idx_t end) const {
    if (!*this || begin >= end) return {};
    const seen_range keys = from(b, begin);
    return seen_of(keys.flags, end - begin, keys.stride) == mask_coverage::all ? seen_range{} : keys;
  }
  /// How many of them are seen, counted up to `most`.
  idx_t count(idx_t b, idx_t begin, idx_t end, idx_t most = (std::numeric_limits<idx_t>::max)()) const {
    if (!*this) return (std::min)(end - begin, most);
    const seen_range keys = from(b, 0);
    idx_t seen = 0;
    for (idx_t j = begin; j < end && seen < most; ++j) seen += !keys.hides(j);
    return seen;
  }
  bool any(idx_t b, idx_t begin, idx_t end) const { return count(b, begin, end, 1) > 0; }
};

}}}  // namespace attn::ATTN_ISA::detail
