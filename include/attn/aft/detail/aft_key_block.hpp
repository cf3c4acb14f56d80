// attn: the one backward kernel of the attention-free family: the gradients of a block of keys and of the biases
// towards them, from all rows that see them.
//
// With g_t = dy_t / den_t and h_t = y_t g_t of every row (aft_gradients.hpp), separately for each channel,
// except in dw:
//
//   dv_j  = e^k_j sum_t e^w_tj g_t
//   dk_j  = e^k_j (v_j sum_t e^w_tj g_t - sum_t e^w_tj h_t)
//   dw_tj = e^w_tj sum_c e^k_j (v_j g_t - h_t)
//
//   1. weights     e^w 2^-W of a chunk of rows                  fill_weights
//   2. sums        [G | H] += weights^T [g | h]                 tile_product
//   3. products    [g | h] [e^k v | -e^k]^T                     channel_products
//   4. dw = weights * products
//
// Each of 2 and 3 is as large as the product of aft_block.hpp; they share the weights. Rows that are stored separately
// are added exactly, key by key. All operands of the products are finite: a row or key that is not contributes only
// where it is seen.
#pragma once

#include <attn/aft/detail/aft_bias_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The rows of a bundle of heads, ready for the products.
template <class T>
struct aft_stored_rows {
  T* panels = nullptr;           // per packet [capacity][g | h]
  key_sums<T>* exact = nullptr;  // per packet [capacity]: touched only where a row is separate
  bool* separate = nullptr;         // per packet [capacity]
  T* scales = nullptr;           // [capacity]: W
  packet<T>* highest = nullptr;  // K of all packets of the heads of the call
  idx_t capacity = 0, parts = 0;

  static aft_stored_rows layout(arena& memory, idx_t heads, idx_t parts, idx_t length, idx_t packets) {
    const idx_t capacity = round_up(length, block_rows) + tile_rows;  // packets fall into different cache sets
    return {.panels = memory.allocate<T>(packets * capacity * panel_width<T>),
            .exact = memory.allocate<key_sums<T>>(packets * capacity),
            .separate = memory.allocate<bool>(packets * capacity), .scales = memory.allocate<T>(capacity),
            .highest = memory.allocate<packet<T>>(heads * parts), .capacity = capacity, .parts = parts};
  }

  packed_rows_of<T> of(idx_t p) const {
    return {panels + p * capacity * panel_width<T>, exact + p * capacity, separate + p * capacity};
  }
  const packet<T>& highest_of(const head_bundle& heads, idx_t p) const {
    return highest[heads.data()[p / parts].number * parts + p % parts];
  }

  void find_highest(const aft_tensors<T>& x, const aft_gradient_elements<T>& elements, execution& exec) const {
    exec.for_each(x.batch * x.heads, [&](idx_t n, int) {
      const aft_head head = x.head(n);
      for (idx_t p = 0; p < parts; ++p) highest[n * parts + p] = elements.highest(head, p * width<T>, head.length);
    });
  }

  /// A block of rows from its sums. sees_beyond(r): may row r see keys without a bias?
  template <class Rows, class Beyond>
  void add(const aft_tensors<T>& x, const aft_gradient_elements<T>& elements, const Rows& rows, idx_t keys,
           Beyond&& sees_beyond) const {
    bool scaled = false;
    const idx_t first = rows.first, count = rows.block.rows;
    rows.finish(keys, [&](idx_t p, const key_sums<T>* totals) {
      for (idx_t r = 0; !scaled && r < count; ++r) {
        T scale = rows.block.row_exponent[r];
        if (rows.bias.has_diagonal())
          for (idx_t j = 0; j <= r; ++j) scale = (std::max)(scale, rows.block.diagonal.row(r).exponent[j]);
        if (sees_beyond(r)) scale = (std::max)(scale, T(0));
        scales[first + r] = scale == -std::numeric_limits<T>::infinity() ? T(0) : scale;
      }
      scaled = true;
      const aft_head& head = rows.heads.data()[p / parts];
      elements.rows(head, x.gate, x.accumulate, p % parts * width<T>, first, count, totals, scales + first,
                    highest_of(rows.heads, p), of(p));
    });
  }

  /// Adds rows [begin, end) of packet p, whose keys have no biases: num = g, den = h, exponent as of `exact`.
  void add_plain(const head_bundle& heads, idx_t p, idx_t begin, idx_t end, key_sums<T>& sums) const {
    const auto own = of(p);
    const packet<T> none = sub(zero<T>(), highest_of(heads, p));
    for (idx_t t = begin; t < end; ++t) {
      const T* const row = own.panel + t * panel_width<T>;
      sums.merge({load<T>(row), load<T>(row + width<T>), sub(none, broadcast<T>(scales[t]))});
      if (own.separate[t]) sums.merge(own.exact[t]);
    }
  }
};

/// Products of M rows with one panel of keys over `packets` packets of channels, num and den; added to what is there.
template <class T, int M>
void channel_products(const T* rows, idx_t packet_stride, const T* panel, idx_t packets, T* to, idx_t stride) {
  constexpr int wide = panel_width<T>;
  packet<T> acc[array_size<M>][2];
  unroll<M>([&](auto m) { unroll<2>([&](auto n) { acc[m][n] = load<T>(to + m * stride + n * width<T>); }); });
  for (idx_t p = 0; p < packets; ++p, rows += packet_stride)
    for (int k = 0; k < wide; ++k, panel += wide) {
      const packet<T> b[2] = {load<T>(panel), load<T>(panel + width<T>)};
      unroll<M>([&](auto m) {
        const packet<T> x = broadcast<T>(rows[m * wide + k]);
        unroll<2>([&](auto n) { acc[m][n] = fma(x, b[n], acc[m][n]); });
      });
    }
  unroll<M>([&](auto m) { unroll<2>([&](auto n) { store<T>(to + m * stride + n * width<T>, acc[m][n]); }); });
}

/// Up to block_rows keys of a bundle of heads. Bias tells of the biases:
///   fill(t, begin, count, to)             those of row t towards keys begin ...; -infinity for keys it does not see
///   add_gradient(t, begin, count, values) takes the gradient of those
template <class T>
struct aft_key_block {
  static constexpr idx_t row_chunk = 192;              // rows whose weights are computed at a time
  static constexpr int stride = int(block_rows) + 16;  // rows of a tile fall into different cache sets
  static constexpr idx_t chunk = 8;                    // packets of channels whose panels stay in the first-level cache
  static constexpr idx_t wide = panel_width<T>;

  T* keys = nullptr;                          // per packet [block_rows][e^k v | e^k]
  T* across = nullptr;                        // per panel of keys [channel, num then -den][wide]
  T* sums = nullptr;                          // per packet [block_rows][G | H], in the end [dv | dk]
  T* exact = nullptr;                         // per packet [block_rows][dv | dk] of rows kept separate
  bool* any_exact = nullptr;                  // per packet
  T *weights = nullptr, *products = nullptr;  // [row_chunk][stride]
  key_sums<T>* split = nullptr;               // [block_rows]
  T* shared = nullptr;                        // [block_rows][width]: dk of keys that all channels share
  split_biases<T> biases{};

  static aft_key_block layout(arena& memory, idx_t packets, bool biased) {
    const idx_t size = packets * block_rows * wide;
    return {.keys = memory.allocate<T>(size), .across = memory.allocate<T>(biased ? size : 0),
            .sums = memory.allocate<T>(size), .exact = memory.allocate<T>(size),
            .any_exact = memory.allocate<bool>(packets), .weights = memory.allocate<T>(row_chunk * stride),
            .products = memory.allocate<T>(biased ? (row_chunk + tile_rows) * stride : 0),
            .split = memory.allocate<key_sums<T>>(block_rows), .shared = memory.allocate<T>(block_rows * width<T>),
            .biases = split_biases<T>::layout(memory, 1)};
  }
};

template <class T, class Bias>
struct aft_key_gradients {
  const aft_key_block<T>& block;
  const aft_tensors<T>& x;
  const aft_gradient_elements<T>& elements;
  const aft_stored_rows<T>& rows;
  head_bundle heads;
  const Bias& bias;
  idx_t begin, count;  // of the keys
  bool biased;         // whether the gradient of w is wanted

  static constexpr idx_t wide = panel_width<T>, stride = aft_key_block<T>::stride;

  idx_t packets() const { return std::ssize(heads) * rows.parts; }
  const aft_head& head_of_packet(idx_t p) const { return heads.data()[p / rows.parts]; }
  idx_t channel(idx_t p) const { return p % rows.parts * width<T>; }
  bool wants_keys() const { return x.wants(x.dk) || x.wants(x.dv); }

  void start() const {
    for (idx_t p = 0; p < packets(); ++p) {
      T* const panel = block.keys + p * block_rows * wide;
      elements.keys(head_of_packet(p), channel(p), begin, count, rows.highest_of(heads, p), panel);
      std::fill(panel + count * wide, panel + block_rows * wide, T(0));
    }
    std::fill_n(block.sums, packets() * block_rows * wide, T(0));
    std::fill_n(block.any_exact, packets(), false);
    if (biased) transpose_keys();
  }

  /// Rows [first, first + n).
  void add_rows(idx_t first, idx_t n) const {
    for (idx_t t = first; t < first + n; t += block.row_chunk) add_chunk(t, (std::min)(block.row_chunk, first + n - t));
  }

  /// All rows are added: `outside` are sums over rows that see the keys without a bias, per packet; null if there are
  /// none.
  void finish(const key_sums<T>* outside) const {
    if (!wants_keys()) return;
    const bool one_key = x.one_key && x.dk.data && x.dk.extents[3] == 1 && x.dim != 1;
    for (idx_t p = 0; p < packets(); ++p) {
      const aft_head& head = head_of_packet(p);
      const T* const panel = block.keys + p * block_rows * wide;
      T* const sums = block.sums + p * block_rows * wide;
      for (idx_t j = 0; j < count; ++j) {
        const packet<T> weighted = load<T>(panel + j * wide), weight = load<T>(panel + j * wide + width<T>);
        const packet<T> g = load<T>(sums + j * wide), h = load<T>(sums + j * wide + width<T>);
        store<T>(sums + j * wide, mul(weight, g));
        store<T>(sums + j * wide + width<T>, sub(mul(weighted, g), mul(weight, h)));
      }
      if (block.any_exact[p]) {
        const T* const exact = block.exact + p * block_rows * wide;
        for (idx_t j = 0; j < count * wide; j += width<T>)
          store<T>(sums + j, add(load<T>(sums + j), load<T>(exact + j)));
      }
      if (outside) add_outside(p, outside[p], sums);
      if (head.dv.data) elements.store(head.dv, channel(p), begin, count, sums, wide, x.accumulate);
      if (!head.dk.data) continue;
      if (!one_key) {
        elements.store(head.dk, channel(p), begin, count, sums + width<T>, wide, x.accumulate);
        continue;
      }
      if (p % rows.parts == 0) std::fill_n(block.shared, block_rows * width<T>, T(0));
      for (idx_t j = 0; j < count; ++j) block.shared[j * width<T>] += sum_lanes(load<T>(sums + j * wide + width<T>));
      if (p % rows.parts == rows.parts - 1)
        elements.store(head.dk, 0, begin, count, block.shared, width<T>, x.accumulate);
    }
  }

 private:
  /// Step 3's right-hand side: keys become columns.
  void transpose_keys() const {
    const idx_t depth = packets() * wide;
    for (idx_t p = 0; p < packets(); ++p)
      for (idx_t j = 0; j < count; j += width<T>)
        for (int half = 0; half < 2; ++half) {
          packet<T> square[width<T>];
          for (int i = 0; i < width<T>; ++i)
            square[i] = load<T>(block.keys + (p * block_rows + j + i) * wide + half * width<T>);
          transpose<T>(square);
          T* const to = block.across + (j / wide * depth + p * wide + half * width<T>) * wide + j % wide;
          for (int c = 0; c < width<T>; ++c) store<T>(to + c * wide, half ? sub(zero<T>(), square[c]) : square[c]);
        }
    if (count % wide != 0 && count % wide <= width<T>)  // the second half of the last panel
      for (idx_t k = 0; k < depth; ++k)
        store<T>(block.across + (count / wide * depth + k) * wide + width<T>, zero<T>());
  }

  void add_chunk(idx_t first, idx_t n) const {
    for (idx_t t = 0; t < n; ++t) {
      T* const row = block.weights + t * stride;
      bias.fill(first + t, begin, count, row);
      fill_weights(row, count, rows.scales[first + t]);
      std::fill(row + count, row + round_up(count, tile_rows), T(0));
    }
    if (wants_keys()) add_sums(first, n);
    if (biased) {
      multiply(first, n);
      for (idx_t t = 0; t < n && packets() > 0; ++t)  // without channels, weights are undefined
        for (idx_t j = 0; j < round_up(count, width<T>); j += width<T>) {
          T* const at = block.products + t * stride + j;
          store<T>(at, mul(load<T>(at), load<T>(block.weights + t * stride + j)));
        }
    }
    for (idx_t p = 0; p < packets(); ++p) {
      const bool* const separate = rows.of(p).separate + first;
      if (std::find(separate, separate + n, true) != separate + n) add_separate(p, first, n);
    }
    for (idx_t t = 0; biased && t < n; ++t) bias.add_gradient(first + t, begin, count, block.products + t * stride);
  }

  /// Step 2.
  void add_sums(idx_t first, idx_t n) const {
    for (idx_t p = 0; p < packets(); ++p) {
      const T* const panel = rows.of(p).panel + first * wide;
      T* const all = block.sums + p * block_rows * wide;
      for (idx_t j = 0; j < count; j += tile_rows)
        with_tile_height(count - j, [&](auto M) {
          tile_product<T, M.value, 2>(left_operand<T, 1, int(stride)>{block.weights + j}, panel, n,
                                      [&](auto m, auto half, const auto& sum) {
                                        T* const s = all + (j + m) * wide + half * width<T>;
                                        store<T>(s, add(load<T>(s), sum));
                                      });
        });
    }
  }

  /// Step 3.
  void multiply(idx_t first, idx_t n) const {
    const idx_t depth = packets() * wide, packet_stride = rows.capacity * wide;
    std::fill_n(block.products, round_up(n, tile_rows) * stride, T(0));
    for (idx_t j = 0; j < count; j += wide)
      for (idx_t p = 0; p < packets(); p += block.chunk) {
        const T* const panel = block.across + (j / wide * depth + p * wide) * wide;
        for (idx_t t = 0; t < n; t += tile_rows)
          with_tile_height(n - t, [&](auto M) {
            channel_products<T, M.value>(rows.of(p).panel + (first + t) * wide, packet_stride, panel,
                                         (std::min)(block.chunk, packets() - p), block.products + t * stride + j,
                                         stride);
          });
      }
  }

  /// Rows of packet p that are stored separately, key by key.
  [[gnu::noinline]] void add_separate(idx_t p, idx_t first, idx_t n) const {
    T* const exact = block.exact + p * block_rows * wide;
    if (!block.any_exact[p]) std::fill_n(exact, block_rows * wide, T(0));
    block.any_exact[p] = true;
    x.elements->split(head_of_packet(p), channel(p), begin, count, block.split);
    const auto row = block.biases.row(0);
    for (idx_t t = first; t < first + n; ++t) {
      if (!rows.of(p).separate[t]) continue;
      const key_sums<T>& own = rows.of(p).exact[t];
      bias.fill(t, begin, count, row.factor);
      row.split(count);
      for (idx_t j = 0; j < count; ++j) {
        if (row.factor[j] == T(0)) continue;
        const packet<T> exponent = add(own.exponent, broadcast<T>(row.exponent[j]));
        const auto [dv, dk] = weighted(block.split[j], own, exponent, broadcast<T>(row.factor[j]));
        T* const to = exact + j * wide;
        store<T>(to, add(load<T>(to), dv));
        store<T>(to + width<T>, add(load<T>(to + width<T>), dk));
        if (biased) block.products[(t - first) * stride + j] += sum_lanes(dk);
      }
    }
  }

  /// Adds the sums over rows without biases.
  void add_outside(idx_t p, const key_sums<T>& outside, T* sums) const {
    x.elements->split(head_of_packet(p), channel(p), begin, count, block.split);
    for (idx_t j = 0; j < count; ++j) {
      const auto [dv, dk] = weighted(block.split[j], outside, outside.exponent, broadcast<T>(T(1)));
      T* const to = sums + j * wide;
      store<T>(to, add(load<T>(to), dv));
      store<T>(to + width<T>, add(load<T>(to + width<T>), dk));
    }
  }

  struct key_gradient {
    packet<T> dv, dk;
  };
  /// Of a key, from sums g, h times factor * 2^exponent; a masked key has none.
  static ATTN_INLINE key_gradient weighted(const key_sums<T>& key, const key_sums<T>& row, const packet<T>& exponent,
                                           const packet<T>& factor) {
    const packet<T> most = broadcast<T>(T(float_bits<T>::bias));
    const packet<T> weight = mul(power_of_two<T>((min)(add(key.exponent, exponent), most)), factor);
    const packet<T> dv = mul(weight, mul(key.den, row.num));
    const packet<T> dk = mul(weight, sub(mul(key.num, row.num), mul(key.den, row.den)));
    return {if_less(zero<T>(), key.den, dv, key.den), if_less(zero<T>(), key.den, dk, key.den)};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
