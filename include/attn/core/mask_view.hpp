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

#include <attn/core/tensor_view.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

namespace detail {

template <class T>
concept flag = std::same_as<std::remove_const_t<T>, bool> || std::same_as<std::remove_const_t<T>, std::uint8_t>;

/// Flags as bytes [batch, heads, queries, keys].
class flag_view {
 public:
  explicit operator bool() const { return static_cast<bool>(bytes_); }
  /// For operators.
  const tensor_view<const unsigned char>& bytes() const { return bytes_; }

 protected:
  flag_view() = default;
  template <flag T>
  flag_view(const T* data, const std::array<idx_t, 4>& extents, const std::array<idx_t, 4>& strides)
      : bytes_(reinterpret_cast<const unsigned char*>(data), extents, strides) {}

 private:
  static_assert(sizeof(bool) == 1);
  tensor_view<const unsigned char> bytes_{};
};

}  // namespace detail

/// A view of bool or std::uint8_t, or an Eigen matrix of them for one head.
class mask_view : public detail::flag_view {
 public:
  mask_view() = default;
  template <detail::flag T>
  mask_view(const tensor_view<T>& x) : flag_view(x.data(), x.extents(), x.strides()) {}
  template <detail::eigen_memory M>
    requires detail::flag<detail::eigen_element<const M>>
  mask_view(const M& x) : mask_view(as_view(x)) {}
};

/// A view of bool or std::uint8_t, or an Eigen matrix of them: rows are batch items.
class key_mask_view : public detail::flag_view {
 public:
  key_mask_view() = default;
  template <detail::flag T>
  key_mask_view(const tensor_view<T, 2>& x)
      : flag_view(x.data(), {x.extent(0), 1, 1, x.extent(1)}, {x.stride(0), 0, 0, x.stride(1)}) {}
  template <detail::eigen_memory M>
    requires detail::flag<detail::eigen_element<const M>>
  key_mask_view(const M& matrix) {
    const auto x = as_view(matrix);
    *this = tensor_view<std::remove_pointer_t<decltype(x.data())>, 2>(x.data(), {x.extent(2), x.extent(3)},
                                                                      {x.stride(2), x.stride(3)});
  }
};

}}  // namespace attn::ATTN_ISA
