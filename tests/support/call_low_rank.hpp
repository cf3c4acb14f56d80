#pragma once
// The low-rank operators with every argument as a plain view, compiled once for all tests, and problems run through
// them.
#include <attn/low_rank/linformer_backward.hpp>
#include <attn/low_rank/nystrom_backward.hpp>

#include "reference/linformer.hpp"
#include "reference/nystrom.hpp"
#include "support/run.hpp"

namespace testing {

template <class S>
using projection_view = attn::tensor_view<const S, 3>;

template <class S>
struct compiled_linformer {
  using options = attn::linformer_options<S>;
  using gradients = attn::linformer_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, projection_view<S> e,
                   projection_view<S> f, const options&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, projection_view<S> e,
                       projection_view<S> f, in_view<S> d_out, const gradients&, const options&, attn::execution&);
};

template <class S>
struct compiled_nystrom {
  using options = attn::nystrom_options<S>;
  using gradients = attn::nystrom_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out, const gradients&, const options&,
                       attn::execution&);
};

using linformer_problem = problem<reference::linformer_options>;
using nystrom_problem = problem<reference::nystrom_options>;

inline reference::result expected(const linformer_problem& p) { return reference::linformer(p.q, p.k, p.v, p.options); }
inline reference::result expected(const nystrom_problem& p) { return reference::nystrom(p.q, p.k, p.v, p.options); }

template <class S>
projection_view<S> heads_view(const tensor<S>& e) {
  return {e.data.data(), {e.heads(), e.length(), e.dim()}};
}

// What a problem's reference options and the library's have in common; `seen` is its key_mask.
template <class Options>
void copy_common(const reference::softmax_options& from, Options& to, const key_mask_bytes& seen = {}) {
  if (from.scale) to.scale = static_cast<typename Options::real>(*from.scale);
  to.lengths = from.lengths, to.query_lengths = from.query_lengths, to.key_lengths = from.key_lengths;
  to.key_mask = seen.view();
}

template <class S>
linformer_problem rounded(linformer_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.e = rounded<S>(p.options.e), p.options.f = rounded<S>(p.options.f);
  round_options<S>(p.options);
  return p;
}
template <class S>
nystrom_problem rounded(nystrom_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.convolution = rounded<real<S>>(p.options.convolution);
  p.options.cutoff = static_cast<double>(static_cast<real<S>>(p.options.cutoff));
  round_options<S>(p.options);
  return p;
}

template <class S>
reference::result run(const linformer_problem& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), e = cast<S>(p.options.e),
                  f = cast<S>(p.options.f);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  attn::linformer_options<S> options;
  const key_mask_bytes seen(p.options.key_mask);
  copy_common(p.options, options, seen);
  options.lse = row_view(lse);
  compiled_linformer<S>::call(view(q), view(k), view(v), view(out), heads_view(e), heads_view(f), options, execution);
  return {cast<double>(out), cast<double>(lse)};
}

template <class S>
attn::nystrom_options<S> library_options(const reference::nystrom_options& from, const tensor<real<S>>& convolution,
                                         const key_mask_bytes& seen = {}) {
  attn::nystrom_options<S> options;
  copy_common(from, options, seen);
  options.landmarks = from.landmarks, options.iterations = from.iterations;
  options.cutoff = static_cast<real<S>>(from.cutoff);
  options.inverse = from.inverse == reference::pinv::exact         ? attn::pseudo_inverse::exact
                    : from.inverse == reference::pinv::whole_batch ? attn::pseudo_inverse::whole_batch
                                                                   : attn::pseudo_inverse::per_head;
  if (!convolution.empty()) options.convolution = {convolution.data.data(), {convolution.length(), convolution.dim()}};
  return options;
}

template <class S>
reference::result run(const nystrom_problem& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const tensor<real<S>> convolution = cast<real<S>>(p.options.convolution);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  compiled_nystrom<S>::call(view(q), view(k), view(v), view(out), library_options<S>(p.options, convolution, key_mask_bytes(p.options.key_mask)), execution);
  return {cast<double>(out), {}};
}

}  // namespace testing
