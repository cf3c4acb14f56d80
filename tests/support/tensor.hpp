#pragma once
// The tests' own tensor: [batch, head, length, dim] in contiguous memory, nothing else.
// It knows nothing of the library, so that the references stay independent of it.
#include <array>
#include <cstddef>
#include <limits>
#include <vector>

namespace testing {

using idx_t = std::ptrdiff_t;

template <class T>
struct tensor {
  std::array<idx_t, 4> extents{};
  std::vector<T> data;

  tensor() = default;
  tensor(idx_t batch, idx_t heads, idx_t length, idx_t dim, T value = T(0))
      : extents{batch, heads, length, dim}, data(static_cast<std::size_t>(batch * heads * length * dim), value) {}

  idx_t batch() const { return extents[0]; }
  idx_t heads() const { return extents[1]; }
  idx_t length() const { return extents[2]; }
  idx_t dim() const { return extents[3]; }
  idx_t size() const { return static_cast<idx_t>(data.size()); }
  bool empty() const { return data.empty(); }

  std::size_t offset(idx_t b, idx_t h, idx_t i, idx_t d) const {
    return static_cast<std::size_t>(((b * heads() + h) * length() + i) * dim() + d);
  }
  T& operator()(idx_t b, idx_t h, idx_t i, idx_t d) { return data[offset(b, h, i, d)]; }
  const T& operator()(idx_t b, idx_t h, idx_t i, idx_t d) const { return data[offset(b, h, i, d)]; }

  // For tensors that are broadcast along extents of 1.
  const T& broadcast(idx_t b, idx_t h, idx_t i, idx_t d) const {
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
tensor<T> rows(const tensor<T>& x, idx_t begin, idx_t count) {
  tensor<T> part(x.batch(), x.heads(), count, x.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < count; ++i)
        for (idx_t d = 0; d < x.dim(); ++d) part(b, h, i, d) = x(b, h, begin + i, d);
  return part;
}

// What lies beyond the lengths of the batch items becomes NaN.
inline void poison_padding(tensor<double>& x, const std::vector<idx_t>& lengths) {
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = lengths[static_cast<std::size_t>(b)]; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = std::numeric_limits<double>::quiet_NaN();
}

// One head of one batch item.
template <class T>
tensor<T> head(const tensor<T>& x, idx_t b, idx_t h) {
  tensor<T> part(1, 1, x.length(), x.dim());
  for (idx_t i = 0; i < x.length(); ++i)
    for (idx_t d = 0; d < x.dim(); ++d) part(0, 0, i, d) = x(b, h, i, d);
  return part;
}

}  // namespace testing
