#pragma once
// Bad input: std::invalid_argument with a message of the form "attn::NAME: expected ...; found ...".
#include <stdexcept>
#include <string>

namespace testing {

// The message with which `call` was refused; empty if it went through.
template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

inline bool well_formed(const std::string& message, const std::string& name) {
  // By hand: <regex> costs every file that includes it three seconds.
  const std::string begin = "attn::" + name + ": expected ", found = "; found ";
  const std::size_t at = message.rfind(found);
  return message.starts_with(begin) && message.find('\n') == std::string::npos && at != std::string::npos &&
         at > begin.size() && message[begin.size()] != ' ' && at + found.size() < message.size() &&
         message[at + found.size()] != ' ';
}

}  // namespace testing
