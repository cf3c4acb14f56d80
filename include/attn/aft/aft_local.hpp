// attn: the attention-free transformer with biases for near positions only.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_tt') v_t' / sum_t' e^(k_t' + w_tt')       each channel on its own
//   with w_tt' = 0 for |t - t'| >= s: such keys are seen all the same.
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_local(q, k, v, out, w, {.window = 128});                            // w [length, length]
//   attn::aft_local(q, k, v, out, w, {.window = 128, .band = true, .causal = true});   // w [length, 2 * 128 - 1]
//
// k and w may be of any size up to 5e37, as for aft_full. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]; w [L, L], one for all heads, or [H, L, L]. A band is [L, 2 s - 1] or
//          [H, L, 2 s - 1]: entry p of row t belongs to t' = t + p - s + 1. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L (2 s + 94) D operations, half of it when causal; some data take longer, as for aft_full. Scratch: a
//          sixteenth of k, and about a million numbers a thread.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_window.hpp>

namespace attn::inline ATTN_ISA {

/// Options of aft_local for elements of type S.
template <class S>
struct aft_local_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// s: positions nearer than this have a bias, >= 1; may be longer than the sequence.
  index window = 128;
  /// w is a band [L, 2 s - 1] instead of [L, L].
  bool band = false;
  /// Row t sees the keys up to t.
  bool causal = false;
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
  /// True lengths, one per batch item. Rows of padding are 0 in out.
  list_view<index> lengths{};
};

namespace detail {

template <class S>
void aft_local(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
               const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<const S>& w,
               const aft_local_options<S>& options, execution& exec) {
  const aft_call<S> call = check_aft(check, q, k, v, out, options);
  check.at_least("window", 1, options.window);
  check.fits("window", {2, options.window});
  check_parameter(check, w, out);
  check.broadcasts("w heads", call.heads, w.extent(1));
  check.equal("w rows = length", call.length, w.extent(2));
  if (options.band)
    check.equal("w columns = 2 * window - 1 =", 2 * options.window - 1, w.extent(3));
  else
    check.equal("w columns = length", call.length, w.extent(3));
  const bool shared = w.extent(1) == 1;
  const auto matrix = [&](index h) { return head_of(w, 0, shared ? 0 : h); };
  const aft_window_grid grid{1, call.length, 0, options.window - 1, options.causal};
  aft_window_call<S, decltype(matrix)>{call, grid, options.band ? aft_window_layout::band : aft_window_layout::square,
                                       shared, matrix}
      .run(exec);
}

}  // namespace detail

/// Attention-free mixing with biases for near positions, by an execution, which may be left out. See the top of the
/// file.
template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_local(const Q& q, const K& k, const V& v, O&& out, const W& w,
               const aft_local_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  using S = element_of<const Q&>;
  detail::aft_local<S>(detail::validator("aft_local"), as_view(q), as_view(k), as_view(v), as_view(out),
                       detail::parameter_view(w), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_local(const Q& q, const K& k, const V& v, O&& out, const W& w,
               const aft_local_options<element_of<const Q&>>& options = {}) {
  execution serial;
  aft_local(q, k, v, out, w, options, serial);
}

}  // namespace attn
