#include "terminal.hpp"

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace bench {
namespace {

std::string three_digits(double value, const char* unit) {
  char text[64];
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::snprintf(text, sizeof text, "%.*f %s", decimals, value, unit);
  return text;
}

}  // namespace

bool is_terminal() {
#if __has_include(<unistd.h>)
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  return terminal;
#else
  return false;
#endif
}

void show_status(const char* format, ...) {
  clear_status();
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (!is_terminal()) std::fputc('\n', stderr);
  std::fflush(stderr);
}

void clear_status() {
  if (is_terminal()) std::fputs("\r\033[K", stderr);
}

void say(const char* format, ...) {
  clear_status();
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6, "us");
  if (seconds < 1) return three_digits(seconds * 1e3, "ms");
  return three_digits(seconds, "s");
}

std::string memory_text(double bytes) {
  if (bytes < 1024) return std::to_string(static_cast<int>(bytes)) + " B";
  if (bytes < 1024.0 * 1024) return three_digits(bytes / 1024, "KiB");
  if (bytes < 1024.0 * 1024 * 1024) return three_digits(bytes / (1024.0 * 1024), "MiB");
  return three_digits(bytes / (1024.0 * 1024 * 1024), "GiB");
}

}  // namespace bench
