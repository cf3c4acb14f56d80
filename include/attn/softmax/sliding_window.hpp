// attn: sliding-window attention with dilation and global tokens.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys the query sees: with the query at position p = i + Lk -
//   Lq or i + first_position, key j with -left d <= j - p <= right d and (j - p) mod d = 0, d the dilation, and every
//   global key. A global query sees every key.
//                           Beltagy, Peters, Cohan 2020, "Longformer"; sliding windows from Child 2019 on
//
//   attn::sliding_window(q, k, v, out, {.left = 128, .right = 0});
//   attn::sliding_window(q, k, v, out, {.left = 64, .right = 64, .dilation = per_head, .global_positions = first});
//
// Shapes   as full_softmax, and so are the values for which `out` is finite.
// Cost     2 B H (D + Dv) operations for every visible key of a query; keys that no query sees are not read. Scratch
//          per thread: about (w + max(w, 768) + 300 + global positions) (D + Dv) numbers, w = left + right, whatever
//          the length; beside these what log_decay, relative_keys and position_queries need (full_softmax_options).
// Result   A row that sees no key is 0 and its lse the sink, -infinity without one, as in rows of padding.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/sliding_window_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// No bound of the window on that side.
inline constexpr idx_t unlimited = (std::numeric_limits<idx_t>::max)();

/// Options of sliding_window for elements of type S.
template <class S>
struct sliding_window_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::first_position |
                                     detail::fields::distances | detail::fields::masks | detail::fields::of_softmax |
                                     detail::fields::dropout | detail::fields::skip;

  /// As in full_softmax_options; with causal a query sees no key after its own position, not even a global one.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  std::optional<idx_t> first_position{};
  /// Number of keys seen before and after the query's own, >= 0, or `unlimited`; a window of 2 w + 1 keys is left =
  /// right = w.
  idx_t left = 128, right = 128;
  /// Stride between the keys of the window, >= 1: a list of one for all heads, or of one per head; 1 unless given.
  list_view<idx_t> dilation{};
  /// Positions, >= 0, whose keys are seen by every query, and whose queries see every key. In any order; duplicates and
  /// positions beyond the length are ignored. global_counts: how many of them each batch item has, whose positions
  /// follow those of the item before; unless given, every item has all.
  list_view<idx_t> global_positions{}, global_counts{};
  /// Separate projections for the rows of global queries (all three, or none), of the shapes of q, k, v.
  view_field<const S> q_global{}, k_global{}, v_global{};
  /// As in full_softmax_options.
  view_field<const real, 3> relative_keys{};
  view_field<const S> relative_queries{};
  view_field<const real, 3> position_queries{};
  view_field<const real, 2> relative_bias{};
  view_field<const real, 3> log_decay{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Sliding-window attention; score as in full_softmax.hpp. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = sliding_window_options<element_of<const Q&>>,
          class Score = detail::no_score>
void sliding_window(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
                    execution_ref exec = {}) {
  auto call = detail::checked_call<sliding_window_options, detail::invariant_form::rows>("sliding_window", q, k, v, out,
                                                                                         options, score, exec);
  detail::check_window_options(call.views, call.shape, call.options, call.out);
  detail::run_sliding_window(call, call.options);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_sliding_window(softmax_call<S, no_score>, const sliding_window_options<S>&, idx_t)
#include <attn/core/detail/compiled.hpp>
