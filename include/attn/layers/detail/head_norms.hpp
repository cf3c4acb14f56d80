// attn: what multi_head does to queries and keys between their projection and the operator: RMS norms and rotations.
#pragma once

#include <attn/core/rotary.hpp>
#include <attn/layers/layer_norm.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// x [B, L, n] as rows of `dim` numbers, [B, L n / dim, dim]; where those are not whole tokens, of whole memory.
template <class S>
tensor_view<S, 3> rows_of_norm(const tensor_view<S, 3>& x, idx_t dim) {
  if (x.extent(2) == dim) return x;
  return {x.data(), {x.extent(0), dim == 0 ? 0 : x.extent(1) * (x.extent(2) / dim), dim}};
}

/// Fills a norm without means.
template <class S>
void set_norm_of_heads(row_norm<compute_type<S>>& norm, const tensor_view<const S, 1>& gamma, compute_type<S> eps) {
  norm.template set<S>({.gamma = gamma}, eps);
  norm.centred = false;
}

/// to = RMS norm of `from`, which may be the same.
template <class S>
void normalise_heads(const tensor_view<S, 3>& from, const tensor_view<S, 3>& to, const tensor_view<const S, 1>& gamma,
                     compute_type<S> eps, execution& exec) {
  using T = compute_type<S>;
  const idx_t dim = gamma.extent(0);
  auto norm = exec.shared_scratch([dim](arena& memory) { return row_norm<T>(memory, dim); });
  set_norm_of_heads<S>(norm, gamma, eps);
  run_layer_norm<T>(rows_of_norm<const S>(from, dim), rows_of_norm(to, dim), norm, exec);
}

/// Rotates in place, or back.
template <class S>
void rotate_heads(const tensor_view<S, 3>& x, idx_t heads, const rotary_options<S>& options, bool back,
                  execution& exec) {
  const tensor_view<S> of_heads = split_heads(x, heads);
  run_rotary<S>(validator("multi_head"), of_heads, of_heads, {"q", "q"}, options, back, false, exec);
}

/// The check of a norm's weight: of the numbers of a head, or of all heads.
template <class S>
void check_norm_of_heads(layer_views& check, const char* what, const tensor_view<const S, 1>& gamma, idx_t heads,
                         idx_t dim) {
  check.option(what, gamma);
  if (gamma && gamma.extent(0) != dim && gamma.extent(0) != heads * dim)
    check.fail({what, " of ", dim, " numbers, a head's, or of all heads ", heads * dim}, gamma.extent(0));
}

}}}  // namespace attn::ATTN_ISA::detail
