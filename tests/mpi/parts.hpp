#pragma once
// Whole sequences, the same on every process, and the rows of them that a process has.
#include <attn/mpi/zigzag.hpp>

#include <limits>
#include <numeric>

#include "mpi/processes.hpp"

namespace testing {

// How tokens are spread: evenly; unevenly; all on the last process; none on every second one; in zigzag order.
enum class spread { even, uneven, last, every_second, zigzag };
inline constexpr spread spreads[] = {spread::even, spread::uneven, spread::last, spread::every_second, spread::zigzag};

// The rows of the whole sequence that `rank` of `size` processes has, in its order.
inline std::vector<idx_t> rows_of(idx_t tokens, spread how, int rank, int size) {
  if (how == spread::zigzag) return attn::mpi::zigzag_positions(tokens, rank, size);
  std::vector<idx_t> shares;
  for (idx_t p = 0; p < size; ++p)
    shares.push_back(how == spread::even     ? 1
                     : how == spread::uneven ? 1 + p * 7 % 5
                     : how == spread::last   ? (p + 1 == size)
                                             : (p + 1) % 2);
  const idx_t all = std::accumulate(shares.begin(), shares.end(), idx_t(0));
  const idx_t before = std::accumulate(shares.begin(), shares.begin() + rank, idx_t(0));
  const idx_t begin = tokens * before / all, end = tokens * (before + shares[static_cast<std::size_t>(rank)]) / all;
  std::vector<idx_t> rows(static_cast<std::size_t>(end - begin));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}
inline std::vector<idx_t> own_rows(idx_t tokens, spread how) {
  return rows_of(tokens, how, own_rank(), process_count());
}

// These rows of every head.
template <class T>
tensor<T> rows(const tensor<T>& x, const std::vector<idx_t>& which) {
  tensor<T> part(x.batch(), x.heads(), std::ssize(which), x.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < std::ssize(which); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) part(b, h, i, d) = x(b, h, which[static_cast<std::size_t>(i)], d);
  return part;
}

// How far these rows of a result are from those of the whole, as a part of its norm: what one process has may be
// smaller than the rounding errors.
template <class A, class E>
double error_of_rows(const tensor<A>& part, const tensor<E>& whole, const std::vector<idx_t>& which) {
  tensor<A> merged = cast<A>(whole);
  if (part.extents != rows(whole, which).extents) return std::numeric_limits<double>::infinity();
  for (idx_t b = 0; b < part.batch(); ++b)
    for (idx_t h = 0; h < part.heads(); ++h)
      for (idx_t i = 0; i < part.length(); ++i)
        for (idx_t d = 0; d < part.dim(); ++d) merged(b, h, which[static_cast<std::size_t>(i)], d) = part(b, h, i, d);
  return relative_error(merged, whole);
}

// What two results of the same formula, each rounded, may differ by: both errors, and that of merging, which is of the
// compute type.
template <class S>
inline constexpr double allowed = sizeof(S) == 8 ? 4e-13 : sizeof(S) == 4 ? 8e-6 : 0x1p-7 + 8e-6;

// Of lse, in the compute type. Where weights are rounded to bf16 for a product of pairs, their exponentials err by
// 1.02e-4 of themselves, and a sum of them by as much.
template <class S>
inline constexpr double allowed_lse =
    allowed<attn::compute_type<S>> +
    (attn::detail::numbers_of<attn::detail::product_type<S>> > 1 ? 2 * 1.02e-4 : 0);

// All processes refuse the call with the same words, in the form of the library.
template <class Call>
void check_all_refuse(const std::string& name, const std::string& says, const Call& call) {
  const std::string message = refusal_of_all(name, call);
  CAPTURE(message);
  CHECK(message.find(says) != std::string::npos);
}

}  // namespace testing
