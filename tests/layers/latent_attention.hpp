#pragma once
// A problem of latent_attention: by its reference and through the library.
#include "layers/gradients.hpp"
#include "reference/latent_attention.hpp"
#include "support/call_latent_attention.hpp"

namespace testing {

struct latent_problem {
  tensor<double> q, q_rotary, latent, k_rotary, w_key, w_value;  // the rotary parts may be empty
  reference::full_softmax_options options{};
  attn::latent_form form = attn::latent_form::automatic;

  reference::result by_reference() const {
    return reference::latent_attention(q, q_rotary, latent, k_rotary, w_key, w_value, options);
  }
};

struct latent_extents {
  idx_t batch = 2, heads = 3, queries = 20, keys = 20, dim = 8, rotary = 4, latent = 16, value = 5;
};
inline latent_problem random_latent(const latent_extents& e) {
  latent_problem p{random_normal(1, e.batch, e.heads, e.queries, e.dim),
                   random_normal(2, e.batch, e.heads, e.queries, e.rotary),
                   random_normal(3, e.batch, 1, e.keys, e.latent), random_normal(4, e.batch, 1, e.keys, e.rotary),
                   random_normal(5, 1, e.heads, e.dim, e.latent), random_normal(6, 1, e.heads, e.value, e.latent)};
  for (tensor<double>* w : {&p.w_key, &p.w_value})  // keys and values of size 1
    for (double& x : w->data) x /= std::sqrt(static_cast<double>(e.latent));
  if (e.rotary == 0) p.q_rotary = p.k_rotary = {};
  return p;
}
template <class S>
latent_problem rounded(latent_problem p) {
  for (tensor<double>* x : {&p.q, &p.q_rotary, &p.latent, &p.k_rotary, &p.w_key, &p.w_value, &p.options.bias})
    *x = rounded<S>(*x);
  return p;
}

template <class S>
attn::tensor_view<S, 3> weights_view(tensor<S>& x) {
  return {x.data.data(), {x.heads(), x.length(), x.dim()}};
}
template <class S>
in_view<S> rotary_view(const tensor<S>& x) {  // the null view where there is none
  return x.extents == tensor<S>().extents ? in_view<S>() : view(x);
}

// Everything of one call in S.
template <class S>
struct latent_memory {
  using T = real<S>;
  tensor<S> q, q_rotary, latent, k_rotary, w_key, w_value, out;
  tensor<T> bias, lse;
  std::vector<T> sinks, slopes;
  attn::latent_attention_options<S> options{};

  explicit latent_memory(const latent_problem& p)
      : q(cast<S>(p.q)), q_rotary(cast<S>(p.q_rotary)), latent(cast<S>(p.latent)), k_rotary(cast<S>(p.k_rotary)),
        w_key(cast<S>(p.w_key)), w_value(cast<S>(p.w_value)),
        out(q.batch(), q.heads(), q.length(), w_value.length(), S(7)), bias(cast<T>(p.options.bias)),
        lse(q.batch(), q.heads(), q.length(), 1, T(7)), sinks(p.options.sinks.begin(), p.options.sinks.end()),
        slopes(p.options.alibi_slopes.begin(), p.options.alibi_slopes.end()) {
    const auto& o = p.options;
    options.causal = o.causal, options.first_position = o.first_position, options.form = p.form;
    if (o.scale) options.scale = static_cast<T>(*o.scale);
    if (o.softcap) options.softcap = static_cast<T>(*o.softcap);
    options.lengths = o.lengths, options.query_lengths = o.query_lengths, options.key_lengths = o.key_lengths;
    options.sinks = sinks, options.alibi_slopes = slopes;
    if (!bias.empty()) options.bias = view(std::as_const(bias));
    options.lse = row_view(lse);
  }
  latent_memory(const latent_memory&) = delete;

  latent_inputs<S> inputs() const {
    return {view(q), rotary_view(q_rotary), view(latent), rotary_view(k_rotary),
            {w_key.data.data(), {w_key.heads(), w_key.length(), w_key.dim()}},
            {w_value.data.data(), {w_value.heads(), w_value.length(), w_value.dim()}}};
  }
  void run(attn::execution& exec) { compiled_latent_attention<S>::call(inputs(), view(out), options, exec); }
};

// What is differentiated, in order: q, q_rotary, latent, k_rotary, w_key, w_value, bias, sinks, those that are given.
inline gradient_case case_of(const latent_problem& p, bool with_lse = false) {
  gradient_case c;
  c.name = std::to_string(p.q.length()) + " queries, " + std::to_string(p.latent.length()) + " latents of " +
           std::to_string(p.latent.dim()) + (p.options.causal ? ", causal" : "");
  const bool rotary = !p.q_rotary.empty(), bias = !p.options.bias.empty(), sinks = !p.options.sinks.empty();
  add(c, "q", p.q);
  if (rotary) add(c, "q_rotary", p.q_rotary);
  add(c, "latent", p.latent);
  if (rotary) add(c, "k_rotary", p.k_rotary);
  add(c, "w_key", p.w_key), add(c, "w_value", p.w_value);
  if (bias) add(c, "bias", p.options.bias);
  if (sinks) {
    tensor<double> list(1, 1, 1, static_cast<idx_t>(p.options.sinks.size()));
    std::copy(p.options.sinks.begin(), p.options.sinks.end(), list.data.begin());
    add(c, "sinks", list);
  }
  c.forward = [=](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    reference::basic_full_softmax_options<variable> o;
    reference::copy_choices(p.options, o);
    for (double slope : p.options.alibi_slopes) o.alibi_slopes.push_back(slope);
    const auto q = next(), q_rotary = next(rotary), latent = next(), k_rotary = next(rotary), w = next(), u = next();
    o.bias = next(bias);
    o.sinks = next(sinks).data;
    const auto all = reference::latent_attention(q, q_rotary, latent, k_rotary, w, u, o);
    return with_lse ? std::vector{all.out, all.lse} : std::vector{all.out};
  };
  return c;
}

// The library's, to those that are not null, in the order of the case's inputs. Bias and sinks are of the compute type:
// they are converted.
template <class S>
void latent_gradients_of(const latent_problem& p, const std::vector<tensor<S>>& in, const tensor<S>& d_out,
                         const std::vector<tensor<S>*>& to, bool accumulate, attn::execution& exec,
                         const tensor<real<S>>& d_lse = {}, bool save_lse = true) {
  latent_memory<S> m(p);
  const bool rotary = !p.q_rotary.empty(), bias = !p.options.bias.empty(), sinks = !p.options.sinks.empty();
  const auto original = case_of(p).inputs;
  std::size_t n = 0;
  attn::latent_attention_gradients<S> g{.accumulate = accumulate};
  const auto next = [&](tensor<S>& x, auto& field, bool given = true) {
    if (!given) return;
    x = in[n];
    if (to[n]) field = view(*to[n]);
    ++n;
  };
  next(m.q, g.q), next(m.q_rotary, g.q_rotary, rotary), next(m.latent, g.latent);
  next(m.k_rotary, g.k_rotary, rotary);
  for (auto* w : {&m.w_key, &m.w_value}) {
    *w = in[n];
    if (to[n]) (w == &m.w_key ? g.w_key : g.w_value) = weights_view(*to[n]);
    ++n;
  }
  tensor<real<S>> d_bias, d_sinks;
  if (bias && to[n]) d_bias = cast<real<S>>(cast<double>(*to[n])), g.bias = view(d_bias);
  const std::size_t of_bias = n;
  n += bias;
  if (sinks && to[n])
    d_sinks = cast<real<S>>(cast<double>(*to[n])),
    g.sinks = attn::tensor_view<real<S>, 1>(d_sinks.data.data(), {d_sinks.dim()});
  m.run(exec);
  if (!d_lse.empty())
    g.d_lse = {d_lse.data.data(), {d_lse.batch(), d_lse.heads(), d_lse.length()}};
  if (!save_lse) m.options.lse = {};
  compiled_latent_attention<S>::backward(m.inputs(), view(std::as_const(m.out)), view(d_out), g, m.options, exec);
  if (!d_bias.empty()) *to[of_bias] = cast<S>(cast<double>(d_bias));
  if (!d_sinks.empty()) *to[n] = cast<S>(cast<double>(d_sinks));
}

}  // namespace testing
