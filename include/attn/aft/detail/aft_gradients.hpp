// attn: elements in memory as the backward kernels of the attention-free family see them, and the arguments of the
// backward calls: aft_elements.hpp and aft_tensors.hpp for gradients.
//
//   dq_t = d_out_t y_t sigma'(q_t)      dy_t = d_out_t sigma(q_t)      y_t the mean of the values row t sees
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

#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/core/detail/gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// sigma(q) and its derivative; 1 and 0 without a gate.
template <class T>
struct gate_slopes {
  packet<T> value = broadcast<T>(T(1)), slope = zero<T>();

  gate_slopes() = default;
  explicit ATTN_INLINE gate_slopes(const packet<T>& q) {
    const packet<T> one = value, e = exp_weight<T>(sub(zero<T>(), abs(q))), inverse = div(one, add(one, e));
    value = mul(if_less(q, zero<T>(), e, one), inverse);
    slope = mul(mul(e, inverse), inverse);
  }
};

/// Packets of a gradient from channel c on.
template <class T, class S>
struct gradient_writer {
  matrix_view<S> to;
  idx_t c;
  bool accumulate;

  explicit operator bool() const { return to.data != nullptr; }
  ATTN_INLINE void operator()(idx_t row, int n, const packet<T>& x) const {
    const idx_t at = c + n * width<T>;
    S* const p = to.row(row) + at * to.col_stride;
    if constexpr (std::same_as<T, S>)
      if (to.col_stride == 1 && at + width<T> <= to.cols) [[likely]]
        return store<T>(p, accumulate ? add(load<T>(p), x) : x);
    alignas(64) T lanes[width<T>];
    store<T>(lanes, x);
    for (idx_t i = 0; i < std::min<idx_t>(to.cols - at, width<T>); ++i)
      store_gradient(p[i * to.col_stride], lanes[i], accumulate);
  }
};

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
  void (*rows)(const aft_head& head, bool gate, bool accumulate, idx_t c, idx_t begin, idx_t count,
               const key_sums<T>* totals, const T* scales, const packet<T>& highest, const packed_rows_of<T>& packed);
  /// Keys [begin, begin + count): those that are masked or not finite are 0.
  void (*keys)(const aft_head& head, idx_t c, idx_t begin, idx_t count, const packet<T>& highest, T* panel);
  /// Rows of a gradient from one packet of channels on, `stride` numbers apart.
  void (*store)(const matrix_view<void>& to, idx_t c, idx_t begin, idx_t count, const T* from, idx_t stride,
                bool accumulate);
};

template <class T, class S>
packet<T> highest_key(const aft_head& head, idx_t c, idx_t length) {
  packet<T> exponent = zero<T>();
  read_seen_channels<T, S>(head, c, [&](const auto& key, const auto&) {
    const packet<T> none = broadcast<T>(std::numeric_limits<T>::lowest());
    packet<T> highest = none;
    for (idx_t j = 0; j < length; ++j) {
      const packet<T> k_j = key(j);
      highest = (max)(highest, if_less(abs(k_j), broadcast<T>(std::numeric_limits<T>::infinity()), k_j, none));
    }
    exponent = if_less(none, highest, nearest_power<T>(highest), zero<T>());
  });
  return exponent;
}

template <class T, class S>
void pack_backward_rows(const aft_head& head, bool gate, bool accumulate, idx_t c, idx_t begin, idx_t count,
                        const key_sums<T>* totals, const T* scales, const packet<T>& highest,
                        const packed_rows_of<T>& packed) {
  const gradient_writer<T, S> dq{typed<S>(head.dq), c, accumulate};
  const packet<T> least = broadcast<T>(std::ldexp(T(1), -(float_bits<T>::bias + 1) / 2)), one = broadcast<T>(T(1));
  const packet<T> tiny = broadcast<T>((std::numeric_limits<T>::min)());
  read_channels<T, S, 1>(c, [&](const auto& q, const auto& d_out) {
    for (idx_t r = 0; r < count; ++r) {
      const key_sums<T>& all = totals[r];
      const packet<T> d = d_out(begin + r), mean = if_less(zero<T>(), all.den, div(all.num, all.den), all.den);
      const auto factors = gate ? gate_slopes<T>(q(begin + r)) : gate_slopes<T>();
      if (dq) dq(begin + r, 0, gate ? mul(mul(d, mean), factors.slope) : zero<T>());
      const packet<T> g = if_less(zero<T>(), all.den, div(mul(d, factors.value), all.den), all.den), h = mul(g, mean);
      const packet<T> shift = sub(all.exponent, add(broadcast<T>(scales[r]), highest));
      // den in the scale of the product; NaN where anything is not finite
      const packet<T> size = fma(add(g, h), zero<T>(), mul(all.den, power_of_two<T>((min)(shift, zero<T>()))));
      const packet<T> lost = if_less(least, size, zero<T>(), if_less(add(abs(g), abs(h)), tiny, zero<T>(), one));
      const packet<T> factor = power_of_two<T>((min)(sub(zero<T>(), shift), broadcast<T>(T(float_bits<T>::bias))));
      T* const row = packed.panel + (begin + r) * panel_width<T>;
      store<T>(row, if_less(zero<T>(), lost, zero<T>(), mul(g, factor)));
      store<T>(row + width<T>, if_less(zero<T>(), lost, zero<T>(), mul(h, factor)));
      const bool separate = sum_lanes(lost) != T(0);
      packed.separate[begin + r] = separate;
      if (separate)
        packed.exact[begin + r] = {if_less(zero<T>(), lost, g, zero<T>()), if_less(zero<T>(), lost, h, zero<T>()),
                                   sub(zero<T>(), key_sums<T>::finite(all.exponent))};
    }
  }, head.q, head.out);
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
    highest_key<T, S>, pack_backward_rows<T, S>, pack_backward_keys<T, S>, store_channels<T, S>};

/// What a backward call is asked for.
template <class S>
struct aft_gradients {
  memory_layout q, k, v;
  bool accumulate = false;
  memory_layout w{};
  const aft_gradient_elements<compute_type<S>>* elements = nullptr;  // where there are biases
};

/// The arguments of a backward call, whose types are checked here; w may be the null view.
template <class Options, class Q, class K, class V, class W, class D, class Given>
auto unchecked_aft_backward(const char* name, const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                            const aft_gradients<element_of<const Q&>>& gradients, Given& options, execution_ref& exec) {
  using S = element_of<const Q&>;
  require_one_element_type<const Q&, const K&, const V&, const tensor_view<S>&>();
  static_assert(std::same_as<S, element_of<const D&>>, "attn: q and d_out must have one element type");
  auto call = aft_call_of<S>(name, as_view(q), as_view(k), as_view(v), as_view(d_out), w,
                             options_or_default<Options>(options), plain_execution_of(name, exec, options));
  call.x.backward = true, call.x.accumulate = gradients.accumulate;
  call.x.dq = gradients.q, call.x.dk = gradients.k, call.x.dv = gradients.v, call.x.dw = gradients.w;
  call.x.gradients = gradients.elements;
  return call;
}
template <class Options, class Q, class K, class V, class W, class D, class Given>
auto checked_aft_backward(const char* name, const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                          const aft_gradients<element_of<const Q&>>& gradients, Given& options, execution_ref& exec) {
  auto call = unchecked_aft_backward<Options>(name, q, k, v, w, d_out, gradients, options, exec);
  check_aft(call.views, call.x);
  call.x.key_mask.validate(call.views, call.x.batch, call.x.length);
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
