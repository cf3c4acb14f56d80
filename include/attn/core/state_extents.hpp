// attn: the extents a state or cache is made for.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});
#pragma once

#include <attn/core/detail/attention_shape.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a state that keeps keys and values, or sums over their channels.
struct state_extents {
  idx_t batch = 1;
  /// Key heads.
  idx_t heads = 1;
  /// Of keys.
  idx_t dim = 0;
  /// Of values; that of keys unless given.
  idx_t value_dim = -1;
};

/// How many tokens of a chunk a cache or state takes: of item b the first lengths[b]; all unless given.
struct append_options {
  list_view<idx_t> lengths{};
};

/// Extents of a state of kernel attention: linear_state, performer_state, rfa_state.
struct kernel_state_extents {
  idx_t batch = 1;
  /// Key heads; query heads where features, decay or gate differ between those.
  idx_t heads = 1;
  /// Features of a token: those of the map of linear, or the rows of W of performer and rfa.
  idx_t features = 0;
  idx_t value_dim = 0;
  /// Tokens that rollback can undo.
  idx_t keep = 0;
};

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

/// The same with value_dim filled in. Throws std::invalid_argument for extents that are negative or beyond memory.
inline state_extents check_state_extents(const validator& check, state_extents e) {
  if (e.value_dim == -1) e.value_dim = e.dim;
  check.at_least("batch", 0, e.batch);
  check.at_least("heads", 0, e.heads);
  check.at_least("dim", 0, e.dim);
  check.at_least("value_dim", 0, e.value_dim);
  check.fits("batch items", {e.batch, sizeof(idx_t)});
  check.fits("batch * heads * dims", {e.batch, e.heads, (std::max)(e.dim, e.value_dim)});
  return e;
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
