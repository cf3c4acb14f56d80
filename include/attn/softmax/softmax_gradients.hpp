// attn: the gradients of operators of exact softmax attention that have none of their own: topk_blocks, selected_keys;
// block, strided, bigbird, pattern_softmax.
#pragma once

#include <attn/core/view_field.hpp>
#include <attn/softmax/detail/shared_fields.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of operators that have no others, as topk_blocks: those given. S is the element type of the call.
template <class S>
struct softmax_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::alibi_slopes;

  view_field<S> q{}, k{}, v{};
  /// [H]
  view_field<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  view_field<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// The gradients of softmax attention by a pattern: those given. S is the element type of the call.
template <class S>
struct pattern_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::relative_bias | detail::fields::alibi_slopes;

  tensor_view<S> q{}, k{}, v{};
  /// As relative_bias: [H or 1, 2R + 1].
  view_field<real, 2> relative_bias{};
  /// As in softmax_gradients.
  tensor_view<real, 1> alibi_slopes{}, sinks{};
  tensor_view<const real, 3> d_lse{};
  bool accumulate = false;
};

}}  // namespace attn::ATTN_ISA
