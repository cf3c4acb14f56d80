// attn: drawing projections along the sequence, as Linformer begins its training with.
//
//   const auto e = attn::draw_projection<float>(256, length, {.seed = 7});          // [1, 256, length]
//   const auto f = attn::draw_projection<float>(256, length, {.seed = 8, .heads = 12});
//   attn::linformer(q, k, v, out, e, f);
//
// Every number is normal with mean 0 and variance 1 / rank (Wang et al. 2020). A seed gives the same numbers with every
// compiler and on every machine, and a projection for a longer sequence begins with that for a shorter one.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/random.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// Numbers [heads, rank, length] that own their memory; operators take it as it is.
template <class T>
class projection {
 public:
  using element_type = T;

  /// Zeros. Throws std::invalid_argument for heads or rank below 1, length below 0, or more than memory can hold.
  projection(index heads, index rank, index length) : extents_{heads, rank, length} {
    const detail::validator check("projection");
    check.at_least("heads", 1, heads);
    check.at_least("rank", 1, rank);
    check.at_least("length", 0, length);
    numbers_.resize(static_cast<std::size_t>(check.fits("heads * rank * length", {heads, rank, length})));
  }

  tensor_view<T, 3> view() { return {numbers_.data(), extents_}; }
  tensor_view<const T, 3> view() const { return {numbers_.data(), extents_}; }

 private:
  std::array<index, 3> extents_;
  std::vector<T> numbers_;
};

struct projection_options {
  std::uint64_t seed = 0;
  /// One projection for all heads, or one for each of as many.
  index heads = 1;
};

/// Cost: about 0.1 microseconds a number.
template <element T>
projection<T> draw_projection(index rank, index length, const projection_options& options = {}) {
  projection<T> drawn(options.heads, rank, length);
  const auto to = drawn.view();
  const double deviation = 1 / std::sqrt(static_cast<double>(rank));
  for (index h = 0; h < options.heads; ++h)
    for (index j = 0; j < length; ++j) {
      random_numbers numbers(options.seed, static_cast<std::uint64_t>(h) << 32 ^ static_cast<std::uint64_t>(j));
      for (index r = 0; r < rank; ++r) to(h, r, j) = static_cast<T>(numbers.normal() * deviation);
    }
  return drawn;
}

}  // namespace attn
