// attn: what happens where a call is refused.
//
//   attn::set_error_handler([](const char* message) { log(message); });     // in programs without exceptions
//
// A call that does not fit throws std::invalid_argument before anything is written, a damaged stream
// std::runtime_error, memory that runs out std::bad_alloc. Where exceptions are switched off (-fno-exceptions), the
// handler gets the message of the first two, stderr unless one is set, and then the program ends. It is that of the
// files compiled with the same instructions; no file of a program may have exceptions where another has none.
#pragma once

#include <attn/core/detail/config.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <utility>

namespace attn { inline namespace ATTN_ISA {

using error_handler = void (*)(const char* message);

namespace detail {

inline std::atomic<error_handler> current_error_handler{[](const char* message) {
  std::fputs(message, stderr);
  std::fputc('\n', stderr);
}};

/// Throws an E, or ends the program.
template <class E, class... Arguments>
[[noreturn, gnu::cold]] void raise(Arguments&&... arguments) {
#ifdef __cpp_exceptions
  throw E(std::forward<Arguments>(arguments)...);
#else
  current_error_handler.load()(E(std::forward<Arguments>(arguments)...).what());
  std::abort();
#endif
}

/// What body() throws; null where it does not.
template <class Body>
std::exception_ptr error_of(Body&& body) {
#ifdef __cpp_exceptions
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
#else
  body();
#endif
  return nullptr;
}

/// body(), and if that throws undo() before the exception goes on.
template <class Body, class Undo>
void do_or_undo(Body&& body, Undo&& undo) {
  if (const std::exception_ptr error = error_of(body)) {
    undo();
    std::rethrow_exception(error);
  }
}

}  // namespace detail

/// Sets the handler, which several threads may call; returns the one before. Only called where exceptions are switched
/// off.
inline error_handler set_error_handler(error_handler handler) {
  return detail::current_error_handler.exchange(handler);
}

}}  // namespace attn::ATTN_ISA
