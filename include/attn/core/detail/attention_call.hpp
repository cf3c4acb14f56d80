// attn: a checked call of an attention operator, as a value: what every family's own call begins with.
//
//   template <viewable Q, ..., class Options = NAME_options<element_of<const Q&>>>
//   void NAME(const Q& q, ..., O&& out, Options&& options = {}, execution_ref exec = {}) {
//     auto call = detail::checked_call<NAME_options>("NAME", q, k, v, out, options, exec);
//     call.views.option("table", call.options.table, {...});     // the operator's own views and checks
//     /* run a driver on the call */
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/simd.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The views of a call and what their extents agree on. Keys and values of a cache may have another element type, C.
template <class S, class C = S>
struct attention_views {
  tensor_view<const S> q{};
  tensor_view<const C> k{}, v{};
  tensor_view<S> out{};
  attention_shape shape{};
  sequence_lengths lengths{};

  /// The rows that query head h reads and writes.
  matrix_view<const S> query(idx_t b, idx_t h) const { return head_of(q, b, h); }
  matrix_view<const C> key(idx_t b, idx_t h) const { return head_of(k, b, h / shape.group()); }
  matrix_view<const C> value(idx_t b, idx_t h) const { return head_of(v, b, h / shape.group()); }
  matrix_view<S> result(idx_t b, idx_t h) const { return head_of(out, b, h); }
};

/// A checked call, and what its own checks and its driver need.
template <class S, class Options>
struct attention_call : attention_views<S> {
  call_views views;
  Options options;
  execution& exec;
};

/// Checks views and lengths; lse may be the null view.
template <template <class> class Options, class Q, class K, class V, class O, class Given>
auto checked_call(const char* name, const Q& q, const K& k, const V& v, O& out, Given& options, execution_ref& exec,
                  const memory_layout& lse = {}) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  using S = element_of<const Q&>;
  attention_call<S, Options<S>> call{{view_in(q), view_in(k), view_in(v), view_in(out)}, call_views(name),
                                     options_or_default<Options<S>>(options), plain_execution_of(name, exec, options)};
  call.shape = check_attention(call.views, call.q, call.k, call.v, call.out, lse);
  call.lengths = check_lengths(call.views, call.shape, call.options);
  return call;
}

/// What the backward pass of a softmax has of the forward call, of out only the extents, and the gradient of lse.
struct forward_rows {
  memory_layout out, lse, d_lse;
};

/// Checks views, lengths and the gradients of q, k and v.
template <template <class> class Options, class Q, class K, class V, class D, class Gradients, class Given>
auto checked_backward_call(const char* name, const Q& q, const K& k, const V& v, const D& d_out,
                           const Gradients& gradients, Given& options, execution_ref& exec,
                           const forward_rows* rows = nullptr) {
  using S = element_of<const Q&>;
  require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  require_one_element_type<const Q&, const Q&, const D&, tensor_view<S>>();
  attention_call<S, Options<S>> call{{as_view(q), as_view(k), as_view(v)}, call_views(name),
                                     options_or_default<Options<S>>(options), plain_execution_of(name, exec, options)};
  call_views& views = call.views;
  const tensor_view<const S> none(nullptr, {call.q.extent(0), call.q.extent(1), call.q.extent(2), call.v.extent(3)});
  const memory_layout result = rows ? rows->out : memory_layout(none);
  views.read("q", call.q), views.read("k", call.k), views.read("v", call.v);
  if (rows) views.read("out", result);
  const attention_shape s = call.shape = check_attention_extents(views, call.q, call.k, call.v, result);
  if (rows)
    read_gradient_of_out(views, s, result, as_view(d_out), rows->lse, rows->d_lse);
  else
    views.read_like("d_out", as_view(d_out), "the result", result);
  views.gradient("q", gradients.q, call.q);
  views.gradient("k", gradients.k, call.k);
  views.gradient("v", gradients.v, call.v);
  call.lengths = check_lengths(views, s, call.options);
  return call;
}
/// The same of a softmax, which takes the forward call's out.
template <template <class> class Options, class Q, class K, class V, class O, class D, class Gradients, class Given>
auto checked_backward_call(const char* name, const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const Gradients& gradients, Given& options, execution_ref& exec) {
  using S = element_of<const Q&>;
  require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  const forward_rows rows{as_view(out), options_or_default<Options<S>>(options).lse, gradients.d_lse};
  return checked_backward_call<Options>(name, q, k, v, d_out, gradients, options, exec, &rows);
}

}}}  // namespace attn::ATTN_ISA::detail
