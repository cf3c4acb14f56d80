// attn: which keys the queries of softmax attention see.
//
//   std::vector<std::uint8_t> seen(queries * keys);
//   attn::full_softmax(q, k, v, out, {.mask = attn::tensor_view<std::uint8_t>(seen.data(), {1, 1, queries, keys})});
//
// [B or 1, H or 1, Lq or 1, Lk], of bool or of bytes, where 0 and false hide a key, in addition to causal, lengths and
// pattern. For a tile of queries and keys in which every key is hidden only the mask is read; one in which every key is
// seen costs little more than without a mask.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

/// A view of bool or std::uint8_t, or an Eigen matrix of them for one head.
class mask_view {
  template <class T>
  static constexpr bool is_flag = std::same_as<std::remove_const_t<T>, bool> ||
                                  std::same_as<std::remove_const_t<T>, std::uint8_t>;

 public:
  mask_view() = default;
  template <class T>
    requires is_flag<T>
  mask_view(const tensor_view<T>& x)
      : bytes_(reinterpret_cast<const unsigned char*>(x.data()), x.extents(), x.strides()) {}
  template <detail::eigen_memory M>
    requires is_flag<detail::eigen_element<const M>>
  mask_view(const M& x) : mask_view(as_view(x)) {}

  explicit operator bool() const { return static_cast<bool>(bytes_); }
  /// For operators.
  const tensor_view<const unsigned char>& bytes() const { return bytes_; }

 private:
  static_assert(sizeof(bool) == 1);
  tensor_view<const unsigned char> bytes_{};
};

}}  // namespace attn::ATTN_ISA
