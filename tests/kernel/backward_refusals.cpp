// Bad input of backward passes is refused on entry: std::invalid_argument in one sentence, all gradients untouched.
#include <algorithm>
#include <functional>

#include "support/call_kernel.hpp"
#include "support/refused.hpp"

namespace testing::backward_refusals_tests {
namespace {

// A good call, to be spoilt in one place: batch 2, heads 4 over 2, lengths 6 and 9, dims 8 and 5.
struct backward_inputs {
  tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, d_out{2, 4, 6, 5, 1},
      other{2, 4, 30, 30, 1};
  tensor<float> w{1, 1, 10, 8, 0.1f}, gate{2, 4, 9, 1, 0.5f};
  tensor<float> dq{2, 4, 6, 8, 7}, dk{2, 2, 9, 8, 7}, dv{2, 2, 9, 5, 7}, dw{1, 1, 10, 8, 7}, dg{2, 4, 9, 1, 7};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  in_view<float> d_view = view(std::as_const(d_out));
  out_view<float> dq_view = view(dq), dk_view = view(dk), dv_view = view(dv);
  attn::tensor_view<const float, 3> features = features_of(w), gates{};
  attn::tensor_view<float, 3> dw_view{dw.data.data(), {1, 10, 8}}, dg_view{};
  std::vector<idx_t> indices;
  bool causal = true, centred = false;
  float eps = 1e-6f, feature_eps = 0;

  backward_inputs() = default;
  backward_inputs(const backward_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &dw, &dg}; }

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
  void gated() { gates = {gate.data.data(), {2, 4, 9}}, dg_view = {dg.data.data(), {2, 4, 9}}; }
};

using refused = testing::refused<backward_inputs>;

// What every one of them refuses.
std::vector<refused> common() {
  return {{"another batch of k", "batch",
           [](backward_inputs& d) { d.k_view = d.shaped(1, 2, 9, 8), d.dk_view = d.dk_view.slice(0, 0, 1); }},
          {"heads of k that do not divide", "heads",
           [](backward_inputs& d) {
             d.k_view = d.shaped(2, 3, 9, 8), d.v_view = d.shaped(2, 3, 9, 5), d.dk_view = d.dv_view = {};
           }},
          {"another dim of k", "key dim = query dim 8; found 7",
           [](backward_inputs& d) { d.k_view = d.shaped(2, 2, 9, 7), d.dk_view = {}; }},
          {"another dim of d_out", "d_out dim = value dim 5; found 4",
           [](backward_inputs& d) { d.d_view = d.d_view.slice(3, 0, 4); }},
          {"another length of d_out", "d_out length", [](backward_inputs& d) { d.d_view = d.shaped(2, 4, 7, 5); }},
          {"other heads of d_out", "d_out heads", [](backward_inputs& d) { d.d_view = d.shaped(2, 2, 6, 5); }},
          {"another batch of d_out", "d_out batch", [](backward_inputs& d) { d.d_view = d.shaped(1, 4, 6, 5); }},
          {"a null q", "null", [](backward_inputs& d) { d.q_view = null_view(2, 4, 6, 8); }},
          {"a null d_out", "null", [](backward_inputs& d) { d.d_view = null_view(2, 4, 6, 5); }},
          {"a null gradient with extents", "null", [](backward_inputs& d) { d.dq_view = null_view(2, 4, 6, 8); }},
          {"a gradient of q of another shape", "the gradient of q of the shape of q",
           [](backward_inputs& d) { d.dq_view = d.dq_view.slice(2, 0, 5); }},
          {"a gradient of k of another shape", "the gradient of k",
           [](backward_inputs& d) { d.dk_view = d.dk_view.slice(3, 0, 7); }},
          {"a gradient of v of another shape", "the gradient of v",
           [](backward_inputs& d) { d.dv_view = d.dv_view.slice(1, 0, 1); }},
          {"a gradient that is an input", "overlap", [](backward_inputs& d) { d.q_view = reshaped(d.dq, 2, 4, 6, 8); }},
          {"a gradient that is d_out", "overlap",
           [](backward_inputs& d) { d.d_view = reshaped(d.dq, 2, 4, 6, 5).strided(192, 48, 8, 1); }},
          {"two gradients in one place", "overlap",
           [](backward_inputs& d) { d.dv_view = reshaped(d.dk, 2, 2, 9, 5).strided(144, 72, 8, 1); }},
          {"a gradient whose rows are one", "overlap",
           [](backward_inputs& d) { d.dq_view = reshaped(d.dq, 2, 4, 6, 8).strided(192, 48, 0, 1); }},
          {"a negative eps", "eps", [](backward_inputs& d) { d.eps = -1; }}};
}

std::vector<refused> gates(const char* name) {
  return {{"a gradient of gates not given", name,
           [](backward_inputs& d) { d.dg_view = reshaped(d.dg, 2, 4, 9); }},
          {"a gradient of gates of another shape", name,
           [](backward_inputs& d) { d.gated(), d.dg_view = d.dg_view.slice(1, 0, 2); }},
          {"gates of another length", name,
           [](backward_inputs& d) { d.gated(), d.gates = d.gates.slice(2, 0, 8), d.dg_view = {}; }},
          {"gates without causal", "causal", [](backward_inputs& d) { d.gated(), d.causal = false; }},
          {"a gate above 1", "from 0 to 1", [](backward_inputs& d) { d.gated(), d.gate.data[3] = 1.5f; }}};
}

std::vector<refused> features() {
  return {{"features of another dim", "feature columns = query dim 8; found 7",
           [](backward_inputs& d) { d.features = d.features.slice(2, 0, 7), d.dw_view = {}; }},
          {"features not given", "features", [](backward_inputs& d) { d.features = {}; }},
          {"a gradient of features of another shape", "the gradient of features",
           [](backward_inputs& d) { d.dw_view = d.dw_view.slice(1, 0, 9); }},
          {"a gradient of features that is theirs", "overlap",
           [](backward_inputs& d) { d.features = reshaped(d.dw, 1, 10, 8); }}};
}

template <class... Lists>
std::vector<refused> joined(const Lists&... lists) {
  std::vector<refused> all;
  (all.insert(all.end(), lists.begin(), lists.end()), ...);
  return all;
}

}  // namespace

TEST_CASE("linear_backward refuses what does not fit", "[refusals][linear_backward]") {
  check_refused("linear_backward", joined(common(), gates("decay")), [](backward_inputs& d) {
    attn::execution serial;
    attn::linear_options<float> options;
    options.causal = d.causal, options.eps = d.eps, options.decay = d.gates;
    compiled_linear<float>::backward(d.q_view, d.k_view, d.v_view, d.d_view,
                                     {.q = d.dq_view, .k = d.dk_view, .v = d.dv_view, .decay = d.dg_view}, options,
                                     reference::linear_feature::elu_plus_one, serial);
  });
}

TEST_CASE("performer_backward refuses what does not fit", "[refusals][performer_backward]") {
  const std::vector<refused> own = {
      {"centred keys, causal", "center_keys", [](backward_inputs& d) { d.centred = true; }},
      {"feature_eps, causal", "causal", [](backward_inputs& d) { d.feature_eps = 0.1f; }}};
  check_refused("performer_backward", joined(common(), features(), own), [](backward_inputs& d) {
    attn::execution serial;
    attn::performer_options<float> options;
    options.causal = d.causal, options.eps = d.eps;
    options.center_keys = d.centred, options.feature_eps = d.feature_eps;
    compiled_performer<float>::backward(
        d.q_view, d.k_view, d.v_view, d.features, d.d_view,
        {.q = d.dq_view, .k = d.dk_view, .v = d.dv_view, .features = d.dw_view}, options, serial);
  });
}

TEST_CASE("rfa_backward refuses what does not fit", "[refusals][rfa_backward]") {
  check_refused("rfa_backward", joined(common(), features(), gates("gate")), [](backward_inputs& d) {
    attn::execution serial;
    attn::rfa_options<float> options;
    options.causal = d.causal, options.eps = d.eps, options.gate = d.gates;
    compiled_rfa<float>::backward(
        d.q_view, d.k_view, d.v_view, d.features, d.d_view,
        {.q = d.dq_view, .k = d.dk_view, .v = d.dv_view, .features = d.dw_view, .gate = d.dg_view}, options, serial);
  });
}

}  // namespace testing::backward_refusals_tests
