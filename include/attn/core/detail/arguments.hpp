// attn: the last arguments of every operator. Options, a callable where the operator takes one, and an execution may
// each be left out:
//
//   f(q, k, v, out)                       f(q, k, v, out, {.causal = true}, score, threads)
//   f(q, k, v, out, threads)              f(q, k, v, out, {.causal = true}, threads)
//
// One declaration serves all of these: a parameter whose argument is written in braces is not deduced, so `Options` is
// then its default, the options of this operator; what is deduced is checked here.
//
//   template <viewable Q, ..., class Options = f_options<element_of<const Q&>>, class Score = no_score>
//   void f(const Q& q, ..., Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
//     const auto& given = options_or_default<f_options<S>>(options);
//     auto& score_given = callable_or_default<no_score>(score);
//     execution& e = execution_of(exec, options, score);
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/execution.hpp>
#include <attn/core/view_field.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The view of an argument that is copied at once: a view itself, where it is one.
template <viewable X>
constexpr decltype(auto) view_in(X& x) {
  if constexpr (is_view<std::remove_const_t<X>>) return (x);
  else return as_view(x);
}

template <class X>
concept is_execution = std::same_as<std::remove_cvref_t<X>, execution>;

template <class Options>
inline const Options default_options{};

/// The options given, or the defaults where an execution is given in their place.
template <class Options, class Given>
const Options& options_or_default(const Given& given) {
  if constexpr (std::same_as<Given, Options>) {
    return given;
  } else {
    static_assert(is_execution<Given>,
                  "attn: expected the operator's own options for this element type, or an execution");
    return default_options<Options>;
  }
}

/// The callable given, or Default{} where there is none.
template <class Default, class Given>
decltype(auto) callable_or_default(Given& given) {
  if constexpr (is_execution<Given>)
    return Default{};
  else
    return (given);
}

template <class Last>
execution* execution_in(Last& argument) {
  static_assert(!std::same_as<Last, const execution>, "attn: an execution must not be const: a call uses its memory");
  if constexpr (std::same_as<Last, execution>)
    return &argument;
  else
    return nullptr;
}

/// The execution of a call, whichever argument it is given as.
template <class... Others>
execution& execution_of(execution_ref& last, Others&... others) {
  execution* given = nullptr;
  ((given = given ? given : execution_in(others)), ...);
  return given ? *given : last.get();
}

/// Whether the rows of an operator may have the same bits however they are asked for (execution::set_invariant). One
/// without such a form refuses an execution that wants it, before anything is written.
enum class invariant_form { none, rows };

inline void check_invariant(const validator& check, const execution& exec) {
  if (exec.invariant()) check.fail("an execution that is not invariant, since the operator has no such form", "one");
}
/// The execution of an operator that has none.
template <class... Others>
execution& plain_execution_of(const char* name, execution_ref& last, Others&... others) {
  execution& exec = execution_of(last, others...);
  check_invariant(validator(name), exec);
  return exec;
}

}}}  // namespace attn::ATTN_ISA::detail
