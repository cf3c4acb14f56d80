// attn: what pooled_tokens, its step and its backward pass share: the rows of a window, and softmax over them for every
// channel by itself.
//
// Rows are taken in tiles, from left to right: the maximum of a tile first, so that sums of the tiles before it are
// multiplied once by a power, then its exponentials. Sums over tiles are compensated: a window may be long.
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
};

/// Rows of a tile, whose logits stay in registers.
inline constexpr int pooling_tile = 8;
/// Bytes of rows that are read ahead: of longer ones a cache has no room for two tiles, shorter ones do not need it.
inline constexpr idx_t shortest_ahead = 512, longest_ahead = 1024;

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

/// Rows of x and of the logits that are needed next, read line by line while others are computed: processors predict
/// what is read from begin to end, but not columns of several rows, nor prefetches.
struct pooled_ahead {
  const char* rows[2][pooling_tile];
  int count[2] = {};
  idx_t bytes = 0;

  /// Where it is, and lines of each kind for a packet of those that are computed.
  struct place {
    idx_t lines, row = 0, at = 0;
  };
  place begin(idx_t packets) const { return {ceil_div(count[0] * ceil_div(bytes, 64), packets)}; }
  ATTN_INLINE void read(place& p) const {
    for (idx_t n = 0; n < p.lines && p.row < count[0]; ++n) {
      for (int kind = 0; kind < 2; ++kind)
        if (p.row < count[kind]) static_cast<void>(*static_cast<const volatile char*>(rows[kind][p.row] + p.at));
      if ((p.at += 64) >= bytes) p.at = 0, ++p.row;
    }
  }
};

/// Rows of a window. Logits or bias may be zeros.
template <class T>
struct pooled_rows {
  const T *x[pooling_tile], *logits[pooling_tile], *bias[pooling_tile];
  int count;

  ATTN_INLINE packet<T> logit(int r, idx_t c) const {
    return attn::detail::add(load<T>(logits[r] + c), load<T>(bias[r] + c));
  }
};

/// e^(logit - top)
template <class T>
ATTN_INLINE packet<T> pooling_weight(const packet<T>& logit, const packet<T>& top) {
  return exp2_weight<T>(mul(sub(logit, top), broadcast<T>(exp_constants<T>::log2_e_high)));
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
  T *top, *sum, *mean, *sum_error, *mean_error;  // in the end the mean is divided by the sum
  T *zeros, *copies, *spare;

  pooling_memory(arena& memory, idx_t of_row)
      : padded(of_row),
        top(memory.allocate<T>(padded)),
        sum(memory.allocate<T>(padded)),
        mean(memory.allocate<T>(padded)),
        sum_error(memory.allocate<T>(padded)),
        mean_error(memory.allocate<T>(padded)),
        zeros(memory.allocate<T>(padded)),
        copies(memory.allocate<T>(3 * pooling_tile * padded)),
        spare(memory.allocate<T>(padded)) {}

  void clear() const { std::fill_n(zeros, padded, T(0)); }
  T* slot(int kind, int r) const { return copies + (kind * pooling_tile + r) * padded; }
};

/// The result of a window for the channels of a packet; 0 where every logit is -infinity, for the largest one adds 1.
template <class T>
ATTN_INLINE packet<T> divided(const packet<T>& mean, const packet<T>& sum) {
  return if_less(sum, broadcast<T>(T(0.5)), zero<T>(), div(mean, sum));
}

/// Adds the rows of a tile, `Rows` of them; `first` where there are none before them. To `result`, unless it is null,
/// the result of a window of this tile alone.
template <int Rows, class T>
void add_softmax_rows(const pooled_rows<T>& rows, bool first, const pooled_ahead& ahead, const pooling_memory<T>& to,
                      T* result) {
  auto next = ahead.begin(to.padded / width<T>);
  for (idx_t c = 0; c < to.padded; c += width<T>) {
    ahead.read(next);
    const packet<T> before = first ? broadcast<T>(std::numeric_limits<T>::lowest()) : load<T>(to.top + c);
    packet<T> logits[array_size<Rows>], top = before, sum = zero<T>(), mean = zero<T>();
    unroll<Rows>([&](auto r) { top = (max)(top, logits[r] = rows.logit(r, c)); });
    unroll<Rows>([&](auto r) {
      const packet<T> weight = pooling_weight<T>(logits[r], top);
      sum = add(sum, weight), mean = fma(weight, seen_number<T>(load<T>(rows.x[r] + c), logits[r]), mean);
    });
    store<T>(to.top + c, top);
    if (result) {
      store<T>(to.sum + c, sum), store<T>(result + c, divided<T>(mean, sum));
      continue;
    }
    packet<T> sum_error = zero<T>(), mean_error = zero<T>();
    if (!first) {
      const packet<T> factor = pooling_weight<T>(before, top), more = sum, more_mean = mean;
      sum = mul(load<T>(to.sum + c), factor), sum_error = mul(load<T>(to.sum_error + c), factor);
      mean = mul(load<T>(to.mean + c), factor), mean_error = mul(load<T>(to.mean_error + c), factor);
      add_compensated(sum, sum_error, more), add_compensated(mean, mean_error, more_mean);
    }
    store<T>(to.sum + c, sum), store<T>(to.sum_error + c, sum_error);
    store<T>(to.mean + c, mean), store<T>(to.mean_error + c, mean_error);
  }
}
template <class T>
void add_softmax_rows(const pooled_rows<T>& rows, bool first, const pooled_ahead& ahead, const pooling_memory<T>& to,
                      T* result) {
  switch (rows.count) {
    case 1: return add_softmax_rows<1>(rows, first, ahead, to, result);
    case 2: return add_softmax_rows<2>(rows, first, ahead, to, result);
    case 3: return add_softmax_rows<3>(rows, first, ahead, to, result);
    case 4: return add_softmax_rows<4>(rows, first, ahead, to, result);
    case 5: return add_softmax_rows<5>(rows, first, ahead, to, result);
    case 6: return add_softmax_rows<6>(rows, first, ahead, to, result);
    case 7: return add_softmax_rows<7>(rows, first, ahead, to, result);
    default: return add_softmax_rows<pooling_tile>(rows, first, ahead, to, result);
  }
}

/// The same without logits and bias.
template <class T>
void add_equal_rows(const pooled_rows<T>& rows, bool first, const pooling_memory<T>& to) {
  for (idx_t c = 0; c < to.padded; c += width<T>) {
    packet<T> here = zero<T>();
    for (int r = 0; r < rows.count; ++r) here = add(here, load<T>(rows.x[r] + c));
    packet<T> mean = here, error = zero<T>();
    if (!first) {
      mean = load<T>(to.mean + c), error = load<T>(to.mean_error + c);
      add_compensated(mean, error, here);
    }
    store<T>(to.mean + c, mean), store<T>(to.mean_error + c, error);
  }
}

/// The result of a window of several tiles.
template <class T>
void divide_pooled(const pooling_memory<T>& m, T* to) {
  for (idx_t c = 0; c < m.padded; c += width<T>) {
    const packet<T> sum = compensated_sum<T>(load<T>(m.sum + c), load<T>(m.sum_error + c));
    store<T>(m.sum + c, sum);
    store<T>(to + c, divided<T>(compensated_sum<T>(load<T>(m.mean + c), load<T>(m.mean_error + c)), sum));
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

  int tile_rows(const head& of, idx_t w, idx_t n) const {
    return static_cast<int>(std::min<idx_t>(pooling_tile, rows(of, w) - n));
  }
  const char* at(const pooled_source<T>& from, const head& of, const place& p) const {
    return from.at(of.b, of.h, p.token, of.held, p.channel);
  }
  /// Whether rows are used where they lie, and read ahead of it.
  bool reads_ahead() const {
    const idx_t bytes = token_bytes();
    return logits && x.tokens.in_place(dim) && bytes >= shortest_ahead && bytes <= longest_ahead;
  }
  idx_t token_bytes() const { return (overlap ? 2 : 1) * dim * x.tokens.item; }
  /// Rows n, n + 1, ... of a window. Those with logits are read from begin to end here, unless that is done before; of
  /// the others the next tile is prefetched.
  void load_rows(const head& of, idx_t w, idx_t n, const pooling_memory<T>& m, pooled_rows<T>& to) const {
    const bool at_once = logits && !overlap && x.tokens.in_place(dim) && !reads_ahead();
    const bool prefetch = !x.tokens.in_place(dim) || !logits;  // rows that are copied, or added alone
    const auto load = [&](const pooled_source<T>& from, const place& p, T* slot) {
      const char* const row = at(from, of, p);
      const idx_t item = from.tokens.item;
      for (idx_t byte = 0; prefetch && byte < dim * item; byte += 64)
        __builtin_prefetch(row + pooling_tile * from.tokens.strides[2] * item + byte);
      return from.rows(p.token, of.held).load(row, dim, slot);
    };
    to.count = tile_rows(of, w, n);
    for (int r = 0; r < to.count; ++r) {
      const place p = place_of(of, w, n + r);
      to.x[r] = load(x, p, m.slot(0, r));
      to.logits[r] = logits ? load(logits, p, m.slot(1, r)) : m.zeros;
      for (idx_t c = 0; c < dim && at_once; c += 64 / idx_t(sizeof(T))) {
        static_cast<void>(*static_cast<const volatile T*>(to.logits[r] + c));
        static_cast<void>(*static_cast<const volatile T*>(to.x[r] + c));
      }
      to.bias[r] = bias.data ? bias.load(bias.at(of.b, of.h, p.row, p.channel), dim, m.slot(2, r)) : m.zeros;
    }
  }
  /// The tokens behind those, if they are read ahead; with overlap both halves of them.
  pooled_ahead rows_after(const head& of, idx_t w, idx_t n) const {
    pooled_ahead ahead;
    ahead.bytes = token_bytes();
    if (!reads_ahead()) return ahead;
    if ((n += pooling_tile) >= rows(of, w)) ++w, n = 0;
    if (w >= of.windows) return ahead;
    const int count = tile_rows(of, w, n);
    for (int r = 0; r < count; ++r) {
      place p = place_of(of, w, n + r);
      if (p.token < w * window) continue;
      p.channel = 0;
      ahead.rows[0][ahead.count[0]++] = at(x, of, p);
      if (logits.tokens.in_place(dim)) ahead.rows[1][ahead.count[1]++] = at(logits, of, p);
    }
    return ahead;
  }

  /// The result of a window, to padded memory; its maxima and sums stay in m, its last rows in `tile`.
  void pool(const head& of, idx_t w, const pooling_memory<T>& m, pooled_rows<T>& tile, T* to) const {
    const idx_t count = rows(of, w);
    const bool alone = weighted() && count <= pooling_tile;
    for (idx_t n = 0; n < count; n += pooling_tile) {
      load_rows(of, w, n, m, tile);
      weighted() ? add_softmax_rows(tile, n == 0, rows_after(of, w, n), m, alone ? to : nullptr)
                 : add_equal_rows(tile, n == 0, m);
    }
    if (alone) return;
    if (!weighted()) std::fill_n(m.sum, m.padded, static_cast<T>(count)), std::fill_n(m.sum_error, m.padded, T(0));
    divide_pooled(m, to);
  }
};

/// Windows of a task: about so many tokens.
inline idx_t pooling_segment(idx_t window) { return std::max<idx_t>(1, 256 / window); }

}}}  // namespace attn::ATTN_ISA::detail
