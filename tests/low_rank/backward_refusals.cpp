// Bad input to the backward passes of this family: std::invalid_argument in one sentence, no gradient written.
#include "support/call_long_short.hpp"
#include "support/call_low_rank.hpp"
#include "support/low_rank_gradient.hpp"

namespace testing::backward_refusals_tests {
namespace {

// What all of them are given: a good call, of batch 2, heads 4 over 2, lengths 6 and 9, dims 8 and 5.
struct common_call {
  tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, out{2, 4, 6, 5, 2}, d{2, 4, 6, 5, 1};
  tensor<float> lse{2, 4, 6, 1, 3}, d_lse{2, 4, 6, 1, 1}, more{2, 4, 30, 30, 1};
  tensor<float> dq{2, 4, 6, 8, 7}, dk{2, 2, 9, 8, 7}, dv{2, 2, 9, 5, 7};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v)),
                 out_view_ = view(std::as_const(out)), d_view = view(std::as_const(d));
  std::vector<idx_t> list;
  std::vector<float> numbers;
  attn::execution serial;

  static attn::key_mask_view mask(tensor<float>& memory, idx_t b, idx_t j) {
    return attn::tensor_view<std::uint8_t, 2>(reinterpret_cast<std::uint8_t*>(memory.data.data()), {b, j});
  }

  common_call() = default;
  common_call(const common_call&) = delete;
};

template <class Call>
std::vector<refused_gradient<Call>> common_list() {
  using here = Call;
  return {
      {"d_out of the shape", [](here& c) { c.d_view = c.d_view.slice(2, 0, 5); }},
      {"d_out of the shape", [](here& c) { c.d_view = c.d_view.slice(1, 0, 2); }},
      {"value length = key length", [](here& c) { c.v_view = c.v_view.slice(2, 0, 8), c.g.v = c.g.v.slice(2, 0, 8); }},
      {"key dim = query dim", [](here& c) { c.k_view = c.k_view.slice(3, 0, 7), c.g.k = c.g.k.slice(3, 0, 7); }},
      {"the gradient of q of the shape of q [2, 4, 6, 8]; found [2, 4, 5, 8]",
       [](here& c) { c.g.q = c.g.q.slice(2, 0, 5); }},
      {"the gradient of k of the shape of k", [](here& c) { c.g.k = c.g.k.slice(3, 0, 7); }},
      {"the gradient of v of the shape of v", [](here& c) { c.g.v = c.g.v.slice(0, 0, 1); }},
      {"overlap", [](here& c) { c.g.q = reshaped(c.q, 2, 4, 6, 8); }},
      {"overlap", [](here& c) { c.g.v = reshaped(c.d, 2, 2, 9, 5).strided(0, 0, 5, 1); }},
      {"overlap", [](here& c) { c.g.k = reshaped(c.dq, 2, 2, 9, 8); }},
      {"overlap", [](here& c) { c.d_view = reshaped(c.dv, 2, 4, 6, 5).strided(0, 0, 5, 1); }},
      {"elements do not overlap", [](here& c) { c.g.q = reshaped(c.dq, 2, 4, 6, 8).strided(0, 48, 8, 1); }},
      {"memory behind", [](here& c) { c.d_view = null_view(2, 4, 6, 5); }},
      {"memory behind", [](here& c) { c.g.q = null_view(2, 4, 6, 8); }},
      {"scale", [](here& c) { c.options.scale = HUGE_VALF; }},
      {"key_mask batch 1 or 2; found 3", [](here& c) { c.options.key_mask = c.mask(c.more, 3, 9); }},
      {"key_mask length = key length 9; found 6", [](here& c) { c.options.key_mask = c.mask(c.more, 2, 6); }},
      {"overlap", [](here& c) { c.options.key_mask = c.mask(c.dk, 2, 9); }},
      {"key_lengths",
       [](here& c) {
         c.list = {10, 0}, c.options.key_lengths = c.list;
       }},
      {"lengths",
       [](here& c) {
         c.list = {6, 6}, c.options.lengths = c.list;
       }},
  };
}
template <class Call>
std::vector<refused_gradient<Call>> list_with_lse() {
  using here = Call;
  auto list = common_list<here>();
  const std::vector<refused_gradient<here>> own = {
      {"out length = query length", [](here& c) { c.out_view_ = c.out_view_.slice(2, 0, 5); }},
      {"out dim = value dim", [](here& c) { c.out_view_ = c.shaped(2, 4, 6, 4); }},
      {"overlap", [](here& c) { c.out_view_ = reshaped(c.dq, 2, 4, 6, 5); }},
      {"lse of the shape", [](here& c) { c.options.lse = c.options.lse.slice(2, 0, 5); }},
      {"overlap", [](here& c) { c.options.lse = reshaped(c.dq, 2, 4, 6); }},
      {"d_lse of the shape", [](here& c) { c.g.d_lse = c.g.d_lse.slice(1, 0, 2); }},
      {"overlap", [](here& c) { c.g.d_lse = reshaped(c.dv, 2, 4, 6).strided(0, 0, 1); }},
  };
  list.insert(list.end(), own.begin(), own.end());
  return list;
}

struct nystrom_gradient_call : common_call {
  tensor<float> dc{1, 1, 4, 3, 7}, weights{1, 1, 4, 3, 1};
  attn::nystrom_gradients<float> g{
      .q = view(dq), .k = view(dk), .v = view(dv), .convolution = {dc.data.data(), {4, 3}}};
  attn::nystrom_options<float> options;

  nystrom_gradient_call() { options.convolution = {weights.data.data(), {4, 3}}; }
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &dc}; }
  void run() { compiled_nystrom<float>::backward(q_view, k_view, v_view, d_view, g, options, serial); }
};

struct linformer_gradient_call : common_call {
  tensor<float> e{1, 1, 3, 9, 1}, f{1, 4, 3, 9, 1}, de{1, 1, 3, 9, 7}, df{1, 4, 3, 9, 7};
  projection_view<float> e_view = heads_view(e), f_view = heads_view(f);
  attn::linformer_gradients<float> g{.q = view(dq),
                                     .k = view(dk),
                                     .v = view(dv),
                                     .e = {de.data.data(), {1, 3, 9}},
                                     .f = {df.data.data(), {4, 3, 9}},
                                     .d_lse = {d_lse.data.data(), {2, 4, 6}}};
  attn::linformer_options<float> options;

  linformer_gradient_call() { options.lse = row_view(lse); }
  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t n) const { return {more.data.data(), {b, h, i, n}}; }
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &de, &df}; }
  void run() {
    compiled_linformer<float>::backward(q_view, k_view, v_view, out_view_, e_view, f_view, d_view, g, options, serial);
  }
};

struct long_short_gradient_call : common_call {
  tensor<float> logits{2, 4, 9, 3, 1}, dp{2, 4, 9, 3, 7}, ds{1, 1, 1, 4, 7}, dg{1, 1, 1, 5, 7};
  std::vector<float> sinks = std::vector<float>(4, 0.5f);
  in_view<float> logits_view = view(std::as_const(logits));
  attn::long_short_gradients<float> g{.q = view(dq),
                                      .k = view(dk),
                                      .v = view(dv),
                                      .logits = view(dp),
                                      .sinks = ds.data,
                                      .d_lse = {d_lse.data.data(), {2, 4, 6}}};
  attn::long_short_options<float> options;

  long_short_gradient_call() { options.lse = row_view(lse), options.sinks = sinks; }
  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t n) const { return {more.data.data(), {b, h, i, n}}; }
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &dp, &ds, &dg}; }
  void run() {
    compiled_long_short<float>::backward(q_view, k_view, v_view, out_view_, logits_view, d_view, g, options, serial);
  }
};

}  // namespace

TEST_CASE("nystrom_backward refuses what does not fit", "[nystrom_backward]") {
  using here = nystrom_gradient_call;
  auto list = common_list<here>();
  const std::vector<refused_gradient<here>> own = {
      {"the gradient of convolution of the shape of convolution",
       [](here& c) { c.g.convolution = c.g.convolution.slice(1, 0, 1); }},
      {"convolution, since its gradient is asked for; found none", [](here& c) { c.options.convolution = {}; }},
      {"overlap", [](here& c) { c.g.convolution = reshaped(c.weights, 4, 3); }},
      {"landmarks >= 1; found 0", [](here& c) { c.options.landmarks = 0; }},
      {"iterations >= 0", [](here& c) { c.options.iterations = -1; }},
      {"cutoff", [](here& c) { c.options.cutoff = 1; }},
      {"odd width",
       [](here& c) {
         c.options.convolution = c.options.convolution.slice(1, 0, 2), c.g.convolution = c.g.convolution.slice(1, 0, 2);
       }},
  };
  list.insert(list.end(), own.begin(), own.end());
  check_gradients_refused<here>("nystrom_backward", list);
}

TEST_CASE("linformer_backward refuses what does not fit", "[linformer_backward]") {
  using here = linformer_gradient_call;
  auto list = list_with_lse<here>();
  const std::vector<refused_gradient<here>> own = {
      {"the gradient of e of the shape of e [1, 3, 9]; found [1, 3, 8]", [](here& c) { c.g.e = c.g.e.slice(2, 0, 8); }},
      {"the gradient of f of the shape of f", [](here& c) { c.g.f = c.g.f.slice(0, 0, 1); }},
      {"overlap", [](here& c) { c.g.e = reshaped(c.e, 1, 3, 9); }},
      {"overlap", [](here& c) { c.g.f = reshaped(c.dk, 4, 3, 9); }},
      {"overlap", [](here& c) { c.g.e = reshaped(c.df, 1, 3, 9); }},
      {"rank of f = rank of e 3; found 2",
       [](here& c) { c.f_view = c.f_view.slice(1, 0, 2), c.g.f = c.g.f.slice(1, 0, 2); }},
      {"projection columns = key length 9; found 8",
       [](here& c) { c.e_view = c.e_view.slice(2, 0, 8), c.g.e = c.g.e.slice(2, 0, 8); }},
      {"heads of f 1 or 4; found 2", [](here& c) { c.f_view = c.f_view.slice(0, 0, 2), c.g.f = c.g.f.slice(0, 0, 2); }},
  };
  list.insert(list.end(), own.begin(), own.end());
  check_gradients_refused<here>("linformer_backward", list);
}

TEST_CASE("long_short_backward refuses what does not fit", "[long_short_backward]") {
  using here = long_short_gradient_call;
  auto list = list_with_lse<here>();
  const std::vector<refused_gradient<here>> own = {
      {"the gradient of logits of the shape of logits", [](here& c) { c.g.logits = c.g.logits.slice(3, 0, 2); }},
      {"logits length = key length",
       [](here& c) { c.logits_view = c.logits_view.slice(2, 0, 8), c.g.logits = c.g.logits.slice(2, 0, 8); }},
      {"overlap", [](here& c) { c.g.logits = reshaped(c.logits, 2, 4, 9, 3); }},
      {"overlap", [](here& c) { c.logits_view = reshaped(c.dq, 2, 4, 9, 3).strided(0, 0, 3, 1); }},
      {"local_gamma, since its gradient is asked for; found none", [](here& c) { c.g.local_gamma = c.dg.data; }},
      {"global_beta, since its gradient is asked for; found none", [](here& c) { c.g.global_beta = c.dg.data; }},
      {"sinks, since its gradient is asked for; found none", [](here& c) { c.options.sinks = {}; }},
      {"overlap", [](here& c) { c.g.sinks = c.sinks; }},
      {"value dim = key dim where keys and values are normed",
       [](here& c) { c.numbers.assign(8, 1), c.options.local_gamma = c.numbers; }},
      {"left >= 0", [](here& c) { c.options.left = -1; }},
      {"a segment with causal only", [](here& c) { c.options.segment = 4; }},
      {"softcap", [](here& c) { c.options.softcap = 0.0f; }},
      {"norm_eps", [](here& c) { c.options.norm_eps = -1; }},
  };
  list.insert(list.end(), own.begin(), own.end());
  check_gradients_refused<here>("long_short_backward", list);
}

}  // namespace testing::backward_refusals_tests
