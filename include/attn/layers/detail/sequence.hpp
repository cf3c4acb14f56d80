// attn: what the layers take and give: sequences [batch, length, dim], and the checks they share.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/execution.hpp>

namespace attn::inline ATTN_ISA {

/// The view [batch, length, dim] of an argument: of such a view itself, or of an Eigen matrix [length, dim], or of an
/// mdspan.
template <viewable X>
constexpr auto as_sequence(X&& x) {
  using object = std::remove_cvref_t<X>;
  if constexpr (detail::is_view<object>) {
    static_assert(object::rank == 3, "attn: sequences must be [batch, length, dim]");
    return x;
  } else if constexpr (detail::eigen_memory<X>) {
    return tensor_view<detail::eigen_element<X>, 3>(x);
  } else {
    return tensor_view<typename object::element_type, 3>(x);
  }
}

/// What mixes the tokens of a sequence: mixer(x, out, execution), both [batch, length, dim]. It fills out, which may
/// lie in any memory but x's.
template <class F, class S>
concept sequence_function = std::invocable<F&, const tensor_view<const S, 3>&, const tensor_view<S, 3>&, execution&>;

namespace detail {

template <class X>
using sequence_element = typename decltype(as_sequence(std::declval<X>()))::value_type;

/// The types of a call of a layer, checked where the compiler can.
template <class X, class Out>
constexpr void require_sequences() {
  static_assert(element<sequence_element<X>>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<sequence_element<X>, sequence_element<Out>>,
                "attn: the sequences of a layer must have one element type");
  static_assert(!std::is_const_v<typename decltype(as_sequence(std::declval<Out>()))::element_type>,
                "attn: out must be writable, but its elements are const");
}

/// A parameter that is given: extents as wanted, readable, apart from what is written.
template <class P, class S>
void check_parameter(const validator& check, const char* what, const P& parameter, const char* written,
                     const tensor_view<S, 3>& out) {
  check.readable(what, parameter);
  check.no_alias(written, out, what, parameter);
}

/// Out [batch, length, dim] for x [batch, length, ...].
template <class S>
void check_sequences(const validator& check, const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, index dim) {
  check.readable("x", x);
  check.writable("out", out);
  check.equal("out batch = x batch", x.extent(0), out.extent(0));
  check.equal("out length = x length", x.extent(1), out.extent(1));
  check.equal("out dim", dim, out.extent(2));
  check.fits("x batch * length", {x.extent(0), x.extent(1)});  // counted even where the dim is 0
}

/// Out is x itself, or apart from it.
template <class S>
void check_in_place(const validator& check, const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out) {
  bool same = x.data() == out.data() && x.extents() == out.extents();
  for (int axis = 0; axis < 3; ++axis) same &= x.extent(axis) < 2 || x.stride(axis) == out.stride(axis);
  if (!same) check.no_alias("out", out, "x", x);
}

/// Row n of all the rows of a sequence.
template <class S>
S* token(const tensor_view<S, 3>& x, index n) {
  return x.data() + n / x.extent(1) * x.stride(0) + n % x.extent(1) * x.stride(1);
}
template <class S>
index tokens(const tensor_view<S, 3>& x) {
  return x.extent(0) * x.extent(1);
}

/// A row of numbers to and from memory of any stride.
template <class S, class T>
void load_row(const S* from, index stride, index count, T* to) {
  if (stride == 1)
    for (index n = 0; n < count; ++n) to[n] = static_cast<T>(from[n]);
  else
    for (index n = 0; n < count; ++n) to[n] = static_cast<T>(from[n * stride]);
}
template <class T, class S>
void store_row(const T* from, index count, S* to, index stride) {
  if (stride == 1)
    for (index n = 0; n < count; ++n) to[n] = static_cast<S>(from[n]);
  else
    for (index n = 0; n < count; ++n) to[n * stride] = static_cast<S>(from[n]);
}

}  // namespace detail
}  // namespace attn
