// attn_bench: memory the operators are timed on.
#pragma once

#include <cstddef>

namespace bench {

enum class role { query, key, value, parameter };

/// `count` unit normal random numbers, the same for the same role. Memory is kept for the whole run and shared by all
/// lengths: the pointer holds until a larger count is asked for.
const float* normal_numbers(role, std::size_t count);

/// Memory for `count` results, already touched.
float* result_memory(std::size_t count);

}  // namespace bench
