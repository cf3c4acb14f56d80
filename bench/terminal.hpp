// attn_bench: status lines while it runs, and how numbers are written.
#pragma once

#include <string>

namespace bench {

bool is_terminal();  // of standard error, where status lines go

/// One line that the next one overwrites; on anything but a terminal a line of its own.
[[gnu::format(printf, 1, 2)]] void show_status(const char* format, ...);
void clear_status();

/// A line on standard error.
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);

std::string time_text(double seconds);  // "12.3 ms"
std::string memory_text(double bytes);  // "1.5 MiB"

}  // namespace bench
