// attn: elements in memory as the backward kernels of the attention-free family see them: aft_elements.hpp for
// gradients.
//
// Rows become ready for a product over rows, keys for one over channels:
//
//   rows   [g | h] 2^-(W + K)     g = dy / den, h = y g: p_tt' dy_t = e^(k_t') e^(w_tt') g_t       stored_rows
//   keys   [e^k v | e^k] 2^-K     K the largest exponent of all keys in each channel               pack_keys
//
// Where den 2^-(W + K) is below 2^-64 (double: 2^-512), a key the row does see may have underflowed. Such a row and
// channel, and one that is not finite, is 0 in the product and stored separately, to be added exactly. For all others a
// key that underflowed has p below 2^-60.
#pragma once

#include <attn/aft/detail/aft_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The rows of one packet of channels.
template <class T>
struct packed_rows_of {
  T* panel;            // [row][g | h]
  key_sums<T>* exact;  // [row]: num = g, den = h, exponent: those of -log2 den; where `separate`, 0 for all others
  bool* separate;      // [row]
};

/// Functions for elements of one type. Those of a head work on one packet of channels from c on.
template <class T>
struct aft_gradient_elements {
  /// K of one packet of channels of the first `length` keys.
  packet<T> (*highest)(const aft_head& head, idx_t c, idx_t length);
  /// Rows [begin, begin + count) of one packet of channels, from the sums of their keys; writes dq. `scales` are the W.
  void (*rows)(const aft_head& head, const aft_head_gradients& to, bool gate, bool accumulate, idx_t c, idx_t begin,
               idx_t count, const key_sums<T>* totals, const T* scales, const packet<T>& highest,
               const packed_rows_of<T>& packed);
  /// Keys [begin, begin + count): those that are masked or not finite are 0.
  void (*keys)(const aft_head& head, idx_t c, idx_t begin, idx_t count, const packet<T>& highest, T* panel);
  /// Rows of a gradient from one packet of channels on, `stride` numbers apart.
  void (*store)(const matrix_view<void>& to, idx_t c, idx_t begin, idx_t count, const T* from, idx_t stride,
                bool accumulate);
  void (*clear_padding)(const aft_head_gradients& to, idx_t begin, idx_t end, bool accumulate);
};

template <class T, class S>
packet<T> highest_key(const aft_head& head, idx_t c, idx_t length) {
  packet<T> exponent = zero<T>();
  read_seen_channels<T, S>(head, c, [&](const auto& key, const auto&) {
    const packet<T> none = broadcast<T>(std::numeric_limits<T>::lowest());
    packet<T> highest = none;
    for (idx_t j = 0; j < length; ++j) {
      const packet<T> k_j = key(j);
      highest = max(highest, if_less(abs(k_j), broadcast<T>(std::numeric_limits<T>::infinity()), k_j, none));
    }
    exponent = if_less(none, highest, nearest_power<T>(highest), zero<T>());
  });
  return exponent;
}

template <class T, class S>
void pack_backward_rows(const aft_head& head, const aft_head_gradients& to, bool gate, bool accumulate, idx_t c,
                        idx_t begin, idx_t count, const key_sums<T>* totals, const T* scales, const packet<T>& highest,
                        const packed_rows_of<T>& packed) {
  const gradient_writer<T, S> dq{typed<S>(to.q), c, accumulate};
  const packet<T> least = broadcast<T>(std::ldexp(T(1), -(float_bits<T>::bias + 1) / 2)), one = broadcast<T>(T(1));
  const packet<T> tiny = broadcast<T>(std::numeric_limits<T>::min());
  read_backward<T, S, 1>(head, to.d_out, c, [&](const auto& x) {
    for (idx_t r = 0; r < count; ++r) {
      const key_sums<T>& all = totals[r];
      const packet<T> d = x.d_out(begin + r), mean = if_less(zero<T>(), all.den, div(all.num, all.den), all.den);
      const auto factors = gate ? gate_slopes<T>(x.q(begin + r)) : gate_slopes<T>();
      if (dq) dq(begin + r, 0, gate ? mul(mul(d, mean), factors.slope) : zero<T>());
      const packet<T> g = if_less(zero<T>(), all.den, div(mul(d, factors.value), all.den), all.den), h = mul(g, mean);
      const packet<T> shift = sub(all.exponent, add(broadcast<T>(scales[r]), highest));
      // den in the scale of the product; NaN where anything is not finite
      const packet<T> size = fma(add(g, h), zero<T>(), mul(all.den, power_of_two<T>(min(shift, zero<T>()))));
      const packet<T> lost = if_less(least, size, zero<T>(), if_less(add(abs(g), abs(h)), tiny, zero<T>(), one));
      const packet<T> factor = power_of_two<T>(min(sub(zero<T>(), shift), broadcast<T>(T(float_bits<T>::bias))));
      T* const row = packed.panel + (begin + r) * panel_width<T>;
      store<T>(row, if_less(zero<T>(), lost, zero<T>(), mul(g, factor)));
      store<T>(row + width<T>, if_less(zero<T>(), lost, zero<T>(), mul(h, factor)));
      const bool separate = sum_lanes(lost) != T(0);
      packed.separate[begin + r] = separate;
      if (separate)
        packed.exact[begin + r] = {if_less(zero<T>(), lost, g, zero<T>()), if_less(zero<T>(), lost, h, zero<T>()),
                                   sub(zero<T>(), key_sums<T>::finite(all.exponent))};
    }
  });
}

template <class T, class S>
void pack_backward_keys(const aft_head& head, idx_t c, idx_t begin, idx_t count, const packet<T>& highest, T* panel) {
  read_seen_channels<T, S>(head, c, [&](const auto& key, const auto& value) {
    for (idx_t j = begin; j < begin + count; ++j, panel += panel_width<T>) {
      const auto e = split_exp<T>(key(j));
      const packet<T> x = value(j), weight = mul(e.factor, power_of_two<T>(sub(e.exponent, highest)));
      const packet<T> finite = fma(x, zero<T>(), weight);  // NaN where key or value is not finite
      store<T>(panel, if_less(zero<T>(), finite, mul(weight, x), zero<T>()));
      store<T>(panel + width<T>, if_less(zero<T>(), finite, weight, zero<T>()));
    }
  });
}

template <class T, class S>
void store_channels(const matrix_view<void>& to, idx_t c, idx_t begin, idx_t count, const T* from, idx_t stride,
                    bool accumulate) {
  const gradient_writer<T, S> write{typed<S>(to), c, accumulate};
  for (idx_t j = 0; j < count; ++j) write(begin + j, 0, load<T>(from + j * stride));
}

template <class S, class T = compute_type<S>>
inline constexpr aft_gradient_elements<T> gradient_elements_of = {
    highest_key<T, S>,
    pack_backward_rows<T, S>,
    pack_backward_keys<T, S>,
    store_channels<T, S>,
    clear_padding<S>};

}}}  // namespace attn::ATTN_ISA::detail
