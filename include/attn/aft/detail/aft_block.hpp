// attn: the one blockwise kernel of the attention-free family.
//
// Every channel has a separate softmax over tokens, with logits k_j + w_tj. As e^(k + w) = e^w e^k, the sums of a block
// of rows over a chunk of keys are one product for all channels, num and den side by side:
//
//   1. keys      [e^k v | e^k] 2^-K, K the largest exponent of the chunk in each channel      packed_chunk
//   2. weights   e^w 2^-W, W the largest exponent of each row                                 fill_weights
//   3. product   sums = sums 2^(K_old - K) + weights keys                                     tile_product
//
// At the end the sums over keys outside the product (key_sums) are added, and the result is divided, gated and written.
//
// Error bound, in float. Scales are powers of two, so scaling is exact; the only loss is by underflow, where W and K
// come from different keys. A factor below 2^-126 becomes 0 while the other one is below 1.5, and so does a sum
// rescaled to a larger K: each key loses less than 2^-124 of den and 2^-124 max(1, |v|) of num, in the scale of the
// sums. Where den and den max |v|, over the keys the row sees, are at least (keys + 1) 2^-97, that is below 2^-27 of
// both: less than rounding. Which values a row sees depends on the biases, so max |v| is replaced by a lower bound:
// |num| / den and, unless num is 0 anyway, the smallest non-zero |v| of all keys. Rows and channels where this bound is
// too small are computed again, exactly. Maxima of k and w at different keys thus cost nothing until a factor of 10^25
// apart.
#pragma once

#include <attn/aft/detail/aft_elements.hpp>

#include <span>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t block_rows = 96;                  // rows of a block, a multiple of every tile height
inline constexpr idx_t product_keys = 384;               // keys a product takes at most
inline constexpr int weight_stride = product_keys + 16;  // rows of a tile fall into different cache sets

/// The least that sum_lower_bound() may be for a fast result over `keys` keys.
template <class T>
T trusted_sum(idx_t keys) {
  return std::ldexp(static_cast<T>(keys + 1), float_bits<T>::mantissa + 7 - float_bits<T>::bias);
}

/// A lower bound of den min(1, max |v|), where no value but 0 is smaller than `smallest`.
template <class T>
ATTN_INLINE packet<T> sum_lower_bound(const packet<T>& num, const packet<T>& den, const packet<T>& smallest) {
  return (min)(den, (max)(mul(den, (min)(smallest, broadcast<T>(T(1)))), abs(num)));
}

/// Heads that share their biases and true length.
using head_bundle = std::span<const aft_head>;

/// A chunk of keys of several heads, ready for the product.
template <class T>
struct packed_chunk {
  T* panels = nullptr;  // per packet [capacity][e^k v | e^k]
  packed_channels<T>* packets = nullptr;
  idx_t capacity = 0;

  static packed_chunk layout(arena& memory, idx_t packets, idx_t capacity) {
    T* const panels = memory.allocate<T>(packets * capacity * panel_width<T>);
    return {panels, memory.allocate<packed_channels<T>>(packets), capacity};
  }

  T* panel(idx_t packet) const { return panels + packet * capacity * panel_width<T>; }

  /// Packs rows [begin, begin + count) of one head as packets first ... of the chunk.
  void pack(const aft_elements<T>& elements, const aft_head& head, idx_t first, idx_t begin, idx_t count) const {
    for (idx_t c = 0, p = first; c < head.v.cols; c += width<T>, ++p)
      packets[p] = elements.pack(head, c, begin, count, panel(p));
  }
};

/// Up to block_rows rows that share their biases, with the sums of all channels of a bundle of heads.
template <class T>
struct aft_block {
  static constexpr idx_t together = 4;  // packets that are finished together and share what the exact form reads

  T* weights = nullptr;                // [block_rows][weight_stride]
  T* sums = nullptr;                   // per packet [block_rows][num | den]
  T* long_sums = nullptr;              // the same of keys before the last most_taken
  packet<T>* long_exponent = nullptr;  // per packet: their exponent
  packed_channels<T>* seen = nullptr;  // per packet: K, the exponent of its sums beside that of the row, and min |v|
  T* row_exponent = nullptr;           // [block_rows]: W
  key_sums<T>* totals = nullptr;       // [together][block_rows]: the sums of some packets over all keys
  bool* exact = nullptr;               // [together][block_rows]: which of them are added up exactly
  key_sums<T>* keys = nullptr;         // [key_chunk]
  split_biases<T> biases, diagonal;
  idx_t packets = 0, rows = 0;
  idx_t taken = 0;     // keys since sums were moved to long_sums
  bool moved = false;
  static constexpr idx_t most_taken = 32 * product_keys;

  static aft_block layout(arena& memory, idx_t packets, bool causal) {
    return {.weights = memory.allocate<T>(block_rows * weight_stride),
            .sums = memory.allocate<T>(packets * block_rows * panel_width<T>),
            .long_sums = memory.allocate<T>(packets * block_rows * panel_width<T>),
            .long_exponent = memory.allocate<packet<T>>(packets),
            .seen = memory.allocate<packed_channels<T>>(packets), .row_exponent = memory.allocate<T>(block_rows),
            .totals = memory.allocate<key_sums<T>>(together * block_rows),
            .exact = memory.allocate<bool>(together * block_rows), .keys = memory.allocate<key_sums<T>>(key_chunk),
            .biases = split_biases<T>::layout(memory, block_rows),
            .diagonal = split_biases<T>::layout(memory, causal ? block_rows : 0), .packets = packets};
  }

  void begin(idx_t count) {
    rows = count, taken = 0, moved = false;
    const idx_t padded = round_up(rows, tile_rows);
    for (idx_t p = 0; p < packets; ++p)
      std::fill_n(sums + p * block_rows * panel_width<T>, padded * panel_width<T>, T(0));
    std::fill_n(seen, packets, packed_channels<T>{});
    std::fill_n(weights + rows * weight_stride, (padded - rows) * weight_stride, T(0));
  }

  /// Moves the sums to long_sums, so that they take most_taken keys from zero.
  [[gnu::noinline]] void move_sums() {
    constexpr idx_t size = block_rows * panel_width<T>;
    for (idx_t p = 0; p < packets; ++p) {
      const packet<T> scale = moved ? power_of_two<T>(sub(long_exponent[p], key_sums<T>::finite(seen[p].exponent)))
                                    : zero<T>();
      T *const from = sums + p * size, *const to = long_sums + p * size;
      for (idx_t x = 0; x < rows * panel_width<T>; x += width<T>) {
        const packet<T> all = moved ? fma(load<T>(to + x), scale, load<T>(from + x)) : load<T>(from + x);
        store<T>(to + x, all), store<T>(from + x, zero<T>());
      }
      long_exponent[p] = seen[p].exponent;
    }
    taken = 0, moved = true;
  }
  /// After the last key: the sums become those of all.
  void join_sums() {
    if (!moved) return;
    move_sums();
    std::swap(sums, long_sums);
  }
};

/// The exponent of the largest of `count` biases, -infinity if all mask.
template <class T>
T highest_exponent(const T* bias, idx_t count) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  packet<T> highest = broadcast<T>(-infinity);
  const auto include = [&](const packet<T>& x) {
    highest = (max)(highest, if_less(abs(x), broadcast<T>(infinity), x, broadcast<T>(-infinity)));
  };
  idx_t j = 0;
  for (; j + width<T> <= count; j += width<T>) include(load<T>(bias + j));
  for (; j < count; ++j) include(broadcast<T>(bias[j]));
  return max_lanes(split_exp<T>(highest).exponent);
}

/// Step 2 for one row, in place.
template <class T>
void fill_weights(T* row, idx_t count, T exponent) {
  const packet<T> reference = key_sums<T>::finite(broadcast<T>(exponent));
  map_packets(row, row, count, [&](const packet<T>& x) {
    const auto e = split_exp<T>(x);
    return mul(e.factor, power_of_two<T>(sub(e.exponent, reference)));
  });
}

/// Step 3 for one row where a key or value is not finite: masked keys are left out. Same sums, to the last bit.
template <class T>
[[gnu::noinline]] void masked_sums(const T* weights, const T* bias, const T* panel, idx_t count,
                                   const packet<T>& old_scale, const packet<T>& new_scale, T* sums) {
  for (int half = 0; half < panel_width<T>; half += width<T>) {
    packet<T> x = zero<T>();
    for (idx_t j = 0; j < count; ++j)
      if (bias[j] != -std::numeric_limits<T>::infinity())
        x = fma(broadcast<T>(weights[j]), load<T>(panel + j * panel_width<T> + half), x);
    store<T>(sums + half, fma(x, new_scale, mul(load<T>(sums + half), old_scale)));
  }
}

struct aft_keys {
  idx_t begin, end;
};

/// One block of rows of one bundle of heads. Bias tells what the rows see:
///   keys_of(line)             the keys of a line, first_line() <= line < end_line(), that the product takes
///   fill(row, begin, n, to)   the biases of row `row` of the block towards keys begin ...
///   has_diagonal(), diagonal()  causal: row r also sees keys [diagonal, diagonal + r], added exactly
template <class T, class Bias>
struct aft_rows {
  aft_block<T>& block;
  const aft_elements<T>& elements;
  head_bundle heads;
  const Bias& bias;
  idx_t first, parts;  // row of the sequence the block begins with; packets of channels per head
  const key_sums<T>* outside;  // sums over keys all rows see without a bias, per packet; null if there are none
  bool gate;

  /// W for every row.
  void find_row_exponents() const {
    for (idx_t r = 0; r < block.rows; ++r) {
      T highest = -std::numeric_limits<T>::infinity();
      for (idx_t line = bias.first_line(); line < bias.end_line(); ++line)
        for (auto [j, end] = bias.keys_of(line); j < end; j += product_keys) {
          const idx_t count = (std::min)(product_keys, end - j);
          bias.fill(r, j, count, block.weights);
          highest = (std::max)(highest, highest_exponent(block.weights, count));
        }
      block.row_exponent[r] = highest;
    }
  }

  /// Steps 2 and 3 for keys [begin, begin + count), which `chunk` holds.
  void add_chunk(const packed_chunk<T>& chunk, idx_t begin, idx_t count) const {
    if (block.taken > 0 && block.taken + count > block.most_taken) block.move_sums();
    block.taken += count;
    for (idx_t r = 0; r < block.rows; ++r) {
      T* const row = block.weights + r * weight_stride;
      bias.fill(r, begin, count, row);
      fill_weights(row, count, block.row_exponent[r]);
    }
    for (idx_t p = 0; p < block.packets; ++p) {
      packed_channels<T>& seen = block.seen[p];
      const packed_channels<T>& added = chunk.packets[p];
      const packet<T> now = (max)(seen.exponent, added.exponent), reference = key_sums<T>::finite(now);
      const packet<T> old_scale = power_of_two<T>(sub(seen.exponent, reference));
      const packet<T> scale = power_of_two<T>(sub(added.exponent, reference));
      seen.exponent = now, seen.smallest = (min)(seen.smallest, added.smallest);
      const T* const panel = chunk.panel(p);
      T* const sums = block.sums + p * block_rows * panel_width<T>;
      if (added.finite) [[likely]]
        for (idx_t r = 0; r < block.rows; r += tile_rows)
          products_of_rows<T, panel_width<T>, true>(
              block.rows - r, left_operand<T, weight_stride, 1>{block.weights + r * weight_stride}, panel, 0, 0,
              panel_width<T>, count, [&](auto m, idx_t col, const auto& x) {
                T* const s = sums + (r + m) * panel_width<T> + col;
                store<T>(s, fma(x, scale, mul(load<T>(s), old_scale)));
              });
      else
        for (idx_t r = 0; r < block.rows; ++r) {
          alignas(64) T plain[product_keys];
          bias.fill(r, begin, count, plain);
          masked_sums(block.weights + r * weight_stride, plain, panel, count, old_scale, scale,
                      sums + r * panel_width<T>);
        }
    }
  }

  /// Adds keys [begin, begin + keys) with the biases of `rows` to the totals marked `exact` of `count` packets from p
  /// on; a row of the diagonal sees those up to its own.
  void add_exactly(idx_t p, idx_t count, idx_t begin, idx_t keys, const split_biases<T>& rows, bool diagonal) const {
    const aft_head& head = heads.data()[p / parts];
    for (idx_t n = 0; n < count; ++n) {
      bool split = false;
      for (idx_t r = 0; r < block.rows; ++r) {
        if (!block.exact[n * block_rows + r]) continue;
        if (!split) elements.split(head, (p + n) % parts * width<T>, begin, keys, block.keys);
        split = true;
        add_keys(block.totals[n * block_rows + r], block.keys, rows.row(r), diagonal ? r + 1 : keys);
      }
    }
  }
  void add_diagonal(idx_t p, idx_t count) const {
    if (bias.has_diagonal()) add_exactly(p, count, bias.diagonal(), block.rows, block.diagonal, true);
  }

  /// After all chunks: adds the diagonal and the keys outside, tests, divides and writes. Returns how many rows of
  /// packets needed recomputation.
  idx_t finish(idx_t keys) const {
    return finish(keys, [&](idx_t p, const key_sums<T>* totals) {
      elements.write(heads.data()[p / parts], gate, p % parts * width<T>, first, block.rows, totals);
    });
  }
  /// The same; write(p, totals) takes the sums of packet p in every row.
  template <class Write>
  idx_t finish(idx_t keys, Write&& write) const {
    block.join_sums();
    for (idx_t r = 0; bias.has_diagonal() && r < block.rows; ++r) {
      const auto row = block.diagonal.row(r);
      bias.fill(r, bias.diagonal(), r + 1, row.factor);
      row.split(r + 1);
    }
    idx_t recomputed = 0;
    for (idx_t p = 0, count; p < block.packets; p += count) {
      count = (std::min)(block.together, parts - p % parts);
      std::fill_n(block.totals, block.together * block_rows, key_sums<T>{});
      std::fill_n(block.exact, block.together * block_rows, true);
      add_diagonal(p, count);
      idx_t underflowed = 0;
      for (idx_t n = 0; n < count; ++n) underflowed += combine(p, n, keys);
      if (underflowed > 0) recompute(p, count, keys);
      recomputed += underflowed;
      for (idx_t n = 0; n < count; ++n) write(p + n, block.totals + n * block_rows);
    }
    return recomputed;
  }

  /// Adds up all sums of packet p + n; marks in `exact`, and counts, the rows that need recomputation. Where every key
  /// is masked nothing can be lost.
  idx_t combine(idx_t p, idx_t n, idx_t keys) const {
    const T* const sums = block.sums + (p + n) * block_rows * panel_width<T>;
    const packet<T> exponent = block.seen[p + n].exponent, smallest = block.seen[p + n].smallest;
    const packet<T> enough = broadcast<T>(trusted_sum<T>(keys));
    const packet<T> none = broadcast<T>(-std::numeric_limits<T>::infinity());
    idx_t underflowed = 0;
    for (idx_t r = 0; r < block.rows; ++r) {
      const packet<T> scale = add(exponent, broadcast<T>(block.row_exponent[r]));
      key_sums<T> all{load<T>(sums + r * panel_width<T>), load<T>(sums + r * panel_width<T> + width<T>), scale};
      key_sums<T>& total = block.totals[n * block_rows + r];
      all.merge(total);
      if (outside) all.merge(outside[p + n]);
      total = all;
      const packet<T> bound = sum_lower_bound<T>(all.num, all.den, smallest);
      const packet<T> lost = if_less(bound, enough, broadcast<T>(T(1)), zero<T>());
      const bool recompute = sum_lanes(if_less(none, scale, lost, zero<T>())) != T(0);
      block.exact[n * block_rows + r] = recompute;
      underflowed += recompute;
    }
    return underflowed;
  }

  /// Computes the marked rows of `count` packets again, exactly; channels that lost nothing keep their sums.
  [[gnu::noinline]] void recompute(idx_t p, idx_t count, idx_t keys) const {
    const packet<T> enough = broadcast<T>(trusted_sum<T>(keys));
    auto* const fast_sums = reinterpret_cast<key_sums<T>*>(block.weights);  // the product is over
    static_assert(aft_block<T>::together * sizeof(key_sums<T>) <= weight_stride * sizeof(T));
    for (idx_t n = 0; n < count * block_rows; ++n)
      if (block.exact[n]) fast_sums[n] = block.totals[n], block.totals[n] = {};
    for (idx_t line = bias.first_line(); line < bias.end_line(); ++line)
      for (auto [j, end] = bias.keys_of(line); j < end; j += key_chunk) {
        const idx_t some = (std::min)(key_chunk, end - j);
        for (idx_t r = 0; r < block.rows; ++r) {
          bool any = false;
          for (idx_t n = 0; n < count; ++n) any |= block.exact[n * block_rows + r];
          if (!any) continue;
          const auto row = block.biases.row(r);
          bias.fill(r, j, some, row.factor);
          row.split(some);
        }
        add_exactly(p, count, j, some, block.biases, false);
      }
    add_diagonal(p, count);
    for (idx_t n = 0; n < count * block_rows; ++n) {
      if (!block.exact[n]) continue;
      key_sums<T>& exact = block.totals[n];
      if (outside) exact.merge(outside[p + n / block_rows]);
      const key_sums<T>& fast = fast_sums[n];
      const packet<T> bound = sum_lower_bound<T>(fast.num, fast.den, block.seen[p + n / block_rows].smallest);
      exact.num = if_less(bound, enough, exact.num, fast.num);
      exact.den = if_less(bound, enough, exact.den, fast.den);
      exact.exponent = if_less(bound, enough, exact.exponent, fast.exponent);
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
