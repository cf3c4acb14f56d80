// attn: the extents a state or cache is made for.
//
//   attn::kv_cache<float> cache({.batch = 2, .heads = 8, .dim = 64});
#pragma once

#include <attn/core/detail/attention_shape.hpp>

namespace attn::inline ATTN_ISA {

/// Extents of a state that keeps keys and values, or sums over their channels.
struct state_extents {
  index batch = 1;
  /// Key heads.
  index heads = 1;
  /// Of keys.
  index dim = 0;
  /// Of values; that of keys unless given.
  index value_dim = -1;
};

/// Extents of a state of kernel attention: linear_state, performer_state, rfa_state.
struct kernel_state_extents {
  index batch = 1;
  /// Key heads; query heads where features, decay or gate differ between those.
  index heads = 1;
  /// Of a token: those of linear's map, or the rows of W of performer and rfa.
  index features = 0;
  index value_dim = 0;
  /// Tokens that rollback can undo.
  index keep = 0;
};

namespace detail {

/// The same with value_dim filled in. Throws std::invalid_argument for negative extents.
inline state_extents check_state_extents(const validator& check, state_extents e) {
  if (e.value_dim == -1) e.value_dim = e.dim;
  check.at_least("batch", 0, e.batch);
  check.at_least("heads", 0, e.heads);
  check.at_least("dim", 0, e.dim);
  check.at_least("value_dim", 0, e.value_dim);
  return e;
}

/// What every state of tokens tells of itself.
class token_state {
 public:
  /// Tokens fed so far.
  index tokens() const { return tokens_; }
  index batch() const { return extents_.batch; }
  /// Key heads.
  index heads() const { return extents_.heads; }
  index dim() const { return extents_.dim; }
  index value_dim() const { return extents_.value_dim; }

  /// For the step: k and v of a call fit.
  void check_tokens(const validator& check, const memory_layout& k, const memory_layout& v) const {
    detail::check_tokens(check, batch(), heads(), dim(), value_dim(), k, v);
  }

 protected:
  /// Throws std::invalid_argument for negative extents.
  token_state(const char* name, const state_extents& extents)
      : extents_(check_state_extents(validator(name), extents)) {}

  state_extents extents_;
  index tokens_ = 0;
};

}  // namespace detail
}  // namespace attn::inline ATTN_ISA
