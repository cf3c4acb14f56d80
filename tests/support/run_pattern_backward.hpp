#pragma once
// The gradients of the operators that attend by a pattern, and of lsh.
#include "reference/lsh.hpp"
#include "support/call_lsh.hpp"
#include "support/run_backward.hpp"
#include "support/run_pattern.hpp"

namespace testing {

template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>&, const tensor<N>& v, const reference::basic_lsh_options<N>& o) {
  return reference::lsh(q, v, o);
}
template <class N, class Options>
  requires requires(const Options& o) { sees(o, 0, 0, 0, 0); }
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const Options& o) {
  return reference::by_pattern(q, k, v, o);
}
template <class S, class Options>
  requires std::is_base_of_v<reference::softmax_options, Options>
problem<Options> rounded(problem<Options> p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  round_options<S>(p.options);
  return p;
}

template <class S, class Options>
  requires requires { typename library_form<S, Options>::options; }
struct library_operator<S, Options> : common_softmax_options<S, typename library_form<S, Options>::options> {
  using form = library_form<S, Options>;
  explicit library_operator(const Options& from)
      : common_softmax_options<S, typename form::options>(from), given(from) {
    form::set(given, this->options);
  }
  Options given;  // what the library's options refer to

  void forward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, tensor<S>& out,
               attn::execution& exec) const {
    form::call(view(q), view(k), view(v), view(out), this->options, this->score, exec);
  }
  void backward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, const tensor<S>& out,
                const tensor<S>& d_out, const typename form::gradients& gradients,
                const score_backward_of<S>& score_backward, attn::execution& exec) const {
    form::backward(view(q), view(k), view(v), view(out), view(d_out), gradients, this->options, this->score,
                   score_backward, exec);
  }
};

// Queries are keys: k is empty.
template <class S>
struct library_operator<S, reference::lsh_options> : common_softmax_options<S, attn::lsh_options<S>> {
  using form = compiled_lsh<S>;
  explicit library_operator(const reference::lsh_options& from)
      : common_softmax_options<S, attn::lsh_options<S>>(from), rotations(cast<real<S>>(from.rotations)) {
    auto& o = this->options;
    o.rounds = from.rounds, o.buckets = from.buckets, o.chunk = from.chunk;
    o.lookback = from.lookback, o.lookahead = from.lookahead, o.wrap = from.wrap, o.scaled = from.scaled;
    o.norm_eps = static_cast<real<S>>(from.norm_eps), o.rotations = view(std::as_const(rotations));
  }
  tensor<real<S>> rotations;

  void forward(const tensor<S>& q, const tensor<S>&, const tensor<S>& v, tensor<S>& out, attn::execution& exec) const {
    form::call(view(q), view(v), view(out), this->options, this->score, exec);
  }
  void backward(const tensor<S>& q, const tensor<S>&, const tensor<S>& v, const tensor<S>& out, const tensor<S>& d_out,
                const typename form::gradients& gradients, const score_backward_of<S>& score_backward,
                attn::execution& exec) const {
    form::backward(view(q), view(v), view(out), view(d_out), gradients, this->options, this->score, score_backward,
                   exec);
  }
};
template <class S>
problem<reference::lsh_options> rounded(problem<reference::lsh_options> p) {
  p.q = rounded<S>(p.q), p.v = rounded<S>(p.v);
  p.options.rotations = rounded<real<S>>(p.options.rotations);
  p.options.norm_eps = static_cast<double>(static_cast<real<S>>(p.options.norm_eps));
  round_options<S>(p.options);
  return p;
}

}  // namespace testing
