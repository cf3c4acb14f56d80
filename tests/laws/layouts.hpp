#pragma once
// Ways to lay out a tensor in memory (law 3).
#include "laws/law.hpp"
#include "support/guarded_memory.hpp"

namespace testing {

using strides = std::array<idx_t, 4>;

struct layout {
  const char* name;
  strides (*of)(const strides& extents);
  bool backwards = false;
};

// [batch, head, length, dim] extents to strides.
inline const layout layouts[] = {
    {"[batch, length, head, dim]",
     [](const strides& e) {
       return strides{e[2] * e[1] * e[3], e[3], e[1] * e[3], 1};
     }},
    {"column-major heads",
     [](const strides& e) {
       return strides{e[1] * e[2] * e[3], e[2] * e[3], 1, e[2]};
     }},
    {"batch fastest",
     [](const strides& e) {
       return strides{1, e[0], e[0] * e[1], e[0] * e[1] * e[2]};
     }},
    {"gaps between rows",
     [](const strides& e) {
       return strides{e[1] * e[2] * (e[3] + 5), e[2] * (e[3] + 5), e[3] + 5, 1};
     }},
    {"gaps between numbers",
     [](const strides& e) {
       return strides{e[1] * e[2] * e[3] * 3, e[2] * e[3] * 3, e[3] * 3, 3};
     }},
    {"backwards",
     [](const strides& e) {
       return strides{e[1] * e[2] * e[3], e[2] * e[3], e[3], 1};
     },
     true},
};

// Few lengths: layouts are a matter of reading rows and writing them, not of how many blocks there are.
inline std::vector<law_shape> layout_shapes() { return law_shapes({7, 64, 65, 130, 0, 1}); }

// The tensor's numbers laid out anew; what lies between them is NaN, and touching what lies behind them a fault.
template <class T>
struct laid_out {
  std::vector<T, guarded_allocator<T>> memory;
  attn::tensor_view<T> view;

  laid_out(const tensor<T>& x, const layout& as) {
    strides steps = as.of(x.extents);
    idx_t last = 0;
    for (std::size_t axis = 0; axis < 4; ++axis) last += std::max<idx_t>(x.extents[axis] - 1, 0) * steps[axis];
    memory.assign(static_cast<std::size_t>(last + 1), std::numeric_limits<T>::quiet_NaN());
    T* origin = memory.data();
    if (as.backwards) {
      origin += last;
      for (idx_t& step : steps) step = -step;
    }
    view = {origin, x.extents, steps};
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) view(b, h, i, d) = x(b, h, i, d);
  }

  tensor<T> gathered() const {
    tensor<T> x(view.extent(0), view.extent(1), view.extent(2), view.extent(3));
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = view(b, h, i, d);
    return x;
  }
  // As [batch, head, length].
  attn::tensor_view<T, 3> row_view() const {
    return {view.data(),
            {view.extent(0), view.extent(1), view.extent(2)},
            {view.stride(0), view.stride(1), view.stride(2)}};
  }
  idx_t untouched() const {
    return static_cast<idx_t>(std::count_if(memory.begin(), memory.end(), [](T x) { return std::isnan(x); }));
  }
};

}  // namespace testing
