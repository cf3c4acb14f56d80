// attn: keys and values in four or eight bits with a scale and an offset for each channel of a block of tokens, as
// caches of attn::int4 and attn::int8_channels keep them (KIVI, Liu et al. 2024).
//
//   number of token t, channel c = offset_c + scale_c * code_tc     code_tc whole numbers from 0 to 15, or to 255
//
// channel_block rows are one block of bytes, of which the codes are in words of 32 bits:
//
//   bfloat16 scale[cols], bfloat16 offset[cols]
//   std::uint32_t word[ceil(cols / A)][32]       of keys: word [n][t] has the codes of columns A n to A n + A - 1
//   std::uint32_t word[32 / A][cols]             of values: word [n][c] has the codes of tokens A n to A n + A - 1
//
// A = 8 codes of four bits, or 4 of eight. Code a of a word is at bit a % 2 * 16 + a / 2 * bits, so that a shift and a
// mask give two adjacent codes in 16 bits each, as products of pairs take them.
//
// A block gets its scales when its last token comes. Until then its tokens are bfloat16, in the tail: the last few
// blocks of the memory of an item, which the sign bit of the first scale of the block says. An item has at most one
// block in the tail. A token that comes behind others of a full block, as after truncate(), brings those into the tail
// again.
//
// Measured on the keys of a trained model (bench/data) in four bits, error of the attention of two layers: scales for
// each channel of 16, 32 and 64 tokens 3.3, 4.2 and 4.6 %, 1.2, 1.5 and 1.8 %; for each token and 32 channels 10.7 and
// 2.2 %, of differences from the first of 16 keys 6.1 and 2.0 %, after a Hadamard transform as well 5.9 and 2.1 %. Of
// values, for each channel of 32 tokens 2.6 and 2.0 %, for each token and 32 channels 3.9 and 2.3 %. Of both, for each
// channel of 32 tokens, from the smallest number to the largest 4.9 and 2.5 %, by the best of nine grids 4.4 and 2.2 %;
// after a Hadamard transform of the keys 4.2 and 2.3 %, but with two channels 50 times as large 38 in place of 9 %.
#pragma once

#include <attn/core/detail/bf16_pair.hpp>
#include <attn/core/detail/coded.hpp>
#include <attn/core/detail/quantised.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t channel_block = 32;

/// Offsets within a block, in bytes.
template <class C>
struct channel_layout {
  static constexpr int bits = std::same_as<C, int4> ? 4 : 8;
  static constexpr idx_t in_word = 32 / bits;
  static constexpr std::int32_t most = (1 << bits) - 1;
  static constexpr std::uint32_t pair_mask = static_cast<std::uint32_t>(most) * 0x10001u;
  /// Tokens that at least fit in the bytes of a block as bfloat16, and blocks of the tail.
  static constexpr idx_t tail_rows = (4 + channel_block * bits / 8) / 2,
                         tail = (channel_block + tail_rows - 1) / tail_rows;

  idx_t cols = 0;
  bool of_keys = false;

  /// What blocks of so many bytes hold: as many columns as there is room for.
  static channel_layout of_bytes(idx_t bytes, bool of_keys) {
    idx_t cols = bytes / (2 * tail_rows);
    while (cols > 0 && channel_layout{cols, of_keys}.bytes() > bytes) --cols;
    return {cols, of_keys};
  }
  idx_t words() const {
    return of_keys ? (cols + in_word - 1) / in_word * channel_block : channel_block / in_word * cols;
  }
  idx_t bytes() const { return 4 * (cols + words()); }

  struct place {
    idx_t byte;
    int shift;
  };
  place code(idx_t row, idx_t col) const {
    const idx_t along = of_keys ? col : row, word = of_keys ? col / in_word * channel_block + row
                                                            : row / in_word * cols + col;
    const int a = static_cast<int>(along % in_word);
    return {4 * (cols + word), a % 2 * 16 + a / 2 * bits};
  }
};

/// The parts of a block.
template <class C>
const Eigen::bfloat16* channel_scales(const C* block) {
  return reinterpret_cast<const Eigen::bfloat16*>(block);
}
template <class C>
bool in_tail(const C* block, idx_t cols) {
  return cols > 0 && (bf16_bits(channel_scales(block)[0]) & 0x8000) != 0;
}

/// N words of codes.
template <int N, class C>
ATTN_INLINE auto load_words(const C* p) {
  typename lanes_of<std::uint32_t, N>::type x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
using code_words = typename lanes_of<std::uint32_t, width<float>>::type;

/// Consecutive rows of one head, or every step-th of them: the first `cols` columns.
template <class C>
struct channel_rows {
  using layout_type = channel_layout<C>;

  const C* blocks = nullptr;
  idx_t block_stride = 0;
  layout_type layout{};
  idx_t first = 0, rows = 0, cols = 0, step = 1, tail = 0;  // the number of the block in which the tail begins
  const block_pages* pages = nullptr;  // none: one after another

  channel_rows() = default;
  /// All rows of a matrix of blocks, the tail included.
  channel_rows(const matrix_view<const C>& x, const layout_type& l, idx_t columns)
      : blocks(x.data), block_stride(x.row_stride), layout(l), rows((x.rows - layout_type::tail) * channel_block),
        cols(columns), tail(x.rows - layout_type::tail) {}

  const C* block(idx_t i) const {
    const idx_t n = (first + i * step) / channel_block;
    return blocks + (pages ? pages->block(n, block_stride) : n * block_stride);
  }
  idx_t in_block(idx_t i) const { return (first + i * step) % channel_block; }
  bool in_tail(idx_t i) const { return detail::in_tail(block(i), layout.cols); }
  /// Row i of those in the tail.
  const Eigen::bfloat16* tail_row(idx_t i) const {
    const idx_t t = in_block(i), n = t / layout_type::tail_rows;
    const C* const page = blocks + (pages ? pages->page((first + i * step) / channel_block) : 0);
    return reinterpret_cast<const Eigen::bfloat16*>(page + (tail + n) * block_stride) +
           (t - n * layout_type::tail_rows) * layout.cols;
  }

  /// Row i as numbers, from its codes whether or not it is in the tail.
  template <class N>
  void decode(idx_t i, N* to) const {
    const C* const from = block(i);
    const idx_t row = in_block(i);
    const Eigen::bfloat16 *const scales = channel_scales(from), *const offsets = scales + layout.cols;
    const auto number = [&](idx_t c) {
      const auto at = layout.code(row, c);
      const auto code = static_cast<std::int32_t>(load_words<1>(from + at.byte)[0] >> at.shift &
                                                  std::uint32_t(layout.most));
      return static_cast<float>(offsets[c]) + std::abs(static_cast<float>(scales[c])) * static_cast<float>(code);
    };
    const auto numbers = [&](const packet<float>& codes, idx_t c) {
      return fma(codes, abs(load_as<float>(scales + c)), load_as<float>(offsets + c));
    };
    constexpr int w = width<float>, some = (std::max)(16, w), words = some / layout_type::in_word;
    if (layout.of_keys)
      in_packets<some>(cols, to, [&](idx_t c, float* x) {
        const C* const word = from + layout.code(row, c).byte;
        const idx_t before = c % layout_type::in_word;
        std::uint8_t codes[some + layout_type::in_word];
        const auto put = [&](idx_t n, const auto& some_codes) {
          std::memcpy(codes + n * layout_type::in_word, &some_codes, sizeof some_codes);
        };
        put(0, row_codes<words>([&](idx_t n) { return word + n * 4 * channel_block; }));
        if (before != 0) put(words, row_codes<1>([&](idx_t) { return word + words * 4 * channel_block; }));
        for (int n = 0; n < some; n += w) store<float>(x + n, numbers(load_codes(codes + before + n), c + n));
      }, number);
    else
      in_packets<w>(cols, to, [&](idx_t c, float* x) {
        const auto at = layout.code(row, c);
        const code_words codes = load_words<w>(from + at.byte) >> at.shift & std::uint32_t(layout.most);
        store<float>(x, numbers(whole_to_float(bits_as<whole_lanes>(codes)), c));
      }, number);
  }
  /// Rows [begin, end) as numbers, `stride` apart.
  void expand(idx_t begin, idx_t end, float* __restrict__ to, idx_t stride) const {
    for (idx_t i = begin; i < end; ++i, to += stride) {
      if (!in_tail(i)) {
        decode(i, to);
        continue;
      }
      const Eigen::bfloat16* const row = tail_row(i);
      in_packets<width<float>>(
          cols, to, [&](idx_t c, float* x) { store<float>(x, load_as<float>(row + c)); },
          [&](idx_t c) { return static_cast<float>(row[c]); });
    }
  }
  /// How many of the first `count` rows are all in the tail, or all not, as the first one is.
  idx_t alike(idx_t count) const {
    if (count <= 0) return count;
    const bool tails = in_tail(0);
    const auto in_same_block = [&](idx_t n) { return (channel_block - in_block(n) + step - 1) / step; };
    idx_t n = in_same_block(0);
    while (n < count && in_tail(n) == tails) n += in_same_block(n);
    return (std::min)(n, count);
  }

  /// The codes of one key in N words, word n at word_at(n), in bytes one after another.
  template <int N, class F>
  ATTN_INLINE static auto row_codes(F&& word_at) {
    using half_words = typename lanes_of<std::uint16_t, 2 * N>::type;
    using bytes = typename lanes_of<std::uint8_t, N * layout_type::in_word>::type;
    typename lanes_of<std::uint32_t, N>::type x{};
    unroll_constants<N>([&](auto n) { x[n.value] = load_words<1>(word_at(n))[0]; });
    x = (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x & 0xff00u) << 8;
    if constexpr (layout_type::bits == 8) {
      return bits_as<bytes>(x);
    } else {
      const auto wide = __builtin_convertvector(bits_as<half_words>(x), typename lanes_of<std::uint32_t, 2 * N>::type);
      return bits_as<bytes>((wide & 0x0f0fu) | (wide & 0xf0f0u) << 12);
    }
  }
};
template <class C>
bool in_tail(const channel_rows<C>& x) {
  return x.in_tail(0);
}
template <class C>
channel_rows<C> every(channel_rows<C> x, idx_t step, idx_t count) {
  x.step *= step, x.rows = count;
  return x;
}

template <class C>
idx_t alike(const channel_rows<C>& x, idx_t count) {
  return x.alike(count);
}

/// Writes rows of one head: a matrix of blocks, the tail included.
template <class C>
struct channel_code_writer {
  using layout_type = channel_layout<C>;

  matrix_view<C> memory;
  layout_type layout;
  channel_rows<C> all{{memory.data, memory.rows, memory.cols, memory.row_stride, 1}, layout, layout.cols};

  /// Stores x, `stride` apart, as row `row`; the rows of its block before it are there already.
  template <class S>
  void put(const S* x, idx_t stride, idx_t row) const {
    const idx_t in_block = row % channel_block;
    if (layout.cols == 0) return;
    C* const block = memory.row(row / channel_block);
    if (!in_tail(block, layout.cols)) {
      for (idx_t r = row - in_block; r < row; ++r) all.decode(r, tail_row(r));
      const auto marked = static_cast<std::uint16_t>(bf16_bits(channel_scales(block)[0]) | 0x8000);
      std::memcpy(static_cast<void*>(block), &marked, sizeof marked);
    }
    Eigen::bfloat16* const to = tail_row(row);
    for (idx_t c = 0; c < layout.cols; ++c) to[c] = Eigen::bfloat16(static_cast<float>(x[c * stride]));
    if (in_block + 1 == channel_block) encode(row - in_block, block);
  }

 private:
  Eigen::bfloat16* tail_row(idx_t row) const { return const_cast<Eigen::bfloat16*>(all.tail_row(row)); }

  static constexpr idx_t some = 16;  // columns that are encoded at a time
  struct grids {
    alignas(64) float offset[some], scale[some], inverse[some];

    /// Of channel c, from `least` to `largest`; the scale is rounded up, so that `largest` has a code.
    void set(idx_t c, float least, float largest) {
      const float exact = (largest - least) / static_cast<float>(layout_type::most);
      const std::uint32_t up = std::bit_cast<std::uint32_t>(exact) + 0xffffu;
      offset[c] = least, scale[c] = exact >= 0x1p-120f ? std::bit_cast<float>(up & 0xffff0000u) : 0.0f;
      inverse[c] = scale[c] > 0 ? 1 / scale[c] : 0;
    }
  };
  /// The sums of the squares of what channels lose by the codes of a grid.
  static void losses_of(const float (&numbers)[channel_block][some], const grids& grid, float (&losses)[some]) {
    using T = packet<float>;
    const T whole = broadcast<float>(whole_number), most = broadcast<float>(layout_type::most);
    for (idx_t c = 0; c < some; c += width<float>) {
      const T offset = load<float>(grid.offset + c), scale = load<float>(grid.scale + c),
              inverse = load<float>(grid.inverse + c);
      T sum = zero<float>();
      for (idx_t r = 0; r < channel_block; ++r) {
        const T number = sub(load<float>(numbers[r] + c), offset),
                code = (max)((min)(sub(fma(number, inverse, whole), whole), most), zero<float>()),
                rest = sub(number, mul(code, scale));
        sum = fma(rest, rest, sum);
      }
      store<float>(losses + c, sum);
    }
  }
  /// Of four bits: grids that begin and end up to half of a step within the numbers, where those lose less. No number
  /// errs by more than half of the step from the smallest to the largest. There are nine; of 25 the best loses 2 %
  /// less.
  static void choose_grids(const float (&numbers)[channel_block][some], const float* least, const float* largest,
                           grids& best) {
    constexpr int choices = 3;
    alignas(64) float fewest[some], losses[some];
    losses_of(numbers, best, fewest);
    for (int n = 1; n < choices * choices; ++n) {
      const int from_least = n % choices, from_largest = n / choices;  // parts
      grids grid;
      for (idx_t c = 0; c < some; ++c) {
        const float part = (largest[c] - least[c]) / (2 * layout_type::most * (choices - 1));
        const float from = static_cast<float>(Eigen::bfloat16(least[c] + static_cast<float>(from_least) * part));
        // An offset that is rounded up beyond half of a step is left out.
        grid.set(c, from - least[c] <= static_cast<float>(choices - 1) * part ? from : least[c],
                 largest[c] - static_cast<float>(from_largest) * part);
      }
      losses_of(numbers, grid, losses);
      for (idx_t c = 0; c < some; ++c)
        if (losses[c] < fewest[c]) {
          fewest[c] = losses[c], best.offset[c] = grid.offset[c], best.scale[c] = grid.scale[c];
          best.inverse[c] = grid.inverse[c];
        }
    }
  }

  /// Makes codes of the rows from `first` on, which are in the tail. The grid of a channel is that from its smallest
  /// number, which is then exact, to its largest, or a finer one (choose_grids).
  void encode(idx_t first, C* block) const {
    const idx_t cols = layout.cols;
    auto* const scales = const_cast<Eigen::bfloat16*>(channel_scales(block));
    std::fill_n(block + 4 * cols, layout.bytes() - 4 * cols, C{});
    alignas(64) float numbers[channel_block][some] = {};
    float least[some] = {}, largest[some] = {};
    grids grid;
    for (idx_t begin = 0; begin < cols; begin += some) {
      const idx_t count = (std::min)(some, cols - begin);
      for (idx_t r = 0; r < channel_block; ++r) {
        const Eigen::bfloat16* const row = tail_row(first + r) + begin;
        for (idx_t c = 0; c < count; ++c) {
          const float number = numbers[r][c] = static_cast<float>(row[c]);
          least[c] = r == 0 ? number : (std::min)(least[c], number);
          largest[c] = r == 0 ? number : (std::max)(largest[c], number);
        }
      }
      for (idx_t c = 0; c < some; ++c) grid.set(c, least[c], largest[c]);
      if constexpr (layout_type::bits == 4) choose_grids(numbers, least, largest, grid);
      for (idx_t c = 0; c < count; ++c) {
        scales[begin + c] = Eigen::bfloat16(grid.scale[c]);
        scales[cols + begin + c] = Eigen::bfloat16(grid.offset[c]);
      }
      for (idx_t r = 0; r < channel_block; ++r)
        for (idx_t c = 0; c < count; ++c) {
          const float shifted = (std::max)(numbers[r][c] - grid.offset[c], 0.0f) * grid.inverse[c] + whole_number;
          const std::uint32_t code =
              std::min<std::uint32_t>(std::bit_cast<std::uint32_t>(shifted) & 0xffffu, std::uint32_t(layout.most));
          const auto at = layout.code(r, begin + c);
          std::uint32_t word;
          std::memcpy(&word, block + at.byte, sizeof word);
          word |= code << at.shift;
          std::memcpy(static_cast<void*>(block + at.byte), &word, sizeof word);
        }
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
