#pragma once
// Gradients of the attention-free family: the library's, and the reverse pass of the references.
#include "aft/cases.hpp"
#include "support/gradient.hpp"

namespace testing {

// The options of a reference for another number type, with w in its place.
template <class N>
struct aft_reference_options {
  static auto of(const reference::aft_simple_options& o, const tensor<N>&) { return o; }
  static auto of(const reference::aft_full_options& o, const tensor<N>& w) {
    return reference::aft_full_options_of<N>{{o}, w};
  }
  static auto of(const reference::aft_local_options& o, const tensor<N>& w) {
    return reference::aft_local_options_of<N>{{o}, w, o.window, o.band};
  }
  static auto of(const reference::aft_conv_options& o, const tensor<N>& w) {
    return reference::aft_conv_options_of<N>{{o}, w, o.columns};
  }
};

template <class Options>
gradient_case aft_gradient_case(const problem<Options>& p) {
  constexpr bool biased = !std::is_same_v<Options, reference::aft_simple_options>;
  gradient_case c{.name = "aft", .names = {"q", "k", "v"}, .inputs = {p.q, p.k, p.v}, .forward = {}};
  if constexpr (biased) c.names.push_back("w"), c.inputs.push_back(p.options.w);
  c.forward = [options = p.options](const std::vector<tensor<variable>>& x) -> std::vector<tensor<variable>> {
    const auto given = aft_reference_options<variable>::of(options, x.back());
    if constexpr (std::is_same_v<Options, reference::aft_simple_options>)
      return {reference::aft_simple(x[0], x[1], x[2], given)};
    else if constexpr (std::is_same_v<Options, reference::aft_full_options>)
      return {reference::aft_full(x[0], x[1], x[2], given)};
    else if constexpr (std::is_same_v<Options, reference::aft_local_options>)
      return {reference::aft_local(x[0], x[1], x[2], given)};
    else
      return {reference::aft_conv(x[0], x[1], x[2], given)};
  };
  return c;
}

// The library's gradients of q, k, v and w, those wanted; `start` is what they hold before.
template <class S, class Options>
std::vector<tensor<S>> run_aft_backward(const problem<Options>& p, const tensor<S>& d_out, attn::execution& execution,
                                        bool accumulate = false, S start = S(7), int wanted = 15) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  const auto filled = [&](tensor<S> x) {
    std::fill(x.data.begin(), x.data.end(), start);
    return x;
  };
  std::vector<tensor<S>> to = {filled(q), filled(k), filled(v)};
  const auto gradient = [&](std::size_t n) { return wanted >> n & 1 ? view(to[n]) : out_view<S>{}; };
  const key_mask_bytes seen(p.options.key_mask);
  const auto with_common = [&](auto options) {
    options.causal = p.options.causal, options.gate = p.options.gate, options.lengths = p.options.lengths;
    options.key_mask = seen.view();
    return options;
  };
  if constexpr (std::is_same_v<Options, reference::aft_simple_options>) {
    const attn::aft_simple_gradients<S> gradients{gradient(0), gradient(1), gradient(2), accumulate};
    compiled_aft_simple<S>::backward(view(q), view(k), view(v), view(d_out), gradients,
                                     with_common(attn::aft_simple_options<S>{}), execution);
  } else {
    const tensor<S> w = cast<S>(p.options.w);
    to.push_back(filled(w));
    if constexpr (std::is_same_v<Options, reference::aft_full_options>) {
      const attn::aft_full_gradients<S> gradients{gradient(0), gradient(1), gradient(2), gradient(3), accumulate};
      compiled_aft_full<S>::backward(view(q), view(k), view(v), view(w), view(d_out), gradients,
                                     with_common(attn::aft_full_options<S>{}), execution);
    } else if constexpr (std::is_same_v<Options, reference::aft_local_options>) {
      auto options = with_common(attn::aft_local_options<S>{});
      options.window = p.options.window, options.band = p.options.band;
      const attn::aft_local_gradients<S> gradients{gradient(0), gradient(1), gradient(2), gradient(3), accumulate};
      compiled_aft_local<S>::backward(view(q), view(k), view(v), view(w), view(d_out), gradients, options, execution);
    } else {
      auto options = with_common(attn::aft_conv_options<S>{});
      const idx_t columns = p.options.columns;
      if (columns > 0) options.grid = attn::token_grid{q.length() / columns, columns};
      const bool image = columns > 0;
      const auto dw = out_view<S>(to[3].data.data(), kernel_view(w, image).extents(), kernel_view(w, image).strides());
      const attn::aft_conv_gradients<S> gradients{gradient(0), gradient(1), gradient(2),
                                                  wanted & 8 ? dw : out_view<S>{}, accumulate};
      compiled_aft_conv<S>::backward(view(q), view(k), view(v), kernel_view(w, image), view(d_out), gradients, options,
                                     execution);
    }
  }
  return to;
}

template <class S, class Options>
problem<Options> rounded_aft(problem<Options> p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  if constexpr (requires { p.options.w; }) p.options.w = rounded<S>(p.options.w);
  return p;
}

// All gradients as one vector. Where one key holds nearly all the weight of a row, v - y of that key is the difference
// of two equal numbers: dk and dw of such keys are 0 but for what rounding leaves of the terms that cancel, which are
// of the size of dv.
template <class S, class Options>
void check_saturated_aft_gradients(problem<Options> p) {
  p = rounded_aft<S>(p);
  const auto wanted = gradients_of(aft_gradient_case(p), [](tensors& d) {
    for (auto& x : d) x = rounded<S>(x);
  });
  attn::execution serial;
  const auto actual = run_aft_backward<S>(p, cast<S>(wanted.d_results[0]), serial);
  double error = 0, norm = 0;
  for (std::size_t n = 0; n < actual.size(); ++n)
    for (std::size_t e = 0; e < actual[n].data.size(); ++e) {
      const double difference = static_cast<double>(actual[n].data[e]) - wanted.gradients[n].data[e];
      error += difference * difference, norm += wanted.gradients[n].data[e] * wanted.gradients[n].data[e];
    }
  CHECK(std::sqrt(error) <= gradient_tolerance<S>::value * std::sqrt(norm));
}

// Against the reverse pass of the reference on the same rounded inputs. In sequences of one or two tokens, rows see a
// single key.
template <class S, class Options>
void check_aft_gradients(problem<Options> p) {
  if (p.q.length() <= 2) return check_saturated_aft_gradients<S>(p);
  p = rounded_aft<S>(p);
  attn::execution serial;
  check_gradients(
      aft_gradient_case(p), gradient_tolerance<S>::value,
      [&](const tensors&, const tensors& d_results) {
        tensors all;
        for (const auto& x : run_aft_backward<S>(p, cast<S>(d_results[0]), serial)) all.push_back(cast<double>(x));
        return all;
      },
      [](tensors& d) {
        for (auto& x : d) x = rounded<S>(x);
      });
}

// What must hold to the last bit: gradients alone or together, threads, and adding to what is there.
template <class S, class Options>
void check_aft_gradient_bits(const problem<Options>& p) {
  attn::execution serial, threads(3, 0);
  const tensor<S> d_out = cast<S>(random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.q.dim()));
  const auto all = run_aft_backward<S>(p, d_out, serial);
  CHECK((all == run_aft_backward<S>(p, d_out, threads)));
  for (std::size_t n = 0; n < all.size(); ++n) {
    const auto alone = run_aft_backward<S>(p, d_out, serial, false, S(7), 1 << n);
    for (std::size_t other = 0; other < all.size(); ++other)
      CHECK((other == n ? alone[n] == all[n] : std::all_of(alone[other].data.begin(), alone[other].data.end(),
                                                           [](S x) { return x == S(7); })));
  }
  // Added once: what is there and a gradient of one rounding, where sums are those of the element type.
  const auto added = run_aft_backward<S>(p, d_out, serial, true, S(3));
  if constexpr (std::is_same_v<S, real<S>>)
    for (std::size_t n = 0; n < all.size(); ++n) {
      auto wanted = all[n];
      for (S& x : wanted.data) x = S(3) + x;
      CHECK((added[n] == wanted));
    }
}

}  // namespace testing
