// attn: a callable without its type, as a parameter: what is called through it is compiled once.
#pragma once

#include <attn/core/detail/config.hpp>

#include <concepts>
#include <type_traits>

namespace attn::inline ATTN_ISA::detail {

template <class Signature>
class function_ref;

/// Refers to a callable that must outlive it; null unless given one.
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

}  // namespace attn::inline ATTN_ISA::detail
