// attn: dropout of attention weights: each is dropped with probability `rate`, the others grow by 1 / (1 - rate).
//
//   attn::full_softmax(q, k, v, out, {.dropout = {.rate = 0.1, .seed = step}});
//   attn::full_softmax_backward(q, k, v, out, d_out, gradients, {.dropout = {.rate = 0.1, .seed = step}});
//
//   out_i = sum_j softmax_j(s_ij) m_ij / (1 - rate) v_j,   m_ij = keeps(b, h, i, j), 0 or 1
//                                                   Srivastava et al. 2014; as in Vaswani et al. 2017. lse is without it
//
// m_ij is a function of the seed, the batch item, the query head and the positions of query and key. Nothing is stored:
// the backward pass finds the same weights dropped, and so does any number of threads and any compiler.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

namespace detail {

/// The generator of one row of weights: 64 bits of the row and 32 of the key are mixed by three multiplications.
/// Constants: Steele et al. 2014, "Fast splittable pseudorandom number generators"; of the rows of keys: Wellons 2018.
struct dropout_row {
  std::uint32_t low = 0, high = 0;  // of the row
  std::uint32_t least = 0;          // weights of numbers below it are dropped

  static constexpr std::uint64_t mixed(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  /// The numbers of keys j, which may be vectors of them.
  template <class Words>
  constexpr Words numbers(Words j) const {
    j ^= low;
    j = (j ^ j >> 17) * 0xed5ad4bbu;
    j += high;
    j = (j ^ j >> 11) * 0xac4c1b51u;
    j = (j ^ j >> 15) * 0x31848babu;
    return j ^ j >> 14;
  }
  constexpr bool keeps(std::uint32_t j) const { return numbers(j) >= least; }
};

}  // namespace detail

struct dropout_options {
  /// Probability that a weight is dropped: 0 <= rate < 1. 0: none.
  double rate = 0;
  std::uint64_t seed = 0;

  constexpr explicit operator bool() const { return rate != 0; }
  /// The factor of the weights that stay.
  constexpr double factor() const { return 1 / (1 - rate); }

  /// What decides about the weights of the query at position i, of a batch item and head.
  constexpr detail::dropout_row row(idx_t batch, idx_t head, idx_t i) const {
    std::uint64_t x = detail::dropout_row::mixed(seed);
    for (idx_t part : {batch, head, i}) x = detail::dropout_row::mixed(x ^ static_cast<std::uint64_t>(part));
    return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32),
            static_cast<std::uint32_t>(rate * 4294967296.0)};
  }
  /// Whether the weight of the key at position j stays.
  constexpr bool keeps(idx_t batch, idx_t head, idx_t i, idx_t j) const {
    return row(batch, head, i).keeps(static_cast<std::uint32_t>(j));
  }
};

}}  // namespace attn::ATTN_ISA
