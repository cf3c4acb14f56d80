// attn: shapes and options, checked once at the door. Everything here throws std::invalid_argument in the form
// "attn::linformer: expected projection columns = key length 512; found 256", before anything is written.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

namespace attn::detail {

/// Joins its arguments as text; only ever called on the way to an exception.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return std::move(stream).str();
}

template <int Rank>
std::string shape_text(const std::array<index, Rank>& extents) {
  std::string out = "[";
  for (std::size_t axis = 0; axis < Rank; ++axis) out += (axis ? ", " : "") + std::to_string(extents[axis]);
  return out + "]";
}

/// Names the operator once; every check tells what was expected and what was found.
class door {
 public:
  constexpr explicit door(const char* name) : name_(name) {}

  template <class Expected, class Found>
  [[noreturn]] void refuse(const Expected& expected, const Found& found) const {
    throw std::invalid_argument(text("attn::", name_, ": expected ", expected, "; found ", found));
  }

  /// expect(value == wanted): "expected WHAT WANTED; found VALUE".
  void equal(const char* what, index wanted, index value) const {
    if (value != wanted) refuse(text(what, ' ', wanted), value);
  }

  template <class T>
  void positive(const char* what, T value) const {
    if (!(value > T(0))) refuse(text(what, " > 0"), value);
  }

  void at_least(const char* what, index least, index value) const {
    if (value < least) refuse(text(what, " >= ", least), value);
  }

  /// A view that can be read: no negative extent, memory behind it unless it is empty.
  template <class T, int Rank>
  void readable(const char* what, const tensor_view<T, Rank>& x) const {
    for (index extent : x.extents())
      if (extent < 0) refuse(text(what, " with extents >= 0"), shape_text<Rank>(x.extents()));
    if (!x.data() && !x.empty()) refuse(text(what, " with memory behind its extents"), "a null view of shape " + shape_text<Rank>(x.extents()));
  }

  /// A view that can be written: readable, and no two of its elements share memory.
  template <class T, int Rank>
  void writable(const char* what, const tensor_view<T, Rank>& x) const;

  /// Output and input share no memory.
  template <class T, int R, class U, int S>
  void apart(const char* what_out, const tensor_view<T, R>& out, const char* what_in, const tensor_view<U, S>& in) const;

  /// An extent that is `wanted` or 1 (broadcast).
  void broadcasts(const char* what, index wanted, index value) const {
    if (value != wanted && value != 1) refuse(text(what, " 1 or ", wanted), value);
  }

 private:
  const char* name_;
};

/// One axis of a memory pattern, in bytes.
struct axis_steps {
  index stride, extent;
};

/// Axes of x that move, in bytes and with positive strides; `origin` becomes the lowest address touched.
template <class T, int Rank>
int moving_axes(const tensor_view<T, Rank>& x, axis_steps* axes, const char*& origin) {
  origin = reinterpret_cast<const char*>(x.data());
  int count = 0;
  for (int axis = 0; axis < Rank; ++axis) {
    if (x.extent(axis) < 2) continue;
    index stride = x.stride(axis) * static_cast<index>(sizeof(T));
    if (stride < 0) {
      origin += stride * (x.extent(axis) - 1);
      stride = -stride;
    }
    axes[count++] = {stride, x.extent(axis)};
  }
  return count;
}

/// Sorted from the fastest axis up, each step passes everything the faster axes touch. That is sufficient for all
/// layouts people build; a layout that interleaves axes in another way is refused.
template <class T, int Rank>
bool elements_apart(const tensor_view<T, Rank>& x) {
  if (x.empty()) return true;
  axis_steps axes[Rank];
  const char* origin = nullptr;
  const int count = moving_axes(x, axes, origin);
  index reach = sizeof(T);
  for (int done = 0; done < count; ++done) {
    axis_steps* next = std::min_element(axes + done, axes + count, [](auto a, auto b) { return a.stride < b.stride; });
    std::swap(axes[done], *next);
    if (axes[done].stride < reach) return false;
    reach += axes[done].stride * (axes[done].extent - 1);
  }
  return true;
}

/// Could the two views share a byte? Disjoint ranges do not. Where the ranges interlace (q, k, v and out as slices of one
/// buffer), every step of a slow axis is a multiple of some period; the views are apart if what the fast axes touch
/// falls in disjoint places of that period. Exact for nested slices; an undecided case counts as shared.
template <class T, int R, class U, int S>
bool may_share(const tensor_view<T, R>& x, const tensor_view<U, S>& y) {
  if (x.empty() || y.empty()) return false;
  axis_steps axes[R + S];
  const char *x0 = nullptr, *y0 = nullptr;
  const int nx = moving_axes(x, axes, x0);
  const int n = nx + moving_axes(y, axes + nx, y0);
  const auto span_below = [&](int first, int last, index limit, index size) {
    index span = size;
    for (int a = first; a < last; ++a)
      if (axes[a].stride < limit) span += axes[a].stride * (axes[a].extent - 1);
    return span;
  };
  constexpr index all = std::numeric_limits<index>::max();
  const auto x_begin = reinterpret_cast<std::uintptr_t>(x0), y_begin = reinterpret_cast<std::uintptr_t>(y0);
  const auto x_end = x_begin + static_cast<std::uintptr_t>(span_below(0, nx, all, sizeof(T)));
  const auto y_end = y_begin + static_cast<std::uintptr_t>(span_below(nx, n, all, sizeof(U)));
  if (x_end <= y_begin || y_end <= x_begin) return false;
  for (int cut = 0; cut < n; ++cut) {
    index period = 0;
    for (int a = 0; a < n; ++a)
      if (axes[a].stride >= axes[cut].stride) period = std::gcd(period, axes[a].stride);
    if (period == 0) continue;
    const index x_span = span_below(0, nx, axes[cut].stride, sizeof(T));
    const index y_span = span_below(nx, n, axes[cut].stride, sizeof(U));
    const auto p = static_cast<std::uintptr_t>(period);
    const index x_at_y = static_cast<index>((x_begin % p + p - y_begin % p) % p);  // where x begins, counted from y
    if (x_at_y >= y_span && x_at_y + x_span <= period) return false;
  }
  return true;
}

template <class T, int Rank>
void door::writable(const char* what, const tensor_view<T, Rank>& x) const {
  readable(what, x);
  if (!elements_apart(x)) refuse(text(what, " whose elements do not overlap"), "strides " + shape_text<Rank>(x.strides()));
}

template <class T, int R, class U, int S>
void door::apart(const char* what_out, const tensor_view<T, R>& out, const char* what_in,
                 const tensor_view<U, S>& in) const {
  if (may_share(out, in)) refuse(text(what_out, " and ", what_in, " in separate memory"), "an overlap");
}

}  // namespace attn::detail
