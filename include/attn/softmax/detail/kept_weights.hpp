// attn: steps 3 and 4 of blockwise attention (blockwise.hpp) for tiles of which some keys are left out (tile_skip.hpp).
#pragma once

#include <attn/softmax/detail/tile_output.hpp>
#include <attn/softmax/detail/tile_skip.hpp>
#include <attn/softmax/detail/tile_weights.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Which keys of a tile are kept, by its scores and the maxima of its rows so far. A row without a key keeps none.
template <class T>
kept_blocks kept_of_tile(const tile& t, const T* s, T factor, const T* maximum, T limit) {
  alignas(64) T least[tile_rows];
  for (idx_t m = 0; m < t.rows; ++m)
    least[m] = maximum[m] == -std::numeric_limits<T>::infinity() ? std::numeric_limits<T>::lowest()
                                                                 : maximum[m] - limit;
  return kept_blocks::of(s, score_stride, t.rows, t.count, factor, least);
}

/// The weights of a row of a tile of which some keys are left out; theirs are 0. Returns the sums of the others.
template <class P, class T>
[[gnu::noinline]] packet<T> kept_weights(const kept_blocks& kept, T* row, idx_t count, T factor, T reference,
                                         P* weights) {
  packet<T> sum = zero<T>();
  kept.for_each_run(count, [&](idx_t begin, idx_t end, bool is_kept) {
    if (is_kept)
      sum = add(sum, row_weights(row + begin, end - begin, factor, reference));
    else
      std::fill(row + begin, row + end, T(0));
  });
  to_operands(row, count, weights);
  return sum;
}

/// The output of the keys of a tile that are kept, run by run; that of the last run is left to `last`.
template <class P, class Keys>
[[gnu::noinline]] void begin_kept(const kept_blocks& kept, const tile& t, const P* weights, const sum_type<P>* rescale,
                                  tile_output<P, Keys>& last) {
  using T = sum_type<P>;
  alignas(64) T ones[round_up(tile_rows, width<T>)];
  std::fill_n(ones, std::size(ones), T(1));
  kept.for_each_run(t.count, [&](idx_t begin, idx_t end, bool is_kept) {
    tile run = t;
    run.low = (std::max)(t.low, t.first + begin), run.high = (std::min)(t.high, t.first + end);
    if (!is_kept || run.low >= run.high) return;
    last.finish();
    last.begin(run, weights, std::exchange(rescale, ones));
  });
}

}}}  // namespace attn::ATTN_ISA::detail
