#pragma once
// Bad input: std::invalid_argument with a message of the form "attn::NAME: expected ...; found ...".
#include <regex>
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
  return std::regex_match(message, std::regex("attn::" + name + ": expected \\S.*; found \\S.*"));
}

}  // namespace testing
