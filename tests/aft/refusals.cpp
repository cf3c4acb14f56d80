// Bad input is refused on entry: std::invalid_argument in one sentence, out untouched.
#include <algorithm>
#include <functional>

#include "support/call_aft.hpp"
#include "support/refused.hpp"

namespace testing::refusals_tests {
namespace {

// A good call, to be changed in one place: batch 2, heads 3, length 6, dim 8.
struct arguments {
  tensor<float> q{2, 3, 6, 8, 0.5f}, k{2, 3, 6, 8, 0.25f}, v{2, 3, 6, 8, 2}, out{2, 3, 6, 8, 7}, w{1, 3, 20, 20, 0.5f};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> out_view_ = view(out);
  tensor<float> other{2, 4, 30, 30, 1};  // more memory to point to
  in_view<float> w_view;
  std::vector<idx_t> lengths;
  idx_t window = 4;
  bool band = false, causal = false;
  std::optional<attn::token_grid> grid;

  explicit arguments(const in_view<float>::extents_type& w_shape) : w_view(w.data.data(), w_shape) {}
  arguments(const arguments&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out}; }

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
};

using call = std::function<void(arguments&, attn::execution&)>;

using refused = testing::refused<arguments>;

// What all four refuse.
std::vector<refused> common_refusals() {
  return {
      {"another batch of k", "key batch", [](arguments& d) { d.k_view = d.shaped(1, 3, 6, 8); }},
      {"other heads of k", "key heads", [](arguments& d) { d.k_view = d.shaped(2, 1, 6, 8); }},
      {"another length of k", "key length", [](arguments& d) { d.k_view = d.shaped(2, 3, 7, 8); }},
      {"another dim of k", "key dim", [](arguments& d) { d.k_view = d.shaped(2, 3, 6, 4); }},
      {"another batch of v", "value batch", [](arguments& d) { d.v_view = d.shaped(1, 3, 6, 8); }},
      {"other heads of v", "value heads", [](arguments& d) { d.v_view = d.shaped(2, 4, 6, 8); }},
      {"another length of v", "value length", [](arguments& d) { d.v_view = d.shaped(2, 3, 5, 8); }},
      {"another dim of v", "value dim", [](arguments& d) { d.v_view = d.shaped(2, 3, 6, 1); }},
      {"another batch of out", "out batch", [](arguments& d) { d.out_view_ = d.out_view_.slice(0, 0, 1); }},
      {"other heads of out", "out heads", [](arguments& d) { d.out_view_ = d.out_view_.slice(1, 0, 2); }},
      {"another length of out", "out length", [](arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 5); }},
      {"another dim of out", "out dim", [](arguments& d) { d.out_view_ = d.out_view_.slice(3, 0, 4); }},
      {"a negative extent", "extent", [](arguments& d) { d.k_view = d.shaped(2, 3, -6, 8); }},
      {"a null q", "null", [](arguments& d) { d.q_view = null_view(2, 3, 6, 8); }},
      {"a null k", "null", [](arguments& d) { d.k_view = null_view(2, 3, 6, 8); }},
      {"a null v", "null", [](arguments& d) { d.v_view = null_view(2, 3, 6, 8); }},
      {"a null out", "null", [](arguments& d) { d.out_view_ = null_view(2, 3, 6, 8); }},
      {"out that is q", "overlap", [](arguments& d) { d.q_view = view(std::as_const(d.out)); }},
      {"out that is k", "overlap", [](arguments& d) { d.k_view = view(std::as_const(d.out)); }},
      {"out that is v", "overlap", [](arguments& d) { d.v_view = view(std::as_const(d.out)); }},
      {"out whose rows are one", "overlap",
       [](arguments& d) { d.out_view_ = reshaped(d.out, 2, 3, 6, 8).strided(24, 8, 0, 1); }},
      {"too few lengths", "lengths", [](arguments& d) { d.lengths = {6}; }},
      {"too many lengths", "lengths",
       [](arguments& d) {
         d.lengths = {6, 6, 6};
       }},
      {"a negative length", "lengths",
       [](arguments& d) {
         d.lengths = {6, -1};
       }},
      {"a length beyond the buffer", "lengths",
       [](arguments& d) {
         d.lengths = {7, 6};
       }},
  };
}

// What those with biases refuse.
std::vector<refused> with_biases(std::vector<refused> list) {
  list.push_back({"a null w", "null", [](arguments& d) { d.w_view = {nullptr, d.w_view.extents()}; }});
  list.push_back({"out that is w", "overlap", [](arguments& d) {
                    d.w_view = {d.out.data.data(), d.w_view.extents()};
                  }});
  list.push_back({"a w for each batch item", "w batch", [](arguments& d) { d.w_view = d.shaped(2, 1, 6, 6); }});
  return list;
}

void check_refused(const std::string& name, const in_view<float>::extents_type& w, const std::vector<refused>& list,
                   const call& run) {
  attn::execution serial;
  testing::check_refused(name, list, [&](arguments& d) { run(d, serial); }, w);
}

std::function<void(arguments&)> biases(idx_t h, idx_t rows, idx_t columns) {
  return [=](arguments& d) { d.w_view = d.shaped(1, h, rows, columns); };
}

}  // namespace

TEST_CASE("aft_full refuses what does not fit", "[refusals]") {
  auto list = with_biases(common_refusals());
  list.push_back({"w of too few rows", "w rows", biases(1, 5, 6)});
  list.push_back({"w of too many columns", "w columns", biases(1, 6, 7)});
  list.push_back({"w of two heads", "w heads", biases(2, 6, 6)});
  check_refused("aft_full", {1, 1, 6, 6}, list, [](arguments& d, attn::execution& execution) {
    compiled_aft_full<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.w_view, {.lengths = d.lengths},
                                   execution);
  });
}

TEST_CASE("aft_local refuses what does not fit", "[refusals]") {
  auto list = with_biases(common_refusals());
  list.push_back({"w of too few rows", "w rows", biases(1, 5, 6)});
  list.push_back({"w of too many columns", "w columns", biases(1, 6, 7)});
  list.push_back({"w of two heads", "w heads", biases(2, 6, 6)});
  list.push_back({"a window of 0", "window", [](arguments& d) { d.window = 0; }});
  list.push_back({"a negative window", "window", [](arguments& d) { d.window = -3; }});
  list.push_back(
      {"a window beyond memory", "window", [](arguments& d) { d.window = std::numeric_limits<idx_t>::max(); }});
  list.push_back({"a square w for a band", "w columns", [](arguments& d) { d.band = true; }});
  list.push_back({"a band for a square w", "w columns", biases(1, 6, 7)});
  list.push_back({"a band of another window", "w columns", [](arguments& d) {
                    d.band = true, d.window = 3;
                    d.w_view = d.shaped(1, 1, 6, 7);
                  }});
  check_refused("aft_local", {1, 1, 6, 6}, list, [](arguments& d, attn::execution& execution) {
    compiled_aft_local<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.w_view,
                                    {.lengths = d.lengths, .window = d.window, .band = d.band}, execution);
  });
}

TEST_CASE("aft_simple refuses what does not fit", "[refusals]") {
  check_refused("aft_simple", {1, 1, 1, 1}, common_refusals(), [](arguments& d, attn::execution& execution) {
    compiled_aft_simple<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, {.lengths = d.lengths}, execution);
  });
}

TEST_CASE("aft_conv refuses what does not fit", "[refusals]") {
  const auto run = [](arguments& d, attn::execution& execution) {
    compiled_aft_conv<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.w_view,
                                   {.causal = d.causal, .lengths = d.lengths, .grid = d.grid}, execution);
  };
  auto list = with_biases(common_refusals());
  list.push_back({"an even width", "odd width", biases(1, 3, 4)});
  list.push_back({"a width of 0", "odd width", biases(1, 3, 0)});
  list.push_back({"kernels for two heads", "w heads", biases(1, 2, 5)});
  list.push_back({"a kernel of rank 3 without an image", "rank 2", biases(3, 1, 5)});
  list.push_back(
      {"two keys for the channels of a head", "key dim", [](arguments& d) { d.k_view = d.shaped(2, 3, 6, 2); }});
  check_refused("aft_conv", {1, 1, 3, 5}, list, run);

  const auto image = [](std::function<void(arguments&)> then) {
    return [=](arguments& d) {
      d.grid = attn::token_grid{2, 3};
      then(d);
    };
  };
  const std::vector<refused> images = {
      {"an even height", "odd height", image(biases(1, 4, 5))},
      {"an even width", "odd width", image(biases(1, 3, 4))},
      {"kernels for two heads", "w heads", image(biases(2, 3, 5))},
      {"causal", "causal", image([](arguments& d) { d.causal = true; })},
      {"too few rows", "rows * columns", image([](arguments& d) {
         d.grid = attn::token_grid{1, 3};
       })},
      {"too many columns", "rows * columns", image([](arguments& d) {
         d.grid = attn::token_grid{2, 4};
       })},
      {"negative rows and columns", "rows", image([](arguments& d) {
         d.grid = attn::token_grid{-2, -3};
       })},
      {"more than memory holds", "grid", image([](arguments& d) {
         d.grid = attn::token_grid{idx_t(1) << 40, idx_t(1) << 40};
       })},
  };
  check_refused("aft_conv", {1, 3, 1, 5}, images, [&](arguments& d, attn::execution& execution) {
    if (!d.grid) d.grid = attn::token_grid{2, 3};
    run(d, execution);
  });
}

}  // namespace testing::refusals_tests
