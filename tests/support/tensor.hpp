#pragma once
// The tests' own tensor: [batch, head, length, dim] in contiguous memory, nothing else.
// It knows nothing of the library, so that the references stay independent of it.
#include <array>
#include <cstddef>
#include <vector>

namespace testing {

using index = std::ptrdiff_t;

template <class T>
struct tensor {
  std::array<index, 4> extents{};
  std::vector<T> data;

  tensor() = default;
  tensor(index batch, index heads, index length, index dim, T value = T(0))
      : extents{batch, heads, length, dim}, data(static_cast<std::size_t>(batch * heads * length * dim), value) {}

  index batch() const { return extents[0]; }
  index heads() const { return extents[1]; }
  index length() const { return extents[2]; }
  index dim() const { return extents[3]; }
  index size() const { return static_cast<index>(data.size()); }
  bool empty() const { return data.empty(); }

  std::size_t offset(index b, index h, index i, index d) const {
    return static_cast<std::size_t>(((b * heads() + h) * length() + i) * dim() + d);
  }
  T& operator()(index b, index h, index i, index d) { return data[offset(b, h, i, d)]; }
  const T& operator()(index b, index h, index i, index d) const { return data[offset(b, h, i, d)]; }

  // For tensors that are broadcast along extents of 1.
  const T& broadcast(index b, index h, index i, index d) const {
    return (*this)(extents[0] == 1 ? 0 : b, extents[1] == 1 ? 0 : h, extents[2] == 1 ? 0 : i, d);
  }

  bool operator==(const tensor&) const = default;
};

template <class To, class From>
tensor<To> cast(const tensor<From>& from) {
  tensor<To> to;
  to.extents = from.extents;
  to.data.reserve(from.data.size());
  for (const From& x : from.data) to.data.push_back(static_cast<To>(x));
  return to;
}

template <class To, class From>
std::vector<To> cast(const std::vector<From>& from) {
  std::vector<To> to;
  to.reserve(from.size());
  for (const From& x : from) to.push_back(static_cast<To>(x));
  return to;
}

// Rows [begin, begin + count) of every head.
template <class T>
tensor<T> rows(const tensor<T>& x, index begin, index count) {
  tensor<T> part(x.batch(), x.heads(), count, x.dim());
  for (index b = 0; b < x.batch(); ++b)
    for (index h = 0; h < x.heads(); ++h)
      for (index i = 0; i < count; ++i)
        for (index d = 0; d < x.dim(); ++d) part(b, h, i, d) = x(b, h, begin + i, d);
  return part;
}

// One head of one batch item.
template <class T>
tensor<T> head(const tensor<T>& x, index b, index h) {
  tensor<T> part(1, 1, x.length(), x.dim());
  for (index i = 0; i < x.length(); ++i)
    for (index d = 0; d < x.dim(); ++d) part(0, 0, i, d) = x(b, h, i, d);
  return part;
}

}  // namespace testing
