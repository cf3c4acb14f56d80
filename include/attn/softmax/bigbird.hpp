// attn: BigBird attention: a window of blocks, global blocks and random ones.
//
//   out_i = softmax attention (full_softmax.hpp) over the blocks of b keys that the query's block sees:
//     window    its own block and those beside it
//     global    the first g and the last g blocks of the true length, whose own queries see every key
//     random    those that a table lists for it
//   A block in two of these sets counts once. With causal, a query sees only keys up to its position, also of global
//   blocks.                                                              Zaheer et al. 2020, "Big Bird"
//
//   const auto random = attn::draw_random_blocks(length / 64, 3, {.seed = 7, .heads = heads});
//   attn::bigbird(q, k, v, out, {.size = 64, .random = random});
//
// Shapes   as full_softmax; random [H or 1, blocks, r], blocks = Lk / b rounded up.
// Cost     2 B H (D + Dv) operations for every visible key of a query, about (3 + 2 g + r) b keys per query. Scratch as
//          pattern_softmax: about Lk (D + Dv) numbers.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/random.hpp>
#include <attn/core/tensor.hpp>
#include <attn/softmax/detail/pattern_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Which query sees which keys in BigBird attention.
struct bigbird_pattern {
  idx_t size = 64, window_blocks = 3, global_blocks = 1;
  view_field<const idx_t, 3> random{};

  /// Query sets are blocks, taken alternately from both ends: the global ones, which see most keys, go first.
  idx_t query_sets(const pattern_shape& s) const { return s.blocks(s.clamped(size)) - s.first_block(s.clamped(size)); }
  static idx_t block_of(const pattern_shape& s, idx_t b, idx_t set) {
    return set % 2 == 0 ? s.first_block(b) + set / 2 : s.blocks(b) - 1 - set / 2;
  }
  position_range queries(const pattern_shape& s, idx_t set) const {
    const idx_t b = s.clamped(size), block = block_of(s, b, set);
    return {block * b, (block + 1) * b};
  }
  void keys(const pattern_shape& s, idx_t set, auto&& see) const {
    const idx_t b = s.clamped(size), count = s.blocks(b), block = block_of(s, b, set),
                reach = (std::min)(window_blocks / 2, s.queries + s.keys);
    const idx_t first = (std::min)(global_blocks, count), last = count - first;
    if (block >= 0 && (block < first || block >= last)) return see(position_range{0, s.keys});
    // Window and global blocks in ascending order, each once.
    const idx_t low = (std::max)(block - reach, first), high = (std::min)(block + reach + 1, last);
    const auto see_blocks = [&](idx_t from, idx_t to) { see(position_range{from * b, to * b}); };
    const bool adjacent = low == first && low < high;
    see_blocks(0, adjacent ? high : first);
    if (low < high && !adjacent) see_blocks(low, high);
    see_blocks((std::max)(last, first), count);
    if (!random || block < 0 || block >= random.extent(1)) return;
    const auto entry = [&, h = random.extent(0) == 1 ? 0 : s.head](idx_t n) { return random(h, block, n); };
    for (idx_t n = 0; n < random.extent(2); ++n) {
      const idx_t a = entry(n);
      bool skip = a < 0 || a >= count || a < first || a >= last || (a >= low && a < high);
      for (idx_t earlier = 0; earlier < n && !skip; ++earlier) skip = entry(earlier) == a;
      if (!skip) see_blocks(a, a + 1);
    }
  }
};

namespace detail {

inline void check_bigbird_blocks(const validator& check, idx_t window_blocks, idx_t global_blocks) {
  check.at_least("window blocks", 1, window_blocks);
  if (window_blocks % 2 == 0) check.fail("an odd number of window blocks", window_blocks);
  check.at_least("global blocks", 0, global_blocks);
}

}  // namespace detail

/// Options of draw_random_blocks.
struct random_blocks_options {
  std::uint64_t seed = 0;
  idx_t heads = 1;
  /// As in bigbird_options: blocks that are seen in any case are not drawn.
  idx_t window_blocks = 3, global_blocks = 1;
  /// Only blocks before the query's.
  bool causal = false;
};

/// Draws `count` different blocks for every query block of every head, uniformly: [heads, blocks, count], with -1 where
/// there are fewer. A seed gives the same table on every machine. Throws std::invalid_argument for negative numbers.
inline tensor<idx_t, 3> draw_random_blocks(idx_t blocks, idx_t count, const random_blocks_options& options = {}) {
  const detail::validator check{"draw_random_blocks"};
  check.at_least("heads", 0, options.heads);
  check.at_least("blocks", 0, blocks);
  check.at_least("random blocks", 0, count);
  detail::check_bigbird_blocks(check, options.window_blocks, options.global_blocks);
  check.fits("a table", {options.heads, blocks, count});
  tensor<idx_t, 3> table({options.heads, blocks, count}, -1);
  const idx_t first = (std::min)(options.global_blocks, blocks),
              last = (std::max)(first, blocks - options.global_blocks);
  for (idx_t h = 0; h < options.heads; ++h)
    for (idx_t block = 0; block < blocks; ++block) {
      // Candidates are [first, low) and [high, last).
      const idx_t reach = (std::min)(options.window_blocks / 2, blocks);
      const idx_t low = std::clamp(block - reach, first, last);
      const idx_t high = options.causal ? last : std::clamp(block + reach + 1, low, last);
      const idx_t candidates = low - first + last - high, drawn = (std::min)(count, candidates);
      random_numbers numbers(options.seed, static_cast<std::uint64_t>(h * blocks + block));
      idx_t* const row = table.data() + (h * blocks + block) * count;
      for (idx_t n = 0; n < drawn; ++n) {  // Floyd's sampling without replacement
        const idx_t most = candidates - drawn + n, rank = numbers.below(most + 1);
        row[n] = std::find(row, row + n, rank) == row + n ? rank : most;
      }
      std::sort(row, row + drawn);
      for (idx_t n = 0; n < drawn; ++n) row[n] += row[n] < low - first ? first : high - (low - first);
    }
  return table;
}

/// Options of bigbird for elements of type S: those of pattern_softmax, and
template <class S>
struct bigbird_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_pattern;

  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// b, >= 1: positions [0, b) are the first block, and so on.
  idx_t size = 64;
  /// Odd: the query's own block, and equally many on each side of it.
  idx_t window_blocks = 3;
  /// g, >= 0: the first g and the last g blocks are global.
  idx_t global_blocks = 1;
  /// Random blocks of each query block, [H or 1, blocks, r], -1 for none; those that begin beyond the length are empty.
  view_field<const idx_t, 3> random{};
  mask_view mask{};
  key_mask_view key_mask{};
  view_field<const real, 2> relative_bias{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

namespace detail {

/// The pattern the options of a call describe. Throws std::invalid_argument for options that do not fit.
template <class Options>
bigbird_pattern bigbird_pattern_of(call_views& views, const attention_shape& shape, const Options& options) {
  const auto& table = options.random;
  views.at_least("block size", 1, options.size);
  check_bigbird_blocks(views, options.window_blocks, options.global_blocks);
  const idx_t blocks = ceil_div(shape.keys, options.size);
  views.option("random", table, {{"random heads", shape.heads, or_one}, {"random rows = key blocks", blocks}});
  for (idx_t h = 0; h < table.extent(0); ++h)
    for (idx_t a = 0; a < blocks; ++a)
      for (idx_t n = 0; n < table.extent(2); ++n)
        if (table(h, a, n) < -1 || table(h, a, n) >= blocks)
          views.fail({"random blocks from -1 to ", blocks - 1}, table(h, a, n));
  return {.size = options.size, .window_blocks = options.window_blocks, .global_blocks = options.global_blocks,
          .random = table};
}

}  // namespace detail

/// BigBird attention; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = bigbird_options<element_of<const Q&>>,
          class Score = detail::no_score>
void bigbird(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
             execution_ref exec = {}) {
  auto call = detail::checked_call<bigbird_options>("bigbird", q, k, v, out, options, score, exec);
  const auto pattern = detail::bigbird_pattern_of(call.views, call.shape, call.options);
  detail::run_pattern_softmax(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
