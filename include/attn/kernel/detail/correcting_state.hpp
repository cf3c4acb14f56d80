// attn: the states of the delta rule and of dplr.
#pragma once

#include <attn/kernel/detail/correcting_step.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a delta_rule_state or dplr_state.
struct delta_rule_state_extents {
  idx_t batch = 1;
  /// Value heads; of the delta rule, the number of key heads divides it.
  idx_t heads = 1;
  /// Dims of keys and of values.
  idx_t dim = 0, value_dim = 0;
  /// Tokens that rollback can undo.
  idx_t keep = 0;
};

namespace detail {

/// What delta_rule_state and dplr_state have in common, for elements of type S.
template <rule R, class S>
class correcting_state : public state_sequences<compute_type<S>> {
  using T = compute_type<S>;

 public:
  idx_t dim() const { return this->features(); }
  /// Element (d, e) of the state of one head.
  T value(idx_t b, idx_t h, idx_t d, idx_t e) const { return this->sums(b, h).value(d, e); }

 protected:
  correcting_state(const char* name, const delta_rule_state_extents& e)
      : state_sequences<T>(name, {.kind = R == rule::correct ? 4 : 5, .parts = sum_parts::values},
                           {e.batch, e.heads, e.dim, e.value_dim, e.keep}, 1) {}
};

}  // namespace detail
}}  // namespace attn::ATTN_ISA
