// attn: tables of indices, such as the keys that each query attends.
//
//   std::vector<std::int32_t> lists(heads * queries * 256);
//   attn::tensor_view<std::int32_t>(lists.data(), {1, heads, queries, 256})        // where an index_view is taken
//
// [.., .., .., ..] of std::int32_t or std::int64_t (attn::idx_t), with any strides; -1 where an entry has no index.
#pragma once

#include <attn/core/view_field.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class T>
concept index_type = std::same_as<T, std::int32_t> || std::same_as<T, std::int64_t>;

/// A view of const or of writable integers of either type.
template <class Void>
class any_index_view {
  template <class T>
  static constexpr bool is_index = index_type<std::remove_const_t<T>> &&
                                   (std::is_const_v<Void> || !std::is_const_v<T>);

 public:
  any_index_view() = default;
  /// A view of them, an Eigen matrix of them for one head, a tensor that owns its memory.
  template <class X>
    requires(!std::same_as<std::remove_cvref_t<X>, any_index_view>)
  any_index_view(X&& x) : any_index_view(view_of<X>(x), 0) {}

  idx_t extent(int axis) const { return extents_[static_cast<std::size_t>(axis)]; }
  explicit operator bool() const { return data_ || extents_ != std::array<idx_t, 4>{}; }

  /// body(view) with the view in its own type.
  template <class Body>
  decltype(auto) typed(Body&& body) const {
    if (wide_) return body(of<std::int64_t>());
    return body(of<std::int32_t>());
  }
  /// The entries [begin, begin + count) of one axis.
  any_index_view slice(int axis, idx_t begin, idx_t count) const {
    return typed([&](const auto& x) { return any_index_view(x.slice(axis, begin, count)); });
  }

 private:
  template <class T>
  any_index_view(const tensor_view<T>& x, int)
      : data_(x.data()), extents_(x.extents()), strides_(x.strides()), wide_(sizeof(T) == sizeof(std::int64_t)) {}
  template <class X>
  static auto view_of(std::remove_reference_t<X>& x) {
    using given = element_type_of<std::remove_reference_t<X>&>;
    if constexpr (has_view<X> && is_index<given>) {
      return view_of_field<given, 4, X>(x);
    } else {
      constexpr bool right = sizeof(X) == 0;
      static_assert(right, "attn: indices are a tensor_view, a tensor or an Eigen matrix of std::int32_t or "
                           "std::int64_t, writable where they are results; found another type");
      return tensor_view<std::conditional_t<std::is_const_v<Void>, const idx_t, idx_t>>();
    }
  }

  template <class T>
  auto of() const {
    using element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return tensor_view<element>(static_cast<element*>(data_), extents_, strides_);
  }

  Void* data_ = nullptr;
  std::array<idx_t, 4> extents_{}, strides_{};
  bool wide_ = true;
};

}  // namespace detail

using index_view = detail::any_index_view<const void>;
/// Indices that are written.
using index_output = detail::any_index_view<void>;

}}  // namespace attn::ATTN_ISA
