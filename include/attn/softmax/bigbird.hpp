// attn: BigBird attention: a window of blocks, global blocks and random ones.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys of the blocks of b the query's own block sees:
//     window   its own and the blocks beside it,
//     global   the first g and the last g blocks of the true length; their own queries see every key,
//     random   those a table lists for it.
//   A block named twice counts once. With causal, only keys up to the query, of global blocks too.
//                                                                 Zaheer et al. 2020, "Big Bird"
//
//   const auto random = attn::draw_random_blocks(heads, length / 64, 3, {.seed = 7});
//   attn::bigbird(q, k, v, out, {.size = 64, .random = random});
//
// Shapes   as full_softmax; random [H or 1, blocks, r], blocks = Lk / b rounded up.
// Cost     2 B H (D + Dv) operations for every pair of query and key it sees, about (3 + 2 g + r) b keys a query.
//          Scratch as pattern_softmax: about Lk (D + Dv) numbers.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/random.hpp>
#include <attn/softmax/pattern_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Which query sees which keys in BigBird attention.
struct bigbird_pattern {
  index size = 64, window_blocks = 3, global_blocks = 1;
  tensor_view<const index, 3> random{};

  /// Numbers larger than the sequence say no more than it.
  index size_in(const sequence& s) const { return std::clamp<index>(size, 1, std::max<index>(1, s.queries + s.keys)); }
  index blocks(const sequence& s) const { return detail::ceil_div(s.keys, size_in(s)); }
  index first_block(const sequence& s) const { return detail::floor_div(s.first(), size_in(s)); }

  /// Groups are query blocks, from both ends by turns: the global ones, which see most, go first.
  index groups(const sequence& s) const { return blocks(s) - first_block(s); }
  index block_of(const sequence& s, index group) const {
    return group % 2 == 0 ? first_block(s) + group / 2 : blocks(s) - 1 - group / 2;
  }
  position_range queries(const sequence& s, index group) const {
    const index b = size_in(s), block = block_of(s, group);
    return {block * b, (block + 1) * b};
  }

  void keys(const sequence& s, index group, auto&& see) const {
    const index b = size_in(s), count = blocks(s), block = block_of(s, group),
                reach = std::min(window_blocks / 2, s.queries + s.keys);
    const index first = std::min(global_blocks, count), last = count - first;
    if (block >= 0 && (block < first || block >= last)) return see(position_range{0, s.keys});
    // What is not random, in ascending order and without the blocks that stand in it twice.
    const index low = std::max(block - reach, first), high = std::min(block + reach + 1, last);
    const auto seen = [=](index a) { return a < first || a >= last || (a >= low && a < high); };
    const auto tell = [&](index from, index to) { see(position_range{from * b, to * b}); };
    if (low >= high) {
      tell(0, first);
    } else if (low == first) {
      tell(0, high);
    } else {
      tell(0, first);
      tell(low, high);
    }
    tell(std::max(last, first), count);
    if (!random || block < 0 || block >= random.extent(1)) return;
    const index h = random.extent(0) == 1 ? 0 : s.head;
    for (index n = 0; n < random.extent(2); ++n) {
      const index a = random(h, block, n);
      bool told = a < 0 || a >= count || seen(a);
      for (index earlier = 0; earlier < n && !told; ++earlier) told = random(h, block, earlier) == a;
      if (!told) tell(a, a + 1);
    }
  }
};

/// Options of draw_random_blocks: what BigBird sees anyway is not drawn.
struct random_blocks_options {
  std::uint64_t seed = 0;
  index window_blocks = 3, global_blocks = 1;
  /// Only blocks before the query's.
  bool causal = false;
};

/// A table of random blocks, [heads, blocks, count].
class random_block_table {
 public:
  random_block_table(index heads, index blocks, index count)
      : extents_{heads, blocks, count}, entries_(static_cast<std::size_t>(heads * blocks * count), -1) {}

  index* row(index head, index block) { return entries_.data() + (head * extents_[1] + block) * extents_[2]; }
  operator tensor_view<const index, 3>() const { return {entries_.data(), extents_}; }

 private:
  std::array<index, 3> extents_;
  std::vector<index> entries_;
};

/// Draws `count` different blocks for every query block of every head, each set as likely; -1 where there are not so
/// many. A seed gives the same table on every machine. Throws std::invalid_argument for negative numbers.
inline random_block_table draw_random_blocks(index heads, index blocks, index count,
                                             const random_blocks_options& options = {}) {
  const detail::validator check("draw_random_blocks");
  check.at_least("heads", 0, heads);
  check.at_least("blocks", 0, blocks);
  check.at_least("random blocks", 0, count);
  check.at_least("window blocks", 1, options.window_blocks);
  if (options.window_blocks % 2 == 0) check.fail("an odd number of window blocks", options.window_blocks);
  check.at_least("global blocks", 0, options.global_blocks);
  check.fits("a table", {heads, blocks, count});
  random_block_table table(heads, blocks, count);
  const index first = std::min(options.global_blocks, blocks), last = std::max(first, blocks - options.global_blocks);
  for (index h = 0; h < heads; ++h)
    for (index block = 0; block < blocks; ++block) {
      // Candidates are [first, low) and [high, last).
      const index reach = std::min(options.window_blocks / 2, blocks);
      const index low = std::clamp(block - reach, first, last);
      const index high = options.causal ? last : std::clamp(block + reach + 1, low, last);
      const index candidates = low - first + last - high, drawn = std::min(count, candidates);
      random_numbers numbers(options.seed, static_cast<std::uint64_t>(h * blocks + block));
      index* const row = table.row(h, block);
      for (index n = 0; n < drawn; ++n) {  // Floyd's sampling without replacement
        const index most = candidates - drawn + n, rank = numbers.below(most + 1);
        row[n] = std::find(row, row + n, rank) == row + n ? rank : most;
      }
      std::sort(row, row + drawn);
      for (index n = 0; n < drawn; ++n) row[n] += row[n] < low - first ? first : high - (low - first);
    }
  return table;
}

/// Options of bigbird for elements of type S.
template <class S>
struct bigbird_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// b, >= 1: positions [0, b) are the first block, and so on.
  index size = 64;
  /// Odd: the query's own block, and as many on each side of it.
  index window_blocks = 3;
  /// g, >= 0: so many first and so many last blocks.
  index global_blocks = 1;
  /// Random blocks of each query block, [H or 1, blocks, r], -1 for none; those that begin beyond the length are empty.
  tensor_view<const index, 3> random{};
  /// Nothing after the query's own position, not even in a global block.
  bool causal = false;
  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// ALiBi: -slope |distance of positions|, one slope a head.
  list_view<real> alibi_slopes{};
  /// A logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

template <class S, class Score>
void bigbird(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
             const tensor_view<const S>& v, const tensor_view<S>& out, const bigbird_options<S>& options, Score& score,
             execution& exec) {
  const auto common = common_options<S>(options);
  const auto [shape, lengths] = check_pattern_softmax(check, q, k, v, out, common);
  check.at_least("block size", 1, options.size);
  check.at_least("window blocks", 1, options.window_blocks);
  if (options.window_blocks % 2 == 0) check.fail("an odd number of window blocks", options.window_blocks);
  check.at_least("global blocks", 0, options.global_blocks);
  if (options.random) {
    const auto& table = options.random;
    const index blocks = ceil_div(shape.keys, options.size);
    check.readable("random", table);
    check.broadcasts("random heads", shape.heads, table.extent(0));
    check.equal("random rows = key blocks", blocks, table.extent(1));
    for (index h = 0; h < table.extent(0); ++h)
      for (index a = 0; a < blocks; ++a)
        for (index n = 0; n < table.extent(2); ++n)
          if (table(h, a, n) < -1 || table(h, a, n) >= blocks)
            check.fail(text({"random blocks from -1 to ", blocks - 1}), table(h, a, n));
    check.no_alias("out", out, "random", table);
    check.no_alias("lse", options.lse, "random", table);
  }
  const bigbird_pattern pattern{options.size, options.window_blocks, options.global_blocks, options.random};
  run_pattern_softmax(check, q, k, v, out, pattern, common, shape, lengths, score, exec);
}

}  // namespace detail

/// BigBird attention; `score(s, batch, head, i, j)` may replace the score s of query row i and key row j,
/// after every other term; -infinity masks the key.
template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void bigbird(const Q& q, const K& k, const V& v, O&& out, const bigbird_options<element_of<const Q&>>& options,
             Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  detail::bigbird<S>(detail::validator("bigbird"), as_view(q), as_view(k), as_view(v), as_view(out), options, score, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void bigbird(const Q& q, const K& k, const V& v, O&& out, const bigbird_options<element_of<const Q&>>& options,
             Score&& score) {
  execution serial;
  bigbird(q, k, v, out, options, score, serial);
}

template <viewable Q, viewable K, viewable V, viewable O>
void bigbird(const Q& q, const K& k, const V& v, O&& out, const bigbird_options<element_of<const Q&>>& options,
             execution& exec) {
  bigbird(q, k, v, out, options, detail::no_score{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void bigbird(const Q& q, const K& k, const V& v, O&& out, const bigbird_options<element_of<const Q&>>& options = {}) {
  execution serial;
  bigbird(q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
