// Bad input: std::invalid_argument in one sentence, out and lse untouched.
#include "support/refusals.hpp"

#include "support/call_low_rank.hpp"

namespace testing::refusals_tests {
namespace {

// With projections of rank 3: one for all heads, and one per head.
struct linformer_door : call_inputs<attn::linformer_options<float>> {
  projection_view<float> e = projection(1, 3, 9), f = projection(4, 3, 9);

  projection_view<float> projection(idx_t h, idx_t r, idx_t j) const { return {other.data.data(), {h, r, j}}; }
};

struct linformer_form {
  using options = attn::linformer_options<float>;
  static void call(linformer_door& d, attn::execution& execution) {
    compiled_linformer<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.e, d.f, d.options, execution);
  }
};

using nystrom_door = call_inputs<attn::nystrom_options<float>>;

struct nystrom_form {
  using options = attn::nystrom_options<float>;
  static void call(nystrom_door& d, attn::execution& execution) {
    compiled_nystrom<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.options, execution);
  }
};

}  // namespace

TEST_CASE("linformer refuses what does not fit", "[refusals]") {
  using here = linformer_door;
  auto list = common_refusals<here>();
  for (const auto& bad : key_mask_refusals<here>()) list.push_back(bad);
  const auto e = [](idx_t h, idx_t r, idx_t j) { return [=](here& d) { d.e = d.projection(h, r, j); }; };
  const auto f = [](idx_t h, idx_t r, idx_t j) { return [=](here& d) { d.f = d.projection(h, r, j); }; };
  list.push_back({"e of no rank", "rank of e >= 1; found 0", e(1, 0, 9)});
  list.push_back({"f of no rank", "rank of f >= 1; found 0", f(1, 0, 9)});
  list.push_back({"e of a negative rank", "extents", e(1, -2, 9)});
  list.push_back({"ranks that differ", "rank of f = rank of e 3; found 4", f(1, 4, 9)});
  list.push_back({"e of the query length", "expected projection columns = key length 9; found 6", e(1, 3, 6)});
  list.push_back({"f of another length", "projection columns of f = key length 9; found 10", f(1, 3, 10)});
  list.push_back({"e per key head", "heads of e 1 or 4; found 2", e(2, 3, 9)});
  list.push_back({"f of no heads", "heads of f 1 or 4; found 0", f(0, 3, 9)});
  list.push_back({"a null e", "null", [](here& d) { d.e = {nullptr, {1, 3, 9}}; }});
  list.push_back({"no f", "f", [](here& d) { d.f = {}; }});
  list.push_back({"out in e", "overlap", [](here& d) { d.e = {d.out.data.data() + 9, {1, 3, 9}}; }});
  list.push_back({"out in f", "overlap", [](here& d) { d.f = {d.out.data.data(), {1, 3, 9}, {0, 0, 0}}; }});
  list.push_back({"lse in e", "overlap", [](here& d) { d.e = {d.lse.data.data(), {1, 3, 9}, {0, 0, 1}}; }});
  list.push_back({"lse in f", "overlap", [](here& d) { d.f = {d.lse.data.data(), {1, 3, 9}}; }});
  check_refused<linformer_form, 9, here>("linformer", list);
}

TEST_CASE("nystrom refuses what does not fit", "[refusals]") {
  using here = nystrom_door;
  auto list = common_refusals<here>();
  for (const auto& bad : key_mask_refusals<here>()) list.push_back(bad);
  list.push_back({"no landmarks", "landmarks >= 1; found 0", [](here& d) { d.options.landmarks = 0; }});
  list.push_back({"negative landmarks", "landmarks >= 1; found -64", [](here& d) { d.options.landmarks = -64; }});
  list.push_back({"negative iterations", "iterations >= 0; found -1", [](here& d) { d.options.iterations = -1; }});
  list.push_back({"a negative cutoff", "cutoff", [](here& d) { d.options.cutoff = -0.1f; }});
  list.push_back({"a cutoff of 1", "cutoff", [](here& d) { d.options.cutoff = 1; }});
  list.push_back({"a cutoff of NaN", "cutoff", [](here& d) { d.options.cutoff = std::nanf(""); }});
  const auto kernel = [](idx_t h, idx_t width) {
    return [=](here& d) { d.options.convolution = {d.other.data.data(), {h, width}}; };
  };
  list.push_back({"a convolution of even width", "odd width; found 4", kernel(4, 4)});
  list.push_back({"a convolution of no width", "odd width; found 0", kernel(4, 0)});
  list.push_back({"a convolution per key head", "heads of convolution = query heads 4; found 2", kernel(2, 3)});
  list.push_back({"one convolution for all heads", "heads of convolution", kernel(1, 3)});
  list.push_back({"a null convolution", "null", [](here& d) { d.options.convolution = {nullptr, {4, 3}}; }});
  list.push_back({"out in the convolution", "overlap", [](here& d) { d.options.convolution = reshaped(d.out, 4, 3); }});
  check_refused<nystrom_form>("nystrom", list);
}

}  // namespace testing::refusals_tests
