// attn: the drivers of pointwise are those of softmax attention, whose kernels find a pointwise_function in the place
// of a score function.
#pragma once

#include <attn/softmax/detail/full_softmax_run.hpp>
#include <attn/softmax/detail/pointwise_function.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Checks at compile time that the caller's function can be called, or that there is none.
template <class F, class T>
constexpr void require_function() {
  static_assert(std::is_invocable_r_v<T, F&, T> || std::same_as<std::remove_cvref_t<F>, no_function>,
                "attn: f must be callable as f(s) and return a number");
}

/// Checks at compile time that a derivative is given exactly where a function is.
template <class F, class D, class T>
constexpr void require_derivative() {
  if constexpr (std::same_as<std::remove_cvref_t<F>, no_function>)
    static_assert(std::same_as<std::remove_cvref_t<D>, no_function>, "attn: f_derivative without a function f");
  else
    static_assert(!std::same_as<std::remove_cvref_t<D>, no_function> && std::is_invocable_r_v<T, D&, T>,
                  "attn: the gradients of pointwise with a function f need its derivative: pass f_derivative(s) after "
                  "it");
}

template <class F>
using function_in = std::conditional_t<is_execution<F>, no_function, F>;

/// The function of a call: that of the options, or the caller's, in whose place an execution may be.
template <class S, class Options, class F, class D = no_function>
auto pointwise_function_of(const Options& given, F& f, D* derivative = nullptr) {
  using T = compute_type<S>;
  require_function<function_in<F>, T>();
  pointwise_function<T, function_in<F>, D> weights{given.activation, given.shift, given.weight, given.row_weights};
  if constexpr (!is_execution<F>) weights.function = &f;
  weights.derivative = derivative;
  return weights;
}
/// The same with its derivative.
template <class S, class Options, class F, class D>
auto differentiable_function_of(const Options& given, F& f, D& derivative) {
  require_derivative<function_in<F>, function_in<D>, compute_type<S>>();
  if constexpr (is_execution<D>)
    return pointwise_function_of<S>(given, f);
  else
    return pointwise_function_of<S>(given, f, &derivative);
}

/// Checks what only pointwise has.
template <class Call>
void check_pointwise(Call& call) {
  const auto& given = call.options;
  call_views& views = call.views;
  const int which = static_cast<int>(given.activation);
  if (which < 0 || which > static_cast<int>(pointwise_activation::squared_relu))
    views.fail("an activation of pointwise_activation", which);
  if (!std::isfinite(given.weight)) views.fail("a finite weight", given.weight);
  if (!std::isfinite(given.shift)) views.fail("a finite shift", given.shift);
  views.option("row_weights", given.row_weights, {{"row_weights batch", call.shape.batch, or_one},
                                                  {"row_weights length = query length", call.shape.queries}});
  views.at_least("left", 0, given.left);
}

template <class S, class F>
void run_pointwise(const softmax_call<S, F>& call, const sliding_window_options<S>& window) {
  if (window.left == unlimited && (window.causal || window.right == unlimited)) return run_full_softmax(call);
  run_sliding_window(call, window);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pointwise(const softmax_call<S, pointwise_function<compute_type<S>>>&,                    \
  const sliding_window_options<S>&)
#include <attn/core/detail/compiled.hpp>
