// attn_bench: memory the operators are timed on.
#pragma once

#include <attn/core/detail/eigen.hpp>

#include <cstddef>

namespace bench {

/// What numbers are for. Biases are unit normal like queries, keys, values, parameters and gradients; rates are uniform
/// in [0, 1), log decays in (-0.1, 0].
enum class role { query, key, value, parameter, gradient, bias, rate, log_decay };

/// `count` random numbers, the same for the same role, rounded to S. They are drawn once for the whole run: every
/// length and operator views the first `count` of them, and the pointer always holds. Where a page of memory is slow to
/// come by, drawing anew for every row took longer than the rows.
template <class S = float>
const S* drawn_numbers(role, std::size_t count);

/// Memory for `count` results, already touched, the same for the same slot.
template <class S = float>
S* result_memory(std::size_t count, int slot = 0);
inline constexpr int result_slots = 6;
inline constexpr int parameter_slot = 5;  // of the gradient of parameters

/// What drawing and touching have taken so far.
struct memory_cost {
  double seconds = 0, bytes = 0;
};
memory_cost memory_so_far();

}  // namespace bench
