// attn: messages of errors, from words and numbers. They lie in an array: strings would be compiled into every program.
#pragma once

#include <attn/core/detail/config.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <initializer_list>

namespace attn { inline namespace ATTN_ISA { namespace detail {

class error_text;

/// A word of a message: text that outlives it, or a number.
struct word {
  enum class kind { text, whole, real } is;
  union {
    const char* text;
    std::ptrdiff_t whole;
    double real;
  };

  word(const char* t) : is(kind::text), text(t) {}
  word(const error_text& t);
  word(std::integral auto n) : is(kind::whole), whole(static_cast<std::ptrdiff_t>(n)) {}
  word(double x) : is(kind::real), real(x) {}
};

/// Words one after another, cut off where they exceed its 1023 characters.
class error_text {
 public:
  [[gnu::cold, gnu::noinline]] error_text(std::initializer_list<word> words) {
    for (const word& w : words) append(w);
  }
  /// "[1, 2, 3]"
  [[gnu::cold, gnu::noinline]] static error_text list(const std::ptrdiff_t* numbers, int count) {
    error_text all{"["};
    for (int n = 0; n < count; ++n) all.append(n > 0 ? ", " : ""), all.append(numbers[n]);
    all.append("]");
    return all;
  }
  const char* c_str() const { return text_; }

 private:
  [[gnu::cold, gnu::noinline]] void append(word w) {
    char* const end = text_ + size_;
    const std::size_t left = sizeof text_ - size_;
    const int more = w.is == word::kind::text   ? std::snprintf(end, left, "%s", w.text)
                     : w.is == word::kind::real ? std::snprintf(end, left, "%g", w.real)
                                                : std::snprintf(end, left, "%td", w.whole);
    size_ += (std::min)(static_cast<std::size_t>((std::max)(more, 0)), left - 1);
  }

  char text_[1024] = {};
  std::size_t size_ = 0;
};

inline word::word(const error_text& t) : word(t.c_str()) {}

}}}  // namespace attn::ATTN_ISA::detail
