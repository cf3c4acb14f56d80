#pragma once
// The attention-free operators, compiled once for all tests, and their references.
#include <attn/aft/aft_conv_backward.hpp>
#include <attn/aft/aft_conv_step.hpp>
#include <attn/aft/aft_full_backward.hpp>
#include <attn/aft/aft_full_step.hpp>
#include <attn/aft/aft_local_backward.hpp>
#include <attn/aft/aft_local_step.hpp>
#include <attn/aft/aft_simple_backward.hpp>
#include <attn/aft/aft_simple_step.hpp>

#include "reference/aft_conv.hpp"
#include "reference/aft_full.hpp"
#include "reference/aft_local.hpp"
#include "reference/aft_simple.hpp"
#include "support/run.hpp"

namespace testing {

// S is one of all_types.
template <class S>
struct compiled_aft_full {
  using options = attn::aft_full_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w, const options&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> w, in_view<S> d_out,
                       const attn::aft_full_gradients<S>&, const options&, attn::execution&);
  static void step(attn::kv_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w,
                   const attn::aft_step_options&, attn::execution&);
};
template <class S>
struct compiled_aft_local {
  using options = attn::aft_local_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w, const options&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> w, in_view<S> d_out,
                       const attn::aft_local_gradients<S>&, const options&, attn::execution&);
  static void step(attn::aft_local_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w,
                   const attn::aft_local_step_options&, attn::execution&);
};
template <class S>
struct compiled_aft_conv {
  using options = attn::aft_conv_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w, const options&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> w, in_view<S> d_out,
                       const attn::aft_conv_gradients<S>&, const options&, attn::execution&);
  static void step(attn::aft_conv_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> w,
                   const attn::aft_step_options&, attn::execution&);
};
template <class S>
struct compiled_aft_simple {
  using options = attn::aft_simple_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out,
                       const attn::aft_simple_gradients<S>&, const options&, attn::execution&);
  static void step(attn::aft_simple_state<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const attn::aft_step_options&, attn::execution&);
};

// A kernel [1, H, 1, width] as the library takes it: [H, width].
template <class S>
in_view<S> kernel_view(const tensor<S>& w, bool image) {
  return image ? view(w) : in_view<S>(w.data.data(), {1, 1, w.heads(), w.dim()}, {0, 0, w.length() * w.dim(), 1});
}

inline tensor<double> expected(const problem<reference::aft_full_options>& p) {
  return reference::aft_full(p.q, p.k, p.v, p.options);
}
inline tensor<double> expected(const problem<reference::aft_local_options>& p) {
  return reference::aft_local(p.q, p.k, p.v, p.options);
}
inline tensor<double> expected(const problem<reference::aft_conv_options>& p) {
  return reference::aft_conv(p.q, p.k, p.v, p.options);
}
inline tensor<double> expected(const problem<reference::aft_simple_options>& p) {
  return reference::aft_simple(p.q, p.k, p.v, p.options);
}

// The library's answer; out starts with other numbers.
template <class S, class Options>
tensor<double> run_aft(const problem<Options>& p, attn::execution& execution) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), q.dim(), S(7)), w;
  if constexpr (!std::is_same_v<Options, reference::aft_simple_options>) w = cast<S>(p.options.w);
  const key_mask_bytes seen(p.options.key_mask);
  const auto with_common = [&](auto options) {
    options.causal = p.options.causal, options.gate = p.options.gate, options.lengths = p.options.lengths;
    options.key_mask = seen.view();
    return options;
  };
  if constexpr (std::is_same_v<Options, reference::aft_full_options>) {
    compiled_aft_full<S>::call(view(q), view(k), view(v), view(out), view(std::as_const(w)),
                               with_common(attn::aft_full_options<S>{}), execution);
  } else if constexpr (std::is_same_v<Options, reference::aft_local_options>) {
    auto options = with_common(attn::aft_local_options<S>{});
    options.window = p.options.window, options.band = p.options.band;
    compiled_aft_local<S>::call(view(q), view(k), view(v), view(out), view(std::as_const(w)), options, execution);
  } else if constexpr (std::is_same_v<Options, reference::aft_conv_options>) {
    auto options = with_common(attn::aft_conv_options<S>{});
    const idx_t columns = p.options.columns;
    if (columns > 0) options.grid = attn::token_grid{q.length() / columns, columns};
    compiled_aft_conv<S>::call(view(q), view(k), view(v), view(out), kernel_view(std::as_const(w), columns > 0),
                               options, execution);
  } else {
    compiled_aft_simple<S>::call(view(q), view(k), view(v), view(out), with_common(attn::aft_simple_options<S>{}),
                                 execution);
  }
  return cast<double>(out);
}

// Against the reference on the same rounded inputs.
template <class S, class Options>
double aft_error(problem<Options> p, attn::execution& execution) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  if constexpr (!std::is_same_v<Options, reference::aft_simple_options>) p.options.w = rounded<S>(p.options.w);
  return relative_error(run_aft<S>(p, execution), expected(p));
}
template <class S, class Options>
double aft_error(const problem<Options>& p) {
  attn::execution serial;
  return aft_error<S>(p, serial);
}

}  // namespace testing
