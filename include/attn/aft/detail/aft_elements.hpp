// attn: elements in memory as the kernels of the attention-free family see them. Kernels are compiled once for each
// compute type T; functions that depend on the element type S are in a table, and each handles many elements.
//
// A hidden key (key_mask) is a key of -infinity with a value of 0, or is left out.
#pragma once

#include <attn/aft/detail/key_sums.hpp>
#include <attn/core/detail/any_rows.hpp>
#include <attn/core/detail/key_flags.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One head of one batch item, elements of any type; its biases and its true length where there are any. In a backward
/// pass `out` is d_out, and the gradients that are not asked for have no memory.
struct aft_head {
  matrix_view<const void> q, k, v;
  matrix_view<void> out;
  matrix_view<const void> w{};
  matrix_view<void> dq{}, dk{}, dv{};
  idx_t length = 0;
  idx_t number = 0, bias_head = 0;  // batch item * heads + head; the head of w that is its own
  seen_range keys{};
};

/// Packets of channels from some channel on, of any row: plain loads where the channels are contiguous, else gathered,
/// with zeros for channels beyond the last.
template <class T, class S, bool Whole>
struct channel_reader {
  matrix_view<const S> x;
  idx_t c;

  ATTN_INLINE packet<T> operator()(idx_t row, int n = 0) const {
    const idx_t from = c + n * width<T>;
    if constexpr (Whole) return load_as<T>(x.row(row) + from);
    return gather_part<T>(x.row(row) + from * x.col_stride, x.col_stride, x.cols - from);
  }
};

/// f(readers of the matrices) for C packets from channel c on.
template <class T, class S, int C, class F, class... X>
ATTN_INLINE void read_channels(idx_t c, F&& f, const X&... x) {
  if (((x.col_stride == 1 && c + C * width<T> <= x.cols) && ...)) [[likely]]
    f(channel_reader<T, S, true>{typed<const S>(x), c}...);
  else
    f(channel_reader<T, S, false>{typed<const S>(x), c}...);
}

/// f(key, value) for one packet of channels from c on; both are functions of the row.
template <class T, class S, class F>
ATTN_INLINE void read_seen_channels(const aft_head& head, idx_t c, F&& f) {
  read_channels<T, S, 1>(c, [&](const auto& key, const auto& value) {
    const packet<T> none = broadcast<T>(-std::numeric_limits<T>::infinity());
    const seen_range keys = head.keys;
    f([&](idx_t row) { return keys.hides(row) ? none : key(row); },
      [&](idx_t row) { return keys.hides(row) ? zero<T>() : value(row); });
  }, head.k, head.v);
}

/// Writes packets of channels of the output: num / den, times sigmoid(q) if gated; 0 where den is 0, which is where no
/// key was seen.
template <class T, class S, bool Whole>
struct channel_writer {
  channel_reader<T, S, Whole> q;
  matrix_view<S> out;
  idx_t c;
  bool gate;

  ATTN_INLINE void operator()(idx_t row, int n, packet<T> num, packet<T> den) const {
    packet<T> over = broadcast<T>(T(1));  // multiplies the mean, since num may be tiny
    if (gate) {
      const sigmoid_fraction<T> factor(q(row, n));
      over = factor.over, den = mul(den, factor.under);
    }
    const packet<T> mean = if_less(zero<T>(), den, mul(div(num, den), over), den);
    const idx_t at = c + n * width<T>;
    if constexpr (Whole && std::same_as<T, S>) {
      store<T>(out.row(row) + at, mean);
    } else {
      alignas(64) T lanes[width<T>];
      store<T>(lanes, mean);
      S* const to = out.row(row) + at * out.col_stride;
      for (idx_t i = 0; i < std::min<idx_t>(out.cols - at, width<T>); ++i)
        to[i * out.col_stride] = static_cast<S>(lanes[i]);
    }
  }
};

/// f(writer) for C packets from channel c on.
template <class T, class S, int C, class F>
ATTN_INLINE void write_channels(const aft_head& head, bool gate, idx_t c, F&& f) {
  const auto q = typed<const S>(head.q);
  const auto out = typed<S>(head.out);
  if (q.col_stride == 1 && out.col_stride == 1 && c + C * width<T> <= out.cols) [[likely]]
    f(channel_writer<T, S, true>{{q, c}, out, c, gate});
  else
    f(channel_writer<T, S, false>{{q, c}, out, c, gate});
}

/// What the product of aft_block.hpp must know of some keys of one packet of channels: of none, unless set.
template <class T>
struct packed_channels {
  packet<T> exponent = broadcast<T>(-std::numeric_limits<T>::infinity());  // the largest, in each channel
  packet<T> smallest = broadcast<T>(std::numeric_limits<T>::infinity());   // |v| but 0
  bool finite = true;                                                      // all keys and values
};

/// Functions for elements of one type. Those of a head work on its rows [begin, begin + count) and one packet of
/// channels from c on.
template <class T>
struct aft_elements {
  const number_access<T>& numbers;
  /// Keys with their values, each as sums of its own.
  void (*split)(const aft_head& head, idx_t c, idx_t begin, idx_t count, key_sums<T>* to);
  /// Keys for the product: panel [count][e^k v | e^k], both times 2^-exponent.
  packed_channels<T> (*pack)(const aft_head& head, idx_t c, idx_t begin, idx_t count, T* panel);
  /// Rows of out.
  void (*write)(const aft_head& head, bool gate, idx_t c, idx_t begin, idx_t count, const key_sums<T>* sums);
  /// Adds rows [begin, end) without biases to sums in memory, `parts` packets of them.
  void (*add_rows)(const aft_head& head, idx_t begin, idx_t end, idx_t parts, key_sums<T>* sums);

  /// Zeros in rows [begin, end).
  void clear(const matrix_view<void>& x, idx_t begin, idx_t end) const { numbers.clear(x, begin, end); }
  /// An element of a matrix.
  const void* at(const matrix_view<const void>& x, idx_t row, idx_t column) const {
    return static_cast<const char*>(x.data) + (row * x.row_stride + column * x.col_stride) * numbers.size;
  }
};

template <class T, class S>
void split_channels(const aft_head& head, idx_t c, idx_t begin, idx_t count, key_sums<T>* to) {
  read_seen_channels<T, S>(head, c, [&](const auto& key, const auto& x) {
    for (idx_t j = 0; j < count; ++j) {
      const auto e = split_exp<T>(key(begin + j));
      to[j] = {if_less(zero<T>(), e.factor, mul(e.factor, x(begin + j)), e.factor), e.factor, e.exponent};
    }
  });
}

template <class T, class S>
packed_channels<T> pack_channels(const aft_head& head, idx_t c, idx_t begin, idx_t count, T* panel) {
  packed_channels<T> all;
  read_seen_channels<T, S>(head, c, [&](const auto& key, const auto& x) {
    const packet<T> none = all.exponent, infinity = all.smallest;
    packet<T> highest = none, size = infinity, trace = zero<T>();
    for (idx_t j = begin; j < begin + count; ++j) {
      const packet<T> k_j = key(j);
      highest = (max)(highest, if_less(abs(k_j), infinity, k_j, none));
    }
    const packet<T> exponent = split_exp<T>(highest).exponent, reference = key_sums<T>::finite(exponent);
    for (idx_t j = begin; j < begin + count; ++j, panel += panel_width<T>) {
      const auto e = split_exp<T>(key(j));
      const packet<T> v_j = x(j), weight = mul(e.factor, power_of_two<T>(sub(e.exponent, reference)));
      const packet<T> weighted = if_less(zero<T>(), e.factor, mul(weight, v_j), e.factor);
      size = if_less(zero<T>(), abs(v_j), (min)(size, abs(v_j)), size);
      trace = fma(add(weighted, weight), zero<T>(), trace);
      store<T>(panel, weighted);
      store<T>(panel + width<T>, weight);
    }
    all = {exponent, size, sum_lanes(trace) == T(0)};
  });
  return all;
}

template <class T, class S>
void write_sums(const aft_head& head, bool gate, idx_t c, idx_t begin, idx_t count, const key_sums<T>* sums) {
  write_channels<T, S, 1>(head, gate, c, [&](const auto& write) {
    for (idx_t r = 0; r < count; ++r) write(begin + r, 0, sums[r].num, sums[r].den);
  });
}

/// f(integral_constant<int, C>, p) for packets p ... p + C - 1, until all are done.
template <class F>
void for_columns(idx_t packets, F&& f) {
  constexpr int columns = 4;  // packets of channels that are summed together
  idx_t p = 0;
  for (; p + columns <= packets; p += columns) f(std::integral_constant<int, columns>{}, p);
  for (; p < packets; ++p) f(std::integral_constant<int, 1>{}, p);
}

/// Adds rows [begin, end) of k and v, channels from c on, without biases, to the sums of C packets in memory.
template <class T, class S, int C>
void add_plain_keys(const aft_head& head, idx_t c, idx_t begin, idx_t end, key_sums<T>* total) {
  // Rows that share a maximum and are summed up from zero; they come from the cache the second time.
  constexpr idx_t step = 16;
  read_channels<T, S, C>(c, [&](const auto& key, const auto& value) {
    key_sums<T> sums[array_size<C>];
    unroll<C>([&](auto n) { sums[n] = total[n]; });
    for (idx_t j0 = begin; j0 < end; j0 += step) {
      const idx_t j1 = (std::min)(j0 + step, end);
      packet<T> reference[array_size<C>];
      unroll<C>([&](auto n) { reference[n] = broadcast<T>(-std::numeric_limits<T>::infinity()); });
      for (idx_t j = j0; j < j1; ++j) unroll<C>([&](auto n) { reference[n] = (max)(reference[n], key(j, n)); });
      unroll<C>([&](auto n) {
        const auto largest = split_exp<T>(reference[n]);
        sums[n].raise(lower_large<T>(largest.exponent));
        sums[n].den = fma(largest.factor, zero<T>(), sums[n].den);  // an infinite key makes it NaN
        reference[n] = sub(zero<T>(), key_sums<T>::finite(sums[n].exponent));
      });
      packet<T> num[array_size<C>], den[array_size<C>];
      unroll<C>([&](auto n) { num[n] = den[n] = zero<T>(); });
      for (idx_t j = j0; j < j1; ++j)
        unroll<C>([&](auto n) {
          const packet<T> weight = weight_beside(key(j, n), reference[n]);
          num[n] = fma(weight, if_less(zero<T>(), weight, value(j, n), zero<T>()), num[n]);
          den[n] = add(den[n], weight);
        });
      unroll<C>([&](auto n) { sums[n].num = add(sums[n].num, num[n]), sums[n].den = add(sums[n].den, den[n]); });
    }
    unroll<C>([&](auto n) { total[n] = sums[n]; });
  }, head.k, head.v);
}

template <class T, class S>
void add_rows(const aft_head& head, idx_t begin, idx_t end, idx_t parts, key_sums<T>* sums) {
  head.keys.runs(begin, end, [&](idx_t first, idx_t last, bool hidden) {
    for_columns(hidden ? 0 : parts, [&](auto count, idx_t p) {
      add_plain_keys<T, S, count.value>(head, p * width<T>, first, last, sums + p);
    });
  });
}

template <class S, class T = compute_type<S>>
inline constexpr aft_elements<T> elements_of = {
    number_access_of<T, S>, split_channels<T, S>, pack_channels<T, S>, write_sums<T, S>, add_rows<T, S>};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void split_channels<compute_type<S>, S>(const aft_head&, idx_t, idx_t, idx_t,                      \
  key_sums<compute_type<S>>*)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) packed_channels<compute_type<S>> pack_channels<compute_type<S>, S>(const aft_head&, idx_t, idx_t,  \
  idx_t, compute_type<S>*)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void write_sums<compute_type<S>, S>(const aft_head&, bool, idx_t, idx_t, idx_t,                    \
  const key_sums<compute_type<S>>*)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void add_rows<compute_type<S>, S>(const aft_head&, idx_t, idx_t, idx_t,                            \
  key_sums<compute_type<S>>*)
#include <attn/core/detail/compiled.hpp>
