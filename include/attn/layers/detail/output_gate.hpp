// attn: the gate between the heads of multi_head and its output weight: attended * f(gate), f sigmoid or SiLU.
#pragma once

#include <attn/layers/detail/activation.hpp>
#include <attn/layers/detail/sequence.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// f(x) and f'(x) in the places of x and slope.
template <class T>
struct gate_values {
  packet<T> value, slope;

  ATTN_INLINE gate_values(gate_activation f, const packet<T>& x) {
    using terms = sigmoid_terms<T>;
    const packet<T> lowest = broadcast<T>(terms::lowest), highest = broadcast<T>(terms::highest);
    const packet<T> above = if_less(x, lowest, lowest, x), within = if_less(highest, above, highest, above);
    const packet<T> unit = broadcast<T>(terms::unit);
    const terms t(within);
    const packet<T> e = mul(t.power, t.factor), inverse = div(broadcast<T>(T(1)), add(unit, e));
    const packet<T> s = mul(inverse, unit), rest = mul(e, inverse);  // 1 - s
    value = f == gate_activation::sigmoid ? s : mul(above, s);
    slope = f == gate_activation::sigmoid ? mul(s, rest) : mul(s, fma(within, rest, broadcast<T>(T(1))));
  }
};

/// to = attended * f(gate); `to` may be `gate`.
template <class S>
void apply_gate(const tensor_view<const S, 3>& attended, const tensor_view<const S, 3>& gate, gate_activation f,
                const tensor_view<S, 3>& to, execution& exec) {
  using T = compute_type<S>;
  const input_tokens<T> x(attended), g(gate);
  const output_tokens<T> out(to);
  for_each_token<T>(x.count, x.dim, 2, {.operations = 20}, exec, [&](idx_t n, idx_t stride, T* rows) {
    x.load(n, rows), g.load(n, rows + stride);
    for (idx_t d = 0; d < stride; d += width<T>)
      store<T>(rows + d, mul(load<T>(rows + d), gate_values<T>(f, load<T>(rows + stride + d)).value));
    out.store(n, rows);
  });
}

/// d_attended = d * f(gate), d_gate = d * attended * f'(gate); where d is 0 both are, whatever the others. They may be
/// d and gate.
template <class S>
void apply_gate_backward(const tensor_view<const S, 3>& attended, const tensor_view<const S, 3>& gate,
                         const tensor_view<const S, 3>& d, gate_activation f, const tensor_view<S, 3>& d_attended,
                         const tensor_view<S, 3>& d_gate, execution& exec) {
  using T = compute_type<S>;
  const input_tokens<T> x(attended), g(gate), d_out(d);
  const output_tokens<T> to_attended(d_attended), to_gate(d_gate);
  for_each_token<T>(x.count, x.dim, 3, {.operations = 20}, exec, [&](idx_t n, idx_t stride, T* rows) {
    T *const a = rows, *const b = rows + stride, *const c = rows + 2 * stride;
    x.load(n, a), g.load(n, b), d_out.load(n, c);
    for (idx_t i = 0; i < stride; i += width<T>) {
      const packet<T> slope = load<T>(c + i), some = abs(slope);
      const gate_values<T> of(f, load<T>(b + i));
      const packet<T> of_gate = mul(mul(slope, load<T>(a + i)), of.slope);
      store<T>(b + i, if_less(zero<T>(), some, of_gate, slope));
      store<T>(a + i, if_less(zero<T>(), some, mul(slope, of.value), slope));
    }
    to_attended.store(n, a), to_gate.store(n, b);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
