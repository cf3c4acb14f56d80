// Bad input to the backward passes is refused on entry: std::invalid_argument in one sentence, gradients untouched.
#include <algorithm>
#include <functional>

#include "support/call_aft.hpp"
#include "support/refused.hpp"

namespace testing::backward_refusals_tests {
namespace {

using extents = in_view<float>::extents_type;

// A good call, to be changed in one place: batch 2, heads 3, length 6, dim 8.
struct arguments {
  tensor<float> q{2, 3, 6, 8, 0.5f}, k{2, 3, 6, 8, 0.25f}, v{2, 3, 6, 8, 2}, d_out{2, 3, 6, 8, 1},
      w{1, 3, 20, 20, 0.5f};
  tensor<float> gradients[4] = {tensor<float>{2, 3, 6, 8, 7}, tensor<float>{2, 3, 6, 8, 7},
                                tensor<float>{2, 3, 6, 8, 7}, tensor<float>{1, 3, 20, 20, 7}};
  tensor<float> other{2, 4, 30, 30, 1};  // more memory to point to
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v)),
                 d_view = view(std::as_const(d_out)), w_view;
  out_view<float> dq = view(gradients[0]), dk = view(gradients[1]), dv = view(gradients[2]), dw;
  std::vector<idx_t> lengths;
  idx_t window = 4;
  bool band = false, causal = false;
  std::optional<attn::token_grid> grid;

  explicit arguments(const extents& w_shape)
      : w_view(w.data.data(), w_shape), dw(gradients[3].data.data(), w_shape) {}
  arguments(const arguments&) = delete;
  std::vector<const tensor<float>*> written() const {
    return {&gradients[0], &gradients[1], &gradients[2], &gradients[3]};
  }

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
  out_view<float> writable(idx_t b, idx_t h, idx_t i, idx_t d) { return {other.data.data(), {b, h, i, d}}; }
};

using call = std::function<void(arguments&, attn::execution&)>;

using refused = testing::refused<arguments>;

// What all four refuse.
std::vector<refused> common_refusals() {
  return {
      {"another batch of k", "k", [](arguments& d) { d.k_view = d.shaped(1, 3, 6, 8), d.dk = {}; }},
      {"another length of v", "value length", [](arguments& d) { d.v_view = d.shaped(2, 3, 5, 8), d.dv = {}; }},
      {"another batch of d_out", "d_out batch", [](arguments& d) { d.d_view = d.shaped(1, 3, 6, 8); }},
      {"other heads of d_out", "d_out heads", [](arguments& d) { d.d_view = d.shaped(2, 2, 6, 8); }},
      {"another length of d_out", "d_out length", [](arguments& d) { d.d_view = d.shaped(2, 3, 5, 8); }},
      {"another dim of d_out", "d_out dim", [](arguments& d) { d.d_view = d.shaped(2, 3, 6, 7); }},
      {"a null d_out", "null", [](arguments& d) { d.d_view = null_view(2, 3, 6, 8); }},
      {"another length of the gradient of q", "gradient of q", [](arguments& d) { d.dq = d.writable(2, 3, 5, 8); }},
      {"another dim of the gradient of k", "gradient of k", [](arguments& d) { d.dk = d.writable(2, 3, 6, 9); }},
      {"other heads of the gradient of v", "gradient of v", [](arguments& d) { d.dv = d.writable(2, 4, 6, 8); }},
      {"a null gradient of q", "null", [](arguments& d) { d.dq = null_view(2, 3, 6, 8); }},
      {"a gradient of q that is q", "overlap", [](arguments& d) { d.q_view = view(std::as_const(d.gradients[0])); }},
      {"a gradient of k that is d_out", "overlap",
       [](arguments& d) { d.d_view = view(std::as_const(d.gradients[1])); }},
      {"a gradient of k that is that of v", "overlap", [](arguments& d) { d.dk = d.dv; }},
      {"a gradient of v whose rows are one", "overlap",
       [](arguments& d) { d.dv = reshaped(d.gradients[2].data.data(), 2, 3, 6, 8).strided(24, 8, 0, 1); }},
      {"too few lengths", "lengths", [](arguments& d) { d.lengths = {6}; }},
      {"a length beyond the buffer", "lengths",
       [](arguments& d) {
         d.lengths = {7, 6};
       }},
  };
}

// What those with biases refuse.
std::vector<refused> with_biases(std::vector<refused> list) {
  list.push_back({"a null w", "null", [](arguments& d) { d.w_view = {nullptr, d.w_view.extents()}; }});
  list.push_back({"no w", "w", [](arguments& d) { d.w_view = {}; }});
  list.push_back(
      {"a w for each batch item", "w batch", [](arguments& d) { d.w_view = d.shaped(2, 1, 6, 6), d.dw = {}; }});
  list.push_back({"another gradient of w", "gradient of w", [](arguments& d) { d.dw = d.writable(1, 1, 9, 9); }});
  list.push_back({"a gradient of w that is w", "overlap",
                  [](arguments& d) { d.dw = {d.w.data.data(), d.w_view.extents()}; }});
  return list;
}

void check_refused(const std::string& name, const extents& w, const std::vector<refused>& list, const call& run) {
  attn::execution serial;
  testing::check_refused(name, list, [&](arguments& d) { run(d, serial); }, w);
}

std::function<void(arguments&)> biases(idx_t h, idx_t rows, idx_t columns) {
  return [=](arguments& d) { d.w_view = d.shaped(1, h, rows, columns), d.dw = {}; };
}

}  // namespace

TEST_CASE("aft_simple_backward refuses what does not fit", "[aft_backward_refusals]") {
  check_refused("aft_simple_backward", {1, 1, 1, 1}, common_refusals(), [](arguments& d, attn::execution& execution) {
    compiled_aft_simple<float>::backward(d.q_view, d.k_view, d.v_view, d.d_view, {d.dq, d.dk, d.dv},
                                         {.lengths = d.lengths}, execution);
  });
}

TEST_CASE("aft_full_backward refuses what does not fit", "[aft_backward_refusals]") {
  auto list = with_biases(common_refusals());
  list.push_back({"w of too few rows", "w rows", biases(1, 5, 6)});
  list.push_back({"w of two heads", "w heads", biases(2, 6, 6)});
  check_refused("aft_full_backward", {1, 1, 6, 6}, list, [](arguments& d, attn::execution& execution) {
    compiled_aft_full<float>::backward(d.q_view, d.k_view, d.v_view, d.w_view, d.d_view, {d.dq, d.dk, d.dv, d.dw},
                                       {.lengths = d.lengths}, execution);
  });
}

TEST_CASE("aft_local_backward refuses what does not fit", "[aft_backward_refusals]") {
  auto list = with_biases(common_refusals());
  list.push_back({"w of too few rows", "w rows", biases(1, 5, 6)});
  list.push_back({"w of two heads", "w heads", biases(2, 6, 6)});
  list.push_back({"a window of 0", "window", [](arguments& d) { d.window = 0; }});
  list.push_back({"a square w for a band", "w columns", [](arguments& d) { d.band = true; }});
  check_refused("aft_local_backward", {1, 1, 6, 6}, list, [](arguments& d, attn::execution& execution) {
    compiled_aft_local<float>::backward(d.q_view, d.k_view, d.v_view, d.w_view, d.d_view, {d.dq, d.dk, d.dv, d.dw},
                                        {.lengths = d.lengths, .window = d.window, .band = d.band}, execution);
  });
}

TEST_CASE("aft_conv_backward refuses what does not fit", "[aft_backward_refusals]") {
  const auto run = [](arguments& d, attn::execution& execution) {
    compiled_aft_conv<float>::backward(d.q_view, d.k_view, d.v_view, d.w_view, d.d_view, {d.dq, d.dk, d.dv, d.dw},
                                       {.causal = d.causal, .lengths = d.lengths, .grid = d.grid}, execution);
  };
  auto list = with_biases(common_refusals());
  list.push_back({"an even width", "odd width", biases(1, 3, 4)});
  list.push_back({"kernels for two heads", "w heads", biases(1, 2, 5)});
  list.push_back({"one key, but a gradient for every channel", "gradient of k",
                  [](arguments& d) { d.k_view = d.shaped(2, 3, 6, 1); }});
  list.push_back({"a causal image", "causal", [](arguments& d) {
                    d.grid = attn::token_grid{2, 3}, d.causal = true;
                    d.w_view = d.shaped(1, 3, 3, 5), d.dw = {};
                  }});
  list.push_back({"an image of another size", "rows * columns", [](arguments& d) {
                    d.grid = attn::token_grid{2, 4};
                    d.w_view = d.shaped(1, 3, 3, 5), d.dw = {};
                  }});
  check_refused("aft_conv_backward", {1, 1, 3, 5}, list, run);
}

}  // namespace testing::backward_refusals_tests
