// attn: which keys the queries see.
//
//   std::vector<std::uint8_t> seen(queries * keys);
//   attn::full_softmax(q, k, v, out, {.mask = attn::tensor_view<std::uint8_t>(seen.data(), {1, 1, queries, keys})});
//
// mask_view [B or 1, H or 1, Lq or 1, Lk] is for pairs of queries and keys, key_mask_view [B or 1, Lk] for the keys of
// all queries, such as those of left padding. Both are of bool or of bytes, where 0 and false hide a key, in addition
// to causal, lengths and pattern. For a tile of queries and keys in which every key is hidden only the mask is read;
// one in which every key is seen costs little more than without a mask.
#pragma once

#include <attn/core/view_field.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

namespace detail {

template <class T>
concept flag = std::same_as<std::remove_const_t<T>, bool> || std::same_as<std::remove_const_t<T>, std::uint8_t>;

/// Whether X is a list, which is the key mask of one item.
template <class X>
concept flag_list = !eigen_memory<X> && (std::is_constructible_v<tensor_view<const bool, 1>, X&> ||
                                         std::is_constructible_v<tensor_view<const std::uint8_t, 1>, X&>);

/// The view of what a mask is given as X&&.
template <int Rank, class X>
constexpr auto view_of_flags(std::remove_reference_t<X>& x) {
  using given = std::remove_reference_t<X>;
  if constexpr (Rank == 2 && flag_list<given>) {
    using T = std::conditional_t<std::is_constructible_v<tensor_view<const bool, 1>, given&>, bool, std::uint8_t>;
    const auto list = view_of_field<const T, 1, X>(x);
    return tensor_view<const T, 2>(list.data(), {1, list.extent(0)}, {0, list.stride(0)});
  } else if constexpr (has_view<given> && flag<element_of<given&>>) {
    return view_of_field<const element_of<given&>, Rank, X>(x);
  } else {
    constexpr bool right = sizeof(X) == 0;
    static_assert(right, "attn: a mask is a tensor_view, a tensor or an Eigen matrix of bool or std::uint8_t, the "
                         "key_mask of one item also a list of them, but no std::vector<bool>; found another type");
    return tensor_view<const bool, Rank>();
  }
}

/// Flags as bytes [batch, heads, queries, keys], of a view of rank 4, or of 2: those of batch and keys.
template <int Rank>
class flag_view {
 public:
  flag_view() = default;
  template <class X>
    requires(!std::same_as<std::remove_cvref_t<X>, flag_view>)
  flag_view(X&& x) : flag_view(view_of_flags<Rank, X>(x), 0) {}

  explicit operator bool() const { return static_cast<bool>(bytes_); }
  /// For operators.
  const tensor_view<const unsigned char>& bytes() const { return bytes_; }

 private:
  static_assert(sizeof(bool) == 1);
  template <class T>
  flag_view(const tensor_view<T>& x, int)
      : bytes_(reinterpret_cast<const unsigned char*>(x.data()), x.extents(), x.strides()) {}
  template <class T>
  flag_view(const tensor_view<T, 2>& x, int)
      : bytes_(reinterpret_cast<const unsigned char*>(x.data()), {x.extent(0), 1, 1, x.extent(1)},
               {x.stride(0), 0, 0, x.stride(1)}) {}

  tensor_view<const unsigned char> bytes_{};
};

}  // namespace detail

/// A view of bool or std::uint8_t, a tensor of them, or an Eigen matrix of them for one head.
using mask_view = detail::flag_view<4>;
/// A view of bool or std::uint8_t, a tensor of them, an Eigen matrix of them, whose rows are batch items, or for one
/// item a list of them.
using key_mask_view = detail::flag_view<2>;

}}  // namespace attn::ATTN_ISA
