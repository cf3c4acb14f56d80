#pragma once
// How often the program has asked for memory so far: operator new, and malloc where the linker lets us see it.
#include <cstddef>

namespace testing {

std::size_t allocations();

#if defined(ATTN_TEST_WRAP_MALLOC)
inline constexpr std::size_t counted_ways = 3;  // new, malloc, Eigen
#else
inline constexpr std::size_t counted_ways = 1;  // new
#endif

}  // namespace testing
