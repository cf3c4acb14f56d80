// attn: the views of a call, by name: what it reads, what it writes, what it differentiates. An operator names each of
// them once. A view is checked as it is named: for memory behind it, for its extents, and against all that were named
// before, since what a call writes may overlap nothing else.
//
//   call_views views("full_softmax");
//   views.read("k", k);
//   views.write("out", out);
//   views.option("bias", bias, {{"bias batch", s.batch, or_one}, ..., {"bias key length = key length", s.keys}});
//   views.gradient("k", dk, k);
#pragma once

#include <attn/core/detail/check.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether an extent may also be 1, and serve all.
enum class broadcast_axis : bool { no, yes };
inline constexpr broadcast_axis or_one = broadcast_axis::yes;

/// What an extent of a view must be: "expected WHAT WANTED"; any, where nothing is said.
struct axis {
  const char* what = nullptr;
  idx_t wanted = 0;
  broadcast_axis broadcast = broadcast_axis::no;
};

/// Addresses from `begin` on, below `end`.
struct address_range {
  std::uintptr_t begin, end;

  static address_range of(const moving_axes& axes) {
    constexpr idx_t all = (std::numeric_limits<idx_t>::max)();
    return {axes.origin, axes.origin + static_cast<std::uintptr_t>(axes.covered(all))};
  }
};

/// The addresses that a view touches, where that is easily said, as for most: memory is behind it, no extent is 0, none
/// and no stride negative or large and, of one that is written, every axis steps over all that those after it touch.
inline bool plain_addresses(const memory_layout& x, bool written, address_range& to) {
  std::size_t furthest = 0, steps = 0, numbers = 1;
  bool distinct = x.data != nullptr;
  for (int n = x.rank; n-- > 0;) {
    const auto last = static_cast<std::size_t>(x.extents[n]) - 1, stride = static_cast<std::size_t>(x.strides[n]);
    distinct &= !written | (last == 0) | (stride >= numbers);
    furthest |= last, steps |= stride, numbers += last * stride;
  }
  to.begin = reinterpret_cast<std::uintptr_t>(x.data);
  to.end = to.begin + numbers * static_cast<std::size_t>(x.item);
  return distinct && furthest < (std::size_t(1) << 18) && steps < (std::size_t(1) << 24);
}

/// A view of the shape of another.
[[gnu::noinline]] inline void check_same_shape(const validator& check, const char* what, const memory_layout& x,
                                               const char* other, const memory_layout& like, const char* before = "") {
  for (int n = 0; n < x.rank; ++n)
    if (x.extents[n] != like.extents[n])
      check.fail({before, what, " of the shape of ", other, " ", error_text::list(like.extents, like.rank)},
                 error_text::list(x.extents, x.rank));
}

/// A list as a view, for the checks.
template <class List>
memory_layout list_layout(const List& list) {
  using T = typename List::element_type;
  return tensor_view<T, 1>(list.empty() ? nullptr : list.data(), {static_cast<idx_t>(list.size())});
}

class call_views : public validator {
 public:
  explicit call_views(const validator& check) : validator(check) {}
  explicit call_views(const char* name) : validator(name) {}

  /// A view that is read. The first axes are as listed.
  [[gnu::noinline]] void read(const char* name, const memory_layout& x, std::initializer_list<axis> axes = {}) {
    add(name, x, use::read, axes);
  }
  /// The same for one that may be left out.
  [[gnu::noinline]] void option(const char* name, const memory_layout& x, std::initializer_list<axis> axes = {}) {
    if (x.given()) read(name, x, axes);
  }
  /// The same, without making a layout of a view that was left out: steps take microseconds.
  template <class T, int Rank>
  void option(const char* name, const tensor_view<T, Rank>& x, std::initializer_list<axis> axes = {}) {
    if (x) read(name, x, axes);
  }
  /// A view that is read, of the shape of another.
  [[gnu::noinline]] void read_like(const char* name, const memory_layout& x, const char* other,
                                   const memory_layout& like) {
    read(name, x);
    check_same_shape(*this, name, x, other, like);
  }

  /// A view that is written.
  [[gnu::noinline]] void write(const char* name, const memory_layout& x, std::initializer_list<axis> axes = {}) {
    add(name, x, use::written, axes);
  }
  /// The same, named before the others: what a call updates or keeps for another one, such as a cache.
  [[gnu::noinline]] void update(const char* name, const memory_layout& x) {
    add(name, x, use::updated);
  }

  /// The gradient of view x, where it is asked for: x must be given, and the gradient have its shape. `of` is the full
  /// name of x, if it has a longer one.
  [[gnu::noinline]] void gradient(const char* name, const memory_layout& gradient, const memory_layout& x,
                                  const char* of = nullptr) {
    if (!gradient.given()) return;
    add(name, gradient, use::gradient);
    if (!of) of = name;
    if (!x.given()) fail({of, ", since its gradient is asked for"}, "none");
    check_same_shape(*this, of, gradient, of, x, of_gradients);
  }

 private:
  static constexpr const char* of_gradients = "the gradient of ";
  enum class use { read, written, updated, gradient };
  struct named {
    const char *before, *name;
    memory_layout view;
    bool written;
    address_range at;  // all addresses it touches: most views need no closer look
  };
  static constexpr std::size_t most = 64;

  /// Checks a view against those before it, and keeps it; an empty one overlaps nothing.
  [[gnu::noinline]] void add(const char* name, const memory_layout& x, use how, std::initializer_list<axis> axes = {}) {
    if (count_ == most) fail({"at most ", most, " views"}, "more: call_views::most is too small");
    named& one = views_[count_];
    one.before = how == use::gradient ? of_gradients : "", one.name = name, one.written = how != use::read;
    // In the parts that it was written in: processors read larger ones late.
    one.view.data = x.data, one.view.item = x.item, one.view.rank = x.rank;
    std::memcpy(one.view.extents, x.extents, sizeof x.extents);
    std::memcpy(one.view.strides, x.strides, sizeof x.strides);
    if (!plain_addresses(x, one.written, one.at))
      one.at = address_range::of(one.written ? writable(name, x, one.before) : readable(name, x, one.before));
    for (std::size_t n = 0; n < count_; ++n) {
      const named& other = views_[n];
      if (other.at.end <= one.at.begin || one.at.end <= other.at.begin || !(one.written || other.written)) continue;
      if (may_share(one.view, other.view))
        how == use::updated || !other.written ? overlap(one, other) : overlap(other, one);
    }
    const idx_t* found = x.extents;
    for (const axis& a : axes) {
      if (a.what) a.broadcast == or_one ? broadcasts(a.what, a.wanted, *found) : equal(a.what, a.wanted, *found);
      ++found;
    }
    count_ += one.at.end > one.at.begin;
  }
  [[noreturn, gnu::cold, gnu::noinline]] void overlap(const named& x, const named& y) const {
    fail({x.before, x.name, " and ", y.before, y.name, " in separate memory"}, "an overlap");
  }

  std::size_t count_ = 0;
  union {
    named views_[most];  // the first count_ of them
  };
};

}}}  // namespace attn::ATTN_ISA::detail
