// attn: references to callables whose type is not known.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <concepts>
#include <type_traits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A reference to a callable with its type erased, so that code that calls through it is compiled once. The callable
/// must outlive it. Null unless given.
template <class Signature>
class function_ref;
template <class Result, class... Args>
class function_ref<Result(Args...)> {
 public:
  function_ref() = default;
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, function_ref> && std::is_invocable_r_v<Result, const F&, Args...>)
  function_ref(const F& f)
      : function_(&f),
        call_([](const void* g, Args... args) -> Result { return (*static_cast<const F*>(g))(args...); }) {}

  explicit operator bool() const { return call_ != nullptr; }
  Result operator()(Args... args) const { return call_(function_, args...); }

 private:
  const void* function_ = nullptr;
  Result (*call_)(const void*, Args...) = nullptr;
};

}}}  // namespace attn::ATTN_ISA::detail
