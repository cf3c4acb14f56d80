// The gradients of neighborhood against the reverse pass of its reference: grids of all kinds, options in all pairs,
// all types.
#include "support/pairwise.hpp"
#include "support/run_neighborhood.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::neighborhood_backward_tests {
namespace {

struct choice {
  bool softcap = false, sinks = false, score = false, scale = false, d_lse = false, saved_lse = true;
  int bias = 0;  // none, one for each head, one for all
  idx_t kv_heads = 2;
  int grid = 0;
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(17);
  for (int n = 0; n < 400; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.softcap = flag(), c.sinks = flag(), c.score = flag(), c.scale = flag(), c.d_lse = flag(), c.saved_lse = flag();
    c.bias = static_cast<int>(random.below(3)), c.kv_heads = idx_t(1) << random.below(3);
    c.grid = static_cast<int>(random.below(std::ssize(grids())));
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.softcap,   +c.sinks, +c.score,        +c.scale, +c.d_lse,
                          +c.saved_lse, c.bias,   int(c.kv_heads), c.grid};
      },
      true);
}

template <class S>
neighborhood_problem apply(const choice& c, idx_t dim = 9, idx_t value_dim = 12) {
  reference::neighborhood_options o = grids()[static_cast<std::size_t>(c.grid)];
  if (c.softcap) o.softcap = 1.5;
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.scale) o.scale = 0.4;
  if (c.bias > 0) o.relative_bias = offset_table(o.kernel, c.bias == 1 ? 4 : 1);
  if (tokens_of(o.kernel) == 1) value_dim = lone_key_value_dim;
  return neighborhood_of<S>({.kv_heads = c.kv_heads, .dim = dim, .value_dim = value_dim}, o);
}

template <class S>
void check_choices() {
  for (const choice& c : choices()) {
    CAPTURE(c.softcap, c.sinks, c.score, c.scale, c.d_lse, c.saved_lse, c.bias, c.kv_heads, c.grid);
    check_backward<S>(apply<S>(c), c.d_lse, {.saved_lse = c.saved_lse});
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("neighborhood_backward: options in all pairs", "[neighborhood_backward]", exact_types) {
  check_choices<TestType>();
}

TEMPLATE_LIST_TEST_CASE("neighborhood_backward: 16-bit storage computes in float", "[neighborhood_backward]",
                        storage_types) {
  for (int grid : {1, 7, 14}) {
    CAPTURE(grid);
    check_backward<TestType>(apply<TestType>({.bias = 1, .grid = grid}));
  }
}

TEST_CASE("neighborhood_backward: the reverse pass agrees with central differences", "[neighborhood_backward]") {
  for (const choice& c : choices())
    if (tokens_of(grids()[static_cast<std::size_t>(c.grid)].grid) < 70)
      check_central_differences(case_of(apply<double>(c, 3, 4), c.d_lse));
}

TEST_CASE("neighborhood_backward: accumulates, and each gradient alone has the same bits", "[neighborhood_backward]") {
  const choice c{.sinks = true, .bias = 1, .grid = 7};
  check_accumulate<float>(apply<float>(c));
  check_each_alone<float>(apply<float>(c));
}

TEMPLATE_LIST_TEST_CASE("neighborhood_backward: the same bits for any number of threads", "[neighborhood_backward]",
                        exact_types) {
  reference::neighborhood_options o;
  o.grid = {20, 26}, o.kernel = {5, 7}, o.relative_bias = offset_table(o.kernel, 4);
  const auto p = neighborhood_of<TestType>({.batch = 1, .dim = 5, .value_dim = 8}, o);
  const gradient_case c = case_of(p, true);
  const reference_gradients wanted = gradients_of(c, round_results<TestType>);
  attn::execution serial, two(2, 0), three(3, 0);
  const named_tensors alone = library_gradients<TestType>(p, c, wanted.d_results, {}, serial);
  for (std::size_t n = 0; n < c.names.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    CHECK(relative_error(alone.at(c.names[n]), wanted.gradients[n]) <= product_gradient_tolerance<TestType>);
  }
  for (attn::execution* threads : {&two, &three})
    CHECK(library_gradients<TestType>(p, c, wanted.d_results, {}, *threads) == alone);
}

}  // namespace testing::neighborhood_backward_tests
