// attn: drawing random projections along the sequence, with which the training of Linformer begins.
//
//   const attn::tensor<float, 3> e = attn::draw_projection<float>(256, length, {.seed = 7});  // [1, 256, length]
//   const auto f = attn::draw_projection<float>(256, length, {.seed = 8, .heads = 12});
//   attn::linformer(q, k, v, out, e, f);
//
// Every number is normal with mean 0 and variance 1 / rank (Wang et al. 2020). A seed gives the same numbers with every
// compiler and on every machine, and a projection for a longer sequence begins with that for a shorter one.
#pragma once

#include <attn/core/random.hpp>
#include <attn/core/tensor.hpp>

namespace attn { inline namespace ATTN_ISA {

struct draw_projection_options {
  std::uint64_t seed = 0;
  idx_t heads = 1;  // one projection for all heads, or one per head
};

/// A projection [heads, rank, length]. Cost: about 0.1 microseconds a number. Throws std::invalid_argument for heads or
/// rank below 1, length below 0, or more numbers than memory can hold.
template <element T>
tensor<T, 3> draw_projection(idx_t rank, idx_t length, const draw_projection_options& options = {}) {
  const detail::validator check{"draw_projection"};
  check.at_least("heads", 1, options.heads);
  check.at_least("rank", 1, rank);
  check.at_least("length", 0, length);
  check.fits("heads * rank * length", {options.heads, rank, length});
  tensor<T, 3> drawn({options.heads, rank, length});
  const double deviation = 1 / std::sqrt(static_cast<double>(rank));
  for (idx_t h = 0; h < options.heads; ++h)
    for (idx_t j = 0; j < length; ++j) {
      random_numbers numbers(options.seed, static_cast<std::uint64_t>(h) << 32 ^ static_cast<std::uint64_t>(j));
      for (idx_t r = 0; r < rank; ++r) drawn(h, r, j) = static_cast<T>(numbers.normal() * deviation);
    }
  return drawn;
}

}}  // namespace attn::ATTN_ISA
