// attn: what pooled_tokens, its step and its backward pass share: the rows of a window, and softmax over them for every
// channel by itself.
//
// Short windows lie in registers, packet by packet: largest logits, exponentials, results or gradients. Longer
// ones are read row by row, as they lie in memory, with sums beside them: weights are relative to a logit that is
// replaced only where a later one is larger by a margin, which is seldom; sums over blocks of rows are compensated, for
// a window may be long.
#pragma once

#include <attn/core/detail/any_rows.hpp>
#include <attn/core/detail/compensated.hpp>
#include <attn/core/detail/exp.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows of numbers by batch item, head and token, in memory of any element type. May be missing.
template <class T>
struct rows_of_heads : memory_layout {
  const number_access<T>* access = nullptr;

  rows_of_heads() = default;
  template <class S>
  rows_of_heads(const tensor_view<S, 4>& x) : memory_layout(x), access(&number_access_of<T, std::remove_const_t<S>>) {}

  char* at(idx_t b, idx_t h, idx_t i, idx_t c) const {
    return const_cast<char*>(data) + (b * strides[0] + h * strides[1] + i * strides[2] + c * strides[3]) * item;
  }
  /// Whether `count` numbers of a row can be used where they lie.
  bool in_place(idx_t count) const { return item == sizeof(T) && strides[3] == 1 && count % width<T> == 0; }
  /// `count` numbers from a place on, padded to whole packets: in `slot` unless they can be used where they lie.
  const T* load(const char* from, idx_t count, T* slot) const {
    if (in_place(count)) return reinterpret_cast<const T*>(from);
    access->load(from, strides[3], count, slot);
    std::fill(slot + count, slot + round_up(count, width<T>), T(0));
    return slot;
  }
  void store(const T* from, idx_t count, char* to, bool add = false) const {
    if (reinterpret_cast<const char*>(from) != to) access->store(from, count, to, strides[3], add);
  }
  /// `rows` rows from `first` on, each as load has it: places are `padded` numbers apart.
  void load_rows(const char* first, int rows, idx_t count, T* places, idx_t padded, const T** to) const {
    for (int r = 0; r < rows; ++r) to[r] = load(first + r * strides[2] * item, count, places + r * padded);
  }
};

/// Rows that are loaded at once; the logits of a window of so many stay in registers.
inline constexpr int pooling_tile = 8;
/// Rows that are summed before their sums are added to those of a window, a multiple of pooling_tile.
inline constexpr idx_t pooling_block = 16;
/// How much larger than the reference a logit may be: weights are at most e^8, and sums of large numbers finite.
inline constexpr int pooling_margin = 8;
/// How many bytes after a tile lie the tokens that are prefetched while it is computed.
inline constexpr idx_t pooling_distance = 16384;

/// Tokens behind those of a state: `current`, of the unfinished window, and `previous`, the first halves of the last
/// complete one. The last two may be missing.
template <class T>
struct pooled_source {
  rows_of_heads<T> tokens, current{}, previous{};

  explicit operator bool() const { return tokens.data != nullptr; }
  /// Channel c of token i, counted from the unfinished window's first one, of which `held` are in the state.
  const char* at(idx_t b, idx_t h, idx_t i, idx_t held, idx_t c) const {
    return rows(i, held).at(b, h, i < 0 ? i + previous.extents[2] : i < held ? i : i - held, c);
  }
  const rows_of_heads<T>& rows(idx_t i, idx_t held) const { return i < 0 ? previous : i < held ? current : tokens; }
};

/// Tokens and their logits, prefetched line by line in the order in which they lie, into the second cache: processors
/// fetch no columns of several rows ahead. Lines of x, then as many of logits: in turn they take 6.9, not 5.6, ns a
/// packet, where both begin at one place of a large page. (ns a packet of float, Zen 4, in large pages: windows of 4
/// tokens 4.6 to 5.4, where reading x and the logits takes 4.2; windows of 128 row by row 5, in tiles of 8 rows 7. Into
/// the first cache, 4 KiB ahead: 4.5 to 5.2 for windows of up to 4 KiB, 8 to 10 for larger ones.)
struct pooled_prefetch {
  const char *x = nullptr, *logits = nullptr;
  idx_t at = 0, bytes = 0, x_stride = 0, logits_stride = 0;  // of a row, and from row to row
  idx_t packet_bytes = 0;

  /// As many bytes as `Rows` packets have; those behind a row that ends among them are left out. (No lambda: GCC takes
  /// one that prefetches for one that does nothing. Constants between lines: else GCC has them in turn.)
  template <int Rows, class T>
  ATTN_INLINE void next() {
    constexpr int line = 64, lines = (std::max)(1, Rows * width<T> * int(sizeof(T)) / line);
    for (int n = 0; n < lines; ++n) __builtin_prefetch(x + at + n * line, 0, 2);
    for (int n = 0; n < lines; ++n) __builtin_prefetch(logits + at + n * line, 0, 2);
    if ((at += Rows * packet_bytes) >= bytes) at = 0, x += x_stride, logits += logits_stride;
  }
};

/// Rows of a window. Logits or bias may be zeros. More windows may follow, whose rows lie `step` numbers behind. Where
/// gradients are wanted, also that of the result, those of rows, and sums of those of logits, which may be missing.
template <class T>
struct pooled_rows {
  const T *x[pooling_tile]{}, *logits[pooling_tile]{}, *bias[pooling_tile]{}, *d_result = nullptr;
  int count = 0;
  idx_t windows = 1, step = 0, logits_step = 0, result_step = 0, d_x_step = 0, d_logits_step = 0;
  T *d_x[pooling_tile]{}, *d_logits[pooling_tile]{}, *result = nullptr, *sums = nullptr;

  ATTN_INLINE packet<T> logit(int r, idx_t c, idx_t window = 0) const {
    return attn::detail::add(load<T>(logits[r] + window * logits_step + c), load<T>(bias[r] + c));
  }
};

/// e^(logit - reference)
template <class T>
ATTN_INLINE packet<T> pooling_weight(const packet<T>& logit, const packet<T>& reference) {
  return exp2_weight<T>(mul(sub(logit, reference), broadcast<T>(exp_constants<T>::log2_e_high)));
}
/// 0 where the logit is -infinity: what lies there is not seen.
template <class T>
ATTN_INLINE packet<T> seen_number(const packet<T>& x, const packet<T>& logit) {
  return if_less(logit, broadcast<T>(std::numeric_limits<T>::lowest()), zero<T>(), x);
}

/// Memory of a task: sums over the rows of a window, and rows that are copied.
template <class T>
struct pooling_memory {
  idx_t padded;
  T *reference, *sum, *mean, *sum_error, *mean_error;  // in the end the mean is divided by the sum
  T *block_sum, *block_mean;                           // of the last rows; 0 between windows
  T *zeros, *unseen, *copies, *spare;                  // unseen: -infinity

  pooling_memory(arena& memory, idx_t of_row)
      : padded(of_row), copies(memory.allocate<T>(3 * pooling_tile * padded)) {
    for (T** const to : {&reference, &sum, &mean, &sum_error, &mean_error, &block_sum, &block_mean, &zeros, &unseen,
                         &spare})
      *to = memory.allocate<T>(padded);
  }

  void clear() const {
    for (T* const to : {zeros, block_sum, block_mean}) std::fill_n(to, padded, T(0));
    std::fill_n(unseen, padded, -std::numeric_limits<T>::infinity());
  }
  T* slot(int kind, int r) const { return copies + (kind * pooling_tile + r) * padded; }
};

/// The result of a window for the channels of a packet; 0 where every logit is -infinity, for the largest one adds 1.
template <class T>
ATTN_INLINE packet<T> divided(const packet<T>& mean, const packet<T>& sum) {
  return if_less(sum, broadcast<T>(T(0.5)), zero<T>(), div(mean, sum));
}

/// The results of windows of at most `Rows` rows, or their gradients. Rows beyond their count have the bias -infinity.
template <int Rows, bool Gradients, class T>
void pool_softmax(const pooled_rows<T>& given, pooled_prefetch next, idx_t padded) {
  const pooled_rows<T> rows = given;  // which no store can change
  for (idx_t w = 0; w < rows.windows; ++w) {
    for (idx_t c = 0; c < padded; c += width<T>) {
      next.template next<Rows, T>();
      packet<T> weight[array_size<Rows>], x[array_size<Rows>], sum = zero<T>(), mean = zero<T>();
      packet<T> largest = broadcast<T>(std::numeric_limits<T>::lowest());
      unroll<Rows>([&](auto r) { largest = (max)(largest, weight[r] = rows.logit(r, c, w)); });
      unroll<Rows>([&](auto r) {
        x[r] = seen_number<T>(load<T>(rows.x[r] + w * rows.step + c), weight[r]);
        weight[r] = pooling_weight<T>(weight[r], largest);
        sum = add(sum, weight[r]), mean = fma(weight[r], x[r], mean);
      });
      mean = divided<T>(mean, sum);
      if constexpr (Gradients) {
        // where no token is seen, all weights are 0
        const packet<T> d = load<T>(rows.d_result + w * rows.result_step + c),
                        share = div(d, (max)(sum, broadcast<T>(T(0.5))));
        unroll<Rows>([&](auto r) {
          if (r >= rows.count) return;
          const packet<T> d_x = mul(weight[r], share), d_logit = mul(d_x, sub(x[r], mean));
          store<T>(rows.d_x[r] + w * rows.d_x_step + c, d_x);
          store<T>(rows.d_logits[r] + w * rows.d_logits_step + c, d_logit);
          if (!rows.sums) return;
          T* const total = rows.sums + r * padded + c;
          store<T>(total, add(load<T>(total), d_logit));
        });
      } else {
        store<T>(rows.result + w * rows.result_step + c, mean);
      }
    }
  }
}
/// Results of short windows without logits and bias.
template <class T>
void pool_equal(const pooled_rows<T>& rows, pooled_prefetch next, idx_t padded) {
  for (idx_t w = 0; w < rows.windows; ++w)
    for (idx_t c = 0; c < padded; c += width<T>) {
      packet<T> mean = zero<T>();
      for (int r = 0; r < rows.count; ++r) {
        next.template next<1, T>();
        mean = add(mean, load<T>(rows.x[r] + w * rows.step + c));
      }
      store<T>(rows.result + w * rows.result_step + c, div(mean, broadcast<T>(static_cast<T>(rows.count))));
    }
}
/// With logits or bias.
template <bool Gradients, class T>
void pool_short(const pooled_rows<T>& rows, pooled_prefetch next, idx_t padded) {
  if (rows.count <= 2) return pool_softmax<2, Gradients>(rows, next, padded);
  if (rows.count <= 4) return pool_softmax<4, Gradients>(rows, next, padded);
  pool_softmax<pooling_tile, Gradients>(rows, next, padded);
}
/// Adds rows to the sums of a block; `first` where there are none before them in their window. Without logits and bias
/// all weights are 1.
template <bool Weighted, class T>
void add_rows(const pooled_rows<T>& rows, bool first, pooled_prefetch next, const pooling_memory<T>& to) {
  const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest()), margin = broadcast<T>(T(pooling_margin));
  for (int r = 0; r < rows.count; ++r, first = false)
    for (idx_t c = 0; c < to.padded; c += width<T>) {
      next.template next<1, T>();
      packet<T> x = load<T>(rows.x[r] + c), weight = broadcast<T>(T(1));
      packet<T> sum = load<T>(to.block_sum + c), mean = load<T>(to.block_mean + c);
      if constexpr (Weighted) {
        const packet<T> logit = rows.logit(r, c);
        packet<T> reference = first ? (max)(lowest, logit) : load<T>(to.reference + c);
        if (first)
          store<T>(to.reference + c, reference);
        else if (const packet<T> most = add(reference, margin); any_less(most, logit)) {
          const packet<T> larger = if_less(most, logit, logit, reference);
          const packet<T> factor = pooling_weight<T>(reference, larger);
          for (T* const sums : {to.sum, to.mean, to.sum_error, to.mean_error})
            store<T>(sums + c, mul(load<T>(sums + c), factor));
          sum = mul(sum, factor), mean = mul(mean, factor), reference = larger;
          store<T>(to.reference + c, reference);
        }
        weight = pooling_weight<T>(logit, reference), x = seen_number<T>(x, logit);
      }
      store<T>(to.block_sum + c, add(sum, weight)), store<T>(to.block_mean + c, fma(weight, x, mean));
    }
}

/// The result of a window that add_rows() has read; of one block if it is `short_window`.
template <class T>
void divide_pooled(const pooling_memory<T>& m, bool short_window, T* to) {
  for (idx_t c = 0; c < m.padded; c += width<T>) {
    packet<T> sum, mean;
    if (short_window) {
      sum = load<T>(m.block_sum + c), mean = load<T>(m.block_mean + c);
      store<T>(m.block_sum + c, zero<T>()), store<T>(m.block_mean + c, zero<T>());
    } else {
      sum = compensated_sum<T>(load<T>(m.sum + c), load<T>(m.sum_error + c));
      mean = compensated_sum<T>(load<T>(m.mean + c), load<T>(m.mean_error + c));
    }
    store<T>(m.sum + c, sum), store<T>(to + c, divided<T>(mean, sum));
  }
}

/// Of a checked call.
template <class T>
struct pooled_tokens_driver {
  pooled_source<T> x, logits;
  rows_of_heads<T> bias;
  idx_t batch, heads, length, window, dim;  // tokens of the call, channels of a result
  bool overlap;
  std::span<const idx_t> lengths, before;  // tokens of the call and of the state, of each item

  /// A head of a batch item: how many of its tokens are in the state, of the unfinished window, from whose first one
  /// tokens and windows are counted, and whether a window lies before it; how many windows are complete.
  struct head {
    idx_t b, h, held;
    bool follows;
    idx_t windows;
  };
  head head_of(idx_t n) const {
    const idx_t b = n / heads;
    const auto at = static_cast<std::size_t>(b);
    const idx_t fed = before.empty() ? 0 : before[at], held = fed % window;
    const idx_t tokens = lengths.empty() ? length : lengths[at];
    return {b, n % heads, held, fed >= window, (held + tokens) / window};
  }
  bool weighted() const { return logits || bias.data; }
  double numbers() const {
    return static_cast<double>(batch) * static_cast<double>(heads) * static_cast<double>(length) *
           static_cast<double>(overlap ? 2 * dim : dim);
  }

  /// How many rows of window w are tokens of the window before it. They come first.
  idx_t earlier_rows(const head& of, idx_t w) const { return overlap && (w > 0 || of.follows) ? window : 0; }
  idx_t rows(const head& of, idx_t w) const { return earlier_rows(of, w) + window; }
  /// A row of window w: its token, its row of the bias and the first of its channels.
  struct place {
    idx_t token, row, channel;
  };
  place place_of(const head& of, idx_t w, idx_t n) const {
    const idx_t earlier = earlier_rows(of, w);
    if (n < earlier) return {(w - 1) * window + n, n, 0};
    return {w * window + n - earlier, n - earlier, overlap ? dim : 0};
  }

  /// Rows n, n + 1, ... of a window: its next tile.
  void load_rows(const head& of, idx_t w, idx_t n, const pooling_memory<T>& m, pooled_rows<T>& to) const {
    const idx_t earlier = earlier_rows(of, w), all = earlier + window;
    to.count = static_cast<int>(std::min<idx_t>(pooling_tile, all - n));
    for (int r = 0, count; r < to.count; r += count) {
      const place p = place_of(of, w, n + r);
      // Rows of one source, with the same channels.
      const idx_t end = p.token < 0 ? 0 : p.token < of.held ? of.held : p.token + all;
      count = static_cast<int>((std::min)({to.count - idx_t(r), (n + r < earlier ? earlier : all) - (n + r),
                                           end - p.token}));
      const auto load = [&](const pooled_source<T>& from, int kind, const T** rows) {
        from.rows(p.token, of.held).load_rows(from.at(of.b, of.h, p.token, of.held, p.channel), count, dim,
                                              m.slot(kind, r), m.padded, rows + r);
      };
      load(x, 0, to.x);
      if (logits) load(logits, 1, to.logits);
      if (bias.data)
        bias.load_rows(bias.at(of.b, of.h, p.row, p.channel), count, dim, m.slot(2, r), m.padded, to.bias + r);
    }
    if (!logits) std::fill_n(to.logits, to.count, m.zeros);
    if (!bias.data) std::fill_n(to.bias, to.count, m.zeros);
    to.step = window * x.tokens.strides[2], to.logits_step = logits ? window * logits.tokens.strides[2] : 0;
    for (int r = to.count; r < pooling_tile; ++r) to.x[r] = to.x[0], to.logits[r] = to.logits[0], to.bias[r] = m.unseen;
  }
  /// What is prefetched during that tile: as many bytes as it has, of whole tokens. Without logits x in their place.
  pooled_prefetch prefetch(const head& of, idx_t w, idx_t n) const {
    const rows_of_heads<T>&from = x.tokens, &other = logits ? logits.tokens : from;
    const idx_t first = n * dim * from.item, bytes = (overlap ? 2 : 1) * dim * from.item;
    const idx_t token = w * window - of.held + ceil_div(pooling_distance, bytes);
    const idx_t stride = from.strides[2] * from.item, other_stride = other.strides[2] * other.item;
    const char *const row = from.at(of.b, of.h, token, 0), *const other_row = other.at(of.b, of.h, token, 0);
    const bool whole = stride == bytes && other_stride == bytes;  // one range of memory
    const idx_t tokens = whole ? 0 : first / bytes;
    return {row + tokens * stride, other_row + tokens * other_stride, first - tokens * bytes,
            whole ? (std::numeric_limits<idx_t>::max)() : bytes, stride, other_stride, width<T> * from.item};
  }
  /// How many windows of [w, end) are computed as one: all, if each is a tile whose rows are used where they lie.
  idx_t windows_together(const head& of, idx_t w, idx_t end) const {
    const idx_t first = overlap ? w - 1 : w, count = rows(of, w);
    const bool alike = (count == 2 || count == 4 || count == pooling_tile) && first >= 0 && first * window >= of.held &&
                       x.tokens.in_place(dim) && (!logits || logits.tokens.in_place(dim));
    return alike ? end - w : 1;
  }
  /// The results of windows [w, w + rows.windows), of one if it has more than pooling_tile rows, to rows.result.
  void pool(const head& of, idx_t w, const pooling_memory<T>& m, pooled_rows<T>& rows) const {
    if (this->rows(of, w) > pooling_tile) return pool_by_rows(of, w, m, rows.result);
    load_rows(of, w, 0, m, rows);
    const pooled_prefetch next = prefetch(of, w, 0);
    weighted() ? pool_short<false>(rows, next, m.padded) : pool_equal(rows, next, m.padded);
  }
  /// The result of a longer window, to padded memory. What weights are relative to, and their sums, stay in m.
  void pool_by_rows(const head& of, idx_t w, const pooling_memory<T>& m, T* to) const {
    pooled_rows<T> tile;
    const idx_t count = rows(of, w);
    const bool short_window = count <= pooling_block;
    for (T* const sums : {m.sum, m.mean, m.sum_error, m.mean_error}) std::fill_n(sums, m.padded, T(0));
    for (idx_t n = 0; n < count; n += tile.count) {
      load_rows(of, w, n, m, tile);
      const pooled_prefetch next = prefetch(of, w, n);
      weighted() ? add_rows<true>(tile, n == 0, next, m) : add_rows<false>(tile, n == 0, next, m);
      const idx_t end = n + tile.count;
      if (short_window || (end != count && end % pooling_block != 0)) continue;
      move_compensated(m.block_sum, m.padded, T(1), m.sum, m.sum_error);
      move_compensated(m.block_mean, m.padded, T(1), m.mean, m.mean_error);
    }
    divide_pooled(m, short_window, to);
  }
};

/// Windows of a task: about so many tokens.
inline idx_t pooling_segment(idx_t window) { return std::max<idx_t>(1, 256 / window); }

}}}  // namespace attn::ATTN_ISA::detail
