// neighborhood against its reference: grids of all kinds with every option alone and in combination, all types; which
// tokens see one another; what is refused.
#include "reference/full_softmax.hpp"

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/refusals.hpp"
#include "support/run_neighborhood.hpp"

namespace testing::neighborhood_tests {
namespace {

template <class S>
void check(const neighborhood_problem& p, const reference::result& wanted, attn::execution& exec) {
  const reference::result actual = run_pattern<S>(p, exec);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}
template <class S>
void check(const neighborhood_problem& p) {
  attn::execution serial;
  check<S>(p, expected(p), serial);
}

// Bits: softcap, sinks, a score function, scale, a bias by offset; of all heads in one, where softcap is given.
void choose(reference::neighborhood_options& o, int bits) {
  if (bits & 1) o.softcap = 1.5;
  if (bits & 2) o.sinks = {0.3, -1, 2, 0};
  if (bits & 4)
    o.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (i * 3 + j * 5 + h) % 11 == 0 ? -reference::infinity : s * 0.5 + 0.01 * static_cast<double>(b + i - j);
    };
  if (bits & 8) o.scale = 0.4;
  if (bits & 16) o.relative_bias = offset_table(o.kernel, bits & 1 ? 1 : 4);
}

// A lone head whose weights are equal: the tokens token i sees.
std::vector<idx_t> seen_by(idx_t i, const attn::neighborhood_options<float>& given, idx_t tokens) {
  const tensor<float> q(1, 1, tokens, 1, 1.0f);
  tensor<float> identity(1, 1, tokens, tokens), out = identity;
  for (idx_t j = 0; j < tokens; ++j) identity(0, 0, j, j) = 1;
  attn::execution serial;
  compiled_neighborhood<float>::call(view(q), view(q), view(std::as_const(identity)), view(out), given, {}, serial);
  std::vector<idx_t> seen;
  for (idx_t j = 0; j < tokens; ++j)
    if (out(0, 0, i, j) != 0) seen.push_back(j);
  return seen;
}
using tokens = std::vector<idx_t>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("neighborhood: grids with every combination of options", "[neighborhood]", exact_types) {
  for (int bits : selected_bits(5))
    for (reference::neighborhood_options o : grids()) {
      choose(o, bits);
      CAPTURE(bits, o.grid, o.kernel, o.stride, o.dilation, o.causal_axes, o.shift);
      check<TestType>(neighborhood_of<TestType>({.dim = 9, .value_dim = 12}, o));
    }
}

TEMPLATE_LIST_TEST_CASE("neighborhood: 16-bit storage computes in float", "[neighborhood]", storage_types) {
  for (int bits : {0, 16, 31})
    for (reference::neighborhood_options o : grids()) {
      choose(o, bits);
      CAPTURE(bits, o.grid, o.kernel);
      check<TestType>(neighborhood_of<TestType>({.dim = 33, .value_dim = 20}, o));
    }
}

TEMPLATE_LIST_TEST_CASE("neighborhood: larger grids, grouped queries, threads", "[neighborhood]", exact_types) {
  const auto grid = [](std::vector<idx_t> axes, std::vector<idx_t> kernel, std::vector<idx_t> stride = {},
                       std::vector<idx_t> dilation = {}, std::vector<idx_t> shift = {}) {
    reference::neighborhood_options o;
    o.grid = axes, o.kernel = kernel, o.stride = stride, o.dilation = dilation, o.shift = shift;
    return o;
  };
  attn::execution three(3, 0);
  for (const auto& o : {grid({600}, {257}), grid({24, 31}, {7, 9}), grid({32, 32}, {8, 8}, {8, 8}, {}, {4, 4}),
                        grid({33, 29}, {5, 7}, {}, {3, 4}), grid({6, 10, 12}, {3, 5, 5}), grid({3, 200}, {3, 200})}) {
    CAPTURE(o.grid, o.kernel);
    const auto p = neighborhood_of<TestType>({.batch = 1, .heads = 4, .kv_heads = 1, .dim = 16, .value_dim = 24}, o);
    const reference::result wanted = expected(p);
    check<TestType>(p, wanted, three);
    attn::execution serial;
    CHECK(run_pattern<TestType>(p, serial).out == run_pattern<TestType>(p, three).out);
  }
}

TEST_CASE("neighborhood: the tokens a token sees", "[neighborhood]") {
  CHECK(seen_by(4, {.grid = {9}, .kernel = {3}}, 9) == tokens{3, 4, 5});
  CHECK(seen_by(0, {.grid = {9}, .kernel = {3}}, 9) == tokens{0, 1, 2});  // moved inside
  CHECK(seen_by(8, {.grid = {9}, .kernel = {3}}, 9) == tokens{6, 7, 8});
  CHECK(seen_by(4, {.grid = {9}, .kernel = {4}}, 9) == tokens{2, 3, 4, 5});  // one more before than after
  CHECK(seen_by(3, {.grid = {9}, .kernel = {3}, .stride = {3}}, 9) == tokens{3, 4, 5});
  CHECK(seen_by(4, {.grid = {9}, .kernel = {3}, .stride = {2}}, 9) == tokens{4, 5, 6});
  CHECK(seen_by(4, {.grid = {9}, .kernel = {3}, .causal_axes = {true}}, 9) == tokens{2, 3, 4});
  CHECK(seen_by(1, {.grid = {9}, .kernel = {3}, .causal_axes = {true}}, 9) == tokens{0, 1});  // not moved
  CHECK(seen_by(4, {.grid = {9}, .kernel = {3}, .stride = {2}, .causal_axes = {true}}, 9) == tokens{3, 4});
  CHECK(seen_by(1, {.grid = {9}, .kernel = {3}, .dilation = {2}}, 9) == tokens{1, 3, 5});
  // Windows of 3 from token 1 on; the last begins with token 7 and ends with token 0, which does not see it.
  CHECK(seen_by(2, {.grid = {9}, .kernel = {3}, .stride = {3}, .shift = {1}}, 9) == tokens{1, 2, 3});
  CHECK(seen_by(8, {.grid = {9}, .kernel = {3}, .stride = {3}, .shift = {1}}, 9) == tokens{7, 8});
  CHECK(seen_by(0, {.grid = {9}, .kernel = {3}, .stride = {3}, .shift = {1}}, 9) == tokens{0});
  CHECK(seen_by(5, {.grid = {3, 4}, .kernel = {3, 2}}, 12) == tokens{0, 1, 4, 5, 8, 9});
  CHECK(seen_by(0, {.grid = {2, 2, 2}, .kernel = {2, 1, 2}}, 8) == tokens{0, 1, 4, 5});
}

// As the original has it: rows and columns of the query less the key's, each plus the window's extent less 1.
TEST_CASE("neighborhood: Swin's table of biases is read backwards", "[neighborhood]") {
  reference::neighborhood_options o;
  o.grid = {4, 6}, o.kernel = o.stride = {2, 3};
  auto p = neighborhood_of<float>({.batch = 1, .heads = 1, .kv_heads = 1, .dim = 4, .value_dim = 4}, o);
  tensor<double> swin = offset_table(o.kernel, 1), backwards = swin;
  std::reverse(backwards.data.begin(), backwards.data.end());
  p.options.relative_bias = backwards;
  reference::full_softmax_options windows;
  windows.score = [&](double s, idx_t, idx_t, idx_t i, idx_t j) {
    const idx_t down = i / 6 - j / 6, right = i % 6 - j % 6;
    if (i / 12 != j / 12 || i % 6 / 3 != j % 6 / 3) return -reference::infinity;
    return s + swin(0, 0, 0, (down + 1) * 5 + right + 2);
  };
  attn::execution serial;
  check<float>(p, reference::full_softmax(p.q, p.k, p.v, windows), serial);
}

TEST_CASE("neighborhood: options, score and execution may each be left out", "[neighborhood]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(300, 8), k = Eigen::MatrixXf::Random(300, 8),
                        v = Eigen::MatrixXf::Random(300, 8);
  Eigen::MatrixXf wanted(300, 8), out(300, 8);
  attn::execution threads(2, 0);
  const auto same = [](float s, auto, auto, auto, auto) { return s; };
  attn::neighborhood(q, k, v, wanted, {.grid = {15, 20}, .kernel = {3, 5}});
  const auto is_same = [&] { return (out - wanted).norm() <= 1e-6f * wanted.norm() && (out.setZero(), true); };
  attn::neighborhood(q, k, v, out, {.grid = {15, 20}, .kernel = {3, 5}}, threads);
  CHECK(is_same());
  attn::neighborhood(q, k, v, out, {.grid = {15, 20}, .kernel = {3, 5}}, same);
  CHECK(is_same());
  attn::neighborhood(q, k, v, out, {.grid = {15, 20}, .kernel = {3, 5}}, same, threads);
  CHECK(is_same());
}

namespace {

template <class Inputs>
void on_grid(Inputs& d) {
  d.options.grid = {2, 3}, d.options.kernel = {2, 2};
}
struct inputs : call_inputs<attn::neighborhood_options<float>, 6> {
  inputs() { on_grid(*this); }
};

}  // namespace

TEST_CASE("neighborhood refuses what does not fit", "[neighborhood][neighborhood_refusals]") {
  using list_of_one = attn::per_axis;
  const auto set = [](list_of_one attn::neighborhood_options<float>::*option, list_of_one numbers) {
    return [=](inputs& d) { d.options.*option = numbers; };
  };
  using o = attn::neighborhood_options<float>;
  const std::vector<refused<inputs>> list = {
      {"no grid", "a grid of 1 to 3 axes; found 0", set(&o::grid, {})},
      {"a grid of four axes", "a grid of 1 to 3 axes; found 4", set(&o::grid, {1, 1, 2, 3})},
      {"a grid that is not the length", "product of the grid = query length 6; found 8", set(&o::grid, {2, 4})},
      {"a grid that no number counts", "product of the grid", set(&o::grid, {idx_t(1) << 40, idx_t(1) << 40})},
      {"a negative grid", "grid >= 0; found -2", set(&o::grid, {-2, -3})},
      {"no kernel", "kernel for each of 2 axes of the grid; found 0", set(&o::kernel, {})},
      {"a kernel of one axis", "kernel for each of 2 axes of the grid; found 1", set(&o::kernel, {2})},
      {"a kernel of 0", "kernel from 1 to 3; found 0", set(&o::kernel, {1, 0})},
      {"a negative kernel", "kernel from 1 to 2; found -1", set(&o::kernel, {-1, 1})},
      {"a kernel beyond the axis", "kernel from 1 to 3; found 4", set(&o::kernel, {2, 4})},
      {"a stride of one axis", "stride for each of 2 axes", set(&o::stride, {1})},
      {"a stride of 0", "stride from 1 to 2; found 0", set(&o::stride, {1, 0})},
      {"a stride beyond the kernel", "stride from 1 to 2; found 3", set(&o::stride, {1, 3})},
      {"a dilation of 0", "dilation", set(&o::dilation, {0, 1})},
      {"kernel times dilation beyond the axis", "kernel * dilation is within the axis, from 1 to 1; found 2",
       set(&o::dilation, {1, 2})},
      {"a dilation that overflows", "dilation", set(&o::dilation, {1, std::numeric_limits<idx_t>::max()})},
      {"a dilation of three axes", "dilation for each of 2 axes", set(&o::dilation, {1, 1, 1})},
      {"a negative shift", "shift from 0 to 1; found -1", set(&o::shift, {-1, 0})},
      {"a shift of the whole axis", "shift from 0 to 2; found 3", set(&o::shift, {0, 3})},
      {"a shift of one axis", "shift for each of 2 axes", set(&o::shift, {0})},
      {"a flag of 2", "causal_axes from 0 to 1; found 2", set(&o::causal_axes, {0, 2})},
      {"flags of three axes", "causal_axes for each of 2 axes", set(&o::causal_axes, {0, 1, 0})},
      {"a relative bias of another shape", "relative_bias entries = product of 2 kernel - 1 9; found 15",
       [](inputs& d) { d.options.relative_bias = {d.other.data.data(), {4, 15}}; }},
      {"a relative bias of some heads", "relative_bias heads",
       [](inputs& d) { d.options.relative_bias = {d.other.data.data(), {2, 9}}; }},
      {"a null relative bias", "null", [](inputs& d) { d.options.relative_bias = {nullptr, {4, 9}}; }},
      {"a relative bias in out", "overlap",
       [](inputs& d) { d.options.relative_bias = {d.out.data.data(), {4, 9}}; }},
      {"more keys than queries", "key length = query length 6; found 9",
       [](inputs& d) { d.k_view = d.shaped(2, 2, 9, 8), d.v_view = d.shaped(2, 2, 9, 5); }},
      {"another batch of k", "batch", [](inputs& d) { d.k_view = d.shaped(1, 2, 6, 8); }},
      {"another length of v", "length", [](inputs& d) { d.v_view = d.shaped(2, 2, 5, 5); }},
      {"a scale of NaN", "scale", [](inputs& d) { d.options.scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"too few sinks", "sinks", [](inputs& d) { d.options.sinks = d.values(2); }},
      {"lse of another length", "lse", [](inputs& d) { d.options.lse = d.options.lse.slice(2, 0, 5); }}};
  struct form {
    static void call(inputs& d, attn::execution& exec) {
      compiled_neighborhood<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.options, {}, exec);
    }
  };
  check_refused<form, 6, inputs>("neighborhood", list);
}

TEST_CASE("neighborhood_backward refuses what does not fit", "[neighborhood][neighborhood_refusals]") {
  struct backward : inputs {
    tensor<float> d_out{2, 4, 6, 5, 0.5f}, dq{2, 4, 6, 8, 7}, dk{2, 2, 6, 8, 7}, dv{2, 2, 6, 5, 7},
        table{1, 1, 4, 9, 0.5f}, d_table{1, 1, 4, 9, 7};
    attn::neighborhood_gradients<float> g{.q = view(dq), .k = view(dk), .v = view(dv)};
  };
  struct form {
    static void call(backward& d, attn::execution& exec) {
      compiled_neighborhood<float>::backward(d.q_view, d.k_view, d.v_view, d.out_view_, view(std::as_const(d.d_out)),
                                             d.g, d.options, {}, {}, exec);
    }
  };
  const auto want_table = [](backward& d, idx_t heads) {
    d.g.relative_bias = {d.d_table.data.data(), {heads, 9}};
  };
  const std::vector<refused<backward>> list = {
      {"a kernel of 0", "kernel from 1 to 3; found 0", [](backward& d) { d.options.kernel = {1, 0}; }},
      {"a grid that is not the length", "product of the grid", [](backward& d) { d.options.grid = {2, 4}; }},
      {"a gradient of what is not given", "relative_bias, since its gradient is asked for",
       [=](backward& d) { want_table(d, 4); }},
      {"a gradient of another shape", "the gradient of relative_bias",
       [=](backward& d) { d.options.relative_bias = table_view(d.table), want_table(d, 1); }},
      {"dq in dv", "overlap", [](backward& d) { d.g.v = {d.dq.data.data(), d.dv.extents}; }},
      {"dk of another length", "the gradient of k", [](backward& d) { d.g.k = d.g.k.slice(2, 0, 5); }}};
  check_refused<form, 6, backward>("neighborhood_backward", list);
}

}  // namespace testing::neighborhood_tests
