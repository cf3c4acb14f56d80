// attn: what the backward passes of the attention-free family share: their views, gates, and gradients in memory.
//
//   dq_t = d_out_t y_t sigma'(q_t)      dy_t = d_out_t sigma(q_t)      y_t the mean of the values row t sees
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/core/detail/gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A head of a writable view of rank 4.
inline matrix_view<void> gradient_head_of(const memory_layout& x, idx_t batch, idx_t head) {
  const auto m = head_of(x, batch, head);
  return {const_cast<void*>(m.data), m.rows, m.cols, m.row_stride, m.col_stride};
}

/// The gradients of one head; those not asked for have no memory.
struct aft_head_gradients {
  matrix_view<const void> d_out;
  matrix_view<void> q, k, v;
};

/// The views of a backward call: those of the forward call, whose out is d_out, and the gradients.
template <class T>
struct aft_backward_tensors : aft_tensors<T> {
  memory_layout dq, dk, dv, dw;
  bool accumulate = false;

  /// Of head `head`, one of those aft_tensors::head() makes.
  aft_head_gradients gradients(idx_t n) const {
    const idx_t b = n / this->heads, h = n % this->heads;
    return {head_of(this->out, b, h), gradient_head_of(dq, b, h), gradient_head_of(dk, b, h),
            gradient_head_of(dv, b, h)};
  }
  bool wants(const memory_layout& gradient) const { return gradient.data && !gradient.empty(); }
};

/// The arguments of a backward call, whose types are checked here; w may be the null view.
template <class Options, class Q, class K, class V, class W, class D, class Gradients, class Given>
auto unchecked_aft_backward(const char* name, const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                            const Gradients& gradients, Given& options, execution_ref& exec) {
  using S = element_of<const Q&>;
  require_one_element_type<const Q&, const K&, const V&, const tensor_view<S>&>();
  static_assert(std::same_as<S, element_of<const D&>>, "attn: q and d_out must have one element type");
  static_assert(std::same_as<S, element_of<const W&>>, "attn: w must have the element type of q, k, v and d_out");
  aft_call<aft_backward_tensors<compute_type<S>>, Options> call{
      {{as_view(q), as_view(k), as_view(v), as_view(d_out), of_rank_4(as_view(w))},
       gradients.q, gradients.k, gradients.v, {}, gradients.accumulate},
      call_views(name), options_or_default<Options>(options), execution_of(exec, options)};
  set_options<S>(call.x, call.options);
  if constexpr (requires { gradients.w; }) call.x.dw = gradients.w;
  return call;
}

/// Checks the views against one another, and sets the extents.
template <class T, class Options>
void check_aft_backward(aft_call<aft_backward_tensors<T>, Options>& call) {
  aft_backward_tensors<T>& x = call.x;
  call_views& views = call.views;
  views.read("q", x.q), views.read("k", x.k), views.read("v", x.v), views.read("w", x.w), views.read("d_out", x.out);
  views.gradient("q", x.dq, x.q);
  views.gradient("k", x.dk, x.k);
  views.gradient("v", x.dv, x.v);
  views.gradient("w", x.dw, x.w);
  check_aft_shapes(views, x, "d_out");
  check_key_mask(views, x, x.length);
}

template <class Options, class Q, class K, class V, class W, class D, class Gradients, class Given>
auto checked_aft_backward(const char* name, const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                          const Gradients& gradients, Given& options, execution_ref& exec) {
  auto call = unchecked_aft_backward<Options>(name, q, k, v, w, d_out, gradients, options, exec);
  check_aft_backward(call);
  return call;
}

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

/// Readers of C packets from channel c on; k may have one channel for all.
template <class T, class S, bool Whole>
struct backward_readers {
  channel_reader<T, S, Whole> q, k, v, d_out;
};

/// f(readers) for C packets from channel c on.
template <class T, class S, int C, class F>
ATTN_INLINE void read_backward(const aft_head& head, const matrix_view<const void>& d_out, idx_t c, F&& f) {
  const auto q = typed<const S>(head.q), k = typed<const S>(head.k), v = typed<const S>(head.v);
  const auto d = typed<const S>(d_out);
  if (q.col_stride == 1 && k.col_stride == 1 && v.col_stride == 1 && d.col_stride == 1 && c + C * width<T> <= v.cols)
      [[likely]]
    f(backward_readers<T, S, true>{{q, c}, {k, c}, {v, c}, {d, c}});
  else
    f(backward_readers<T, S, false>{{q, c}, {k, c}, {v, c}, {d, c}});
}

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

/// Rows [begin, end) of padding: zeros, unless what is there stays.
template <class S>
void clear_padding(const aft_head_gradients& to, idx_t begin, idx_t end, bool accumulate) {
  if (accumulate) return;
  for (const auto* x : {&to.q, &to.k, &to.v})
    if (x->data && begin < end) clear_rows(typed<S>(*x), begin, end);
}

}}}  // namespace attn::ATTN_ISA::detail
