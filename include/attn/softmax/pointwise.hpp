// attn: attention whose weights are a function of the scores, without a softmax.
//
//   out_i = a_i sum_j f(s_ij) v_j,   s_ij = softcap(scale q_i.k_j) + bias_ij + t_(j - p_i) - slope |p_i - j| + shift,
//                                    a_i = weight row_weights_i
//   Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention": sigmoid, shift = -log n
//   Zhai et al. 2024, "Actions Speak Louder than Words" (HSTU): silu, weight = 1 / n
//   Wortsman et al. 2023, "Replacing softmax with ReLU in Vision Transformers": relu or squared_relu, weight = 1 / n
//
//   attn::pointwise(q, k, v, out, {.activation = attn::pointwise_activation::sigmoid, .causal = true, .shift = -8});
//   attn::pointwise(q, k, v, out, {.left = 127, .right = 0, .weight = 1.f / 512}, threads);
//   attn::pointwise(q, k, v, out, {}, [](float s) { return s > 0 ? s * s * s : 0; });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. Elements as in
//          full_softmax; where the processor multiplies bf16 numbers, weights of bf16 values are rounded to bf16. Query
//          i is at position p_i = i + Lk - Lq (true lengths), or i + first_position.
// Cost     2 B H (D + Dv) operations for every visible key of a query. Scratch: as full_softmax, and where there is a
//          window as sliding_window; never Lq x Lk. n is yours: it is usually the longest length in training, not that
//          of the call.
// Result   A key that is not seen (causal, window, lengths, masks, a bias of -infinity) adds nothing, whatever
//          f(-infinity) is. A row that sees no key is 0, and so are rows of padding. There is no denominator and no
//          lse: results over disjoint sets of keys, with one shift and weight, add up. A sigmoid below 2^-127 (double:
//          2^-1023) counts as 0. A key of weight 0, as of relu, adds nothing, even if its value is NaN.
// Values   `out` is finite where the sums of f(s) v are.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// f(s), a function of the caller's, may stand in the place of `activation`. It is inlined, and is called in no
// particular order, from all threads of the execution at once. For keys that are hidden it may be called with 0; what
// it returns is not used.
#pragma once

#include <attn/softmax/detail/pointwise_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of pointwise for elements of type S.
template <class S>
struct pointwise_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::first_position |
                                     detail::fields::of_pointwise;

  /// f: sigmoid, silu, relu or squared_relu (pointwise_activation.hpp).
  pointwise_activation activation = pointwise_activation::sigmoid;
  /// As in full_softmax_options.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  std::optional<idx_t> first_position{};
  /// Number of keys seen before and after the query's own, >= 0; unlimited unless given.
  idx_t left = unlimited, right = unlimited;
  /// a_i: a factor of the result, and one for every row, [B or 1, Lq].
  real weight = 1;
  view_field<const real, 2> row_weights{};
  /// Added to the scores, after all else: of sigmoid -log n.
  real shift = 0;
  /// As in full_softmax_options.
  view_field<const real> bias{};
  view_field<const real, 2> relative_bias{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{};
};

/// Attention without a softmax; options, f and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = pointwise_options<element_of<const Q&>>,
          class F = detail::no_function>
void pointwise(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, F&& f = {},
               execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<pointwise_options<S>>(options);
  auto weights = detail::pointwise_function_of<S>(given, f);
  execution_ref threads(detail::execution_of(exec, options, f));
  auto call = detail::checked_call<pointwise_options>("pointwise", q, k, v, out, given, weights, threads);
  detail::check_pointwise(call);
  call.views.at_least("right", 0, given.right);
  detail::run_pointwise(call, sliding_window_options<S>{.causal = given.causal, .first_position = given.first_position,
                                                        .left = given.left, .right = given.right});
}

}}  // namespace attn::ATTN_ISA
