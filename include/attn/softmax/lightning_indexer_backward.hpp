// attn: the gradients of the scores of lightning_indexer, with which an indexer is trained.
//
//   attn::lightning_indexer(q, k, indices, {.causal = true, .topk = 256, .w = w, .scores = scores});
//   attn::lightning_indexer_backward(q, k, indices, d_scores, {.q = dq, .k = dk, .w = dw},
//                                    {.causal = true, .topk = 256, .w = w});
//
// Of I(t, s) = sum_h w[t, h] act(scale q_h,t . k_s) at the pairs that the indices name, given dI there:
//   dw[t, h] = sum_s dI act(z),  dq_h,t = scale sum_s dI w act'(z) k_s,  dk_s = scale sum_t,h dI w act'(z) q_h,t
// where z = scale q_h,t . k_s; the derivative of max(0, x) at 0 is 0. The choice itself has no gradient. The score of a
// block is that of its key with the largest one, which alone has a gradient: of equal ones the earlier. With per_head
// every head has its own list and dI.
//
// Shapes   q, k, the options: as the forward call's. indices of the forward call, what it wrote or any others: -1, keys
//          beyond the true length and, with causal, those that the query does not see are skipped. d_scores as indices,
//          in the compute type (float for 16-bit elements). Gradients have the shapes of what they are of; options.w
//          must be given where its gradient is wanted. options.scores is not read.
// Cost     6 B HI Lq topk DI operations, with blocks 2 B HI Lq topk block DI more. Scratch: for every batch item in
//          progress Lk DI numbers, up to four times that for long sequences.
// Throws   std::invalid_argument for shapes, options or indices that do not fit, for gradients of what was not given or
//          that share memory with an input or one another, before anything is written.
#pragma once

#include <attn/softmax/detail/lightning_indexer_backward_run.hpp>
#include <attn/softmax/lightning_indexer.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients lightning_indexer_backward computes: those given. S is the element type of the call.
template <class S>
struct lightning_indexer_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{};
  /// [B, Lq, HI]
  view_field<real, 3> w{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// The gradients of the scores of chosen pairs. See the top of the file.
template <viewable Q, viewable K, viewable D, class Options = lightning_indexer_options<element_of<const Q&>>>
void lightning_indexer_backward(const Q& q, const K& k, const index_view& indices, const D& d_scores,
                                const lightning_indexer_gradients<element_of<const Q&>>& gradients,
                                Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  detail::require_one_element_type<const Q&, const K&, const K&, tensor_view<S>>();
  static_assert(std::same_as<element_of<const D&>, T>,
                "attn: d_scores is of the compute type: double for double elements, else float");
  const auto& given = detail::options_or_default<lightning_indexer_options<S>>(options);
  detail::call_views views("lightning_indexer_backward");
  const tensor_view<const T> d = as_view(d_scores);
  auto call = detail::indexer_inputs<S>(views, as_view(q), as_view(k), given,
                                        {{given.causal, given.span}, given.first_position, given.tail},
                                        detail::plain_execution_of("lightning_indexer_backward", exec, options));
  detail::check_chosen(views, call, detail::index_layout(indices), "indices");
  views.read("d_scores", d);
  detail::check_chosen(views, call, d, "d_scores");
  call.lengths = detail::check_lengths(views, call.shape, given);
  detail::check_lists(views, call.shape, call.lengths, indices, given.block, given.tail);
  views.gradient("q", gradients.q, call.q);
  views.gradient("k", gradients.k, call.k);
  views.gradient("w", gradients.w, call.w);
  detail::run_lightning_indexer_backward<S>(call, indices, d, gradients);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_lightning_indexer_backward(const indexer_call<S>&, const index_view&,                     \
  const tensor_view<const compute_type<S>>&, const lightning_indexer_gradients<S>&)
#include <attn/core/detail/compiled.hpp>
