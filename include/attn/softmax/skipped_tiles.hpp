// attn: how much of a softmax was left out (skip-softmax).
//
//   attn::skipped_tiles tiles;
//   attn::full_softmax(q, k, v, out, {.causal = true, .skip_below = 7, .skipped = &tiles});
//   std::cout << tiles.share() << "\n";
//
// skip_below: a tile, some queries of a head by some keys, is left out where its scores lie more than skip_below
// (natural logarithm, >= 0) below the largest score that each of its queries has met so far: neither weights, which
// are below e^-skip_below of the largest, nor their product with the values are computed. lse is that of what is kept.
// Infinity leaves out nothing; the bits are those without the option.
// skip_share: in its place the threshold by the length, e^-skip_below = skip_share / Lk (at most 1), with the true key
// length, in steps the tokens so far. Results depend on the size of tiles: 6 or 12 queries, by the processor's vectors,
// by 64 keys; one query by 64 to 256 keys, within a page of a cache in pages, for up to four queries, for keys in codes
// and for lists of single keys.
// Gradients leave out those of their tiles whose scores lie so far below the final maxima of the rows, sinks included:
// what the call has left out, and what it took before it met the largest scores. They compute lse again.
//                                Yuan et al. 2025, "BLASST: Dynamic blocked attention sparsity via softmax thresholding"
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Tiles that calls with an option `skipped` have looked at, and those they have left out. Each call adds its own, the
/// same for any number of threads; gradients add nothing.
struct skipped_tiles {
  idx_t seen = 0, skipped = 0;

  double share() const { return seen == 0 ? 0 : static_cast<double>(skipped) / static_cast<double>(seen); }
};

}}  // namespace attn::ATTN_ISA
