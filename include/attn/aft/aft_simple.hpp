// attn: the attention-free transformer without biases.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t') v_t' / sum_t' e^(k_t')       each channel separately
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_simple(q, k, v, out);
//   attn::aft_simple(q, k, v, out, {.causal = true}, threads);
//
// k may be of any size: nothing overflows. From 1e7 on (double: 5e15) keys that differ by less than 2^-20 of their size
// (double: 2^-49) count as equal. A k of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     Two passes over memory: k and v, then q and out (causal: then k and v too). Scratch: 3 D numbers for
//          every 256 tokens.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
//          Causal rows add key by key to the sums of the chunks before theirs: in float, means of values that are all
//          equal err by up to 2e-5 where the keys are equal too, by 2e-6 where they are not.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_simple_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_simple_options {
  bool causal = false;         ///< row t sees the keys up to t
  list_view<idx_t> lengths{};  ///< true lengths, one per batch item; rows of padding are 0 in out
  bool gate = true;            ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};    ///< [B or 1, L] of bool or bytes; false for a key that no row sees

  operator detail::aft_parameters() const { return {lengths, causal, gate, key_mask}; }
};

template <viewable Q, viewable K, viewable V, viewable O, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto call =
      detail::checked_aft<aft_simple_options<S>>("aft_simple", q, k, v, out, tensor_view<const S>(), options, exec);
  detail::run_aft_simple<S>(call.x, call.exec);
}

}}  // namespace attn::ATTN_ISA
