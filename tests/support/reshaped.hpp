#pragma once
// Views for lists of what is refused, written with parentheses: of each pair of braces clang-format makes three lines.
#include <attn/core/tensor_view.hpp>

#include "support/tensor.hpp"

namespace testing {

// Assigned to any view of so many axes.
template <std::size_t N>
struct null_extents {
  std::array<idx_t, N> extents;
  template <class T>
  operator attn::tensor_view<T, static_cast<int>(N)>() const {
    return {nullptr, extents};
  }
};
template <class... Extent>
null_extents<sizeof...(Extent)> null_view(Extent... extents) {
  return {{static_cast<idx_t>(extents)...}};
}

template <class T, int Rank>
struct reshaped_view : attn::tensor_view<T, Rank> {
  template <class... Stride>
  attn::tensor_view<T, Rank> strided(Stride... strides) const {
    return {this->data(), this->extents(), {{static_cast<idx_t>(strides)...}}};
  }
};

// The memory from data on, or that of x, in another shape, which may be larger than what is there.
template <class T, class... Extent>
reshaped_view<T, sizeof...(Extent)> reshaped(T* data, Extent... extents) {
  return {{data, {static_cast<idx_t>(extents)...}}};
}
template <class T, class... Extent>
reshaped_view<T, sizeof...(Extent)> reshaped(tensor<T>& x, Extent... extents) {
  return reshaped(x.data.data(), extents...);
}

}  // namespace testing
