// attn: what short_convolution and its backward pass share: the rows of a sequence behind its state, in windows that
// move on by tiles of tokens, and the convolution of a tile.
//
// Row e of an item is entry e of its state for e < taps - 1, and its token e - (taps - 1) from there on: token t sees
// rows t to t + taps - 1. Rows are padded to whole packets, unless they are used where they lie.
#pragma once

#include <attn/layers/detail/activation.hpp>
#include <attn/layers/detail/sequence.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of a tile: a weight is loaded once for all of them.
inline constexpr int convolution_tile = 4;

/// Tokens of a task, whole tiles: with what a task needs of the tokens before them at most a quarter more.
inline idx_t convolution_segment(idx_t taps) { return std::max<idx_t>(tokens_per_task, 4 * (taps - 1)); }

/// Whether the rows of a view can be used where they lie.
template <class T>
bool rows_in_place(const memory_layout& x) {
  const idx_t dim = x.extents[x.rank - 1];
  return x.item == sizeof(T) && x.strides[x.rank - 1] == 1 && dim % width<T> == 0;
}

/// The weight as rows of taps and the bias, both times `factor`, the weight where it lies if it can be; zeros behind
/// the channels.
template <class T>
struct convolution_weights {
  idx_t taps, dim, padded, stride;
  T* packed;
  const T* rows;
  T *bias, *zeros;

  convolution_weights(arena& memory, idx_t width_of_weight, idx_t channels)
      : taps(width_of_weight),
        dim(channels),
        padded(round_up(channels, width<T>)),
        stride(padded),
        packed(memory.allocate<T>(taps * padded)),
        rows(packed),
        bias(memory.allocate<T>(padded)),
        zeros(memory.allocate<T>(padded)) {}

  void set(const any_rows<T>& by_tap, const any_rows<T>& bias_given, T factor = 1) {
    const auto scale = [&](T* row) {
      if (factor != T(1)) map_packets(row, row, padded, [&](const auto& p) { return mul(p, broadcast<T>(factor)); });
    };
    if (factor == T(1) && rows_in_place<T>(by_tap)) {
      rows = reinterpret_cast<const T*>(by_tap.data);
      stride = by_tap.strides[0];
    } else {
      for (idx_t i = 0; i < taps; ++i) {
        by_tap.load(i, 0, dim, packed + i * padded);
        std::fill(packed + i * padded + dim, packed + (i + 1) * padded, T(0));
        scale(packed + i * padded);
      }
    }
    std::fill_n(bias, padded, T(0));
    bias_given.load_or(T(0), 0, dim, bias);
    scale(bias);
    std::fill_n(zeros, padded, T(0));
  }
  /// Whether all numbers are finite, in weights that are packed.
  bool finite() const {
    bool all = true;
    for (const T* x = packed; x != packed + taps * padded; ++x) all &= std::isfinite(*x);
    for (const T* x = bias; x != bias + dim; ++x) all &= std::isfinite(*x);
    return all;
  }
};

/// A row of x, in `slot` unless it can be used where it lies.
template <class T>
const T* row_or_copy(const any_rows<T>& x, idx_t n, idx_t dim, T* slot) {
  if (rows_in_place<T>(x)) return reinterpret_cast<const T*>(x.at(n));
  x.load(n, 0, dim, slot);
  std::fill(slot + dim, slot + round_up(dim, width<T>), T(0));
  return slot;
}

/// The rows of the items of a call.
template <class T>
struct convolution_rows {
  input_tokens<T> x;
  any_rows<T> state;  // may be missing: zeros
  idx_t taps;

  /// Row e of item b, which has `length` tokens; zeros before and after.
  const T* row(idx_t b, idx_t e, idx_t length, const T* zeros, T* slot) const {
    const idx_t t = e - (taps - 1);
    if (e < 0 || t >= length || (t < 0 && !state.data)) return zeros;
    return t < 0 ? row_or_copy(state, b * (taps - 1) + e, x.dim, slot) : row_or_copy(x, b * x.length + t, x.dim, slot);
  }
};

/// The rows that a tile sees, and memory for those that are copied.
template <class T>
struct row_window {
  idx_t taps, padded;
  const T** rows;
  T* ring;

  row_window(arena& memory, idx_t of_taps, idx_t of_row)
      : taps(of_taps),
        padded(of_row),
        rows(memory.allocate<const T*>(count())),
        ring(memory.allocate<T>(count() * padded)) {}

  idx_t count() const { return taps - 1 + convolution_tile; }
  T* slot(idx_t e) const { return ring + (e + count()) % count() * padded; }

  /// The tile before the one that begins with row e; row_of(e, slot) gives a row.
  template <class Row>
  void begin(idx_t e, Row&& row_of) const {
    for (idx_t i = 0; i < taps - 1; ++i) rows[convolution_tile + i] = row_of(e + i, slot(e + i));
  }
  /// The tile that begins with row e.
  template <class Row>
  void advance(idx_t e, Row&& row_of) const {
    for (idx_t i = 0; i < taps - 1; ++i) rows[i] = rows[convolution_tile + i];
    for (idx_t i = taps - 1; i < count(); ++i) rows[i] = row_of(e + i, slot(e + i));
  }
};

/// A tile of a call: out[r] = f(bias + sum_i weights[i] rows[r + i]) for its tokens r.
template <class T>
struct convolution_tile_call {
  const T *weights, *bias;
  idx_t stride;  // of weights, which may be negative
  idx_t taps, padded;
  const T* const* rows;
  T* const* out;
};

/// f(sum, r, c) for the packet of token r at channel c. `Tokens` from the tile's first one on.
template <int Tokens, class T, class F>
ATTN_INLINE void convolve_any(const convolution_tile_call<T>& x, F&& f) {
  for (idx_t c = 0; c < x.padded; c += width<T>) {
    packet<T> sum[array_size<Tokens>];
    unroll<Tokens>([&](auto r) { sum[r] = load<T>(x.bias + c); });
    const T* weight = x.weights + c;
    for (idx_t i = 0; i < x.taps; ++i, weight += x.stride) {
      const packet<T> w = load<T>(weight);
      unroll<Tokens>([&](auto r) { sum[r] = fma(w, load<T>(x.rows[r + i] + c), sum[r]); });
    }
    unroll<Tokens>([&](auto r) { store<T>(x.out[r] + c, f(sum[r], r, c)); });
  }
}

/// The same for `Taps` taps, rows loaded once. To prefetch the next tile changed nothing.
template <int Taps, class T, class F>
ATTN_INLINE void convolve_few(const convolution_tile_call<T>& x, F&& f) {
  constexpr int count = Taps - 1 + convolution_tile;
  const T* from[array_size<count>];
  T* to[convolution_tile];
  unroll<count>([&](auto r) { from[r] = x.rows[r]; });
  unroll<convolution_tile>([&](auto r) { to[r] = x.out[r]; });
  const T *const weights = x.weights, *const bias = x.bias;
  const idx_t stride = x.stride, padded = x.padded;
  for (idx_t c = 0; c < padded; c += width<T>) {
    packet<T> row[array_size<count>], w[array_size<Taps>];
    unroll<count>([&](auto r) { row[r] = load<T>(from[r] + c); });
    unroll<Taps>([&](auto i) { w[i] = load<T>(weights + i * stride + c); });
    const packet<T> first = load<T>(bias + c);
    unroll<convolution_tile>([&](auto r) {
      packet<T> sum = first;
      unroll<Taps>([&](auto i) { sum = fma(w[i], row[r + i], sum); });
      store<T>(to[r] + c, f(sum, r, c));
    });
  }
}

/// A whole tile. Four taps are what most models have.
template <class T, class F>
ATTN_INLINE void convolve(const convolution_tile_call<T>& x, F&& f) {
  if (x.taps == 4)
    convolve_few<4>(x, f);
  else
    convolve_any<convolution_tile>(x, f);
}
/// Less than a tile, as in decoding: token by token, each sum in the same order.
template <class T, class F>
ATTN_INLINE void convolve_rest(convolution_tile_call<T> x, idx_t tokens, F&& f) {
  for (; tokens > 0; --tokens, ++x.rows, ++x.out) convolve_any<1>(x, f);
}

template <class T>
[[gnu::noinline]] void convolve_tile(const convolution_tile_call<T>& x, idx_t tokens = convolution_tile) {
  const auto as_it_is = [](const auto& p, auto, idx_t) { return p; };
  tokens < convolution_tile ? convolve_rest(x, tokens, as_it_is) : convolve(x, as_it_is);
}
/// Weights and bias come times log2 e.
template <class T>
[[gnu::noinline]] void convolve_silu(const convolution_tile_call<T>& x, idx_t tokens) {
  const auto activated = [](const auto& p, auto, idx_t) { return silu_of_log2<T>(p); };
  tokens < convolution_tile ? convolve_rest(x, tokens, activated) : convolve(x, activated);
}
/// out = d times the derivative of silu there.
template <class T>
[[gnu::noinline]] void convolve_silu_backward(const convolution_tile_call<T>& x, const T* const* d) {
  convolve(x, [d](const auto& p, auto r, idx_t c) {
    return flush_tiny<T>(mul(load<T>(d[r] + c), silu_slope<T>(p)));
  });
}

}}}  // namespace attn::ATTN_ISA::detail
