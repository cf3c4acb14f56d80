// attn: the rules of recurrences, and their parameters.
#pragma once

#include <attn/kernel/detail/stored_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

enum class decay_kind { none, token, channel };

/// How a token changes the state S: phi(k) v^T is added; or k times what v differs by from the value stored for k; or
/// k v^T and b (a^T S), so that a decay and a matrix of rank 1 act on it.
enum class rule { add, correct, low_rank };
/// Whether what a token writes depends on the state.
template <rule R>
inline constexpr bool reads_state = R != rule::add;

template <rule R, class T>
struct recurrence_driver;
template <rule R, class T>
struct recurrence_backward_driver;

/// The parameters of a recurrence (recurrence.hpp), beside decays.
template <class T>
struct recurrence_parameters {
  T scale = T(1);
  tensor_view<const T> log_decay{};
  stored_tensor<T> a{}, b{};  // of rule::low_rank
  tensor_view<const T, 2> bonus{};
  tensor_view<const T, 3> beta{};
  T unit_norm_eps = T(-1);  // below 0: q and k are not normalised
  tensor_view<const T> initial_state{};
  tensor_view<const T, 3> initial_weights{};
  tensor_view<T> final_state{};
  tensor_view<T, 3> final_weights{};

  bool per_token() const { return log_decay.data() != nullptr && log_decay.extent(3) == 1; }
  bool per_channel() const { return log_decay && log_decay.extent(3) != 1; }
};

}}}  // namespace attn::ATTN_ISA::detail
