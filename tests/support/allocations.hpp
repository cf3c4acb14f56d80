#pragma once
// How often the program has asked for memory so far: operator new, and malloc where the linker lets us see it.
#include <cstddef>

namespace testing {

std::size_t allocations();

}  // namespace testing
