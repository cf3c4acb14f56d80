// attn_bench: memory the operators are timed on.
#pragma once

#include <attn/core/detail/eigen.hpp>

#include <cstddef>
#include <memory>

namespace bench {

enum class role { query, key, value, parameter, gradient };

/// `count` unit normal random numbers, the same for the same role, rounded to S. Memory is kept for the whole run and
/// shared by all lengths: the pointer holds until a larger count is asked for.
template <class S = float>
const S* normal_numbers(role, std::size_t count);

/// Memory for `count` results, already touched, the same for the same slot.
template <class S = float>
S* result_memory(std::size_t count, int slot = 0);
inline constexpr int result_slots = 5;

/// Memory for the gradient of parameters, zeros.
template <class S>
std::shared_ptr<Eigen::Array<S, Eigen::Dynamic, 1>> parameter_memory(std::size_t count) {
  using memory = Eigen::Array<S, Eigen::Dynamic, 1>;
  return std::make_shared<memory>(memory::Zero(static_cast<Eigen::Index>(count)));
}

}  // namespace bench
