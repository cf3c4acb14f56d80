// attn: shapes and options, checked once on entry. Everything here throws std::invalid_argument in the form
// "attn::linformer: expected projection columns = key length 512; found 256", before anything is written.
// Nothing here is on a hot path or knows an element type: it is kept small and compiled once.
#pragma once

#include <attn/core/detail/error_text.hpp>
#include <attn/core/tensor_view.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <span>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What no process can address, in bytes.
inline constexpr idx_t beyond_memory = idx_t(1) << 47;

/// The product of non-negative sizes, or -1 where it is `limit` or more. Sizes of 0 count as 1 for this: products of
/// some of the sizes do not overflow either, and a state of nothing has lists of its items all the same.
[[gnu::noinline]] inline idx_t checked_product(std::span<const idx_t> sizes, idx_t limit = beyond_memory) {
  idx_t product = 1;
  bool nothing = false;
  for (idx_t size : sizes) {
    nothing |= size == 0;
    if (size < 0 || __builtin_mul_overflow(product, std::max<idx_t>(size, 1), &product) || product >= limit) return -1;
  }
  return nothing ? 0 : product;
}

/// A view without its element type.
struct memory_layout {
  const char* data = nullptr;
  idx_t item = 0;  // bytes of an element
  int rank = 0;
  idx_t extents[4] = {}, strides[4] = {};  // strides in elements

  memory_layout() = default;
  template <class T, int Rank>
  [[gnu::noinline]] memory_layout(const tensor_view<T, Rank>& x)
      : data(reinterpret_cast<const char*>(x.data())),
        item(sizeof(T)),
        rank(Rank),
        extents{axis(x.extents(), 0), axis(x.extents(), 1), axis(x.extents(), 2), axis(x.extents(), 3)},
        strides{axis(x.strides(), 0), axis(x.strides(), 1), axis(x.strides(), 2), axis(x.strides(), 3)} {}

  static idx_t axis(const auto& of, std::size_t n) { return n < of.size() ? of[n] : 0; }

  [[gnu::noinline]] bool empty() const {
    return std::any_of(extents, extents + rank, [](idx_t n) { return n == 0; });
  }
  /// Whether this is not the null view.
  [[gnu::noinline]] bool given() const {
    return data || std::any_of(extents, extents + rank, [](idx_t n) { return n != 0; });
  }
};

/// Adds the bytes that an axis of a view covers to `bytes`; whether memory can hold them.
inline bool add_bytes_of_axis(idx_t stride, idx_t extent, idx_t item, idx_t& bytes) {
  idx_t step = 0, covered = 0;
  return !__builtin_mul_overflow(stride, item, &step) && !__builtin_mul_overflow(step, extent - 1, &covered) &&
         covered > -beyond_memory && covered < beyond_memory && (bytes += std::abs(covered)) < beyond_memory;
}

/// Whether two views are the same memory in the same layout.
inline bool same_memory(const memory_layout& x, const memory_layout& y) {
  bool same = x.data == y.data;
  for (int n = 0; n < 4; ++n)
    same = same && x.extents[n] == y.extents[n] && (x.extents[n] < 2 || x.strides[n] == y.strides[n]);
  return same;
}

/// The axes of a view that move: byte steps made positive, and the lowest address touched. Of an empty view none.
struct moving_axes {
  struct axis {
    idx_t stride, extent;
  };
  axis axes[4];  // `count` of them
  int count = 0;
  idx_t item;
  std::uintptr_t origin;
  bool negative = false, empty = false;  // whether an extent is
  bool endless = false;                  // more bytes than memory can hold

  [[gnu::noinline]] explicit moving_axes(const memory_layout& x) : item(x.item) {
    auto lowest = reinterpret_cast<std::uintptr_t>(x.data);  // a number: null views have strides, too
    idx_t all = item;
    for (int n = 0; n < x.rank; ++n) {
      const idx_t extent = x.extents[n];
      negative |= extent < 0, empty |= extent == 0;
      if (extent < 2) continue;
      endless |= !add_bytes_of_axis(x.strides[n], extent, x.item, all);
      if (endless) continue;
      const idx_t step = x.strides[n] * x.item;
      if (step < 0) lowest += static_cast<std::uintptr_t>(step * (extent - 1));
      axes[count++] = {std::abs(step), extent};
    }
    if (empty) item = count = 0, endless = false;
    origin = empty ? 0 : lowest;
  }

  /// Bytes from the lowest address on that the axes with steps below `limit` touch.
  [[gnu::noinline]] idx_t covered(idx_t limit) const {
    idx_t bytes = item;
    for (int n = 0; n < count; ++n)
      if (axes[n].stride < limit) bytes += axes[n].stride * (axes[n].extent - 1);
    return bytes;
  }
  /// The greatest common divisor of the steps from `limit` on, and of `period`.
  [[gnu::noinline]] idx_t period(idx_t limit, idx_t period) const {
    for (int n = 0; n < count; ++n)
      if (axes[n].stride >= limit) period = std::gcd(period, axes[n].stride);
    return period;
  }
  /// Whether two elements may share memory. Each stride must be larger than all that the faster axes touch, as in every
  /// usual layout; a view that interleaves its axes in another way counts as sharing.
  [[gnu::noinline]] bool elements_overlap() const {
    for (int n = 0; n < count; ++n) {
      if (axes[n].stride < covered(axes[n].stride)) return true;
      for (int other = 0; other < n; ++other)
        if (axes[other].stride == axes[n].stride) return true;
    }
    return false;
  }
};

/// Checks of one operator, whose name begins every message; a message says what was expected and what was found.
class validator {
 public:
  constexpr explicit validator(const char* name) : name_(name) {}

  [[noreturn, gnu::cold, gnu::noinline]] void fail(std::initializer_list<word> expected, word found) const {
    fail(error_text(expected), found);
  }
  [[noreturn, gnu::cold, gnu::noinline]] void fail(word expected, word found) const {
    raise<std::invalid_argument>(error_text{"attn::", name_, ": expected ", expected, "; found ", found}.c_str());
  }

  /// "expected WHAT WANTED; found VALUE"
  [[gnu::noinline]] void equal(const char* what, idx_t wanted, idx_t value) const {
    if (value != wanted) fail({what, " ", wanted}, value);
  }

  [[gnu::noinline]] void at_least(const char* what, idx_t least, idx_t value) const {
    if (value < least) fail({what, " >= ", least}, value);
  }

  /// Checks that memory can hold the product of the sizes; returns it.
  [[gnu::noinline]] idx_t fits(const char* what, std::initializer_list<idx_t> sizes) const {
    const idx_t product = checked_product({sizes.begin(), sizes.size()});
    if (product < 0) fail({what, " that memory can hold"}, "a size beyond it");
    return product;
  }

  /// Checks that a list has `wanted` entries.
  [[gnu::noinline]] void one_per(const char* what, const char* thing, idx_t wanted, idx_t value) const {
    if (value != wanted) fail({what, ", one per ", thing, ": ", wanted}, value);
  }

  /// Checks that an extent is `wanted`, or 1 (broadcast).
  [[gnu::noinline]] void broadcasts(const char* what, idx_t wanted, idx_t value) const {
    if (value != wanted && value != 1) fail({what, " 1 or ", wanted}, value);
  }

  /// A view that can be read: no negative extent, memory behind it unless it is empty. Returns its axes.
  [[gnu::noinline]] moving_axes readable(const char* what, const memory_layout& x, const char* before = "") const {
    const moving_axes axes(x);
    if (axes.negative) fail({before, what, " with extents >= 0"}, error_text::list(x.extents, x.rank));
    if (!x.data && !axes.empty)
      fail({before, what, " with memory behind its extents"},
           error_text{"a null view of shape ", error_text::list(x.extents, x.rank)});
    if (axes.endless)
      fail({before, what, " with strides * extents that memory can hold"},
           error_text{"strides ", error_text::list(x.strides, x.rank)});
    return axes;
  }

  /// A view that can be written: readable, and no two of its elements share memory.
  [[gnu::noinline]] moving_axes writable(const char* what, const memory_layout& x, const char* before = "") const {
    const moving_axes axes = readable(what, x, before);
    if (axes.elements_overlap())
      fail({before, what, " whose elements do not overlap"},
           error_text{"strides ", error_text::list(x.strides, x.rank)});
    return axes;
  }

  /// A table of extents: name, expected, found.
  struct extent {
    const char* what;
    idx_t wanted, value;
  };
  [[gnu::noinline]] void extents(std::initializer_list<extent> table) const {
    for (const extent& e : table) equal(e.what, e.wanted, e.value);
  }

 private:
  const char* name_;
};

/// Views with disjoint address ranges share nothing. Where the ranges interlace (q, k, v and out as slices of one
/// buffer), every stride of the slow axes is a multiple of some period; the views do not overlap if the bytes that
/// their fast axes touch lie at different offsets within the period. Exact for nested slices; an undecided case counts
/// as sharing.
[[gnu::noinline]] inline bool may_share(const memory_layout& x, const memory_layout& y) {
  constexpr idx_t all = (std::numeric_limits<idx_t>::max)();
  const moving_axes a(x), b(y);
  if (a.empty || b.empty) return false;
  if (a.endless || b.endless) return true;
  if (a.origin + static_cast<std::uintptr_t>(a.covered(all)) <= b.origin ||
      b.origin + static_cast<std::uintptr_t>(b.covered(all)) <= a.origin)
    return false;
  const auto disjoint_within = [&](idx_t cut) {
    const idx_t period = b.period(cut, a.period(cut, 0));
    if (period == 0) return false;
    const auto p = static_cast<std::uintptr_t>(period);
    const auto place = static_cast<idx_t>((a.origin % p + p - b.origin % p) % p);  // where a begins, counted from b
    return place >= b.covered(cut) && place + a.covered(cut) <= period;
  };
  for (int n = 0; n < a.count; ++n)
    if (disjoint_within(a.axes[n].stride)) return false;
  for (int n = 0; n < b.count; ++n)
    if (disjoint_within(b.axes[n].stride)) return false;
  return true;
}

}}}  // namespace attn::ATTN_ISA::detail
