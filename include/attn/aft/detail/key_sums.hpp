// attn: sums over keys, weighted by exponentials of any size.
//
//   num = sum_j e^(k_j + w_j) v_j     den = sum_j e^(k_j + w_j)     for a packet of channels, both times 2^-top
//
// e^k and e^w are taken apart into factor and power of two (split_exp); a weight is the product of the factors, and the
// powers meet as whole numbers. So nothing overflows, and since a change of `top` is a change by powers of two, it
// changes no digit. In float, k + w is not rounded up to a size of 10^7, where whole numbers end, and beyond that no
// more than any sum is; from 5e37 on all sizes count as one. (Double: 5 10^15, 3e307. Without fused multiply-adds e^k
// and e^w lose about what rounding k and w would cost.) This is the exact form of everything in this family; its fast
// form is aft_block.hpp.
//
// A key of -infinity, or a w of -infinity, masks: it contributes nothing, whatever its value, not even NaN.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct key_sums {
  packet<T> num = zero<T>(), den = zero<T>(), top = broadcast<T>(-std::numeric_limits<T>::infinity());

  static constexpr index size = 3 * width<T>;  // numbers in memory

  static ATTN_INLINE key_sums read(const T* p) {
    return {load<T>(p), load<T>(p + width<T>), load<T>(p + 2 * width<T>)};
  }
  ATTN_INLINE void write(T* p) const {
    store<T>(p, num);
    store<T>(p + width<T>, den);
    store<T>(p + 2 * width<T>, top);
  }

  /// Takes the sums to a `top` that is at least `least`; that of no key at all stays -infinity.
  ATTN_INLINE void raise(const packet<T>& least) {
    const packet<T> higher = max(top, least);
    const packet<T> factor = power_of_two<T>(sub(top, finite(higher)));
    num = mul(num, factor), den = mul(den, factor), top = higher;
  }
  ATTN_INLINE void merge(const key_sums& other) {
    raise(other.top);
    const packet<T> factor = power_of_two<T>(sub(other.top, finite(top)));
    num = fma(other.num, factor, num), den = fma(other.den, factor, den);
  }

  /// A `top` to subtract: that of no key, -infinity, is replaced by the lowest number.
  static ATTN_INLINE packet<T> finite(const packet<T>& x) {
    return max(x, broadcast<T>(std::numeric_limits<T>::lowest()));
  }
};

/// One head of one batch item.
template <class S>
struct aft_head {
  matrix_view<const S> q, k, v;
  matrix_view<S> out;
};

/// Packets of channels from some channel on, of any row. Where they lie as they are read nothing but loads is left of
/// it; else they are gathered, out of line, zeros standing in for channels that are not there.
template <class T, class S, bool Whole>
struct channel_reader {
  const S* data;
  index row_stride, col_stride, count;

  channel_reader(const matrix_view<const S>& x, index c)
      : data(x.data + c * x.col_stride), row_stride(x.row_stride), col_stride(x.col_stride), count(x.cols - c) {}

  ATTN_INLINE packet<T> operator()(index row, int n = 0) const {
    if constexpr (Whole)
      return load_as<T>(data + row * row_stride + n * width<T>);
    else
      return gather_part<T>(data + row * row_stride + n * width<T> * col_stride, col_stride, count - n * width<T>);
  }
};

/// f(reader of k, reader of v) for C packets from channel c on.
template <class T, int C, class S, class F>
ATTN_INLINE void read_channels(const matrix_view<const S>& k, const matrix_view<const S>& v, index c, F&& f) {
  if (k.col_stride == 1 && v.col_stride == 1 && c + C * width<T> <= std::min(k.cols, v.cols)) [[likely]]
    f(channel_reader<T, S, true>(k, c), channel_reader<T, S, true>(v, c));
  else
    f(channel_reader<T, S, false>(k, c), channel_reader<T, S, false>(v, c));
}

/// Writes packets of channels of the output: num / den, times sigmoid(q) if gated; 0 where den is 0, which is where no
/// key was seen.
template <class T, class S, bool Whole>
struct channel_writer {
  channel_reader<T, S, Whole> q;
  matrix_view<S> out;
  index c;
  bool gate;

  ATTN_INLINE void operator()(index row, int n, packet<T> num, packet<T> den) const {
    packet<T> over = broadcast<T>(T(1));  // multiplies the mean, since num may be tiny
    if (gate) {
      const sigmoid_fraction<T> factor(q(row, n));
      over = factor.over, den = mul(den, factor.under);
    }
    const packet<T> mean = if_less(zero<T>(), den, mul(div(num, den), over), den);
    const index at = c + n * width<T>;
    if constexpr (Whole && std::same_as<T, S>) {
      store<T>(out.row(row) + at, mean);
    } else {
      alignas(64) T lanes[width<T>];
      store<T>(lanes, mean);
      S* const to = out.row(row) + at * out.col_stride;
      for (index i = 0; i < std::min<index>(out.cols - at, width<T>); ++i)
        to[i * out.col_stride] = static_cast<S>(lanes[i]);
    }
  }
};

/// f(writer) for C packets from channel c on.
template <class T, int C, class S, class F>
ATTN_INLINE void write_channels(const aft_head<S>& head, bool gate, index c, F&& f) {
  if (head.q.col_stride == 1 && head.out.col_stride == 1 && c + C * width<T> <= head.out.cols) [[likely]]
    f(channel_writer<T, S, true>{{head.q, c}, head.out, c, gate});
  else
    f(channel_writer<T, S, false>{{head.q, c}, head.out, c, gate});
}

/// Keys taken at a time.
inline constexpr index key_piece = 96;

/// The keys of one packet of channels with their values, taken apart.
template <class T>
struct split_keys {
  T *factor = nullptr, *exponent = nullptr, *value = nullptr;  // [keys][width]; value: factor * v

  split_keys from(index j) const { return {factor + j * width<T>, exponent + j * width<T>, value + j * width<T>}; }

  static split_keys layout(arena& memory) {
    constexpr index size = key_piece * width<T>;
    return {memory.allocate<T>(size), memory.allocate<T>(size), memory.allocate<T>(size)};
  }

  /// Rows [begin, begin + count) of k and v, channels from c on.
  template <class S>
  void take(const matrix_view<const S>& k, const matrix_view<const S>& v, index c, index begin, index count) const {
    read_channels<T, 1>(k, v, c, [&](const auto& key, const auto& x) {
      for (index j = 0; j < count; ++j) {
        const auto e = split_exp<T>(key(begin + j));
        store<T>(factor + j * width<T>, e.factor);
        store<T>(exponent + j * width<T>, e.exponent);
        store<T>(value + j * width<T>, if_less(zero<T>(), e.factor, mul(e.factor, x(begin + j)), e.factor));
      }
    });
  }
};

/// `count` biases from `from` on, converted.
template <class T, class S>
void copy_biases(const S* from, index stride, index count, T* to) {
  index j = 0;
  for (; j + width<T> <= count; j += width<T>) store<T>(to + j, load_part<T>(from + j * stride, stride, width<T>));
  for (; j < count; ++j) to[j] = static_cast<T>(from[j * stride]);
}

/// The biases of one row towards `key_piece` keys, taken apart.
template <class T>
struct split_biases {
  static constexpr index stride = round_up(key_piece, 16) + 16;
  T *factor = nullptr, *exponent = nullptr;

  static split_biases layout(arena& memory, index rows) {
    return {memory.allocate<T>(rows * stride), memory.allocate<T>(rows * stride)};
  }
  split_biases row(index r) const { return {factor + r * stride, exponent + r * stride}; }

  /// Takes the first `count` entries of `factor`, which hold biases, apart.
  void split(index count) const {
    std::fill(factor + count, factor + round_up(count, width<T>), T(0));
    for (index j = 0; j < count; j += width<T>) {
      const auto e = split_exp<T>(load<T>(factor + j));
      store<T>(factor + j, e.factor);
      store<T>(exponent + j, e.exponent);
    }
  }
};

/// Adds one key without a bias.
template <class T>
void add_key(key_sums<T>& sums, const split_keys<T>& key) {
  const packet<T> exponent = load<T>(key.exponent);
  sums.raise(exponent);
  const packet<T> power = power_of_two<T>(sub(exponent, key_sums<T>::finite(sums.top)));
  sums.num = fma(load<T>(key.value), power, sums.num);
  sums.den = fma(load<T>(key.factor), power, sums.den);
}

/// Adds `count` keys with their biases.
template <class T>
void add_keys(key_sums<T>& sums, const split_keys<T>& keys, const split_biases<T>& bias, index count) {
  packet<T> top = sums.top;
  for (index j = 0; j < count; ++j)
    top = max(top, add(load<T>(keys.exponent + j * width<T>), broadcast<T>(bias.exponent[j])));
  sums.raise(top);
  const packet<T> reference = key_sums<T>::finite(top);
  packet<T> num = sums.num, den = sums.den;
  for (index j = 0; j < count; ++j) {
    if (bias.factor[j] == T(0)) continue;
    const packet<T> exponent = add(load<T>(keys.exponent + j * width<T>), broadcast<T>(bias.exponent[j]));
    const packet<T> weight = mul(power_of_two<T>(sub(exponent, reference)), broadcast<T>(bias.factor[j]));
    num = fma(weight, load<T>(keys.value + j * width<T>), num);
    den = fma(weight, load<T>(keys.factor + j * width<T>), den);
  }
  sums.num = num, sums.den = den;
}

/// e^x 2^negated for a power of two that is at least e^x. (Beyond 2^24 numbers are no multiples of 1.)
template <class P, class T = std::remove_cvref_t<decltype(sum_lanes(std::declval<P>()))>>
ATTN_INLINE P weight_beside(const P& x, const P& negated) {
  using constants = exp_constants<T>;
  const P power = fma(x, broadcast<T>(constants::log2_e_low), fma(x, broadcast<T>(constants::log2_e_high), negated));
  return exp2_weight<T>(min(power, broadcast<T>(T(1))));
}

/// Packets of channels that are summed up together.
inline constexpr int sum_columns = 4;

/// Adds rows [begin, end) of k and v, channels from c on, without biases, to the sums of C packets in memory.
template <class T, int C, class S>
void add_plain_keys(const matrix_view<const S>& k, const matrix_view<const S>& v, index c, index begin, index end,
                    T* total) {
  constexpr index step = 16;  // rows that share a maximum; they come from the cache the second time
  read_channels<T, C>(k, v, c, [&](const auto& key, const auto& value) {
    key_sums<T> sums[C];
    unroll<C>([&](auto n) { sums[n] = key_sums<T>::read(total + n * key_sums<T>::size); });
    for (index j0 = begin; j0 < end; j0 += step) {
      const index j1 = std::min(j0 + step, end);
      packet<T> reference[C];
      unroll<C>([&](auto n) { reference[n] = broadcast<T>(-std::numeric_limits<T>::infinity()); });
      for (index j = j0; j < j1; ++j) unroll<C>([&](auto n) { reference[n] = max(reference[n], key(j, n)); });
      unroll<C>([&](auto n) {
        const auto largest = split_exp<T>(reference[n]);
        sums[n].raise(largest.exponent);
        sums[n].den = fma(largest.factor, zero<T>(), sums[n].den);  // an infinite key makes it NaN
        reference[n] = sub(zero<T>(), key_sums<T>::finite(sums[n].top));
      });
      for (index j = j0; j < j1; ++j)
        unroll<C>([&](auto n) {
          const packet<T> weight = weight_beside(key(j, n), reference[n]);
          sums[n].num = fma(weight, if_less(zero<T>(), weight, value(j, n), zero<T>()), sums[n].num);
          sums[n].den = add(sums[n].den, weight);
        });
    }
    unroll<C>([&](auto n) { sums[n].write(total + n * key_sums<T>::size); });
  });
}

}  // namespace attn::detail
