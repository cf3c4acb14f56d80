// attn: what pooled_tokens, its step and its backward pass share: the rows of a window, and softmax over them for every
// channel by itself.
//
// Short windows lie in registers, packet by packet: their largest logits first, then exponentials. Longer ones are read
// row by row, as they lie in memory, with sums beside them: weights are relative to a logit that is replaced only where
// a later one is larger by a margin, which is seldom; sums over blocks of rows are compensated, for a window may be
// long.
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
    const idx_t stride = strides[2] * item;
    if (in_place(count))
      for (int r = 0; r < rows; ++r) to[r] = reinterpret_cast<const T*>(first + r * stride);
    else
      for (int r = 0; r < rows; ++r) to[r] = load(first + r * stride, count, places + r * padded);
  }
};

/// Rows that are loaded at once; the logits of a window of so many stay in registers.
inline constexpr int pooling_tile = 8;
/// Rows that are summed before their sums are added to those of a window, a multiple of pooling_tile.
inline constexpr idx_t pooling_block = 16;
/// How much larger than the reference a logit may be: weights are at most e^8, so that sums of large numbers are finite.
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

/// Tokens and their logits, prefetched line by line in the order in which they lie: processors fetch no columns of
/// several rows ahead, and memory is at full speed only where it is read from begin to end. As many lines of x, then of
/// logits: in turn they take 6.8 instead of 5.3 ns a packet, where both begin at one place of a large page. Into the
/// second cache: the first one's list of lines on their way is too short. (ns a packet of float, Zen 4, in large pages:
/// windows of 4 tokens 4.6 to 5.4, where reading x and the logits takes 4.2; windows of 128 row by row 5, in tiles of 8
/// rows 7. Into the first cache, 4 KiB ahead: 4.5 to 5.2 for windows of up to 4 KiB, 8 to 10 for larger ones.)
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

/// Rows of a window. Logits or bias may be zeros. More windows may follow, whose rows lie `step` numbers behind.
template <class T>
struct pooled_rows {
  const T *x[pooling_tile], *logits[pooling_tile], *bias[pooling_tile];
  int count;
  T* result;
  idx_t windows, step, logits_step, result_step;

  ATTN_INLINE packet<T> logit(int r, idx_t c) const {
    return attn::detail::add(load<T>(logits[r] + c), load<T>(bias[r] + c));
  }
  /// The next window, unless this is the last one.
  template <int Rows>
  ATTN_INLINE bool next_window() {
    if (--windows <= 0) return false;
    for (int r = 0; r < Rows; ++r) x[r] += step, logits[r] += logits_step;
    result += result_step;
    return true;
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
  T *zeros, *copies, *spare;

  pooling_memory(arena& memory, idx_t of_row)
      : padded(of_row),
        reference(memory.allocate<T>(padded)),
        sum(memory.allocate<T>(padded)),
        mean(memory.allocate<T>(padded)),
        sum_error(memory.allocate<T>(padded)),
        mean_error(memory.allocate<T>(padded)),
        block_sum(memory.allocate<T>(padded)),
        block_mean(memory.allocate<T>(padded)),
        zeros(memory.allocate<T>(padded)),
        copies(memory.allocate<T>(3 * pooling_tile * padded)),
        spare(memory.allocate<T>(padded)) {}

  void clear() const {
    for (T* const to : {zeros, block_sum, block_mean}) std::fill_n(to, padded, T(0));
  }
  T* slot(int kind, int r) const { return copies + (kind * pooling_tile + r) * padded; }
};

/// The result of a window for the channels of a packet; 0 where every logit is -infinity, for the largest one adds 1.
template <class T>
ATTN_INLINE packet<T> divided(const packet<T>& mean, const packet<T>& sum) {
  return if_less(sum, broadcast<T>(T(0.5)), zero<T>(), div(mean, sum));
}

/// The results of windows of `Rows` rows.
template <int Rows, class T>
void pool_softmax(pooled_rows<T>& rows, pooled_prefetch next, const pooling_memory<T>& to) {
  do for (idx_t c = 0; c < to.padded; c += width<T>) {
    next.template next<Rows, T>();
    packet<T> logits[array_size<Rows>], largest = broadcast<T>(std::numeric_limits<T>::lowest()), sum = zero<T>(),
                                        mean = zero<T>();
    unroll<Rows>([&](auto r) { largest = (max)(largest, logits[r] = rows.logit(r, c)); });
    unroll<Rows>([&](auto r) {
      const packet<T> weight = pooling_weight<T>(logits[r], largest);
      sum = add(sum, weight), mean = fma(weight, seen_number<T>(load<T>(rows.x[r] + c), logits[r]), mean);
    });
    store<T>(to.reference + c, largest), store<T>(to.sum + c, sum), store<T>(rows.result + c, divided<T>(mean, sum));
  } while (rows.template next_window<Rows>());
}
/// The same without logits and bias.
template <int Rows, class T>
void pool_equal(pooled_rows<T>& rows, pooled_prefetch next, const pooling_memory<T>& to) {
  do for (idx_t c = 0; c < to.padded; c += width<T>) {
    next.template next<Rows, T>();
    packet<T> sum = broadcast<T>(T(Rows)), mean = zero<T>();
    unroll<Rows>([&](auto r) { mean = add(mean, load<T>(rows.x[r] + c)); });
    store<T>(to.sum + c, sum), store<T>(rows.result + c, div(mean, sum));
  } while (rows.template next_window<Rows>());
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
/// Adds the sums of a block to those of the window.
template <class T>
void add_block(const pooling_memory<T>& m) {
  move_compensated(m.block_sum, m.padded, T(1), m.sum, m.sum_error);
  move_compensated(m.block_mean, m.padded, T(1), m.mean, m.mean_error);
}

/// f(number of rows), known when it is compiled.
template <class F>
void with_rows(int count, F&& f) {
  unroll_constants<pooling_tile>([&](auto r) {
    if (count == r + 1) f(std::integral_constant<int, r + 1>{});
  });
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
  /// tokens and windows are counted, and whether a window lies before it; how many windows are complete. Tokens that
  /// are prefetched are `distance` tokens ahead.
  struct head {
    idx_t b, h, held;
    bool follows;
    idx_t windows, distance;
  };
  head head_of(idx_t n) const {
    const idx_t b = n / heads;
    const auto at = static_cast<std::size_t>(b);
    const idx_t fed = before.empty() ? 0 : before[at], held = fed % window;
    const idx_t tokens = lengths.empty() ? length : lengths[at];
    return {b, n % heads, held, fed >= window, (held + tokens) / window, ceil_div(pooling_distance, token_bytes())};
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

  idx_t token_bytes() const { return (overlap ? 2 : 1) * dim * x.tokens.item; }
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
  }
  /// What is prefetched during that tile: as many bytes as it has, of whole tokens. Without logits x in their place.
  pooled_prefetch prefetch(const head& of, idx_t w, idx_t n) const {
    const rows_of_heads<T>&from = x.tokens, &other = logits ? logits.tokens : from;
    const idx_t token = w * window - of.held + of.distance, first = n * dim * from.item, bytes = token_bytes();
    const idx_t stride = from.strides[2] * from.item, other_stride = other.strides[2] * other.item;
    const char *const row = from.at(of.b, of.h, token, 0), *const other_row = other.at(of.b, of.h, token, 0);
    const idx_t packet_bytes = width<T> * from.item;
    if (stride == bytes && other_stride == bytes)
      return {row, other_row, first, (std::numeric_limits<idx_t>::max)(), 0, 0, packet_bytes};
    const idx_t tokens = first / bytes;
    return {row + tokens * stride, other_row + tokens * other_stride, first % bytes, bytes, stride, other_stride,
            packet_bytes};
  }
  /// How many windows of [w, end) are computed as one: all, if each is a tile whose rows are used where they lie.
  idx_t windows_together(const head& of, idx_t w, idx_t end) const {
    const idx_t first = overlap ? w - 1 : w;
    const bool alike = rows(of, w) <= pooling_tile && first >= 0 && first * window >= of.held &&
                       x.tokens.in_place(dim) && (!logits || logits.tokens.in_place(dim));
    return alike ? end - w : 1;
  }
  /// The results of windows, of one or those that are computed together, to padded memory `step` numbers apart; what
  /// weights of the last one are relative to, and their sums, stay in m, its last rows in `tile`.
  void pool(const head& of, idx_t w, const pooling_memory<T>& m, pooled_rows<T>& tile, T* to, idx_t windows = 1,
            idx_t step = 0) const {
    const idx_t count = rows(of, w);
    if (count > pooling_tile) return pool_by_rows(of, w, m, tile, to);
    load_rows(of, w, 0, m, tile);
    tile.result = to, tile.result_step = step, tile.windows = windows;
    tile.step = window * x.tokens.strides[2], tile.logits_step = logits ? window * logits.tokens.strides[2] : 0;
    const pooled_prefetch next = prefetch(of, w, 0);
    with_rows(tile.count, [&](auto r) {
      weighted() ? pool_softmax<r.value>(tile, next, m) : pool_equal<r.value>(tile, next, m);
    });
  }
  void pool_by_rows(const head& of, idx_t w, const pooling_memory<T>& m, pooled_rows<T>& tile, T* to) const {
    const idx_t count = rows(of, w);
    const bool short_window = count <= pooling_block;
    for (T* const sums : {m.sum, m.mean, m.sum_error, m.mean_error}) std::fill_n(sums, m.padded, T(0));
    for (idx_t n = 0; n < count; n += tile.count) {
      load_rows(of, w, n, m, tile);
      const pooled_prefetch next = prefetch(of, w, n);
      weighted() ? add_rows<true>(tile, n == 0, next, m) : add_rows<false>(tile, n == 0, next, m);
      const idx_t end = n + tile.count;
      if (!short_window && (end == count || end % pooling_block == 0)) add_block(m);
    }
    divide_pooled(m, short_window, to);
  }
};

/// Windows of a task: about so many tokens.
inline idx_t pooling_segment(idx_t window) { return std::max<idx_t>(1, 256 / window); }

}}}  // namespace attn::ATTN_ISA::detail
