#pragma once
// The backward passes of kernel attention: a problem as a gradient case, and what holds for all three of them.
#include <algorithm>

#include "support/call_kernel.hpp"
#include "support/catch.hpp"
#include "support/gradient.hpp"

namespace testing {

// The inputs of a problem, in the order of their gradients; a gate or features not given are empty.
inline constexpr std::size_t gradient_count = 5;
inline const std::vector<std::string> gradient_names = {"q", "k", "v", "gate", "features"};

template <class Problem>
constexpr bool has_features = requires(Problem p) { p.options.features; };

template <class Problem>
tensors inputs_of(const Problem& p) {
  tensors all = {p.q, p.k, p.v, p.options.gate, {}};
  if constexpr (has_features<Problem>) all[4] = p.options.features;
  return all;
}
template <class Problem>
Problem with_inputs(Problem p, const tensors& x) {
  p.q = x[0], p.k = x[1], p.v = x[2], p.options.gate = x[3];
  if constexpr (has_features<Problem>) p.options.features = x[4];
  return p;
}

inline tensor<variable> reference_out(const linear_problem& p, const std::vector<tensor<variable>>& x) {
  return reference::linear(x[0], x[1], x[2], x[3], p.options);
}
inline tensor<variable> reference_out(const performer_problem& p, const std::vector<tensor<variable>>& x) {
  return reference::performer(x[0], x[1], x[2], x[4], p.options);
}
inline tensor<variable> reference_out(const rfa_problem& p, const std::vector<tensor<variable>>& x) {
  return reference::rfa(x[0], x[1], x[2], x[3], x[4], p.options);
}

template <class Problem>
gradient_case case_of(const Problem& p, std::string name = {}) {
  return {std::move(name), gradient_names, inputs_of(p),
          [p](const std::vector<tensor<variable>>& x) { return std::vector<tensor<variable>>{reference_out(p, x)}; }};
}

// Which gradients are asked for, and what is in their memory before.
struct asked {
  std::array<bool, gradient_count> of = {true, true, true, true, true};
  bool accumulate = false;
  double before = 7;
};

// The memory of a call in element type S.
template <class S, class Problem>
struct backward_memory {
  tensor<S> q, k, v, w, d_out, dq, dk, dv, dw;
  tensor<real<S>> gate, d_gate;
  key_mask_bytes seen;

  backward_memory(const Problem& p, const tensor<double>& d, const asked& a)
      : q(cast<S>(p.q)), k(cast<S>(p.k)), v(cast<S>(p.v)), d_out(cast<S>(d)), gate(cast<real<S>>(p.options.gate)),
        seen(p.options.key_mask) {
    if constexpr (has_features<Problem>) w = cast<S>(p.options.features);
    dq = q, dk = k, dv = v, dw = w, d_gate = gate;
    for (tensor<S>* x : {&dq, &dk, &dv, &dw}) std::fill(x->data.begin(), x->data.end(), static_cast<S>(a.before));
    std::fill(d_gate.data.begin(), d_gate.data.end(), static_cast<real<S>>(a.before));
  }
  tensors gradients(const asked& a) const {
    tensors all = {cast<double>(dq), cast<double>(dk), cast<double>(dv), cast<double>(d_gate), cast<double>(dw)};
    for (std::size_t n = 0; n < gradient_count; ++n)
      if (!a.of[n]) all[n] = {};
    return all;
  }
};

template <class T>
attn::tensor_view<T, 3> features_of(tensor<T>& w) {
  return {w.data.data(), {w.heads(), w.length(), w.dim()}};
}

template <class S, class Gradients, class Memory>
Gradients gradients_asked(Memory& m, const asked& a) {
  Gradients g;
  if (a.of[0]) g.q = view(m.dq);
  if (a.of[1]) g.k = view(m.dk);
  if (a.of[2]) g.v = view(m.dv);
  if constexpr (requires { g.decay; })
    if (a.of[3] && !m.gate.empty()) g.decay = row_view(m.d_gate);
  if constexpr (requires { g.gate; })
    if (a.of[3] && !m.gate.empty()) g.gate = row_view(m.d_gate);
  if constexpr (requires { g.features; })
    if (a.of[4]) g.features = features_of(m.dw);
  g.accumulate = a.accumulate;
  return g;
}

template <class T>
auto read(const tensor<T>& x) {
  return view(x);
}

template <class S>
void call_backward(const linear_problem& p, backward_memory<S, linear_problem>& m, const asked& a,
                   attn::execution& execution) {
  auto options = common_options<attn::linear_options<S>, S>(p.options);
  options.key_mask = m.seen.view();
  options.normalise = p.options.normalise;
  options.decay = gate_view(m.gate);
  compiled_linear<S>::backward(read(m.q), read(m.k), read(m.v), read(m.d_out),
                               gradients_asked<S, attn::linear_gradients<S>>(m, a), options, p.options.feature,
                               execution);
}
template <class S>
void call_backward(const performer_problem& p, backward_memory<S, performer_problem>& m, const asked& a,
                   attn::execution& execution) {
  auto options = common_options<attn::performer_options<S>, S>(p.options);
  options.key_mask = m.seen.view();
  options.kernel = static_cast<attn::performer_kernel>(p.options.kernel);
  if (p.options.scale) options.scale = static_cast<real<S>>(*p.options.scale);
  if (p.options.feature_eps) options.feature_eps = static_cast<real<S>>(*p.options.feature_eps);
  options.center_keys = p.options.center_keys;
  compiled_performer<S>::backward(read(m.q), read(m.k), read(m.v), features_of(std::as_const(m.w)), read(m.d_out),
                                  gradients_asked<S, attn::performer_gradients<S>>(m, a), options, execution);
}
template <class S>
void call_backward(const rfa_problem& p, backward_memory<S, rfa_problem>& m, const asked& a,
                   attn::execution& execution) {
  auto options = common_options<attn::rfa_options<S>, S>(p.options);
  options.key_mask = m.seen.view();
  options.norm_eps = static_cast<real<S>>(p.options.norm_eps);
  options.gate = gate_view(m.gate);
  compiled_rfa<S>::backward(read(m.q), read(m.k), read(m.v), features_of(std::as_const(m.w)), read(m.d_out),
                            gradients_asked<S, attn::rfa_gradients<S>>(m, a), options, execution);
}

template <class S, class Problem>
tensors gradients_by(const Problem& p, const tensor<double>& d_out, attn::execution& execution, const asked& a = {}) {
  backward_memory<S, Problem> m(p, d_out, a);
  call_backward<S>(p, m, a, execution);
  return m.gradients(a);
}
template <class S, class Problem>
tensors gradients_by(const Problem& p, const tensor<double>& d_out, const asked& a = {}) {
  attn::execution serial;
  return gradients_by<S>(p, d_out, serial, a);
}

// Against the reverse pass of the reference on the same rounded inputs. Denominators of features that are not all
// positive come near 0, where errors grow: cases say by what factor.
template <class S, class Problem>
void check_backward(const Problem& problem, double factor = 1) {
  const Problem p = rounded<S>(problem);
  check_gradients(
      case_of(p), factor * product_gradient_tolerance<S>,
      [&](const tensors&, const tensors& d_results) { return gradients_by<S>(p, d_results[0]); },
      [](tensors& d) {
        for (auto& x : d) x = rounded<S>(x);
      });
}

// The gradients of one batch item and key head alone.
template <class Problem>
Problem one_head(const Problem& p, idx_t b, idx_t kv_head) {
  Problem one = p;
  const idx_t group = p.q.heads() / p.k.heads();
  const auto part = [&](const tensor<double>& x, idx_t heads, bool batched) {
    tensor<double> y(1, heads, x.length(), x.dim());
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) y(0, h, i, d) = x(batched ? b : 0, kv_head * heads + h, i, d);
    return y;
  };
  one.q = part(p.q, group, true), one.k = part(p.k, 1, true), one.v = part(p.v, 1, true);
  if (p.options.key_mask.batch() > 1) one.options.key_mask = head(p.options.key_mask, b, 0);
  if (!p.options.gate.empty()) one.options.gate = part(p.options.gate, p.options.gate.heads() / p.k.heads(), true);
  if constexpr (has_features<Problem>)
    if (p.options.features.heads() > 1)
      one.options.features = part(p.options.features, p.options.features.heads() / p.k.heads(), false);
  for (auto* lengths : {&one.options.lengths, &one.options.query_lengths, &one.options.key_lengths})
    if (!lengths->empty()) *lengths = {(*lengths)[static_cast<std::size_t>(b)]};
  return one;
}

// One gradient at a time, accumulate; and what the laws (laws/gradients_*.cpp) say of gates too, and of 16-bit storage:
// heads and padding. For a problem of batch 2 and lengths below those of its tensors.
template <class S, class Problem>
void check_backward_laws(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  const idx_t group = p.q.heads() / p.k.heads();
  tensor<double> d_out = rounded<S>(random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.v.dim()));
  const tensors all = gradients_by<S>(p, d_out);
  const auto& o = p.options;
  const auto queries = [&](idx_t b) { return reference::true_length(o.lengths, o.query_lengths, b, p.q.length()); };
  const auto keys = [&](idx_t b) { return reference::true_length(o.lengths, o.key_lengths, b, p.k.length()); };

  // What is asked for alone is the same.
  for (std::size_t n = 0; n < gradient_count; ++n) {
    asked alone{.of = {}};
    alone.of[n] = true;
    INFO("alone: " << gradient_names[n]);
    CHECK(gradients_by<S>(p, d_out, alone)[n] == all[n]);
  }

  // Added once.
  const tensors added = gradients_by<S>(p, d_out, {.accumulate = true, .before = 0.5});
  for (std::size_t n = 0; n < gradient_count; ++n)
    for (std::size_t e = 0; e < all[n].data.size(); ++e)
      if (const double sum = all[n].data[e] + 0.5;
          !(std::abs(added[n].data[e] - sum) <= gradient_tolerance<S>::value * (1 + std::abs(sum)))) {
        INFO("added to: " << gradient_names[n] << " " << sum << " " << added[n].data[e]);
        CHECK(false);
        break;
      }

  // A head alone.
  for (idx_t b = 0; b < p.q.batch(); ++b)
    for (idx_t h = 0; h < p.k.heads(); ++h) {
      const Problem one = one_head(p, b, h);
      tensor<double> d_one(1, group, p.q.length(), p.v.dim());
      for (idx_t g = 0; g < group; ++g)
        for (idx_t i = 0; i < p.q.length(); ++i)
          for (idx_t d = 0; d < p.v.dim(); ++d) d_one(0, g, i, d) = d_out(b, h * group + g, i, d);
      const tensors alone = gradients_by<S>(one, d_one);
      CHECK(head(alone[1], 0, 0) == head(all[1], b, h));
      CHECK(head(alone[2], 0, 0) == head(all[2], b, h));
      for (idx_t g = 0; g < group; ++g) CHECK(head(alone[0], 0, g) == head(all[0], b, h * group + g));
      for (idx_t g = 0, each = o.gate.empty() ? 0 : o.gate.heads() / p.k.heads(); g < each; ++g)
        CHECK(head(alone[3], 0, g) == head(all[3], b, h * each + g));
    }

  // Padding: whatever lies in it changes no bit, and its gradients are 0.
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  Problem padded = p;
  tensor<double> d_padded = d_out;
  const auto poison = [&](tensor<double>& x, const auto& length, double value) {
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = length(b); i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = value;
  };
  poison(padded.q, queries, nan), poison(padded.k, keys, nan), poison(padded.v, keys, nan);
  poison(padded.options.gate, keys, nan), poison(d_padded, queries, nan);
  CHECK(gradients_by<S>(padded, d_padded) == all);
  tensors cleared = all;
  poison(cleared[0], queries, 0), poison(cleared[1], keys, 0), poison(cleared[2], keys, 0), poison(cleared[3], keys, 0);
  CHECK(cleared == all);
}

// Several segments, and bits that do not depend on threads.
template <class S, class Problem>
void check_backward_segments(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  check_backward<S>(p);
  const tensor<double> d_out = random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.v.dim());
  attn::execution threads(3, 0);
  CHECK(gradients_by<S>(p, d_out, threads) == gradients_by<S>(p, d_out));
  // Threads share a head where nothing is summed up over all of its tokens.
  for (bool of_keys : {false, true}) {
    const asked shared{.of = {true, of_keys, of_keys, false, false}};
    CHECK(gradients_by<S>(p, d_out, threads, shared) == gradients_by<S>(p, d_out, shared));
  }
}

}  // namespace testing
