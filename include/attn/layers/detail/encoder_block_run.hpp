// attn: a call of encoder_block, its checks and its run.
#pragma once

#include <attn/layers/feed_forward.hpp>
#include <attn/layers/layer_norm.hpp>
#include <attn/layers/project.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_weights;
template <class S>
struct encoder_block_options;

namespace detail {

/// x R^T + b in `memory`, or x where there is no such weight.
template <class S>
tensor_view<const S, 3> project_residual(const tensor_view<const S, 3>& x, const project_weights<S>& w,
                                         const tensor_view<S, 3>& memory, execution& exec) {
  if (!w.weight) return x;
  run_project<S>(x, memory, w, exec);
  return memory;
}

/// Everything after the mixer is computed token by token, in one pass.
template <class T, class P>
void run_encoder_tail(const input_tokens<T>& x, const input_tokens<T>& mixed, const output_tokens<T>& out,
                      const row_norm<T>& norm_1, const row_norm<T>& norm_2, bool norm_first,
                      const feed_forward_memory<P>& weights, activation f, execution& exec) {
  const auto begin = [&](idx_t n, T* normed, T* h) {
    x.load(n, h);
    mixed.load(n, normed);
    for (idx_t d = 0; d < x.dim; ++d) h[d] += normed[d];
    if (!norm_first) norm_1.apply(h);
    std::copy(h, h + x.dim, normed);
    if (norm_first) norm_2.apply(normed);
  };
  const auto end = [&](idx_t n, const T* fed, T* h) {
    for (idx_t d = 0; d < x.dim; ++d) h[d] += fed[d];
    if (!norm_first) norm_2.apply(h);
    out.store(n, h);
  };
  feed_tokens<P>(x, weights, f, {begin, end}, exec);
}

template <class S>
void run_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                       const encoder_block_weights<S>& weights, const encoder_block_options<S>& options,
                       const mixer_ref<S>& mix, execution& exec) {
  using T = compute_type<S>;
  struct buffers {
    tensor_view<S, 3> mixed, normed, residual;
    row_norm<T> norm_1, norm_2;
  };
  const idx_t dim = out.extent(2);
  auto workspace = exec.workspace([&](arena& memory) {
    const auto allocated = [&](idx_t n) { return allocate_sequence<S>(memory, x.extent(0), x.extent(1), n); };
    return buffers{options.mixed ? tensor_view<S, 3>(options.mixed) : allocated(dim),
                   options.norm_first ? allocated(x.extent(2)) : tensor_view<S, 3>(),
                   weights.residual.weight ? allocated(dim) : tensor_view<S, 3>(),
                   row_norm<T>(memory, options.norm_first ? x.extent(2) : dim), row_norm<T>(memory, dim)};
  });
  auto& [mixed, normed, projected, norm_1, norm_2] = *workspace;
  norm_1.set(weights.norm_1, options.eps);
  norm_2.set(weights.norm_2, options.eps);
  norm_1.centred = norm_2.centred = !options.rms;
  if (options.norm_first) run_layer_norm<T>(x, normed, norm_1, exec);
  mix(options.norm_first ? tensor_view<const S, 3>(normed) : x, mixed, exec);
  if (out.empty()) return;
  const auto residual = project_residual(x, weights.residual, projected, exec);
  with_products<S>(exec, [&, &first = mixed, &before = norm_1, &after = norm_2]<class P>(std::type_identity<P>) {
    const feed_forward_memory<P> feed(weights.feed_forward);
    run_encoder_tail<T>(residual, first, out, before, after, options.norm_first, feed, options.activation, exec);
  });
}

template <class S>
void check_encoder_block(layer_views& check, const encoder_block_weights<S>& w,
                         const encoder_block_options<S>& options) {
  const idx_t inputs = check.x.extents[2], dim = w.residual.weight ? w.residual.weight.extent(0) : inputs;
  const idx_t dim_1 = options.norm_first ? inputs : dim;
  const tensor_view<S, 3>& mixed = options.mixed;
  check.out_dim(dim);
  if (w.residual.weight.per_head()) check.fail("residual weight as one matrix", "one for each head");
  if (!(options.eps >= 0)) check.fail("eps >= 0", static_cast<double>(options.eps));
  check.list("gamma of norm_1", w.norm_1.gamma, "feature", dim_1);
  check.list("beta of norm_1", w.norm_1.beta, "feature", dim_1);
  check.list("gamma of norm_2", w.norm_2.gamma, "feature", dim);
  check.list("beta of norm_2", w.norm_2.beta, "feature", dim);
  if (w.residual.weight)
    check.linear("residual weight", w.residual.weight, "residual bias", w.residual.bias, inputs);
  else if (w.residual.bias)
    check.fail("residual bias with a residual weight", "no residual weight");
  check_feed_forward(check, w.feed_forward, dim);
  check.fits("x", {check.x.extents[0], check.x.extents[1], inputs});
  check.fits("out", {check.x.extents[0], check.x.extents[1], dim});
  if (!mixed) return;
  check.extents({{"mixed batch = x batch", check.x.extents[0], mixed.extent(0)},
                 {"mixed length = x length", check.x.extents[1], mixed.extent(1)},
                 {w.residual.weight ? "mixed dim = out dim" : "mixed dim = x dim", dim, mixed.extent(2)}});
  if (check.backward) return check.read("mixed", mixed);
  check.write("mixed", mixed);
}

template <class S>
[[gnu::noinline]] void call_encoder_block(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                          const encoder_block_weights<S>& weights,
                                          const encoder_block_options<S>& options, const mixer_ref<S>& mix,
                                          execution& exec) {
  layer_views check{"encoder_block", x, out};
  check_encoder_block(check, weights, options);
  run_encoder_block<S>(x, out, weights, options, mix, exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
